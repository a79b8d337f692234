"""Hostile coordinators that tell clients different lists: of clients, of keys, of survivors."""

from tests.fed.secure_aggregation.hostile.gathering import Gathering, Listing
from tests.fed.secure_aggregation.hostile.plans import Task
from tests.fed.secure_aggregation.hostile.world import World


def two_lists_of_survivors(world: World) -> None:
    """Tell one group that a client survived, and another group that it did not."""
    rng = world.rng
    names = [*world.usual] if rng.random() < 0.7 else world.some([*world.usual])
    victim = rng.choice(names)
    held = Gathering(world, dict.fromkeys(names, Task()))
    held.until_masked()
    everybody = held.masked()
    others = [name for name in names if name != victim]
    rng.shuffle(others)
    split = len(others) // 2 if rng.random() < 0.7 else rng.randint(0, len(others))
    lost = [name for name in everybody if name != victim]
    if rng.random() < 0.3 and len(lost) > 2:
        lost.remove(rng.choice(lost))
    held.survive(dict.fromkeys([victim, *others[:split]], everybody) | dict.fromkeys(others[split:], lost))
    held.unmask()
    if rng.random() < 0.5:
        held.survive(dict.fromkeys(others, everybody if rng.random() < 0.5 else lost))
        held.unmask()


def others_lost_to_each(world: World) -> None:
    """Tell each client that others were lost, as many as it takes, so that few are lost to nobody."""
    rng = world.rng
    held = Gathering(world, dict.fromkeys(world.usual, Task()))
    held.until_masked()
    everybody = held.masked()
    session = next((one.believed for one in world.honest.values() if one.believed is not None), None)
    if session is None:
        return
    names = [*world.usual]
    rng.shuffle(names)
    at_once = len(everybody) - session.least_survivors  # lost to one client
    needed = max(1, session.degree.threshold - len(world.colluders))  # clients to which one is lost
    lost = names[: min(len(names) * at_once // needed, len(names) - 1)]
    views = dict.fromkeys(names, everybody)
    turn = 0
    for name in names:
        others = [one for one in lost if one != name]
        missing = {others[(turn + more) % len(others)] for more in range(at_once)} if others else set()
        turn += at_once
        views[name] = [one for one in everybody if one not in missing]
    held.survive(views)
    held.unmask()


def false_keys(world: World) -> None:
    """Give a client keys of the coordinator's own in place of the others'."""
    rng = world.rng
    victim = world.anybody()
    held = Gathering(world, dict.fromkeys(world.usual, Task()))
    held.hold([held.join])
    true = held.listing()
    some = [name for name in true.names if name != victim and (rng.random() < 0.8 or name in world.colluders)]
    signer = rng.choice([*world.colluders, "nobody"])
    false = {name: held.keys_of(name, name if name in world.colluders else signer) for name in some}
    listing = Listing(true.names, {**true.keys, **false})
    held.hold([lambda name: held.list_to(name, listing if name == victim else true, " (false keys for one)")])
    held.hold([world.train, held.deliver_to])
    everybody = [*true.names]
    held.survive(everybody)
    held.unmask()


def few_survivors(world: World) -> None:
    """Call all lost but as few as may be, or list as few as may be, all colluders among them."""
    rng = world.rng
    names = rng.sample([*world.usual], rng.randint(2, len(world.usual)))
    held = Gathering(world, dict.fromkeys(names, Task()))
    held.until_masked()
    few = rng.sample(names, rng.randint(1, len(names)))
    held.survive([*few, *world.colluders])
    held.unmask()


def late_message(world: World) -> None:
    """Call a client lost after its message has come, unmask the others, and then ask it and them once more."""
    rng = world.rng
    victim = world.anybody()
    held = Gathering(world, dict.fromkeys(world.usual, Task()))
    others = [name for name in world.usual if name != victim]
    is_late = rng.random() < 0.5
    held.hold([held.join, held.list_to])
    held.hold([world.train, held.deliver_to], others if is_late else None)
    left = [name for name in held.masked() if name != victim]
    held.survive(dict.fromkeys(others, left))
    held.unmask(others)
    if is_late:
        held.hold([world.train, held.deliver_to], [victim])
    views = [left, [*left, victim]]
    for _ in range(2):
        held.survive(dict.fromkeys(world.usual, rng.choice(views)))
        held.unmask()
