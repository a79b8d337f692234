"""Service of a replica to the others: the agreement on each round's sum, the rings that make it, and copies of states.

Promises, votes and sums stay on disk, so that a replica that was killed goes on where it was.
"""

import asyncio
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fed.errors import FedError, RunFailed
from fed.protocol import protocol_pb2 as pb
from fed.server.peer.members.link import Link, Refused
from fed.server.peer.members.member import MOST_MEMBERS
from fed.server.peer.members.member_service import MemberService
from fed.server.peer.members.waiting import Waiting
from fed.server.peer.replica.agreement import Agreement
from fed.server.peer.replica.ballots import (
    Apply,
    BallotTiming,
    Copy,
    Fetch,
    Output,
    Persist,
    Record,
    RunRing,
    Send,
    Value,
)
from fed.server.peer.replica.copy_taker import CopyTaker
from fed.server.peer.replica.decrees import from_wire, to_wire
from fed.server.peer.replica.founding import Founding
from fed.server.peer.replica.peers_needed import PeersNeeded
from fed.server.peer.replica.replica_files import ReplicaFiles, Snapshot
from fed.server.peer.replica.ring import RoundSum, most_ring_bytes, sum_specs
from fed.server.peer.replica.ring_transport import RingListener, RingTransport
from fed.storage.checkpoints import Tree
from fed.wire.format import Format
from fed.wire.payloads import Incoming, TensorSpec

__all__ = ["Decision", "ReplicaService"]

_TICK_S = 0.05
_REACHED_WITHIN_S = 5.0  # wait for a stream with the next member of a ring, where deadlines are short


class Decision(NamedTuple):
    """Outcome of a round.

    Args:
        value: value that was agreed on.
        total: sum of the round's updates.
    """

    value: Value
    total: RoundSum


@dataclass(kw_only=True)
class ReplicaService(MemberService, RingListener):
    """Service of a replica among others.

    Args:
        message: format of clients' messages.
        ballots: time limits of the agreement.
        min_peers: the smallest number of founders, more than half of all peers that may come.
    """

    message: Format
    ballots: BallotTiming
    min_peers: int

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = sum(self.message.summed_sizes)
        self._disk = ReplicaFiles(self.folder, numbers)
        self._founding = Founding(self.own.name, self.min_peers)
        self._agreement: Agreement | None = None
        self._contribution: tuple[int, RoundSum] | None = None
        self._decided: dict[int, Value] = {}
        reached_s = max(self.timing.gone_after_s / 4, min(self.timing.gone_after_s, _REACHED_WITHIN_S))
        self._rings = RingTransport(
            service=self,
            disk=self._disk,
            listener=self,
            most_bytes=partial(most_ring_bytes, self.message),
            limit_s=self.ballots.ballot_s,
            reached_s=reached_s,
        )
        self._copies_taken = CopyTaker(disk=self._disk, numbers=numbers, clock=self.clock, ask=self._ask_for_copy)
        waiting = Waiting(self.patience_s)
        self._peers_needed = PeersNeeded(
            own=self.own.name, rounds=self.rounds, waiting=waiting, have_ended=self.have_ended
        )
        self._wanted: set[str] = set()
        self._applied = self._sums_sent = self._sums_received = 0
        self._began_s = self.clock.monotonic_s()

    # The run's side.

    def restore(self, applied: int) -> None:
        """Take up the record and the sums on disk, before the service starts.

        Args:
            applied: the last round that this replica's model has been moved by; 0: none.

        Raises:
            InvalidCheckpoint: if the record is damaged.
        """
        record, founders = self._disk.restore()
        self.round = record.round
        self._applied = applied
        if record != Record():
            self._founding.members = founders or None
            self._founding.is_late = not founders
            self._begin_agreement(record)

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes of rings and sums: those sent, and those received."""
        sent = self._rings.bytes_sent + self._sums_sent
        received = self._rings.bytes_received + self._sums_received
        return sent, received

    @property
    def has_record(self) -> bool:
        """True if this replica knows its own promises."""
        return self._agreement is not None

    def contribute(self, number: int, total: RoundSum) -> None:
        """Have this replica's own update ready for a round."""
        assert self._agreement is not None
        self._contribution = (number, total)
        if self._agreement.record.round == number:
            self._do(self._agreement.ready(self.clock.monotonic_s()))

    def is_decided(self, number: int) -> bool:
        """Tell whether a round is over, or a copy of a later state has come."""
        return number in self._decided or self._copies_taken.copy is not None

    async def founded(self) -> tuple[str, ...]:
        """Wait until this replica is one of a group; returns the first round's members, none where it joins later."""
        while self._agreement is None:
            await self._changed_or_failed()
        return self._founding.members or ()

    def kept_copy(self) -> Snapshot | None:
        """The copy of another's state that came last, before this process began."""
        return self._disk.copy()

    async def decision(self, number: int) -> Decision | Snapshot:
        """Wait for the outcome of a round, or a copy of another's state after this round or a later one.

        Raises:
            RunFailed: if a file that must be on disk cannot be written.
        """
        while True:
            copy = self._copies_taken.copy
            self._copies_taken.copy = None
            if copy is not None and copy.round >= number:
                return copy
            if (value := self._decided.get(number)) is not None:
                return Decision(value, self._disk.sum(value.sum_sha256))
            await self._changed_or_failed()

    def apply(self, number: int) -> None:
        """Take note that this replica's model has been moved by a round."""
        self._applied = number
        self._decided = {its: value for its, value in self._decided.items() if its > number}
        self._drop()

    def adopt(self, number: int, value: Value) -> None:
        """Take note that this replica's state is now, on disk too, a copy of another's after a round."""
        assert self._agreement is not None
        self._copies_taken.is_wanted = False
        self._copies_taken.lacks_sums = False
        self.apply(number)
        self._do(self._agreement.copied(number, value, self.clock.monotonic_s()))

    def keep_end(self, snapshot: Snapshot) -> None:
        """Keep the state after the last round, for members that come to it late.

        Raises:
            CheckpointFailed: if it cannot be written.
        """
        self._disk.keep_copy(snapshot)

    async def start(self, listen: str | None, advertise: str | None) -> int | None:
        """Listen, and begin to look for others; returns the port."""
        port = await super().start(listen, advertise)
        self._ticking = asyncio.create_task(self._tick_on())
        return port

    async def stop(self, reason: str) -> None:
        """Leave, and end all streams."""
        self._ticking.cancel()
        self._rings.end()
        await super().stop(reason)

    def summed(self, ring: RunRing, path: Path, payload: pb.Payload) -> None:
        """Keep the sum of a ring, and say so."""
        assert self._agreement is not None
        self._disk.take(path, payload)
        self._do(self._agreement.summed(ring, payload.sha256, self.clock.monotonic_s()))

    def broken(self, ring: RunRing, unreachable: tuple[str, ...]) -> None:
        """Say that a ring cannot end."""
        assert self._agreement is not None
        self._do(self._agreement.broken(ring, self.clock.monotonic_s(), unreachable))

    # The others' side.

    def incoming(self, link: Link, header: pb.PeerMessage) -> Incoming | None:
        """Make the file that a message is put into."""
        self._hear(link)
        match header.WhichOneof("what"):
            case "ring_part":
                if not self._rings.wants(link.name, header.ring_part, self._record):
                    return None
                return Incoming(self.new_file(), header.ring_part.payload, self._sum_specs())
            case "sum":
                # Another holder may have been faster, or the round is over.
                if header.sum.payload.sha256 not in self._wanted:
                    return None
                return Incoming(self.new_file(), header.sum.payload, self._sum_specs())
            case "copy":
                self._check_round(header.copy.round)
                if not self._copies_taken.is_wanted:
                    return None
                return self._copies_taken.incoming(self.new_file(), header.copy.payload)
        raise Refused("replicas exchange no vectors with neighbours")

    def arrived(self, link: Link, header: pb.PeerMessage, incoming: Incoming) -> None:
        """Take a file that is whole."""
        if header.HasField("copy"):
            # A copy that came late may be of an earlier round than this replica is in by now.
            if self._copies_taken.is_wanted and header.copy.round >= self._least_copy():
                self._copies_taken.arrived(incoming.path, header.copy.round)
        elif header.HasField("sum"):
            self._take_sum(incoming)
        else:
            self._rings.arrived(link.name, header.ring_part, incoming)
        self._changed.set()

    def _take(self, link: Link, message: pb.PeerMessage) -> None:
        match message.WhichOneof("what"):
            case "decree":
                if self._agreement is not None:
                    self._do(self._agreement.receive(link.name, from_wire(message.decree), self.clock.monotonic_s()))
            case "founding":
                self._go_on_founding(self._founding.receive(link.name, message.founding, self._record.round))
            case "sum_wanted":
                if (found := self._disk.file(message.sum_wanted.sha256)) is not None:
                    path, payload = found
                    link.send(pb.PeerMessage(sum=pb.Sum(payload=payload)), path)
                    self._sums_sent += payload.size_bytes
            case _:
                raise Refused("its message is of a kind that this version does not know")

    def _resend(self, link: Link) -> None:
        self._rings.resend(link)

    # Details.

    @property
    def _record(self) -> Record:
        """State of this replica on disk."""
        return Record() if self._agreement is None else self._agreement.record

    async def _changed_or_failed(self) -> None:
        """Wait until something may have changed.

        Raises:
            FedError: if this replica cannot go on.
        """
        self.raise_failure()
        await self.next_change()

    async def _tick_on(self) -> None:
        while True:
            try:
                self._tick()
            except FedError as error:
                self.fail(error)
            except Exception as error:
                # The run's thread waits for this loop, and must hear of any error here.
                self.fail(RunFailed(f"this peer cannot go on: {type(error).__name__}: {error}"))
            await self.clock.pause(_TICK_S)

    def _tick(self) -> None:
        now_s = self.clock.monotonic_s()
        there = self.members.present(now_s)
        names = [member.name for member in there]
        ready = [member.name for member in there if member.is_ready]
        # A stream proves the certificate: hearsay makes nobody a member.
        candidates = [name for name in ready if self.links.link(name) is not None]
        listening = [member.name for member in there if member.address]
        if self._agreement is None:
            needs = f"{len(ready)} of {self.min_peers} peers are there" if len(ready) < self.min_peers else ""
        else:
            needs = self._peers_needed.needs(self._record, names, lacks_sums=self._copies_taken.lacks_sums)
        self._peers_needed.wait(needs, self._record, now_s)
        if self._agreement is None:
            messages = self._founding.tick(now_s, present=ready, rounds=self.reached, listening=listening)
            self._go_on_founding(messages)
            return
        if self._agreement.record.round > self.rounds:  # the run is over: others are told when they ask
            return
        if now_s - self._began_s < (self.ballots.deadline_s or math.inf):
            # After a restart members that are not heard yet count as present, so that they have time to come.
            members = self.admitted([name for name in self._agreement.record.members if name != self.own.name])
            names += [name for name in members if self.members.is_unheard(name)]
        self._do(self._agreement.tick(now_s, present=names, candidates=candidates, listening=listening))
        if self._copies_taken.lacks_sums:
            self._copies_taken.ask_one_of(
                [name for name, number in self.reached.items() if number > self._least_copy()]
            )

    def _ask_for_copy(self, name: str) -> None:
        self._tell(name, pb.PeerMessage(copy_wanted=pb.CopyWanted()))

    def _go_on_founding(self, messages: Sequence[tuple[str, pb.Founding]]) -> None:
        """Send messages of the founding, and begin to agree once there is a group."""
        for name, message in messages:
            self._tell(name, pb.PeerMessage(founding=message))
        if self._agreement is None and self._founding.members is not None:
            record = Record(round=1, members=self._founding.members)
            # The record is on disk before anything is promised in it.
            self._disk.persist(record, self._founding.members)
            self._begin_agreement(record)
        elif self._agreement is None and self._founding.is_late:
            self._begin_agreement(Record())

    def _begin_agreement(self, record: Record) -> None:
        """Begin the agreement from the record on disk."""
        self._agreement = Agreement(
            self.own.name,
            record,
            timing=self.ballots,
            draws=random.Random(),
            now_s=self.clock.monotonic_s(),
            held={*self._disk.held},
        )
        missed = self._agreement.missed(self._applied)
        if missed is None:
            self._copies_taken.is_wanted = True
            self._copies_taken.lacks_sums = True
        self._do(missed or [])
        self._changed.set()

    def _do(self, outputs: Sequence[Output]) -> None:
        # After a record that could not be written nothing may be sent that relies on it.
        if self._failure is not None:
            return
        try:
            for output in outputs:
                self._perform(output)
        except FedError as error:
            self.fail(error)
        self._drop()

    def _perform(self, output: Output) -> None:
        match output:
            case Persist(record):
                self._disk.persist(record, self._founding.members or ())
            case Send(receiver, message):
                self._tell(receiver, to_wire(message))
            case RunRing():
                own: RoundSum | None = None
                if self._contribution is not None and self._contribution[0] == output.round:
                    own = self._contribution[1]
                self._rings.start(output, own)
            case Fetch(sum_sha256, holders):
                self._wanted.add(sum_sha256)
                self.reach(frozenset(holders))
                linked = [name for name in holders if self.links.link(name) is not None]
                # Two are asked, since one may be slow; each of more would send another copy of the sum.
                for name in random.sample(linked, min(2, len(linked))):
                    self._tell(name, pb.PeerMessage(sum_wanted=pb.SumWanted(sha256=sum_sha256)))
            case Apply(number, value):
                self._wanted = set()
                if number > self._applied:
                    self._decided[number] = value
                self._changed.set()
            case Copy(_, _, holder):
                self._copies_taken.is_wanted = True
                self._copies_taken.ask_one_of([holder])

    def _tell(self, name: str, message: pb.PeerMessage) -> None:
        if (link := self.links.link(name)) is not None:
            link.tell(message)
        else:
            self.reach(frozenset([name]))

    def _drop(self) -> None:
        """Remove sums that no member may need."""
        if self._agreement is None:
            return
        # Sums that are decided and have not moved the model yet are needed, too.
        needed = self._agreement.needed | {value.sum_sha256 for value in self._decided.values()}
        for sha256 in {*self._disk.held} - needed:
            self._disk.drop(sha256)

    def _least_copy(self) -> int:
        """The earliest round after which another's state brings this replica forward."""
        assert self._agreement is not None
        return max(self._applied + 1, self._agreement.record.round - 1)

    def earlier_members(self) -> Collection[str]:
        """Founders, and members of the last rounds."""
        record = self._record
        decided = [name for _, value in record.decided for name in value.members]
        return {*(self._founding.members or ()), *record.members, *decided}

    def _sum_specs(self) -> Sequence[TensorSpec]:
        return sum_specs(self.message, len(self._record.members) or MOST_MEMBERS)

    def _take_sum(self, incoming: Incoming) -> None:
        sha256 = incoming.payload.sha256
        if sha256 not in self._wanted or self._agreement is None:
            return
        self._sums_received += incoming.payload.size_bytes
        self._disk.take(incoming.path, incoming.payload)
        self._wanted.discard(sha256)
        self._do(self._agreement.holds(sha256, self.clock.monotonic_s()))

    def _write_copy(self, path: Path, number: int, state: Tree) -> pb.Payload:
        return self._disk.write_copy(path, number, state)
