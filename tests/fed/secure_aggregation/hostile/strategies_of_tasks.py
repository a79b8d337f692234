"""Hostile coordinators that misuse tasks: a message of one task, or of one round, is to be masked for another."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.fed.secure_aggregation.hostile.gathering import Gathering
from tests.fed.secure_aggregation.hostile.plans import HURRY_S, Task
from tests.fed.secure_aggregation.hostile.world import World

_KNOWN: Sequence[dict[str, Any]] = (
    {"lr": 0.0},
    {"steps": 0},
    {"plan": 5},
    {"takes_parts": True, "deadline_s": HURRY_S},
    {"deadline_s": HURRY_S},
)
"""Ways to ask for a message that anybody knows, or might be asked to."""

_NAMES: Sequence[dict[str, Any]] = (
    {},
    {"plan": 1},
    {"plan": 2},
    {"plan": 3},
    {"population": 11},
    {"plan": 1, "population": 11},
    {"repeats": 1},
    {"broadcast_count": 1},
    {"place": 10},
    {"kept_after": 99},
    {"deadline_s": 60.0},
    {"ledger": 1},
    {"plan": 1, "ledger": 1},
)
"""Ways to ask for the same message, or for nearly the same one, by other names."""

_OTHERS: Sequence[dict[str, Any]] = ({"steps": 5}, {"model": "B"}, {"round": 2}, {"plan": 4})
"""Ways to ask for another message as if it were the same."""


def two_tasks_in_one_session(world: World) -> None:
    """Ask all but one client for a message that anybody knows, and this one for its own."""
    rng = world.rng
    victim = world.anybody()
    task = Task(attempt=rng.randrange(2))
    tasks = dict.fromkeys(world.usual, replace(task, **rng.choice(_KNOWN))) | {victim: task}
    held = Gathering(world, tasks)
    held.until_masked()
    held.survive(held.masked())
    held.unmask()


def message_of_another_task(world: World) -> None:
    """Have a client train one task, and mask for another, in which all others' messages are known or the same again."""
    rng = world.rng
    victim = world.anybody()
    first = Task()
    again = replace(first, attempt=rng.randrange(2), base=rng.choice([100, 100, 200]))
    which = rng.randrange(3)
    again = replace(again, **(rng.choice(_KNOWN) if which else {}))
    again = replace(again, **(rng.choice([*_NAMES, *_OTHERS, *_OTHERS]) if which != 1 else {}))
    before = Gathering(world, dict.fromkeys(world.usual, first) if rng.random() < 0.3 else {victim: first})
    before.hold([before.join, world.train])
    if rng.random() < 0.3:
        before.hold([before.list_to, before.deliver_to])
    held = Gathering(world, dict.fromkeys(world.usual, again))
    others = [name for name in world.usual if name != victim]
    held.hold([held.join])
    if rng.random() < 0.5:  # the session as it is, whatever the client has at hand
        held.hold([world.train], others)
        held.hold([held.list_to, held.deliver_to])
    else:
        held.hold([held.list_to])
        held.hold([world.train], others)
        held.hold([held.deliver_to])
    held.survive(held.masked())
    held.unmask()


def two_sums_of_one_round(world: World) -> None:
    """Learn the sum of all, and then that of all but one, by another attempt, run, plan, name or after a restart."""
    rng = world.rng
    victim = world.anybody()
    first = Task()
    held = Gathering(world, dict.fromkeys(world.usual, first))
    held.until_masked()
    held.survive(held.masked())
    revealing = [*world.usual]
    if rng.random() < 0.3:  # as few as are needed
        revealing = [*world.some(revealing)]
    held.hold([held.consents_to], revealing)
    dying = rng.choice([0.0, 0.0, 0.0, 0.5, 1.0])
    for name in revealing:
        if rng.random() < dying:
            world.restart(name, is_written=rng.random() < 0.3)
        else:
            world.write(name)
    again = replace(first, base=rng.choice([100, 200]), attempt=rng.choice([0, 1, 1]))
    again = replace(again, **rng.choice([*_NAMES, *_NAMES, *_OTHERS]))
    dying = rng.choice([0.0, 0.5, 1.0])
    for name in world.usual:
        if rng.random() < dying:
            world.restart(name)
    left = [name for name in world.usual if name != victim or rng.random() < 0.1]
    second = Gathering(world, dict.fromkeys(left, again))
    second.until_masked()
    second.survive(second.masked())
    second.unmask()


def from_session_to_session(world: World) -> None:
    """Move clients between two attempts after they have masked, so that sums overlap."""
    rng = world.rng
    names = [*world.usual]
    first = Gathering(world, dict.fromkeys(world.some(names), Task()))
    second = Gathering(world, dict.fromkeys(world.some(names), Task(attempt=1)))
    for one, other in ((first, second), (second, first)):
        one.until_masked()
        one.survive(one.masked())
        moving = [name for name in other.tasks if rng.random() < 0.5]
        if one is first:
            other.hold([other.join], moving)
        one.unmask()
    first.survive(first.masked())
    first.unmask()
