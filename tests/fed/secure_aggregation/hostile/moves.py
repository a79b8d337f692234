"""Random coordinators: sessions of which each message may be held back, changed, swapped, replayed or sent twice."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fed.protocol.protocol_pb2 import Box, PlacedConsent
from tests.fed.secure_aggregation.hostile.gathering import Gathering, Listing
from tests.fed.secure_aggregation.hostile.plans import HURRY_S, Task
from tests.fed.secure_aggregation.hostile.world import World

_FIELDS: dict[str, Sequence[Any]] = {
    "plan": (0, 1, 2, 3, 4),
    "base": (100, 200),
    "round": (1, 2),
    "attempt": (0, 1, 2),
    "model": ("A", "B"),
    "lr": (0.1, 0.0, None),
    "steps": (None, 5, 0),
    "takes_parts": (False, True),
    "deadline_s": (None, HURRY_S, 60.0),
    "repeats": (0, 1),
    "population": (10, 11),
    "broadcast_count": (0, 1),
    "place": (0, 10),
    "kept_after": (0, 99),
    "ledger": (0, 1, 2),
}
_SELDOM = 0.05


def changed(world: World, task: Task, fields: int) -> Task:
    """Another task, which differs in some fields."""
    names = world.rng.sample(sorted(_FIELDS), fields)
    return replace(task, **{name: world.rng.choice(_FIELDS[name]) for name in names})


def play_at_random(world: World) -> None:
    """Hold a few sessions, one after another or mixed."""
    rng = world.rng
    tasks = [Task(plan=rng.choice([0, 0, 4]))]
    for _ in range(rng.choice([0, 1, 1, 2])):
        again = replace(rng.choice(tasks), attempt=len(tasks), round=rng.choice([1, 1, 2]))
        tasks.append(changed(world, again, rng.choice([0, 0, 1, 2])))
    rate = rng.choice([0.0, 0.01, 0.03, 0.08])
    running = [Liar(world, task, rng.choice([0.0, rate, rate])).moves() for task in tasks]
    stays = rng.choice([1.0, 1.0, 0.98])  # how likely a session goes on before another one does
    while running:
        session = running[0] if rng.random() < stays else rng.choice(running)
        try:
            move = next(session)
        except StopIteration:
            running.remove(session)
            continue
        move()
        if rng.random() < rate / 20:
            world.restart(world.anybody())


class Liar:
    """One session, with a lie now and then.

    Args:
        world: its clients.
        task: the task that most of the clients are assigned.
        rate: probability of a lie in one message.
    """

    def __init__(self, world: World, task: Task, rate: float) -> None:
        self._world = world
        self._rng = world.rng
        self._rate = rate
        tasks = {
            name: changed(world, task, 1) if self._lies(0.5) else task
            for name in world.usual
            if self._rng.random() > (0.25 if self._lies(5) else 0.0)
        }
        self._held = Gathering(world, tasks or dict.fromkeys(world.usual, task))

    def moves(self) -> Iterator[Callable[[], None]]:
        """All messages of the session, phase by phase."""
        names = [*self._held.tasks]
        self._rng.shuffle(names)
        trains_late = self._rng.random() < 0.5
        phases = [self._join, self._list, self._deliver, self._train, self._survivors, self._consents, self._write]
        if not trains_late:
            phases[2:4] = [self._train, self._deliver]
        for phase in phases:
            for name in names:
                times = self._rng.choice([0, 2]) if self._lies(0.5) else 1
                yield from [lambda phase=phase, name=name: self._moved(phase, name)] * times

    def _moved(self, phase: Callable[[str], None], name: str) -> None:
        """Take a step, seldom with a client that is in the session no more."""
        if self._lies(0.1) and phase != self._join:
            self._world.withdraw(name, self._held.tasks[name])
            self._join(name)
        if phase == self._join or self._held.has(name) or self._rng.random() < _SELDOM:
            phase(name)

    def _lies(self, factor: float = 1.0) -> bool:
        return self._rng.random() < self._rate * factor

    def _join(self, name: str) -> None:
        self._held.join(name, changed(self._world, self._held.tasks[name], 1) if self._lies(0.5) else None)

    def _list(self, name: str) -> None:
        listing = self._held.listing()
        if not self._lies(0.5) or len(listing.names) < 2:
            self._held.list_to(name, listing)
            return
        victim = self._rng.choice(listing.names)
        other = self._rng.choice(listing.names)
        keys = dict(listing.keys)
        lie = self._rng.choice(["without", "false keys", "swapped", "earlier keys"])
        if lie == "without":
            left = [one for one in listing.names if one != victim]
            self._held.list_to(name, Listing(left, keys))
            return
        if lie == "swapped":
            keys[victim], keys[other] = keys[other], keys[victim]
        elif lie == "earlier keys":
            keys[victim] = self._rng.choice(self._world.keys[victim] or [keys[victim]])
        else:
            signer = self._rng.choice(self._world.colluders) if self._world.colluders else None
            keys[victim] = self._held.keys_of(victim, signer or "nobody")
        self._held.list_to(name, Listing(listing.names, keys), f" ({lie}: {victim})")

    def _deliver(self, name: str) -> None:
        boxes = self._held.boxes_to(name)
        if not self._lies(0.5) or not boxes:
            self._held.deliver_to(name, boxes)
            return
        lie = self._rng.choice(["fewer", "altered", "swapped", "replayed"])
        some = self._rng.randrange(len(boxes))
        if lie == "fewer":
            del boxes[some]
        elif lie == "altered":
            boxes[some] = Box(place=boxes[some].place, sealed=boxes[some].sealed[::-1])
        elif lie == "swapped":
            boxes[some] = Box(place=boxes[0].place, sealed=boxes[some].sealed)
        else:
            earlier = [box for kept in self._world.boxes.values() for box in kept.values()]
            boxes[some] = self._rng.choice(earlier) if earlier else boxes[some]
        self._held.deliver_to(name, boxes, f" ({lie})")

    def _train(self, name: str) -> None:
        self._world.train(name)

    def _survivors(self, name: str) -> None:
        masked = self._held.masked()
        if self._lies(3) and masked:
            masked = self._rng.sample(masked, self._rng.randint(max(1, len(masked) - 2), len(masked)))
        self._held.survivors_to(name, masked)

    def _consents(self, name: str) -> None:
        consents = self._held.consents_for(name)
        if not self._lies() or not consents:
            self._held.consents_to(name, consents)
            return
        some = self._rng.randrange(len(consents))
        if self._rng.random() < 0.5:
            del consents[some]
            self._held.consents_to(name, consents, " (fewer)")
            return
        signed = [one for kept in self._world.consents.values() for one in kept.values()]
        consents[some] = PlacedConsent(place=consents[some].place, signature=self._rng.choice(signed or [bytes(64)]))
        self._held.consents_to(name, consents, " (replayed)")

    def _write(self, name: str) -> None:
        if not self._world.honest[name].is_writing:
            return
        if self._lies():
            self._world.restart(name, is_written=self._rng.random() < 0.5)
        else:
            self._world.write(name)
