"""Listening for others: a port of this process, and a watch over the connections that come to it."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import grpc

from fed.errors import InvalidInput
from fed.processes.clock import Clock
from fed.protocol.limits import MOST_MESSAGE_BYTES
from fed.wire.newcomers import HANDSHAKE_MS, Newcomers

__all__ = ["STREAM_OPTIONS", "CredentialsFor", "Listening"]

STREAM_OPTIONS = (
    ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # else a second process could listen on the same port, and get some of the calls
    ("grpc.max_concurrent_streams", 10_000),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    # What arrives waits in memory until it is read: let others send no more ahead, however fast their lines are.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 18),
)
"""Options of gRPC for connections that anyone may begin."""

CredentialsFor: TypeAlias = Callable[[Callable[[], None]], grpc.ServerCredentials]
"""Function from a function, which is called at each new connection, to the credentials of the port."""


class Listening:
    """Port at which others dial in.

    Attributes:
        newcomers: connections that have come, and how many of them have shown a certificate.

    Args:
        clock: clock of the process.
    """

    def __init__(self, clock: Clock) -> None:
        self.newcomers = Newcomers(clock)
        self._server: grpc.aio.Server | None = None
        self._watching: asyncio.Task[None] | None = None

    async def begin(
        self, address: str, handler: grpc.GenericRpcHandler, credentials_for: CredentialsFor | None, who: str
    ) -> int:
        """Listen; returns the port.

        Args:
            address: HOST:PORT; port 0 takes a free one.
            handler: handler of the calls that come.
            credentials_for: function that makes the credentials of the port; None: no encryption.
            who: subject of the error's sentence, such as "the server".

        Raises:
            InvalidInput: if nothing can listen there.
        """
        server = self._server = grpc.aio.server(options=STREAM_OPTIONS)
        server.add_generic_rpc_handlers((handler,))
        try:
            if credentials_for is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, credentials_for(self.newcomers.arrived))
        except RuntimeError as error:
            raise InvalidInput(
                f"{who} cannot listen on {address}: is another program there, and is the address this machine's?"
            ) from error
        await server.start()
        if credentials_for is not None:  # without certificates all are strangers, on this machine alone
            # Kept, since the loop itself holds tasks by weak references alone.
            self._watching = asyncio.create_task(self.newcomers.watch(int(port)))
        return int(port)

    async def end(self, grace_s: float) -> None:
        """Listen no more.

        Args:
            grace_s: seconds in which calls may end by themselves.
        """
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])  # the door's sockets would keep the port taken
        if self._server is not None:
            await self._server.stop(grace_s)
