"""A session that a hostile coordinator holds: what it tells each client, true or false."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from fed.errors import FedError
from fed.protocol.protocol_pb2 import (
    Box,
    ClientList,
    Consents,
    Delivery,
    KeyList,
    PlacedConsent,
    PlacedKeys,
    SessionKeys,
    Survivors,
    ToSession,
)
from fed.secure_aggregation.terms import keys_digest
from tests.fed.secure_aggregation.hostile.forging import boxes_for, consents_for, keys_of, packed
from tests.fed.secure_aggregation.hostile.plans import Task
from tests.fed.secure_aggregation.hostile.world import World


class Listing(NamedTuple):
    """A list of clients with their keys, as some are told it."""

    names: Sequence[str]
    keys: Mapping[str, SessionKeys]


def letters(names: Iterable[str]) -> str:
    """Clients in few letters."""
    return "".join(name.removeprefix("client-") for name in names)


class Gathering:
    """One session, of which each honest client may be told something else.

    Attributes:
        tasks: what each honest client is assigned.
        listed: the names on its list.

    Args:
        world: its clients.
        tasks: what each honest client is assigned.
        colluders: on the list.
    """

    def __init__(self, world: World, tasks: Mapping[str, Task], colluders: Iterable[str] | None = None) -> None:
        self.world = world
        self.tasks = dict(tasks)
        self.colluders = [*(world.colluders if colluders is None else colluders)]
        self.listed = sorted([*self.tasks, *self.colluders])
        self.places: dict[str, bytes] = {}  # the survivors that each client was told
        self._keys: dict[str, SessionKeys] = {}
        self._listing: Listing | None = None

    def join(self, name: str, task: Task | None = None) -> None:
        """Assign a client its task, under its plan."""
        task = task or self.tasks[name]
        if self.world.told_plan.get(name) != task.plan:
            self.world.begin(name, task.plan)
        self.world.assign(name, task)
        if (keys := self.world.honest[name].keys) is not None:
            self._keys[name] = keys

    def has(self, name: str) -> bool:
        """True if a client is in this session, as far as it has said."""
        task = self.tasks[name]
        return self.world.honest[name].joined == (task.base + self.world.names.index(name), task.attempt)

    def keys_of(self, name: str, signer: str | None = None) -> SessionKeys:
        """Keys in a client's name, made by the coordinator.

        Args:
            name: the client that is said to have made them.
            signer: the client that signs them; None: the client itself, a colluder.
        """
        terms = next(one.terms for one in map(self.world.honest.__getitem__, self.tasks) if one.terms is not None)
        return keys_of(self.world, terms, signer or name)

    def listing(self) -> Listing:
        """The true list, made once: all that have keys and are still there."""
        if self._listing is None:
            there = [name for name in self.tasks if name in self._keys and self.has(name)]
            if there:
                self._keys |= {name: self.keys_of(name) for name in self.colluders}
                there = sorted([*there, *self.colluders])
            self._listing = Listing(there, {name: self._keys[name] for name in there})
        return self._listing

    def list_to(self, name: str, listing: Listing | None = None, what: str = "") -> None:
        """Tell a client a list."""
        listing = listing or self.listing()
        clients = ClientList()
        digests = [keys_digest(one, listing.keys[one]) for one in listing.names]
        for one, keys_sha256 in zip(listing.names, digests, strict=True):
            clients.clients.add(name=one, keys_sha256=keys_sha256)
        message = self._message(name)
        others = self._neighbours(name, listing, digests)
        message.key_list.CopyFrom(KeyList(clients=clients.SerializeToString(), neighbours=others))
        said = "" if [*listing.names] == self.listed else f" of {letters(listing.names)}"
        self.world.tell(name, message, f"the list{said}{what}")

    def boxes_to(self, name: str) -> list[Box]:
        """All boxes that there are for a client, colluders' among them."""
        dealt = self.world.honest[name].dealt
        if dealt is None:
            return []
        boxes = self.world.boxes[dealt.session, name] | boxes_for(self.world, dealt)
        return [boxes[sender] for sender in sorted(boxes)]

    def deliver_to(self, name: str, boxes: Sequence[Box] | None = None, what: str = "") -> None:
        """Tell a client its boxes."""
        boxes = self.boxes_to(name) if boxes is None else boxes
        message = self._message(name)
        message.delivery.CopyFrom(Delivery(boxes=boxes))
        self.world.tell(name, message, f"{len(boxes)} boxes{what}")

    def masked(self) -> list[str]:
        """Clients that have masked their message in this session, with the colluders."""
        sessions = [self.world.honest[name].dealt for name in self.tasks]
        ids = [dealt.session for dealt in sessions if dealt is not None]
        most = max(ids, key=ids.count) if ids else b""
        masked = {one.dealt.owner for one in self.world.record.masked if one.dealt.session == most}
        return sorted(masked | {*self.colluders})

    def survivors_to(self, name: str, survivors: Iterable[str], what: str = "") -> None:
        """Tell a client who survived."""
        dealt = self.world.honest[name].dealt
        names = dealt.names if dealt is not None else self.listed
        chosen = [one for one in names if one in set(survivors)]
        message, places = self._message(name), packed([*names], chosen)
        message.survivors.CopyFrom(Survivors(places=places))
        self.places[name] = places
        for said in self.world.tell(name, message, f"survivors {letters(chosen)}{what}"):
            if said.HasField("consent") and dealt is not None:
                self.world.consents[dealt.session, places][name] = said.consent.signature

    def consents_for(self, name: str) -> list[PlacedConsent]:
        """All consents that there are to what a client was told, and those of the colluders."""
        dealt = self.world.honest[name].dealt
        if dealt is None or name not in self.places:
            return []
        return consents_for(self.world, dealt, self.places[name])

    def consents_to(self, name: str, consents: Sequence[PlacedConsent] | None = None, what: str = "") -> None:
        """Tell a client the consents; its record stays on the way to the disk."""
        consents = self.consents_for(name) if consents is None else consents
        message = self._message(name)
        message.consents.CopyFrom(Consents(consents=consents))
        self.world.tell(name, message, f"{len(consents)} consents{what}")

    def hold(self, phases: Iterable[Callable[[str], None]], names: Iterable[str] | None = None) -> None:
        """Take phases with all clients that are there.

        Args:
            phases: moves with one client.
            names: the clients; None: all.
        """
        names = [*(self.tasks if names is None else names)]
        for phase in phases:
            for name in names:
                if phase == self.join or self.has(name):
                    phase(name)

    def until_masked(self, names: Iterable[str] | None = None) -> None:
        """Hold the session until its messages are masked."""
        self.hold([self.join, self.list_to, self.world.train, self.deliver_to], names)

    def survive(self, survivors: Iterable[str] | Mapping[str, Iterable[str]]) -> None:
        """Tell all clients who survived, the same to all or to each something else."""
        views = survivors if isinstance(survivors, Mapping) else dict.fromkeys(self.tasks, tuple(survivors))
        self.hold([lambda name: self.survivors_to(name, views[name])], views)

    def unmask(self, names: Iterable[str] | None = None) -> None:
        """Give clients all consents that there are, and let them record and reveal."""
        self.hold([self.consents_to, self.world.write], names)

    def _message(self, name: str) -> ToSession:
        told = self.tasks[name].assignment(self.world.names.index(name))
        return ToSession(task=told.task, attempt=told.attempt)

    def _neighbours(self, name: str, listing: Listing, digests: Sequence[bytes]) -> list[PlacedKeys]:
        terms = self.world.honest[name].terms
        others: Iterable[int] = range(len(listing.names))
        try:
            assert terms is not None
            session = self.world.beliefs.session(terms, listing.names, digests)
            others = session.graph.neighbours(listing.names.index(name))
        except (AssertionError, FedError, ValueError):
            pass  # a list that no client takes
        keys = [(place, listing.names[place]) for place in others]
        return [PlacedKeys(place=place + 1, keys=listing.keys[one]) for place, one in keys if one != name]
