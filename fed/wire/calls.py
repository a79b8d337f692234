"""A node's call: whose it is, what it says next, and what it is told, each within a limit of size and time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from fed.identity.credentials import peer_of
from fed.wire.messages import client_id_of
from fed.wire.payloads import CHUNK_BYTES
from fed.wire.protocol import MOST_MESSAGE_BYTES
from fed.wire.protocol_pb2 import Chunk, FromNode, Part, ToNode

__all__ = ["Admission", "Call", "TurnedAway", "parsed"]

Admission: TypeAlias = Callable[[str, bytes], str | None]
"""(name, certificate in PEM) → why a node is refused, or None."""

_Result = TypeVar("_Result")
_Message = TypeVar("_Message", FromNode, Part)
_MOST_BYTES = {FromNode: 1 << 16, Part: CHUNK_BYTES + (1 << 16)}


class TurnedAway(Exception):
    """A call that is ended because of what its caller says or is."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Call:
    """A call, in the name that its caller's certificate says.

    Attributes:
        name: the caller's; None where there are no certificates, and a call may claim any.

    Args:
        context: gRPC's.
        admits: who may call; None: there are no certificates.
    """

    def __init__(self, context: Any, admits: Admission | None) -> None:
        self._context = context
        self._admits = admits
        self._certificate_pem = b""
        self.name: str | None = None

    @property
    def client(self) -> int | str | None:
        """The client that the caller stands for, as far as a certificate says."""
        return None if self.name is None else client_id_of(self.name)

    @property
    def sender(self) -> str:
        """What the caller is called in the log: by its address where it has no name."""
        return str(self._context.peer()) if self.name is None else self.name

    def authenticate(self) -> None:
        """Find out who calls.

        Raises:
            TurnedAway: if nobody, or nobody who may.
        """
        if self._admits is None:
            return
        peer = peer_of(self._context)
        if peer is None:
            raise TurnedAway(grpc.StatusCode.PERMISSION_DENIED, "a node must show its certificate")
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
            reason = (
                f"a stream must begin with a message of at most {_MOST_BYTES[kind]} bytes, but ended before there was "
                f"one: it broke off, or the message had more than {MOST_MESSAGE_BYTES}"
            )
            raise TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, reason)
        return message

    async def next(self, kind: type[_Message], limit_s: float) -> _Message | None:
        """The next message of the caller's stream, None at its end.

        Raises:
            TurnedAway: if it may not be taken, or does not come in time.
        """
        try:
            message = await _within(limit_s, self._context.read())
        except DecodeError:
            raise TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, "it sent bytes that are no message") from None
        self.hold_to_roster()
        return message if isinstance(message, kind) else None

    async def tell(self, message: ToNode | Chunk, limit_s: float) -> None:
        """Send the caller a message, as soon as there is room for it.

        Raises:
            TurnedAway: if the caller is not admitted any more, or takes nothing for so long.
        """
        self.hold_to_roster()
        await _within(limit_s, self._context.write(message))

    async def abort(self, code: grpc.StatusCode, reason: str) -> NoReturn:
        """End it."""
        await self._context.abort(code, reason)
        raise AssertionError("an aborted call goes on")


def parsed(kind: type[_Message], data: bytes) -> _Message:
    """A message of a stream, if it is no longer than any has to be.

    Raises:
        TurnedAway: if it is longer.
        DecodeError: if it is none.
    """
    if len(data) > (most_bytes := _MOST_BYTES[kind]):
        reason = f"a message must have at most {most_bytes} bytes, got {len(data)}"
        raise TurnedAway(grpc.StatusCode.INVALID_ARGUMENT, reason)
    return kind.FromString(data)


async def _within(limit_s: float, step: Awaitable[_Result]) -> _Result:
    try:
        return await asyncio.wait_for(step, limit_s)
    except TimeoutError:
        raise TurnedAway(grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing moved for {limit_s:g} s") from None
