"""One stream with another peer: messages and files to send, and those received, within limits of size and time."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from fed.errors import DamagedPayload, InvalidPayload
from fed.protocol import protocol_pb2 as pb
from fed.wire.calls import TurnedAway, hold_to_size, within
from fed.wire.messages import one_line
from fed.wire.payloads import Incoming, chunks
from fed.wire.rate_limits import Allowance, Refusals

__all__ = ["Link", "Listener", "Read", "Refused", "StreamTerms", "Write", "next_message"]

Read: TypeAlias = Callable[[], Awaitable[Any]]
"""Function that gives the next message of a stream, as bytes; no bytes at its end."""

Write: TypeAlias = Callable[[bytes], Awaitable[None]]
"""Function that sends a message, as bytes."""

_MOST_BYTES = 2 << 20  # of a message: a chunk, or the table of many members
_MOST_WAITING = 4096  # messages, or files, that the other side has not taken
_WITH_PAYLOAD = ("vectors", "copy", "ring_part", "sum")


class Refused(Exception):
    """A message that is not taken; the stream goes on."""


class StreamTerms(NamedTuple):
    """StreamTerms on which a peer takes what another sends.

    Args:
        silence_s: seconds without a message after which a stream counts as lost, > 0.
        allowance: limit on the rate of messages, chunks of files apart.
        refusal: function that gives the reason why the other side is no longer admitted; None while it is.
        refusals: count and log of refused messages.
    """

    silence_s: float
    allowance: Allowance
    refusal: Callable[[], str | None]
    refusals: Refusals


class Link:
    """One stream with another peer.

    Attributes:
        greeting: first message of the other side, with its name, start and address.
        is_introduction: True if only tables of members are exchanged over the stream.
        is_hearsay: True if nothing but the greeting says who the other side is, although there are certificates.
    """

    def __init__(self, greeting: pb.Greeting, *, is_introduction: bool, is_hearsay: bool = False) -> None:
        self.greeting = greeting
        self.is_introduction = is_introduction
        self.is_hearsay = is_hearsay
        self._messages: deque[pb.PeerMessage] = deque()
        self._files: deque[tuple[pb.PeerMessage, Path]] = deque()
        self._wakes = asyncio.Event()
        self._ends = False

    @property
    def name(self) -> str:
        """Name of the other side."""
        return self.greeting.name

    def tell(self, message: pb.PeerMessage) -> None:
        """Send a message as soon as there is room for it; a table of members replaces one that still waits."""
        if message.HasField("members"):
            self._messages = deque(one for one in self._messages if not one.HasField("members"))
        self._messages.append(message)
        self._end_if_full()
        self._wakes.set()

    def send(self, header: pb.PeerMessage, path: Path) -> None:
        """Send a message and then a file; other messages may go between its chunks."""
        self._files.append((header, path))
        self._end_if_full()
        self._wakes.set()

    def end(self, reason: str) -> None:
        """End the stream once all waiting messages are sent."""
        self._ends = True
        self.tell(pb.PeerMessage(farewell=pb.Farewell(reason=reason)))

    def _end_if_full(self) -> None:
        """End a stream whose other side asks for more than it takes."""
        if max(len(self._messages), len(self._files)) > _MOST_WAITING:
            self._messages.clear()
            self._files.clear()
            self._ends = True

    async def speak(self, write: Write) -> None:
        """Send messages and files as they are handed in, until the stream ends."""
        file: Iterator[pb.Chunk] = iter(())
        chunk: pb.Chunk | None = None
        while True:
            # Between chunks, for heartbeats must not wait behind a large file.
            while self._messages:
                await write(self._messages.popleft().SerializeToString())
            if self._ends:
                return
            if chunk is None and self._files:
                header, path = self._files.popleft()
                with suppress(FileNotFoundError):  # removed since: nobody needs it any more
                    file = chunks(path)
                    chunk = next(file, None)  # opens the file, which may be removed while it is sent
                    await write(header.SerializeToString())
            if chunk is not None:
                await write(pb.PeerMessage(chunk=chunk).SerializeToString())
                chunk = next(file, None)
                continue
            self._wakes.clear()
            if not self._messages and not self._files:
                await self._wakes.wait()

    async def listen(self, read: Read, listener: "Listener", terms: StreamTerms) -> None:
        """Take messages and files until the other side ends the stream.

        Args:
            read: function that gives the next message.
            listener: receiver of the messages and files.
            terms: limits that the other side is held to.

        Raises:
            TurnedAway: if the other side is silent too long, or sends more than a peer needs.
        """
        files = _ArrivingFiles(self, listener)
        try:
            while (message := await next_message(read, terms.silence_s)) is not None:
                kind = message.WhichOneof("what")
                # Chunks are bounded by the size in their file's header.
                if kind != "chunk" and not terms.allowance.spend():
                    raise TurnedAway(grpc.StatusCode.RESOURCE_EXHAUSTED, "it has sent more messages than a peer needs")
                if kind == "farewell":
                    return
                if reason := terms.refusal():
                    terms.refusals.note(self.name, reason)
                    listener.refused(self, reason)
                    continue
                try:
                    if kind == "chunk":
                        files.add(message.chunk)
                    elif kind in _WITH_PAYLOAD:
                        files.begin(message, getattr(message, kind).payload.size_bytes)
                    else:
                        listener.received(self, message)
                        if self.is_introduction and kind == "members":
                            return
                except (Refused, InvalidPayload, DamagedPayload) as refused:
                    terms.refusals.note(self.name, one_line(str(refused)))
        finally:
            files.drop()


class Listener(ABC):
    """Receiver of other peers' messages."""

    @abstractmethod
    def refusal_of(self, greeting: pb.Greeting) -> str | None:
        """The reason for which a peer is refused, or None."""

    @abstractmethod
    def met_itself(self, address: str) -> None:
        """Take note that an address that was dialled is this peer's own."""

    @abstractmethod
    def opened(self, link: Link) -> None:
        """Take note that a stream has begun."""

    @abstractmethod
    def received(self, link: Link, message: pb.PeerMessage) -> None:
        """Take a message.

        Raises:
            Refused: if it is not in order.
        """

    @abstractmethod
    def incoming(self, link: Link, header: pb.PeerMessage) -> Incoming | None:
        """Make the receiver of the file after a header; None: the file is not wanted.

        Raises:
            Refused: if it is not in order.
            InvalidPayload: if it holds something else than it should.
        """

    @abstractmethod
    def arrived(self, link: Link, header: pb.PeerMessage, incoming: Incoming) -> None:
        """Take a file that is whole, which is removed afterwards unless it has been moved.

        Args:
            link: stream that it came over.
            header: message that came before it.
            incoming: the file, complete.

        Raises:
            Refused: if it is not in order.
            InvalidPayload: if it holds something else than it should.
        """

    @abstractmethod
    def refused(self, link: Link, reason: str) -> None:
        """End a stream whose other side is not admitted any more.

        Args:
            link: the stream.
            reason: the sentence for the other side.
        """

    @abstractmethod
    def closed(self, link: Link) -> None:
        """Take note that a stream has ended."""


class _ArrivingFiles:
    """Files that arrive over a stream, one after another, each as a header and chunks.

    Args:
        link: stream that they come over.
        listener: receiver of files that are whole.
    """

    def __init__(self, link: Link, listener: Listener) -> None:
        self._link = link
        self._listener = listener
        self._header = pb.PeerMessage()
        self._file: Incoming | None = None
        self._left_bytes = 0

    def begin(self, header: pb.PeerMessage, size_bytes: int) -> None:
        """Begin a file; the last one has ended, even if this one is refused.

        Args:
            header: message that announces the file.
            size_bytes: size that it announces.

        Raises:
            Refused: if no such file may come now.
            InvalidPayload: if it holds something else than it should.
        """
        self.drop()
        self._header = header
        self._left_bytes = size_bytes
        if self._link.is_introduction:
            raise Refused("a stream that only introduces peers must carry no files")
        self._file = self._listener.incoming(self._link, header)

    def add(self, chunk: pb.Chunk) -> None:
        """Add a chunk to its file, and hand the file on once it is whole.

        Raises:
            Refused: if the chunk belongs to no file, or the file is not in order.
            InvalidPayload: if the file holds something else than it should.
            DamagedPayload: if the chunk or the file was damaged on its way.
        """
        self._left_bytes -= len(chunk.data)
        file = self._file
        self._file = None  # a chunk that fails ends its file: later chunks must not be added
        if file is None:
            # The other chunks of a refused file are dropped without another refusal.
            if self._left_bytes < 0:
                raise Refused("it sent a chunk that belongs to no file")
            return
        try:
            file.add(chunk)
            if not file.is_complete:
                self._file = file
                return
            file.check()
            self._listener.arrived(self._link, self._header, file)
        finally:
            if self._file is None:
                file.path.unlink(missing_ok=True)

    def drop(self) -> None:
        """Remove a file that is not whole."""
        if self._file is not None:
            self._file.path.unlink(missing_ok=True)
        self._file = None


async def next_message(read: Read, limit_s: float) -> pb.PeerMessage | None:
    """The next message of a stream, None at its end.

    Args:
        read: function that gives it.
        limit_s: seconds that it may take, > 0.

    Raises:
        TurnedAway: if it may not be taken, or does not come in time.
    """
    data = await within(limit_s, read())
    if not isinstance(data, bytes):
        return None
    hold_to_size(data, _MOST_BYTES)
    try:
        return pb.PeerMessage.FromString(data)
    except DecodeError:
        raise TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, "it sent bytes that are no message") from None
