"""Service that every peer has: its streams, its table of members, its progress, and copies of its state.

All of it runs in one event loop.
"""

import asyncio
import hashlib
import logging
import math
import random
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fed.errors import FedError, InvalidCredentials, RunFailed
from fed.identity.credentials import PeerCredentials
from fed.processes.clock import Clock
from fed.protocol import protocol_pb2 as pb
from fed.protocol.limits import PROTOCOL
from fed.server.peer.members.copy_giver import CopyGiver
from fed.server.peer.members.link import Link, Listener, Refused
from fed.server.peer.members.links import Links
from fed.server.peer.members.member import Member
from fed.server.peer.members.membership import MembershipList, Timing
from fed.server.peer.members.presence_log import PresenceLog
from fed.server.peer.members.standing import Standing
from fed.version import __version__
from fed.wire.rate_limits import Refusals

__all__ = ["MemberService"]

_log = logging.getLogger(__name__)
_PROGRESS_EVERY_S = 1.0


@dataclass(kw_only=True)
class MemberService(Listener):
    """Service of a peer, whatever its rounds are made of.

    Attributes:
        round: the round that this peer is in, from 1; 0 before the first.
        durable: the last round whose outcome is on disk; 0: none.
        reached: the round that each of the others told last, by name, while there is a stream with it.

    Args:
        own: the first record of this peer in the table of members.
        experiment: hash of the settings that all peers must share.
        introducers: addresses of other peers, HOST:PORT each.
        folder: directory for messages, used by this peer alone.
        credentials: certificate and key of this peer; None: no encryption, on loopback alone.
        timing: time limits of heartbeats and suspicion.
        silence_s: seconds without a message after which a stream counts as lost, > 0.
        refusals: count and log of refused messages and peers.
        clock: clock of all waits.
        rounds: the number of rounds of the run, ≥ 1.
        snapshot: function that returns the last round with a state, and that state, for peers that join; None before
            the first.
        patience_s: seconds to wait for others without whom this peer cannot go on, > 0.
    """

    own: Member
    experiment: str
    introducers: Sequence[str]
    folder: Path
    credentials: PeerCredentials | None
    timing: Timing
    silence_s: float
    refusals: Refusals
    clock: Clock
    rounds: int
    snapshot: Callable[[], tuple[int, Any] | None]
    patience_s: float = math.inf
    round: int = 0
    durable: int = 0

    def __post_init__(self) -> None:
        # Not one of the run's streams, which all peers share: each peer must choose other members.
        self.members = MembershipList(self.own, self.introducers, self.timing, draws=random.Random())
        greeting = pb.Greeting(protocol=PROTOCOL, software=f"fed {__version__}", experiment=self.experiment)
        greeting.MergeFrom(pb.Greeting(name=self.own.name, start=self.own.start))
        self.links = Links(
            greeting,
            listener=self,
            credentials=self.credentials,
            silence_s=self.silence_s,
            refusals=self.refusals,
            clock=self.clock,
        )
        self._changed = asyncio.Event()
        self._presence = PresenceLog()
        self._copies = CopyGiver(self.snapshot, self._write_copy, self.new_file)
        self.reached: dict[str, int] = {}
        self._files = 0
        self._beating: asyncio.Task[None] | None = None
        self._failure: FedError | None = None
        self._told_version = 0
        self._ended_since_s = math.inf
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds models of single peers

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
        """Leave, and end all streams."""
        # The others hear of it at once, rather than after a time limit.
        self.members.leave()
        for link in self.links.all():
            link.tell(self._table(link.name))
        if self._beating is not None:
            self._beating.cancel()
        await self.links.close(reason)

    def begin(self, number: int, durable: int) -> Standing:
        """Begin a round, and tell the others.

        Args:
            number: the round, from 1.
            durable: the last round whose outcome is on disk; 0: none.
        """
        self.round = number
        self.durable = durable
        self._tell_progress()
        return self.standing()

    def end(self, number: int) -> None:
        """End all rounds, and tell the others.

        Args:
            number: the number of the last round.
        """
        self.members.end()
        self.begin(number + 1, number)

    def ended(self) -> frozenset[str]:
        """Names of the others that have ended all their rounds."""
        return frozenset(member.name for member in self.members.ended())

    def have_ended(self, names: Collection[str]) -> bool:
        """Tell whether all of these have ended their rounds and left.

        Any member may claim this of another. The claim is believed once none has refuted it for as long as a silent
        member counts as present.

        Args:
            names: names of others; with no names the result is false.
        """
        now_s = self.clock.monotonic_s()
        present = {member.name for member in self.members.present(now_s)}
        if not names or not {*names} <= self.ended() - present:
            self._ended_since_s = math.inf
            return False
        self._ended_since_s = min(self._ended_since_s, now_s)
        return now_s - self._ended_since_s >= self.timing.gone_after_s

    def awaited(self, earlier: Collection[str]) -> frozenset[str]:
        """Names of members that may yet come to ask for the end of the run: they have not ended it, nor left.

        Args:
            earlier: names of members from before this process began, which it may not have heard yet.
        """
        unheard = {name for name in self.admitted(earlier) if self.members.is_unheard(name)}
        return (self.members.unended() | unheard) - self.ended() - {self.own.name}

    def admitted(self, names: Collection[str]) -> list[str]:
        """Names among these that this peer's credentials do not refuse."""
        refused = {} if self.credentials is None else self.credentials.refusals(names)
        return [name for name in names if name not in refused]

    def standing(self) -> Standing:
        """Present members, and the round that each is in."""
        now_s = self.clock.monotonic_s()
        there = self.members.present(now_s)
        present = tuple(member for member in there if member.is_ready)
        names = {member.name for member in there}
        known = "\n".join(f"{member.name} {bool(member.address)}" for member in present)
        view = hashlib.sha256(known.encode()).hexdigest()[:16]
        rounds = {name: number for name, number in self.reached.items() if name in names}
        return Standing(present, view, rounds)

    def ready(self) -> frozenset[str]:
        """Names of all members that take part, or took part and have left."""
        return self.members.took_part(self.clock.monotonic_s())

    def reach(self, names: frozenset[str]) -> None:
        """Dial members with which there is no stream."""
        for member in self.members.present(self.clock.monotonic_s()):
            if member.name in names and member.address and self.links.link(member.name) is None:
                self.links.dial(member.address, member.name)

    async def next_change(self, limit_s: float | None = None) -> None:
        """Wait until something may have changed, for at most ``limit_s`` seconds."""
        self._changed.clear()
        with suppress(TimeoutError):
            await self.clock.within(limit_s, self._changed.wait())

    def fail(self, error: FedError) -> None:
        """End the run at this peer, which cannot go on."""
        self._failure = error
        self._changed.set()

    def raise_failure(self) -> None:
        """Raise the error for which this peer cannot go on, if there is one.

        Raises:
            FedError: if it cannot go on.
        """
        if self._failure is not None:
            raise self._failure

    def refusal_of(self, greeting: pb.Greeting) -> str | None:
        """The reason for which a peer cannot take part, or None."""
        # An introduction brings no vectors: it only tells where others listen.
        if not greeting.is_introduction and greeting.experiment != self.experiment:
            return (
                "it runs another experiment, one on other samples, or a model with another fixed part: give all peers "
                "the same file"
            )
        return None

    def met_itself(self, address: str) -> None:
        """Dial this address no more."""
        own = self.members.own
        self.members.heard(own.name, own.start, now_s=self.clock.monotonic_s(), address=address)

    def opened(self, link: Link) -> None:
        """Exchange tables, and say how far this peer is."""
        self._hear(link)
        link.tell(self._table(link.name))
        if not link.is_introduction:
            self._tell_revocations(link)
            self._resend(link)
            link.tell(pb.PeerMessage(progress=self._progress()))
        self._changed.set()

    def received(self, link: Link, message: pb.PeerMessage) -> None:
        """Take a message."""
        self._hear(link)
        if message.HasField("members"):
            table = message.members.members
            # A member that is not admitted is not passed on, whoever names it.
            admitted = {*self.admitted([one.name for one in table])}
            records = [Member.of(one) for one in table if one.name in admitted]
            sender = "" if link.is_hearsay else link.name
            self.members.merge(records, self.clock.monotonic_s(), sender)
            # an answer is not answered: two tables would go back and forth for ever
            if not message.members.is_answer:
                link.tell(self._table(link.name, is_answer=True))
        elif message.HasField("revocations"):
            self._take_revocations(message.revocations.content)
        elif link.is_introduction:
            raise Refused("a stream that only introduces peers must carry tables of members and revocations alone")
        elif message.HasField("progress"):
            self._check_round(message.progress.round - 1)
            self.reached[link.name] = message.progress.round
            self._take_progress(link.name, message.progress)
        elif message.HasField("copy_wanted"):
            self._copies.give(link)
        else:
            self._take(link, message)
        self._changed.set()

    def refused(self, link: Link, reason: str) -> None:
        """End a stream whose other side is not admitted any more, once it has been told of its revocation."""
        self._hold_to_credentials()
        link.end(reason)

    def closed(self, link: Link) -> None:
        """Forget the round that another is in, where no stream with it is left."""
        if self.links.link(link.name) is None:
            # It may be in another round when it comes back.
            self.reached.pop(link.name, None)
        self._changed.set()

    @abstractmethod
    def _take(self, link: Link, message: pb.PeerMessage) -> None:
        """Take a message of this kind of service.

        Raises:
            Refused: if it is not in order.
        """

    @abstractmethod
    def _write_copy(self, path: Path, number: int, state: Any) -> pb.Payload:
        """Write a copy of a state to a file, for a peer that joins.

        Args:
            path: file to write.
            number: the round that the state comes after.
            state: state to copy.

        Raises:
            FedError: if it cannot be written.
        """

    @abstractmethod
    def _resend(self, link: Link) -> None:
        """Send messages that the other side of a new stream may lack."""

    def _take_progress(self, name: str, progress: pb.Progress) -> None:
        """Take note of another's round; there is nothing more to do unless a kind of service says so."""

    def earlier_members(self) -> Collection[str]:
        """Names of members from before this process began, of which it may have had no sign of life."""
        return ()

    def _check_round(self, number: int) -> None:
        """Check that the run has a round that another peer names.

        Raises:
            Refused: if the run has no such round.
        """
        if number > self.rounds:
            raise Refused(f"the run has {self.rounds} rounds, got round {number}")

    def _take_revocations(self, content: bytes) -> None:
        """Take a list of revocations that another has sent, if it is a later one than this peer's.

        Raises:
            Refused: if the authority has not signed it.
        """
        if self.credentials is None:
            raise Refused("peers without credentials have no authority that could revoke certificates")
        try:
            self.credentials.revocations.take(content)
        except InvalidCredentials as error:
            raise Refused(str(error)) from None
        self._hold_to_credentials()

    def _hold_to_credentials(self) -> None:
        """Drop members that the credentials refuse, and tell the others of revocations that are new here."""
        if self.credentials is None:
            return
        latest = self.credentials.revocations.latest()
        if latest.version > self._told_version:
            self._told_version = latest.version
            for link in self.links.all():  # revoked peers, too: they end once they hear of their revocation
                self._tell_revocations(link)
        refused = self.credentials.refusals(self.members.names())
        present = self.members.drop(refused)
        for name, reason in refused.items():
            self.links.end(name, reason)
            self._presence.forget(name)
            if name in present:
                _log.warning("peer %r is no member any more: %s", name, reason)
                self._changed.set()
        if self.credentials.is_revoked:
            self.fail(
                RunFailed(
                    "the authority has revoked this peer's certificate, and no other peer admits it: ask for another "
                    "(fed keys issue --peer), then resume with it"
                )
            )

    def _tell_revocations(self, link: Link) -> None:
        if self.credentials is not None and (content := self.credentials.revocations.latest().content):
            link.tell(pb.PeerMessage(revocations=pb.Revocations(content=content)))

    def _hear(self, link: Link) -> None:
        if link.is_hearsay:
            return
        greeting = link.greeting
        self.members.heard(link.name, greeting.start, now_s=self.clock.monotonic_s(), address=greeting.address)

    async def _beat(self) -> None:
        told_s = 0.0
        while True:
            now_s = self.clock.monotonic_s()
            # Looked at on each beat, since the file may have been replaced by hand.
            self._hold_to_credentials()
            targets = self.members.beat(now_s)
            own = self.members.own
            greeting = self.links.greeting  # its start may have moved with a refutation
            greeting.name = own.name
            greeting.start = own.start
            greeting.address = own.address
            for target in targets:
                link = self.links.link(target.name) if target.name else None
                if link is not None:
                    link.tell(self._table(link.name))
                else:
                    self.links.dial(target.address, target.name or None)
            if now_s - told_s > _PROGRESS_EVERY_S:
                told_s = now_s
                self._tell_progress()
            if self._presence.look(self.members, now_s):
                self._changed.set()
            await self.clock.pause(self.timing.beat_s)

    def _table(self, receiver: str, *, is_answer: bool = False) -> pb.PeerMessage:
        members = [pb.Member(**member._asdict()) for member in self.members.table(receiver)]
        return pb.PeerMessage(members=pb.Members(members=members, is_answer=is_answer))

    def _progress(self) -> pb.Progress:
        return pb.Progress(round=self.round, durable=self.durable)

    def _tell_progress(self) -> None:
        for link in self.links.all():
            link.tell(pb.PeerMessage(progress=self._progress()))

    def new_file(self) -> Path:
        """Path of a new file in the folder of messages."""
        self._files += 1
        return self.folder / f"incoming-{self._files}"
