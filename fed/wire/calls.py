"""The listening side: calls, each in its caller's name, and every message within a limit of size and time."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from fed.identity.credentials import peer_of
from fed.protocol.protocol_pb2 import Chunk, FromNode, Part, ToNode, Wanted
from fed.wire.messages import client_id_of
from fed.wire.payloads import CHUNK_BYTES, SHA256, chunks
from fed.wire.rate_limits import Refusals, Unnamed

__all__ = ["Admission", "Call", "Reception", "TurnedAway", "converse", "hold_to_size", "parsed", "send_file", "within"]

_log = logging.getLogger(__name__)

Admission: TypeAlias = Callable[[str, bytes], str | None]
"""Function from a name and a certificate in PEM to the reason why a node is refused, or None."""

_Result = TypeVar("_Result")
_Message = TypeVar("_Message", FromNode, Part)
_MOST_BYTES = {
    FromNode: 1 << 16,
    Part: CHUNK_BYTES + (1 << 16),  # a chunk and its header
}
# More than a node needs: its stream, transfers, and what is left of a connection that was cut.
_CALLS_AT_ONCE = 8
_BREAKING_S = 1.0  # gRPC ends the stream of a call that broke off a moment before it says that it did


class TurnedAway(Exception):
    """A call that is ended because of its caller, or of a message of its caller."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Call:
    """A call, in the name that its caller's certificate says.

    Attributes:
        name: name of the caller; None where there are no certificates, and a call may claim any name.

    Args:
        context: context of the call, from gRPC.
        admits: rule on who may call; None: there are no certificates.
        identified: function that is called with the caller's address once it has shown a certificate.
    """

    def __init__(self, context: Any, admits: Admission | None, identified: Callable[[str], object]) -> None:
        self._context = context
        self._admits = admits
        self._identified = identified
        self._certificate_pem = b""
        self.name: str | None = None

    @property
    def client(self) -> int | str | None:
        """The client that the caller stands for, as far as a certificate says."""
        return None if self.name is None else client_id_of(self.name)

    @property
    def sender(self) -> int | str:
        """Caller as the log names it: by its address where it has no name."""
        return Unnamed(self._context.peer()) if self.client is None else self.client

    def authenticate(self) -> None:
        """Find out who calls.

        Raises:
            TurnedAway: if the caller shows no certificate, or is not admitted.
        """
        if self._admits is None:
            return
        peer = peer_of(self._context)
        if peer is None:
            raise TurnedAway(grpc.StatusCode.PERMISSION_DENIED, "a node must show its certificate")
        self._identified(self._context.peer())
        self.name, self._certificate_pem = peer
        self.hold_to_roster()

    def hold_to_roster(self) -> None:
        """TLS asks once, when a connection begins; the roster may have changed since.

        Raises:
            TurnedAway: if the caller is not admitted any more.
        """
        if self._admits is not None and (reason := self._admits(self.name or "", self._certificate_pem)) is not None:
            raise TurnedAway(grpc.StatusCode.PERMISSION_DENIED, reason)

    async def first(self, kind: type[_Message], limit_s: float) -> _Message:
        """The message that the caller's stream begins with.

        Raises:
            TurnedAway: if there is none that may be taken, in time.
        """
        if (message := await self.next(kind, limit_s)) is None:
            await asyncio.sleep(_BREAKING_S)  # a call that broke off is cancelled meanwhile, and is no refusal
            reason = f"a stream must begin with a message of at most {_MOST_BYTES[kind]} bytes, but ended without one"
            raise TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, reason)
        return message

    async def next(self, kind: type[_Message], limit_s: float) -> _Message | None:
        """The next message of the caller's stream, None at its end.

        Raises:
            TurnedAway: if it may not be taken, or does not come in time.
        """
        try:
            message = await within(limit_s, self._context.read())
        except DecodeError:
            raise TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, "it sent bytes that are no message") from None
        # A certificate may be revoked while the stream stands.
        self.hold_to_roster()
        # gRPC gives a constant of its own at a stream's end.
        return message if isinstance(message, kind) else None

    async def tell(self, message: ToNode | Chunk, limit_s: float) -> None:
        """Send the caller a message, as soon as there is room for it.

        Raises:
            TurnedAway: if the caller is not admitted any more, or takes nothing for so long.
        """
        self.hold_to_roster()
        # A caller that reads nothing must not hold the call for ever.
        await within(limit_s, self._context.write(message))

    async def abort(self, code: grpc.StatusCode, reason: str) -> NoReturn:
        """End it."""
        await self._context.abort(code, reason)
        raise AssertionError("an aborted call goes on")  # gRPC's abort always raises, which its types do not say


class Reception:
    """Takes calls: identifies each caller, holds it to a few calls at once, and counts refused calls.

    Args:
        admits: rule on who may call; None: there are no certificates.
        refusals: counter of refused calls.
        identified: function that is called with the address of each call that shows a certificate.
    """

    def __init__(self, admits: Admission | None, refusals: Refusals, identified: Callable[[str], object]) -> None:
        self._refusals = refusals
        self._identified = identified
        self._admits = admits
        self._open: Counter[str] = Counter()

    async def answer(self, context: Any, serve: Callable[[Call], Awaitable[_Result]]) -> _Result:
        """Serve one call; a caller that may not make it, or breaks the protocol, is turned away.

        Args:
            context: context of the call, from gRPC.
            serve: function that answers the call.
        """
        call = Call(context, self._admits, self._identified)
        try:
            call.authenticate()
            if call.name is None:  # without certificates a caller could use up the limit of another's name
                return await serve(call)
            # Each open call holds memory for what has arrived of it.
            if self._open[call.name] >= _CALLS_AT_ONCE:
                reason = f"a node may have {_CALLS_AT_ONCE} calls open, and no more"
                raise TurnedAway(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
            self._open[call.name] += 1
            try:
                return await serve(call)
            finally:
                # A name stays in the table: there are no more than certificates.
                self._open[call.name] -= 1
        except TurnedAway as turned:
            self._refusals.note(call.sender, turned.reason)
            await call.abort(turned.code, turned.reason)
        except asyncio.CancelledError:  # a caller that breaks off is no refusal
            _log.debug("a call of %r broke off", call.sender)
            raise


async def send_file(call: Call, spool: Path, wanted: Wanted, limit_s: float) -> None:
    """Send a payload's chunks, from the offset that is wanted; each is read while the one before it is sent.

    Args:
        call: call that the file answers.
        spool: folder of payloads, each under its hash.
        wanted: hash of the payload, and the offset to begin at.
        limit_s: seconds in which each chunk must be taken.

    Raises:
        TurnedAway: if no payload can be meant.
    """
    if not SHA256.fullmatch(wanted.sha256):  # it becomes part of a path, and must not lead out of the spool
        raise TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, "a payload must be named by 64 hexadecimal digits")
    path = spool / f"{wanted.sha256}.out"
    try:
        if wanted.offset > (size_bytes := path.stat().st_size):
            reason = f"the payload has {size_bytes} bytes, got an offset of {wanted.offset}"
            raise TurnedAway(grpc.StatusCode.OUT_OF_RANGE, reason)
        ready = chunks(path, wanted.offset)
        loop = asyncio.get_running_loop()
        chunk = next(ready, None)
        read_bytes = wanted.offset
    except FileNotFoundError:  # another thread removes it
        await call.abort(grpc.StatusCode.NOT_FOUND, "there is no such payload any more")
    while chunk is not None:
        read_bytes += CHUNK_BYTES
        # A slow disk must not stop the loop.
        coming = loop.run_in_executor(None, next, ready, None) if read_bytes < size_bytes else None
        await call.tell(chunk, limit_s)
        chunk = await coming if coming is not None else None


async def converse(*directions: Coroutine[Any, Any, None]) -> list[Exception]:
    """Run both directions of a stream until one of them ends; the problems that they ended with."""
    running = [asyncio.create_task(direction) for direction in directions]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in running:
            direction.cancel()
        # A call must not return while a direction still uses it.
        ended = await asyncio.gather(*running, return_exceptions=True)
    return [problem for problem in ended if isinstance(problem, Exception)]


def parsed(kind: type[_Message], data: bytes) -> _Message:
    """A message of a stream, if it is no longer than any has to be.

    Raises:
        TurnedAway: if it is longer.
        DecodeError: if it is none.
    """
    hold_to_size(data, _MOST_BYTES[kind])
    return kind.FromString(data)


def hold_to_size(data: bytes, most_bytes: int) -> None:
    """Check a message's size, before Protobuf builds the message in memory.

    Raises:
        TurnedAway: if it is longer.
    """
    if len(data) > most_bytes:
        reason = f"a message must have at most {most_bytes} bytes, got {len(data)}"
        raise TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, reason)


async def within(limit_s: float, step: Awaitable[_Result]) -> _Result:
    """Result of one step of a stream.

    Args:
        limit_s: seconds that the step may take.
        step: the step that is waited for.

    Raises:
        TurnedAway: if the step takes longer.
    """
    try:
        async with asyncio.timeout(limit_s):  # Python 3.11's wait_for swallows a cancellation as the step ends
            return await step
    except TimeoutError:
        raise TurnedAway(grpc.StatusCode.DEADLINE_EXCEEDED, f"no message arrived for {limit_s:g} s") from None
