"""Calls of nodes in an lease that a test decides: connections that break off, come twice, or are late."""

import asyncio
import functools
import hashlib
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
import torch

from fed.clients.node.own_data import signature_of_an_app
from fed.clients.node.plans import names_sha256
from fed.processes.clock import SYSTEM_CLOCK
from fed.protocol.protocol_pb2 import (
    Answer,
    Assignment,
    Chunk,
    Farewell,
    FromNode,
    Part,
    Payload,
    Plan,
    Receipt,
    TaskId,
    ToNode,
    Wanted,
)
from fed.server.grpc.service import NodeService, Patience
from fed.server.observer import NodeCame, NodeWent
from fed.server.registry import TaskOutcome
from fed.storage.serialization import bytes_of
from fed.wire.payloads import CHUNK_BYTES, TensorSpec, chunks
from fed.wire.rate_limits import Refusals
from tests.clocks import HandClock, turns
from tests.server.grpc.hostile_wire import Wire, chunk, tensors

NUMBERS = 3 * CHUNK_BYTES // 4
SPEC = (TensorSpec(torch.float32, NUMBERS), TensorSpec(torch.int64, 0))
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
            for _ in range(50):
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
        said: dict[str, Any] = {"admits": None, "accepts": lambda _: None, "clock": SYSTEM_CLOCK, **changed}
        said.setdefault("refusals", Refusals(said["clock"]))
        self.service = NodeService(1, spool, self.arrivals, **said)
        self.service.make_known(Plan(), SPEC)
        self.service.assign([("ann", Assignment(task=TASK))])

    def begin(self, call: Call) -> "asyncio.Task[Receipt]":
        """A delivery, of which nothing has come yet."""
        return asyncio.create_task(self.service.Deliver(None, call))

    def content(self) -> bytes:
        """What the one delivery that has arrived left in its file."""
        (arrived,) = self.arrived()
        assert arrived.read is not None
        return b"".join(map(bytes_of, arrived.read()))

    def arrived(self) -> list[TaskOutcome]:
        found = [self.arrivals.get() for _ in range(self.arrivals.qsize())]
        return [one for one in found if not isinstance(one, NodeCame | NodeWent)]


def header(content: bytes = CONTENT, offset: int = 0, **changed: Any) -> Part:
    payload = {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content), **changed}
    payload = {"tensors": tensors(("float32", NUMBERS), ("int64", 0)), **payload}
    answer = Answer(task=TASK, payload=Payload(**payload), offset=offset, weight=3.0, samples=3, train_loss=0.5)
    return Part(answer=answer)


def pieces(content: bytes = CONTENT) -> list[Part]:
    return [chunk(content[first : first + CHUNK_BYTES]) for first in range(0, len(content), CHUNK_BYTES)]


def during(steps: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test whose steps are awaited, for 30 s at most."""

    @functools.wraps(steps)
    def test(**given: Any) -> None:
        asyncio.run(asyncio.wait_for(steps(**given), 30))

    return test


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
@during
async def test_a_header_that_is_sent_again_says_what_it_said(tmp_path: Path, changed: dict[str, Any]) -> None:
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


@during
async def test_delivery_over_a_replaced_connection_is_ignored(tmp_path: Path) -> None:
    server = Server(tmp_path)
    stale, new = Call(), Call()
    late = server.begin(stale)
    await stale.say(header(), pieces()[0])
    begun = server.begin(new)
    await new.say(header(offset=CHUNK_BYTES), pieces()[1])
    await stale.say(pieces(OTHER)[1])
    assert (await late).received_bytes == 2 * CHUNK_BYTES
    await new.say(pieces()[2])
    assert (await begun).accepted
    assert server.content() == CONTENT


@during
async def test_a_delivery_whose_file_was_begun_anew_has_no_say(tmp_path: Path) -> None:
    server = Server(tmp_path)
    stale, new = Call(), Call()
    late = server.begin(stale)
    await stale.say(header(), pieces()[0])
    begun = server.begin(new)
    await new.say(header(OTHER), pieces(OTHER)[0])
    await stale.say(pieces()[1])
    assert not (await late).accepted
    await new.say(*pieces(OTHER)[1:])
    assert (await begun).accepted
    assert server.content() == OTHER


@during
async def test_an_answer_sent_again_is_not_another_attempts(tmp_path: Path) -> None:
    """Its masks are others: a sum with it would be noise."""
    server = Server(tmp_path)
    first = Call()
    begun = server.begin(first)
    await first.say(header(), *pieces())
    assert (await begun).accepted
    server.service.assign([("ann", Assignment(task=TASK, attempt=1))])
    for content in (CONTENT, OTHER):
        call = Call()
        begun = server.begin(call)
        await call.say(header(content), *pieces(content))
        assert (await begun).accepted
    counted = [one.answer.payload.sha256 for one in server.arrived() if one.answer is not None]
    assert counted == [hashlib.sha256(content).hexdigest() for content in (CONTENT, OTHER)]


@during
async def test_an_answer_counts_once_however_often_it_is_sent(tmp_path: Path) -> None:
    server = Server(tmp_path)
    for _ in range(3):
        call = Call()
        begun = server.begin(call)
        await call.say(header(), *pieces())
        assert (await begun).accepted
    assert len(server.arrived()) == 1
    another = Call()
    begun = server.begin(another)
    await another.say(header(OTHER), *pieces(OTHER))
    assert "not in flight" in (await begun).reason
    assert server.arrived() == []


@pytest.mark.parametrize("name", ["0", "eve"])
@during
async def test_answer_receipt_is_confirmed_to_its_sender(tmp_path: Path, name: str) -> None:
    server = Server(tmp_path, admits=lambda name, certificate_pem: None)
    own, others = Call("ann"), Call(name)
    begun = server.begin(own)
    await own.say(header(), *pieces())
    assert (await begun).accepted
    begun = server.begin(others)
    await others.say(header(), *pieces())
    assert "not in flight for it" in (await begun).reason


@during
async def test_an_answer_withdrawn_during_transfer_leaves_no_file(tmp_path: Path) -> None:
    server = Server(tmp_path)
    call = Call()
    begun = server.begin(call)
    await call.say(header(), *pieces()[:2])
    assert server.service.withdraw([TASK.number, 77]) == [TASK.number]
    await call.say(pieces()[2])
    assert "not in flight any more" in (await begun).reason
    assert server.arrived() == []
    assert list(tmp_path.iterdir()) == []


@during
async def test_an_answer_that_is_there_is_not_withdrawn(tmp_path: Path) -> None:
    server = Server(tmp_path)
    call = Call()
    begun = server.begin(call)
    await call.say(header(), *pieces())
    assert server.service.withdraw([TASK.number]) == []
    assert (await begun).accepted
    assert [arrived.problem for arrived in server.arrived()] == [""]


LEASE_S = 60.0


async def passes(clock: HandClock, seconds: float) -> None:
    """Let time pass second by second, as it does where a process is awake."""
    for _ in range(round(seconds)):
        clock.move(1.0)
        await turns()


@during
async def test_a_file_that_comes_slowly_is_waited_for(tmp_path: Path) -> None:
    clock = HandClock()
    server = Server(tmp_path, clock=clock, patience=Patience(lease_s=LEASE_S))
    watching = asyncio.create_task(server.service.watch())
    call = Call()
    begun = server.begin(call)
    await call.say(header())
    for piece in pieces():
        await passes(clock, 0.7 * LEASE_S)
        await call.say(piece)
    assert (await begun).accepted
    watching.cancel()


@during
async def test_task_of_a_silent_node_fails_and_is_withdrawn(tmp_path: Path) -> None:
    clock = HandClock()
    server = Server(tmp_path, clock=clock, patience=Patience(lease_s=LEASE_S))
    watching = asyncio.create_task(server.service.watch())
    delivering, attending = Call(), Call()
    stream = asyncio.create_task(server.service.Attend(None, attending))
    await attending.say(FromNode(joining=Wire(1, "ann").joining()))
    begun = server.begin(delivering)
    await delivering.say(header(), pieces()[0])
    await passes(clock, LEASE_S - 1)
    assert server.arrived() == []
    await passes(clock, LEASE_S / 10)  # a server looks twenty times
    (failed,) = server.arrived()
    assert "no heartbeat for 60 s" in failed.problem
    await delivering.say(pieces()[1])
    assert "not in flight any more" in (await begun).reason
    assert list(tmp_path.iterdir()) == []
    while not any(message.withdrawal.task == TASK for message in attending.told):
        await asyncio.sleep(0.02)
    stream.cancel()
    watching.cancel()


@during
async def test_a_server_that_was_frozen_waits_for_its_nodes_anew(tmp_path: Path) -> None:
    clock = HandClock()
    server = Server(tmp_path, clock=clock, patience=Patience(lease_s=LEASE_S))
    watching = asyncio.create_task(server.service.watch())
    await passes(clock, 5.0)
    clock.move(2 * LEASE_S)  # nothing else goes on meanwhile, as in a process that is stopped
    await turns()
    await passes(clock, 0.8 * LEASE_S)
    assert server.arrived() == []
    await passes(clock, 0.3 * LEASE_S)  # but it does not wait for ever
    assert len(server.arrived()) == 1
    watching.cancel()


@during
async def test_a_node_that_was_given_another_certificate_keeps_its_task(tmp_path: Path) -> None:
    valid = [b"first"]
    refusal = "it came with another certificate"
    server = Server(tmp_path, admits=lambda _, certificate_pem: None if certificate_pem == valid[0] else refusal)
    before, after = Call("ann", b"first"), Call("ann", b"second")
    left = asyncio.create_task(server.service.Attend(None, before))
    await before.say(FromNode(joining=Wire(1, "ann").joining()))
    valid[0] = b"second"
    came = asyncio.create_task(server.service.Attend(None, after))
    await after.say(FromNode(joining=Wire(1, "ann").joining(held=[TASK])))
    with pytest.raises(Aborted, match="another certificate"):
        await left
    call = Call("ann", b"second")
    begun = server.begin(call)
    await call.say(header(), *pieces())
    assert (await begun).accepted
    assert [arrived.problem for arrived in server.arrived()] == [""]
    came.cancel()


@during
async def test_a_node_that_is_revoked_loses_its_task_at_once(tmp_path: Path) -> None:
    revoked: list[str] = []
    server = Server(tmp_path, admits=lambda name, _: "it was revoked" if name in revoked else None)
    call = Call("ann")
    stream = asyncio.create_task(server.service.Attend(None, call))
    await call.say(FromNode(joining=Wire(1, "ann").joining()))
    revoked.append("ann")
    await call.say(FromNode(accepted=TASK))
    with pytest.raises(Aborted, match="it was revoked"):
        await stream
    assert [arrived.problem for arrived in server.arrived()] == ["it was revoked"]


@during
async def test_server_says_that_two_nodes_share_a_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(tmp_path)
    caplog.set_level("INFO")
    streams = []
    for _ in range(5):  # as two processes do, each of which dials again when the other has taken its connection
        call = Call()
        streams.append(asyncio.create_task(server.service.Attend(None, call)))
        await call.say(FromNode(joining=Wire(1, "ann").joining()))
    warned = [record.getMessage() for record in caplog.records if "second node" in record.getMessage()]
    assert len(warned) == 1
    assert warned[0].startswith("client 'ann' has dialled in 3 times while it was connected: does a second node use")
    assert [message for message in caplog.messages if "joined" in message] == [
        "client 'ann' has joined: it has 10 samples"
    ]
    streams[-1].cancel()


@during
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"samples": 1}, "has 1 sample"),
        (
            {"samples": 1, "signature": signature_of_an_app()},
            "runs an app, which tells its number of samples as it trains",
        ),
    ],
    ids=["one", "app"],
)
async def test_server_says_how_many_samples_a_node_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, Any], words: str
) -> None:
    caplog.set_level("INFO")
    call = Call()
    joining = Wire(1, "ann").joining(**changed)
    stream = asyncio.create_task(Server(tmp_path).service.Attend(None, call))
    await call.say(FromNode(joining=joining))
    assert caplog.messages == [f"client 'ann' has joined: it {words}"]
    stream.cancel()


@during
async def test_a_node_counts_once_it_accepts_the_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(tmp_path, code=["python:mine:model"])
    refusing = [Call(), Call()]
    for call in refusing:  # as its service manager starts it again
        stream = asyncio.create_task(server.service.Attend(None, call))
        await call.say(FromNode(joining=Wire(1, "ann").joining(code_sha256=b"")))
        assert [message.code.names for message in call.told] == [["python:mine:model"]]
        await call.say(FromNode(farewell=Farewell(reason="not this code", is_final=True)))
        await stream
    assert server.service.nodes == {}
    assert caplog.messages == ["client 'ann' takes no part: not this code"]
    accepting = Call()
    stream = asyncio.create_task(server.service.Attend(None, accepting))
    await accepting.say(FromNode(joining=Wire(1, "ann").joining(code_sha256=b"")))
    assert server.service.nodes == {}
    await accepting.say(FromNode(joining=Wire(1, "ann").joining(code_sha256=names_sha256(["python:mine:model"]))))
    assert [*server.service.nodes] == ["ann"]
    stream.cancel()


@during
async def test_returning_node_learns_missing_and_withdrawn_tasks(tmp_path: Path) -> None:
    server = Server(tmp_path)
    over, earlier = TaskId(start=1, number=1), TaskId(start=9, number=2)
    calls = [Call(), Call(), Call()]
    streams = []
    for call, held in zip(calls, ([], [TASK], [over, earlier]), strict=True):
        streams.append(asyncio.create_task(server.service.Attend(None, call)))
        await call.say(FromNode(joining=Wire(1, "ann").joining(held=held)))
        await call.say(FromNode(heartbeat={}))
    told_to_both = calls[0].told[-1].farewell.reason
    assert told_to_both.endswith("a second node uses it: give each node a name of its own")
    assigned = [[message.assignment.task for message in call.told if message.HasField("assignment")] for call in calls]
    withdrawn = [[message.withdrawal.task for message in call.told if message.HasField("withdrawal")] for call in calls]
    assert assigned == [[TASK], [], [TASK]]
    assert withdrawn == [[], [], [over, earlier]]
    assert [call.told[-1].farewell.reason for call in calls[:2]] == [told_to_both] * 2
    assert not any(call.told[-1].farewell.is_final for call in calls[:2])
    assert [stream.done() for stream in streams] == [True, True, False]
    streams[-1].cancel()


@during
async def test_payload_removed_during_a_request_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def going(path: Path, offset: int) -> Iterator[Chunk]:
        path.unlink()
        yield from chunks(path, offset)

    monkeypatch.setattr("fed.wire.calls.chunks", going)
    server = Server(tmp_path)
    (tmp_path / f"{'0' * 64}.out").write_bytes(CONTENT)
    for _ in range(2):
        with pytest.raises(Aborted, match="no such payload any more"):
            await server.service.Download(Wanted(sha256="0" * 64), Call())
    assert server.service.refusals.count == 0


@during
async def test_damaged_payload_is_retried_and_refused_the_third_time(tmp_path: Path) -> None:
    server = Server(tmp_path)
    broken = Part(chunk=Chunk(data=CONTENT[:CHUNK_BYTES], crc32=1))
    receipts = []
    for parts in ([pieces()[0], *pieces(OTHER)[1:]], [pieces()[0], broken]):
        call = Call()
        begun = server.begin(call)
        await call.say(header(), *parts)
        receipts.append(await begun)
    call = Call()
    begun = server.begin(call)
    await call.say(header(offset=CHUNK_BYTES), *pieces(OTHER)[1:])
    receipts.append(await begun)
    assert not any(receipt.accepted for receipt in receipts)
    assert [receipt.received_bytes for receipt in receipts[:2]] == [0, CHUNK_BYTES]
    assert "came damaged 3 times" in receipts[2].reason
    assert "its answer was refused" in server.arrived()[0].problem
    assert list(tmp_path.iterdir()) == []


@during
async def test_each_message_is_held_to_the_roster(tmp_path: Path) -> None:
    revoked: list[str] = []
    server = Server(tmp_path, admits=lambda name, _: "it was revoked" if name in revoked else None)
    (tmp_path / f"{'0' * 64}.out").write_bytes(CONTENT)

    class Fetching(Call):
        async def write(self, message: Any) -> None:
            await super().write(message)
            revoked.append("ann")

    fetching = Fetching("ann")
    with pytest.raises(Aborted, match="it was revoked"):
        await server.service.Download(Wanted(sha256="0" * 64), fetching)
    assert len(fetching.told) == 1
    revoked.clear()
    call = Call("ann")
    begun = server.begin(call)
    await call.say(header(), *pieces()[:2])
    revoked.append("ann")
    await call.say(pieces()[2])
    with pytest.raises(Aborted, match="it was revoked"):
        await begun
    assert server.arrived() == []
    with pytest.raises(Aborted, match="it was revoked"):
        await server.service.Deliver(None, Call("ann"))
    with pytest.raises(Aborted, match="must show its certificate"):
        await server.service.Deliver(None, Call())


@pytest.mark.parametrize("offset", [0, CHUNK_BYTES // 2, 2 * CHUNK_BYTES, 2**63])
@during
async def test_a_delivery_goes_on_from_where_the_server_is(tmp_path: Path, offset: int) -> None:
    server = Server(tmp_path)
    for said, receives in ((header(), CHUNK_BYTES), (header(offset=offset), CHUNK_BYTES)):
        call = Call()
        begun = server.begin(call)
        await call.say(said, pieces()[0], None)
        assert (await begun).received_bytes == receives
    call = Call()
    begun = server.begin(call)
    await call.say(header(offset=CHUNK_BYTES), *pieces()[1:])
    assert (await begun).accepted
    assert server.content() == CONTENT


@during
async def test_what_was_begun_anew_takes_nothing_from_an_earlier_delivery(tmp_path: Path) -> None:
    server = Server(tmp_path)
    stale, new = Call(), Call()
    late = server.begin(stale)
    await stale.say(header(), *pieces()[:2])
    begun = server.begin(new)
    await new.say(header(OTHER, offset=5))
    assert (await begun).received_bytes == 0
    await stale.say(pieces()[2])
    assert not (await late).accepted
    assert server.arrived() == []


@during
async def test_nobody_answers_or_fails_anothers_task(tmp_path: Path) -> None:
    server = Server(tmp_path, admits=lambda name, certificate_pem: None)
    delivering, attending = Call("eve"), Call("eve")
    begun = server.begin(delivering)
    await delivering.say(header(), *pieces())
    assert "not in flight for it" in (await begun).reason
    stream = asyncio.create_task(server.service.Attend(None, attending))
    await attending.say(FromNode(joining=Wire(1, "ann").joining(held=[TASK])))
    await attending.say(FromNode(failed={"task": TASK, "reason": "made up"}), FromNode(accepted=TASK))
    assert server.service.refusals.count == 3
    assert server.arrived() == []
    stream.cancel()


@during
async def test_a_heartbeat_that_names_a_task_has_it_waited_for(tmp_path: Path) -> None:
    clock = HandClock()
    server = Server(tmp_path, clock=clock, patience=Patience(lease_s=LEASE_S))
    watching = asyncio.create_task(server.service.watch())
    call = Call()
    stream = asyncio.create_task(server.service.Attend(None, call))
    await call.say(FromNode(joining=Wire(1, "ann").joining()))
    for _ in range(6):
        await passes(clock, 20.0)
        await call.say(FromNode(heartbeat={"held": [TASK]}))
    assert server.arrived() == []
    for _ in range(4):
        await passes(clock, 20.0)
        await call.say(FromNode(heartbeat={"held": [TaskId(start=9, number=TASK.number)]}))
    assert "no heartbeat" in server.arrived()[0].problem
    stream.cancel()
    watching.cancel()


@pytest.mark.parametrize("start", [0, 2])
@during
async def test_a_task_of_another_start_is_another(tmp_path: Path, start: int) -> None:
    server = Server(tmp_path)
    said = header()
    said.answer.task.start = start
    for parts, tasks in (([said, *pieces()], 0), ([header(), *pieces()], 1), ([said, *pieces()], 1)):
        call = Call()
        begun = server.begin(call)
        await call.say(*parts)
        assert (await begun).accepted == (parts[0] is not said)
        assert server.arrivals.qsize() == tasks
    server.service.assign([("ann", Assignment(task=TASK))])
    call = Call()
    stream = asyncio.create_task(server.service.Attend(None, call))
    other = TaskId(start=start, number=TASK.number)
    await call.say(FromNode(joining=Wire(1, "ann").joining(held=[other])))
    await call.say(FromNode(failed={"task": other, "reason": "made up"}))
    assert len(server.arrived()) == 1
    assert [message.assignment.task for message in call.told if message.HasField("assignment")] == [TASK]
    stream.cancel()
