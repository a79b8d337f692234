"""Rings over the streams of a replica: one at a time, with messages to one member and from another."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from fed.errors import FedError, InvalidPayload, RunFailed
from fed.protocol import protocol_pb2 as pb
from fed.server.peer.members.ahead import Ahead
from fed.server.peer.members.link import Link, Refused
from fed.server.peer.members.member_service import MemberService
from fed.server.peer.replica.ballots import Ballot, Record, RunRing
from fed.server.peer.replica.decrees import ballot_from_wire, ballot_to_wire
from fed.server.peer.replica.replica_files import ReplicaFiles
from fed.server.peer.replica.ring import Ring, RoundSum
from fed.vectors.tensors import Tensor
from fed.wire.payloads import Incoming, read

__all__ = ["RingListener", "RingTransport"]

_log = logging.getLogger(__name__)
_LOOKS_EVERY_S = 0.1


class RingListener(Protocol):
    """Receiver of the outcomes of rings."""

    def summed(self, ring: RunRing, path: Path, payload: pb.Payload) -> None:
        """Take the sum of a ring that has ended.

        Args:
            ring: the output that asked for the ring.
            path: file of the sum.
            payload: size, hash and tensors of the file.
        """

    def broken(self, ring: RunRing, unreachable: tuple[str, ...]) -> None:
        """Take note that a ring cannot end.

        Args:
            ring: the output that asked for the ring.
            unreachable: names of its members that this one could not exchange with.
        """

    def fail(self, error: FedError) -> None:
        """End the run at this replica."""


class _Part(NamedTuple):
    """Place of a message in a ring."""

    round: int
    ballot: Ballot
    step: int
    sender: str


class _Broken(Exception):
    """A ring that cannot end; ``names`` are members that could not be reached."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names


class RingTransport:
    """Messages of rings.

    Attributes:
        bytes_sent: bytes of messages sent since the transport was made.
        bytes_received: bytes of messages received since then.

    Args:
        service: streams, members and clock of this replica.
        disk: files of this replica.
        listener: receiver of the rings' outcomes.
        most_bytes: function of the number of members that gives the most bytes that one of them sends in a ring.
        limit_s: seconds that a message may take to come, > 0.
        reached_s: seconds that a neighbour in the ring may be without a stream, > 0.
    """

    def __init__(
        self,
        service: MemberService,
        disk: ReplicaFiles,
        listener: RingListener,
        most_bytes: Callable[[int], int],
        limit_s: float,
        reached_s: float,
    ) -> None:
        self.bytes_sent = self.bytes_received = 0
        self._service = service
        self._disk = disk
        self._listener = listener
        self._most_bytes = most_bytes
        self._limit_s = limit_s
        self._reached_s = reached_s
        self._own = service.own.name
        self._parts: dict[_Part, list[Tensor]] = {}
        self._sent: list[tuple[str, pb.PeerMessage, Path]] = []
        self._running: asyncio.Task[None] | None = None
        self._ahead = Ahead("parts of rings")

    def start(self, ring: RunRing, own: RoundSum | None) -> None:
        """Begin a ring, in place of the one that goes on.

        Args:
            ring: round, ballot and members of the ring.
            own: sum of this member's update alone; None: it has no update.
        """
        self.end()
        parts = self._parts.items()
        # Faster members may have sent parts of this ring before it was heard of here.
        self._parts = {part: one for part, one in parts if part.round == ring.round and part.ballot >= ring.ballot}
        self._running = asyncio.create_task(self._run(ring, own))

    def end(self) -> None:
        """End the ring that goes on."""
        if self._running is not None:
            self._running.cancel()
            self._running = None
        for _, _, path in self._sent:
            path.unlink(missing_ok=True)
        self._sent = []

    def resend(self, link: Link) -> None:
        """Send a successor the messages of this ring over a new stream."""
        for name, header, path in self._sent:
            if name == link.name:
                link.send(header, path)

    def wants(self, name: str, message: pb.RingPart, record: Record) -> bool:
        """Tell whether a message is new.

        Args:
            name: the sender's name.
            message: header of the message.
            record: current record of this replica.

        Raises:
            Refused: if no ring that may run has such a message.
        """
        part = _part(message, name)
        if part.round < record.round:
            return False  # sent again over a new stream, after the round was over
        if part.round > record.round:
            self._ahead.note(name, part.round, record.round)
            return False
        self._ahead.end(name)
        if reason := self._reason_against(part, message.payload.size_bytes, record):
            raise Refused(f"its part of the ring of round {part.round} is not taken: {reason}")
        return part not in self._parts

    def arrived(self, name: str, message: pb.RingPart, incoming: Incoming) -> None:
        """Take a message that is whole.

        Args:
            name: the sender's name.
            message: header of the message.
            incoming: file with its tensors, complete.
        """
        self.bytes_received += incoming.payload.size_bytes
        self._parts[_part(message, name)] = read(incoming.path, incoming.payload)

    def _reason_against(self, part: _Part, size_bytes: int, record: Record) -> str | None:
        if part.sender not in record.members:
            return f"it is none of the {len(record.members)} members of this round"
        if part.ballot < record.promised:
            return "this peer has promised to take part in a later ballot alone"
        if part.step >= 2 * len(record.members):
            return f"a ring of {len(record.members)} has no step {part.step}"
        held = [tensors for one, tensors in self._parts.items() if one.sender == part.sender]
        held_bytes = sum(tensor.nbytes for tensors in held for tensor in tensors)
        # Parts of the next ring may come before this one has ended.
        most_bytes = 2 * self._most_bytes(len(record.members))
        if len(held) > 4 * len(record.members) or held_bytes + size_bytes > most_bytes:
            return "it has sent more parts than two rings have"
        return None

    async def _run(self, ring: RunRing, own: RoundSum | None) -> None:
        try:
            if own is None:
                raise _Broken
            total = await self._total(ring, own)
            path = self._service.new_file()
            payload = await asyncio.to_thread(self._disk.write, path, total.tensors())
            self._listener.summed(ring, path, payload)
        except _Broken as broken:
            at = f" at {broken.names[0]!r}" if broken.names else ""
            _log.info("round %d: the ring has broken%s, and another one is tried", ring.round, at)
            self._listener.broken(ring, broken.names)
        except FedError as error:
            self._listener.fail(error)
        except Exception as error:
            # The error of a task would be seen by nobody, whatever it is.
            self._listener.fail(RunFailed(f"this peer cannot go on: {type(error).__name__}: {error}"))

    async def _total(self, ring: RunRing, own: RoundSum) -> RoundSum:
        """Sum over a ring.

        Raises:
            _Broken: if the ring cannot end.
        """
        part = Ring(ring.members.index(self._own), ring.members, own)
        for step in range(part.messages):
            tensors = await asyncio.to_thread(part.message, step)
            self._send(ring, step, part.successor, tensors)
            awaited = _Part(ring.round, ring.ballot, step=step, sender=part.predecessor)
            received = await self._received(awaited, part.successor)
            try:
                # Added in a thread beside the loop, which has heartbeats to send.
                await asyncio.to_thread(part.take, received)
            except InvalidPayload as error:
                self._service.refusals.note(part.predecessor, str(error))
                raise _Broken(part.predecessor) from None
        return await asyncio.to_thread(part.result)

    def _send(self, ring: RunRing, step: int, successor: str, tensors: Sequence[Tensor]) -> None:
        path = self._service.new_file()
        payload = self._disk.write(path, tensors)
        ballot = ballot_to_wire(ring.ballot)
        header = pb.PeerMessage(ring_part=pb.RingPart(round=ring.round, ballot=ballot, step=step, payload=payload))
        self._sent.append((successor, header, path))
        self.bytes_sent += payload.size_bytes
        if (link := self._service.links.link(successor)) is not None:
            link.send(header, path)

    async def _received(self, part: _Part, successor: str) -> list[Tensor]:
        """The next message of the predecessor.

        Raises:
            _Broken: if a neighbour in the ring is gone, or cannot be reached.
        """
        service = self._service
        began_s = service.clock.monotonic_s()
        while part not in self._parts:
            now_s = service.clock.monotonic_s()
            present = {member.name for member in service.members.present(now_s)}
            for name in (part.sender, successor):
                # After a restart others may know of a member that this one has not heard of yet.
                is_away = name not in present or service.links.link(name) is None
                is_refused = not service.admitted([name])
                if is_refused or (is_away and now_s - began_s > self._reached_s):
                    raise _Broken(name)
            if now_s - began_s > self._limit_s:
                raise _Broken
            service.reach(frozenset([part.sender, successor]))
            await service.next_change(_LOOKS_EVERY_S)
        return self._parts.pop(part)


def _part(said: pb.RingPart, sender: str) -> _Part:
    return _Part(said.round, ballot_from_wire(said.ballot), step=said.step, sender=sender)
