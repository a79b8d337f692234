"""Calls of nodes in an order that a test decides: connections that break off, come twice, or are late."""

import asyncio
import hashlib
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from fed.payloads import CHUNK_BYTES
from fed.protocol_pb2 import Answer, Assignment, FromNode, Part, Payload, Plan, Receipt, TaskId, ToNode
from fed.server.node_service import Arrival, NodeService, Patience
from tests.server.hostile_wire import Wire, chunk, tensors

NUMBERS = 3 * CHUNK_BYTES // 4
SPEC = tensors(("float32", NUMBERS), ("int64", 0))
CONTENT = bytes(4 * NUMBERS)
OTHER = struct.pack(f"<{NUMBERS}f", *[1.0] * NUMBERS)
TASK = TaskId(start=1, number=2)


class Aborted(Exception):
    """A call that the server has ended."""


class Call:
    """A call whose messages a test says one by one.

    Args:
        name: in its certificate; None: it has none.
        certificate_pem: the certificate.
    """

    def __init__(self, name: str | None = None, certificate_pem: bytes = b"") -> None:
        self.told: list[ToNode] = []
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self._names = {} if name is None else {"x509_common_name": [name.encode()], "x509_pem_cert": [certificate_pem]}

    async def say(self, *messages: Any) -> None:
        """Let the server hear these, and do all that it does at once."""
        for message in messages:
            self._said.put_nowait(message)
            for _ in range(10):
                await asyncio.sleep(0)

    async def read(self) -> Any:
        return await self._said.get()

    async def write(self, message: ToNode) -> None:
        self.told.append(message)

    async def abort(self, code: grpc.StatusCode, reason: str) -> None:
        raise Aborted(code, reason)

    def peer(self) -> str:
        return "a test"

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._names


class Server:
    """A service with ann's task in flight."""

    def __init__(self, spool: Path, **changed: Any) -> None:
        self.arrivals: SimpleQueue[Any] = SimpleQueue()
        said: dict[str, Any] = {"admits": None, "accepts": lambda _: None, "on_change": lambda: None, **changed}
        self.service = NodeService(1, spool, self.arrivals, **said)
        self.service.make_known(Plan(), SPEC)
        self.service.assign([("ann", Assignment(task=TASK))])

    def begin(self, call: Call) -> "asyncio.Task[Receipt]":
        """A delivery, of which nothing has come yet."""
        return asyncio.create_task(self.service.Deliver(None, call))

    def arrived(self) -> list[Arrival]:
        return [self.arrivals.get() for _ in range(self.arrivals.qsize())]


def header(content: bytes = CONTENT, offset: int = 0, **changed: Any) -> Part:
    payload = {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content), "tensors": SPEC, **changed}
    answer = Answer(task=TASK, payload=Payload(**payload), offset=offset, weight=3.0, samples=3, train_loss=0.5)
    return Part(answer=answer)


def pieces(content: bytes = CONTENT) -> list[Part]:
    return [chunk(content[first : first + CHUNK_BYTES]) for first in range(0, len(content), CHUNK_BYTES)]


def during(steps: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(steps(), 30))


@pytest.mark.parametrize(
    "changed",
    [
        {"tensors": tensors(("object", NUMBERS), ("int64", 0))},
        {"tensors": tensors(("float32", 2**62), ("int64", 0))},
        {"tensors": tensors(("float32", NUMBERS))},
        {"size_bytes": 10**10},
    ],
    ids=["type", "size", "count", "bytes"],
)
def test_a_header_that_is_sent_again_says_what_it_said(tmp_path: Path, changed: dict[str, Any]) -> None:
    async def steps() -> None:
        server = Server(tmp_path)
        first, second = Call(), Call()
        begun = server.begin(first)
        await first.say(header(), pieces()[0], None)
        assert (await begun).received_bytes == CHUNK_BYTES
        again = server.begin(second)
        await second.say(header(offset=CHUNK_BYTES, **changed), *pieces()[1:])
        receipt = await again
        assert not receipt.accepted
        assert "the tensors" in receipt.reason
        (arrived,) = server.arrived()
        assert "its answer was refused: the tensors" in arrived.problem
        assert list(tmp_path.iterdir()) == []

    during(steps)
