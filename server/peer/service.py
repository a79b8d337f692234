"""Service of a peer to others: its members, its streams, and the vectors that come and go with each exchange.

A message stays on disk until its receivers have the outcome of its round on disk, or have not taken it. So a peer that
was killed finds, when it is back, all that its neighbours have sent it since its last checkpoint.

All of it runs in one event loop; a run in another thread begins rounds and exchanges.
"""

import asyncio
import hashlib
import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from google.protobuf.json_format import MessageToDict, ParseDict
from torch import Tensor

from fed import __version__
from fed.errors import InvalidPayload, RunFailed, os_errors_as
from fed.identity.credentials import PeerCredentials
from fed.server.peer.links import Link, Links, Refused, StreamPatience
from fed.server.peer.membership import Member, MembershipList, Timing
from fed.wire import protocol_pb2 as pb
from fed.wire.messages import one_line
from fed.wire.payloads import Incoming, TensorSpec, read, written
from fed.wire.protocol import PROTOCOL
from fed.wire.rate_limits import Refusals

__all__ = ["Key", "Outcome", "PeerService", "Standing"]

_log = logging.getLogger(__name__)
_PROGRESS_EVERY_S = 1.0
_LOOKS_EVERY_S = 0.1

_OVER = "this exchange is over"
_NO_NEIGHBOUR = "it is not a neighbour in this round"


class Key(NamedTuple):
    """Key of an exchange: the round, from 1, and its place in the round, from 0."""

    round: int
    exchange: int


class Outcome(NamedTuple):
    """Outcome of an exchange.

    Args:
        vectors: of the neighbours whose vectors count, by name.
        reached: the neighbours that count this peer's.
    """

    vectors: dict[str, list[Tensor]]
    reached: frozenset[str]


class Standing(NamedTuple):
    """Members and their rounds, as one peer sees them.

    Args:
        present: the members that are there and ready, in their order.
        others: how many more are there, which are not ready yet.
        view: their hash.
        rounds: the round that each of the others is in, as far as it is known.
    """

    present: tuple[Member, ...]
    others: int
    view: str
    rounds: Mapping[str, int]

    @property
    def furthest(self) -> int:
        """The round that the furthest of the others is in."""
        return max(self.rounds.values(), default=0)


@dataclass
class _Letter:
    """A message to neighbours; ``owed`` are those that may need it again."""

    key: Key
    view: str
    payload: pb.Payload
    path: Path
    owed: set[str]

    def header(self) -> pb.PeerMessage:
        vectors = pb.Vectors(round=self.key.round, exchange=self.key.exchange, view=self.view, payload=self.payload)
        return pb.PeerMessage(vectors=vectors)


@dataclass
class _Open:
    """Exchange that goes on."""

    key: Key
    view: str
    senders: frozenset[str]
    receivers: frozenset[str]


class _Arrival(NamedTuple):
    view: str
    tensors: list[Tensor]


@dataclass
class PeerService:
    """Peer among others.

    Attributes:
        round: that this peer is in.
        durable: the last round whose outcome is on disk.
        bytes_sent: of vectors.
        bytes_received: likewise.

    Args:
        own: this peer's record.
        experiment: hash of what peers must agree on.
        introducers: addresses of others.
        folder: of messages, of this peer alone.
        specs: the tensors of each exchange of a round.
        copied: the tensors of a copy of a peer's state.
        ahead: rounds by which another may be ahead.
        credentials: of this peer; None: no encryption, on loopback alone.
        timing: of heartbeats.
        patience: of streams.
        refusals: takes down what is refused.
        snapshot: gives the state after the last round, for those that join; None before the first.
        check: raises InvalidPayload where another's vectors of an exchange cannot be decoded; None: all can.
    """

    own: Member
    experiment: str
    introducers: Sequence[str]
    folder: Path
    specs: Sequence[Sequence[TensorSpec]]
    copied: Sequence[TensorSpec]
    ahead: int
    credentials: PeerCredentials | None
    timing: Timing
    patience: StreamPatience
    refusals: Refusals
    snapshot: Callable[[], tuple[int, Sequence[Tensor]] | None]
    check: Callable[[Key, str, Sequence[Tensor]], None] | None = None
    round: int = 0
    durable: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    _arrivals: dict[tuple[Key, str], _Arrival] = field(default_factory=dict)
    _coming: set[tuple[Key, str]] = field(default_factory=set)
    _refused: set[tuple[Key, str]] = field(default_factory=set)
    _verdicts: dict[tuple[Key, str], bool] = field(default_factory=dict)
    _letters: dict[Key, _Letter] = field(default_factory=dict)
    _open: _Open | None = None
    included: dict[Key, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.members = MembershipList(self.own, self.introducers, self.timing, random.Random())
        greeting = pb.Greeting(protocol=PROTOCOL, software=f"fed {__version__}", experiment=self.experiment)
        greeting.MergeFrom(pb.Greeting(name=self.own.name, start=self.own.start))
        self.links = Links(greeting, self, self.credentials, self.patience, self.refusals)
        self._next = Key(0, 0)
        self._changed = asyncio.Event()
        self._copy: tuple[int, list[Tensor]] | None = None
        self._suspected: set[str] = set()
        self._gone: set[str] = set()
        self._files = 0
        self._beating: asyncio.Task[None] | None = None
        self.folder.mkdir(parents=True, exist_ok=True)

    # The run's side.

    async def start(self, listen: str | None, advertise: str | None) -> int | None:
        """Listen, and begin to look for others; returns the port."""
        port = None
        if listen is not None:
            port = await self.links.listen(listen)
            host = listen.rpartition(":")[0]
            self.members.own = self.members.own._replace(address=advertise or f"{host}:{port}")
        self._beating = asyncio.create_task(self._beat())
        return port

    async def stop(self, reason: str) -> None:
        """Say farewell, and end all streams."""
        self.members.leave()
        for link in self.links.all():
            link.tell(self._table(link.name))
        if self._beating is not None:
            self._beating.cancel()
        await self.links.close(reason)

    def standing(self) -> Standing:
        """See who is there, and how far they are."""
        now_s = time.monotonic()
        there = self.members.present(now_s)
        present = tuple(member for member in there if member.is_ready)
        names = {member.name for member in there}
        view = hashlib.sha256("\n".join(member.name for member in present).encode()).hexdigest()[:16]
        rounds = {link.name: link.progress.round for link in self.links.all() if link.name in names and link.progress}
        return Standing(present, len(there) - len(present), view, rounds)

    def begin(self, number: int, durable: int) -> Standing:
        """Begin a round."""
        self.round, self.durable, self._next = number, durable, Key(number, 0)
        self._arrivals = {key: one for key, one in self._arrivals.items() if key[0] >= self._next}
        self._refused = {key for key in self._refused if key[0] >= self._next}
        self._verdicts = {key: one for key, one in self._verdicts.items() if key[0] >= self._next}
        self.included = {key: one for key, one in self.included.items() if key.round >= number - self.ahead - 2}
        self._tell_progress()
        return self.standing()

    def has_letter(self, number: int, name: str) -> bool:
        """Tell whether a message of this round is here, from one peer."""
        return (Key(number, 0), name) in self._arrivals

    async def exchange(
        self,
        key: Key,
        tensors: Sequence[Tensor],
        view: str,
        senders: frozenset[str],
        receivers: frozenset[str],
        limit_s: float,
    ) -> Outcome:
        """Send vectors to neighbours, and wait for theirs.

        Args:
            key: which exchange of which round.
            tensors: to send.
            view: by which the neighbours were found.
            senders: the neighbours that send to this peer.
            receivers: the neighbours that it sends to.
            limit_s: how long to wait.
        """
        self._open = _Open(key, view, senders, receivers)
        letter = self._kept(key, view, tensors, receivers)
        for arrived in [name for its_key, name in self._arrivals if its_key == key and name not in senders]:
            del self._arrivals[key, arrived]
            self._tell_verdict(arrived, key, _NO_NEIGHBOUR)
        for name in sorted(receivers):
            self._send(letter, name)
        self.reach(senders | receivers)
        until_s = time.monotonic() + limit_s
        while not self._is_settled() and (left_s := until_s - time.monotonic()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(min(left_s, _LOOKS_EVERY_S)):
                    await self._changed.wait()
            except TimeoutError:
                self.reach(senders | receivers)
        return self._close(letter)

    async def copy(self, limit_s: float) -> tuple[int, list[Tensor]] | None:
        """A member's state, and the round after which it is; None if nobody gives one."""
        until_s = time.monotonic() + limit_s
        asked: set[str] = set()
        while self._copy is None and time.monotonic() < until_s:
            for link in self.links.all():
                if link.progress and link.progress.round > 1 and link.name not in asked:
                    asked.add(link.name)
                    link.tell(pb.PeerMessage(copy_wanted=pb.CopyWanted()))
                    break
            self._changed.clear()
            try:
                async with asyncio.timeout(2.0):
                    await self._changed.wait()
            except TimeoutError:
                pass
        found, self._copy = self._copy, None
        return found

    def owes(self) -> bool:
        """Tell whether a present member may still need a message."""
        present = {member.name for member in self.members.present(time.monotonic())}
        return any(letter.owed & present for letter in self._letters.values())

    def restore(self, number: int, included: Mapping[Key, frozenset[str]]) -> None:
        """Resume after a round, with the messages that are on disk."""
        self.round, self.durable, self._next = number, number, Key(number + 1, 0)
        self.included = dict(included)
        for path in sorted(self.folder.glob("*.json")):
            try:
                said = json.loads(path.read_text())
                key = Key(*said["key"])
                payload = ParseDict(said["payload"], pb.Payload())
                letter = _Letter(key, said["view"], payload, path.with_suffix(".out"), set(said["owed"]))
                whole = letter.path.stat().st_size == payload.size_bytes
            except (OSError, ValueError, KeyError, TypeError):
                whole = False
            if whole and key.round <= number:
                self._letters[key] = letter
        wanted = {letter.path for letter in self._letters.values()}
        for path in self.folder.iterdir():
            if path.with_suffix(".out") not in wanted:
                path.unlink()

    # The others' side.

    def refusal_of(self, greeting: pb.Greeting) -> str | None:
        """The reason for which a peer cannot take part, or None."""
        if not greeting.is_introduction and greeting.experiment != self.experiment:
            return "it runs another experiment, or one on other samples: give all peers the same file"
        return None

    def met_itself(self, address: str) -> None:
        """Dial this address no more."""
        self.members.heard(self.members.own.name, self.members.own.start, time.monotonic(), address)

    def came(self, link: Link) -> None:
        """Exchange tables, and send what the other side may lack."""
        self._hear(link)
        link.tell(self._table(link.name))
        if not link.is_introduction:
            for letter in self._letters.values():
                if link.name in letter.owed:
                    self._send_over(link, letter)
            link.tell(pb.PeerMessage(progress=self._progress()))
        self._changed.set()

    def heard(self, link: Link, message: pb.PeerMessage) -> None:
        """Take a message."""
        self._hear(link)
        if message.HasField("members"):
            table = message.members.members
            self.members.merge([_record(one) for one in table], time.monotonic(), link.name)
            if not message.members.is_answer:
                link.tell(self._table(link.name, is_answer=True))
        elif link.is_introduction:
            raise Refused("an introduction has members alone")
        elif message.HasField("progress"):
            link.progress = message.progress
            self._take_progress(link.name, message.progress.durable)
        elif message.HasField("verdict"):
            self._take_verdict(link.name, message.verdict)
        elif message.HasField("copy_wanted"):
            self._give_copy(link)
        else:
            raise Refused("it says nothing that is known here")
        self._changed.set()

    def incoming(self, link: Link, header: pb.PeerMessage) -> Incoming | None:
        """Make the file that a message is put into."""
        self._hear(link)
        if header.HasField("copy"):
            return Incoming(self._new_file(), header.copy.payload, self.copied)
        vectors = header.vectors
        key, name = Key(vectors.round, vectors.exchange), link.name
        if key < self._next:
            self._tell_verdict(name, key, None if name in self.included.get(key, ()) else _OVER)
            return None
        if (key, name) in self._arrivals:
            self._tell_verdict(name, key, None)
            return None
        if (key, name) in self._coming:  # over an earlier stream; the last one counts
            self._coming.discard((key, name))
        reason = self._reason_against(key, name)
        if reason is None:
            try:
                incoming = Incoming(self._new_file(), vectors.payload, self.specs[key.exchange])
            except InvalidPayload as error:
                self._refuse(key, name, str(error))
                raise
            self._coming.add((key, name))
            return incoming
        self._refuse(key, name, reason)
        raise Refused(f"its vectors of round {key.round}: {reason}")

    def arrived(self, link: Link, header: pb.PeerMessage, incoming: Incoming) -> None:
        """Take a file that is whole.

        Args:
            link: over which it came.
            header: that came before it.
            incoming: the file.
        """
        tensors = read(incoming.path, incoming.payload)
        incoming.path.unlink(missing_ok=True)
        is_finite = all(bool(part.isfinite().all()) for part in tensors if part.is_floating_point())
        if header.HasField("copy"):
            if not is_finite:
                raise Refused("its copy is not finite")
            self._copy = header.copy.round, tensors
            self._changed.set()
            return
        vectors, name = header.vectors, link.name
        key = Key(vectors.round, vectors.exchange)
        self._coming.discard((key, name))
        if not is_finite:
            self._refuse(key, name, "its vectors must be finite")
            raise Refused("its vectors must be finite, got infinity or NaN")
        if key < self._next:
            self._tell_verdict(name, key, None if name in self.included.get(key, ()) else _OVER)
            return
        try:
            if self.check is not None:
                self.check(key, name, tensors)
        except InvalidPayload as error:
            self._refuse(key, name, str(error))
            raise
        self.bytes_received += incoming.payload.size_bytes
        if self._open is not None and key == self._open.key and name not in self._open.senders:  # opened meanwhile
            self._tell_verdict(name, key, _NO_NEIGHBOUR)
            return
        self._arrivals[key, name] = _Arrival(vectors.view, tensors)
        self._tell_verdict(name, key, None)
        self._changed.set()

    def went(self, link: Link) -> None:
        """A stream has ended."""
        self._coming = {(key, name) for key, name in self._coming if name != link.name}
        self._changed.set()

    # Details.

    def _hear(self, link: Link) -> None:
        self.members.heard(link.name, link.greeting.start, time.monotonic(), link.greeting.address)

    async def _beat(self) -> None:
        told_s = 0.0
        while True:
            now_s = time.monotonic()
            targets = self.members.beat(now_s)
            own = self.members.own
            self.links.greeting.name, self.links.greeting.start, self.links.greeting.address = (
                own.name,
                own.start,
                own.address,
            )
            for target in targets:
                link = self.links.link(target.name) if target.name else None
                if link is not None:
                    link.tell(self._table(link.name))
                else:
                    self.links.dial(target.address, target.name or None)
            if now_s - told_s > _PROGRESS_EVERY_S:
                told_s = now_s
                self._tell_progress()
            self._say_changes(now_s)
            await asyncio.sleep(self.timing.beat_s)

    def _say_changes(self, now_s: float) -> None:
        suspected = {member.name for member in self.members.suspected(now_s)}
        gone = {member.name for member in self.members.gone(now_s)}
        for name in sorted(suspected - self._suspected - self._gone):
            _log.info("peer %r is silent", name)
        for name in sorted(gone - self._gone):
            _log.warning("peer %r is gone, or cannot be reached: the others go on", name)
        for name in sorted(self._gone - gone):
            _log.info("peer %r is back", name)
        if gone != self._gone:
            self._changed.set()
        self._suspected, self._gone = suspected, gone

    def _table(self, receiver: str, *, is_answer: bool = False) -> pb.PeerMessage:
        members = [pb.Member(**member._asdict()) for member in self.members.table(receiver)]
        return pb.PeerMessage(members=pb.Members(members=members, is_answer=is_answer))

    def _progress(self) -> pb.Progress:
        return pb.Progress(round=self.round, durable=self.durable)

    def _tell_progress(self) -> None:
        for link in self.links.all():
            link.tell(pb.PeerMessage(progress=self._progress()))

    def _take_progress(self, name: str, durable: int) -> None:
        for key in [key for key, letter in self._letters.items() if name in letter.owed and key.round <= durable]:
            self._release(key, name)

    def _take_verdict(self, name: str, verdict: pb.Verdict) -> None:
        key = Key(verdict.round, verdict.exchange)
        if not verdict.taken:
            _log.debug("peer %r has not taken the vectors of round %d: %s", name, key.round, one_line(verdict.reason))
            self._release(key, name)
        if key >= self._next and key.round <= self.round + 1:
            self._verdicts[key, name] = verdict.taken

    def _release(self, key: Key, name: str) -> None:
        letter = self._letters.get(key)
        if letter is None or name not in letter.owed:
            return
        letter.owed.discard(name)
        if not letter.owed and (self._open is None or self._open.key != key):
            self._remove(key)

    def _remove(self, key: Key) -> None:
        letter = self._letters.pop(key)
        for path in (letter.path.with_suffix(".json"), letter.path):
            path.unlink(missing_ok=True)

    def _kept(self, key: Key, view: str, tensors: Sequence[Tensor], receivers: frozenset[str]) -> _Letter:
        path = self.folder / f"{key.round:06d}-{key.exchange}.out"
        with os_errors_as(RunFailed, f"{self.folder} cannot be written to", "make room there, then resume the run"):
            payload = written(path, tensors)
        letter = self._letters[key] = _Letter(key, view, payload, path, set(receivers))
        said = {"key": key, "view": view, "owed": sorted(receivers), "payload": MessageToDict(payload)}
        path.with_suffix(".json").write_text(json.dumps(said))
        return letter

    def _send(self, letter: _Letter, name: str) -> None:
        if (link := self.links.link(name)) is not None:
            self._send_over(link, letter)

    def _send_over(self, link: Link, letter: _Letter) -> None:
        link.send(letter.header(), letter.path)
        self.bytes_sent += letter.payload.size_bytes

    def reach(self, names: frozenset[str]) -> None:
        """Dial neighbours with which there is no stream."""
        for member in self.members.present(time.monotonic()):
            if member.name in names and member.address and self.links.link(member.name) is None:
                self.links.dial(member.address, member.name)

    def _is_settled(self) -> bool:
        assert self._open is not None
        present = {member.name for member in self.members.present(time.monotonic())}
        senders, receivers = self._open.senders, self._open.receivers
        return all(self._is_settled_with(name, name in present) for name in senders | receivers)

    def _is_settled_with(self, name: str, is_present: bool) -> bool:
        came, went = self._came(name), self._went(name)
        if came is False or went is False:
            return True
        return not is_present or (came is not None and went is not None)

    def _came(self, name: str) -> bool | None:
        """True once a neighbour's vectors are here, False if they will not count, None while that is open."""
        assert self._open is not None
        if name not in self._open.senders:
            return True
        arrival = self._arrivals.get((self._open.key, name))
        if arrival is not None:
            return arrival.view == self._open.view
        return False if (self._open.key, name) in self._refused else None

    def _went(self, name: str) -> bool | None:
        """True once a neighbour has taken this peer's vectors, False if it will not, None while that is open."""
        assert self._open is not None
        return self._verdicts.get((self._open.key, name)) if name in self._open.receivers else True

    def _close(self, letter: _Letter) -> Outcome:
        assert self._open is not None
        key, senders, receivers = self._open.key, self._open.senders, self._open.receivers
        # where vectors go both ways, both sides count each other's or neither does
        vectors = {
            name: self._arrivals[key, name].tensors for name in sorted(senders) if self._came(name) and self._went(name)
        }
        reached = frozenset(name for name in receivers if self._went(name) and (name not in senders or name in vectors))
        self.included[key] = frozenset(vectors)
        letter.owed &= reached
        for name in sorted(senders - vectors.keys()):  # one that has not had this peer's vectors would wait for them
            self._tell_verdict(name, key, "this peer has left it out")
        self._open, self._next = None, Key(key.round, key.exchange + 1)
        for its_key in [one for one in self._arrivals if one[0] == key]:
            del self._arrivals[its_key]
        if not letter.owed:
            self._remove(key)
        return Outcome(vectors, reached)

    def _reason_against(self, key: Key, name: str) -> str | None:
        if key.exchange >= len(self.specs):
            return f"a round has {len(self.specs)} exchanges, got exchange {key.exchange}"
        if key.round > self.round + self.ahead:
            return f"this peer is in round {self.round}, got vectors of round {key.round}"
        held = sum(its_name == name for _, its_name in (*self._arrivals, *self._coming))
        if held > self.ahead * len(self.specs):
            return "it has sent too many vectors ahead"
        if self._open is not None and key == self._open.key and name not in self._open.senders:
            return _NO_NEIGHBOUR
        return None

    def _refuse(self, key: Key, name: str, reason: str) -> None:
        if key.round <= self.round + 1:
            self._refused.add((key, name))
        self._tell_verdict(name, key, reason)
        self._changed.set()

    def _tell_verdict(self, name: str, key: Key, reason: str | None) -> None:
        if (link := self.links.link(name)) is not None:
            verdict = pb.Verdict(round=key.round, exchange=key.exchange, taken=reason is None, reason=reason or "")
            link.tell(pb.PeerMessage(verdict=verdict))

    def _give_copy(self, link: Link) -> None:
        found = self.snapshot()
        if found is None:
            raise Refused("it wants a copy before there is one")
        number, tensors = found
        path = self._new_file()
        payload = written(path, tensors)
        link.send(pb.PeerMessage(copy=pb.Copy(round=number, payload=payload)), path)

    def _new_file(self) -> Path:
        self._files += 1
        return self.folder / f"incoming-{self._files}"


def _record(said: pb.Member) -> Member:
    return Member(said.name, said.address, said.start, said.beat, said.left, said.samples, said.is_ready)
