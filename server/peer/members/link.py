"""One stream with another peer: messages and files to send, and the listener that takes those received."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

from fed.protocol import protocol_pb2 as pb
from fed.wire.payloads import Incoming, chunks

__all__ = ["Link", "Listener", "Refused"]

_MOST_WAITING = 4096  # messages, or files, that the other side has not taken


class Refused(Exception):
    """A message that is not taken; the stream goes on."""


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

    async def speak(self, write: Callable[[bytes], Awaitable[None]]) -> None:
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
