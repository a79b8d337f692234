"""Services of several peers in one event loop, each with a server of its own."""

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import grpc
import torch
from torch import Tensor

from fed.identity.certificates import peer_host
from fed.identity.credentials import PeerCredentials
from fed.processes.clock import SYSTEM_CLOCK
from fed.protocol import protocol_pb2 as pb
from fed.protocol.limits import PROTOCOL
from fed.server.peer.gossip.copies import Differences
from fed.server.peer.gossip.exchange import ExchangeKey, GossipExchange
from fed.server.peer.gossip.gossip_service import GossipService
from fed.server.peer.members.member import Member
from fed.server.peer.members.membership import Timing
from fed.wire.payloads import TensorSpec, joined
from fed.wire.rate_limits import Refusals

__all__ = [
    "SPEC",
    "Stranger",
    "await_that",
    "exchanged",
    "has_come_to_nothing",
    "hello",
    "listening",
    "made",
    "port_of",
]

SPEC = TensorSpec(torch.float32, 3)


def made(
    folder: Path,
    name: str,
    introducers: Sequence[str] = (),
    *,
    experiment: str = "one",
    credentials: PeerCredentials | None = None,
    gone_after_s: float = 3.0,
    is_ready: bool = True,
    snapshot: Callable[[], tuple[int, Sequence[Tensor]] | None] = lambda: None,
    check: Callable[[ExchangeKey, str, Sequence[Tensor]], None] | None = None,
    rounds: int = 100,
    patience_s: float = 60.0,
    conserves_sum: bool = False,
) -> GossipService:
    return GossipService(
        own=Member(name, "", time.time_ns(), samples=5, is_ready=is_ready),
        experiment=experiment,
        introducers=introducers,
        folder=folder / name,
        specs=[(SPEC,), (SPEC,)],
        copied=(SPEC,),
        ahead=3,
        credentials=credentials,
        timing=Timing(suspect_after_s=min(2.5, gone_after_s), gone_after_s=gone_after_s),
        silence_s=5.0,
        refusals=Refusals(SYSTEM_CLOCK),
        clock=SYSTEM_CLOCK,
        rounds=rounds,
        patience_s=patience_s,
        snapshot=snapshot,
        check=check,
        conserves_sum=conserves_sum,
    )


async def exchanged(
    service: GossipService,
    key: ExchangeKey,
    tensors: Sequence[Tensor],
    view: str,
    senders: frozenset[str],
    receivers: frozenset[str],
    limit_s: float,
    differences: Differences | None = None,
) -> GossipExchange:
    """An exchange that has ended, within the limit."""
    exchange = GossipExchange(key, tensors, view, senders=senders, receivers=receivers, differences=differences)
    await service.send_and_await(exchange, limit_s)
    return exchange


def has_come_to_nothing(exchange: GossipExchange) -> bool:
    """True if neither side counts the other."""
    return not exchange.received and not exchange.reached


@asynccontextmanager
async def listening(*services: GossipService, ports: Sequence[int] = ()) -> AsyncIterator[None]:
    """Services that listen, one after the other, until the end."""
    begun = []
    try:
        for service, port in zip(services, ports or [0] * len(services), strict=True):
            await service.start(f"127.0.0.1:{port}", None)
            begun.append(service)
        yield
    finally:
        await asyncio.gather(*(service.stop("the test is over") for service in begun))


async def await_that(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    until_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until_s, "the condition has not come true"
        await asyncio.sleep(0.01)


class Stranger:
    """Peer that says what it likes, over a stream of its own."""

    def __init__(
        self,
        port: int,
        greeting: pb.PeerMessage | None = None,
        credentials: PeerCredentials | None = None,
        dials: str = "",
    ) -> None:
        address = f"127.0.0.1:{port}"
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address)
        else:
            host = ("grpc.ssl_target_name_override", peer_host(dials))
            self._channel = grpc.aio.secure_channel(address, credentials.for_dialling(), (host,))
        self.call: Any = self._channel.stream_stream("/fed.v1.Neighbours/Meet")()
        self.greeting = greeting or pb.PeerMessage(greeting=hello())

    async def __aenter__(self) -> Self:
        await self.call.write(self.greeting.SerializeToString())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await self._channel.close()

    async def say(self, *messages: pb.PeerMessage | bytes) -> None:
        for message in messages:
            await self.call.write(message if isinstance(message, bytes) else message.SerializeToString())

    async def hear(self, what: str) -> Any:
        """The next message of a kind."""
        async with asyncio.timeout(10.0):
            while isinstance(data := await self.call.read(), bytes):
                message = pb.PeerMessage.FromString(data)
                if message.HasField(what):
                    return getattr(message, what)
        raise AssertionError(f"the stream ended without {what}")

    async def send(self, round_: int, tensor: Tensor, view: str, exchange: int = 0, **said: Any) -> pb.Verdict:
        """Send vectors; returns the verdict."""
        payload, data = joined([tensor])
        payload.MergeFrom(pb.Payload(**said))
        vectors = pb.Vectors(round=round_, exchange=exchange, view=view, payload=payload)
        await self.say(pb.PeerMessage(vectors=vectors))
        await self.say(pb.PeerMessage(chunk=pb.Chunk(data=data, crc32=zlib.crc32(data))))
        verdict: pb.Verdict = await self.hear("verdict")
        return verdict


def hello(name: str = "stranger", **said: Any) -> pb.Greeting:
    greeting = pb.Greeting(protocol=PROTOCOL, software="fed", name=name, start=1, experiment="one")
    greeting.MergeFrom(pb.Greeting(**said))
    return greeting


def port_of(service: GossipService) -> int:
    return int(service.members.own.address.rpartition(":")[2])
