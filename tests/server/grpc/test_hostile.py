"""Hostile nodes: whatever they send is refused, counted and logged, and changes nothing."""

import logging
import math
import os
import re
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from fed.config.experiment import Experiment
from fed.identity.authority import Authority
from fed.processes.clock import SYSTEM_CLOCK
from fed.protocol.protocol_pb2 import (
    Assignment,
    Examination,
    FromNode,
    Heartbeat,
    Joining,
    Part,
    Payload,
    Scores,
    Signature,
    TaskId,
)
from fed.server.grpc.deployment import Deployment
from fed.server.grpc.service import NodeService
from fed.wire.rate_limits import Refusals
from tests.server.grpc.hostile_wire import (
    BOUND_S,
    PATIENCE,
    Attack,
    Wire,
    answer,
    bits,
    chunk,
    honest,
    other_task,
    run_with,
    tensors,
)

MODEL = 650  # numbers of the linear model of digits


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The model of a run that nobody attacked."""
    return bits(run_with(tmp_path_factory.mktemp("untouched"), None))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    made = Authority.create(folder, hosts=["127.0.0.1"])
    for name in ("0", "1", "mallory"):
        made.issue(name)
    return folder


def _content(number: float = 1.0, count: int = MODEL) -> bytes:
    return struct.pack(f"<{count}f", *[1.0] * (count - 1), number)


def sends(content: bytes = _content(), *parts: Part | bytes, **changed: Any) -> Attack:
    """An attack that delivers this answer, with these parts in place of its chunks."""

    def attack(wire: Wire, assignment: Assignment) -> None:
        wire.deliver([Part(answer=answer(assignment, content, **changed)), *(parts or [chunk(content)])])

    return attack


def _shaped(*said: tuple[str, int], content: bytes = _content(), size_bytes: int | None = None) -> Attack:
    payload = Payload(sha256="0" * 64, size_bytes=len(content) if size_bytes is None else size_bytes)
    payload.tensors.extend(tensors(*said))
    return sends(content, payload=payload)


def _with_task(**changed: int) -> Attack:
    def attack(wire: Wire, assignment: Assignment) -> None:
        task = TaskId(start=assignment.task.start, number=assignment.task.number)
        for name, by in changed.items():
            setattr(task, name, getattr(task, name) + by)
        content = wire.trained(assignment, 7)
        receipt = wire.deliver([Part(answer=answer(assignment, content, task=task)), chunk(content)])
        assert not receipt.accepted
        assert "not in flight for it" in receipt.reason
        wire.say(failed={"task": assignment.task, "reason": "enough"})

    return attack


def _says(after: FromNode | None = None, **what: Any) -> Attack:
    """An attack by a message on the stream."""

    def attack(wire: Wire, assignment: Assignment) -> None:
        wire.say(**what)
        wire.say(failed={"task": assignment.task, "reason": "enough"})

    return attack


def _names_anothers(wire: Wire, assignment: Assignment) -> None:
    wire.say(heartbeat=Heartbeat(held=[other_task(assignment, by) for by in (-2, -1, 1, 2)]))
    wire.say(failed={"task": other_task(assignment, -1), "reason": "not mine"})
    wire.say(failed={"task": assignment.task, "reason": "enough"})


def _stalls(wire: Wire, assignment: Assignment) -> None:
    def parts() -> Iterator[Part]:
        yield Part(answer=answer(assignment, _content()))
        time.sleep(PATIENCE.stall_s * 3)

    with pytest.raises(grpc.RpcError) as caught:
        wire.deliver(parts())
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wire.say(failed={"task": assignment.task, "reason": "enough"})


def _never_ends(wire: Wire, assignment: Assignment) -> None:
    def parts() -> Iterator[Part]:
        yield Part(answer=answer(assignment, _content()))
        while True:
            yield chunk(b"")

    assert "a chunk must have" in wire.deliver(parts()).reason


def _bytes_for_parts(wire: Wire, assignment: Assignment) -> None:
    with pytest.raises(grpc.RpcError, match="bytes that are no message"):
        wire.deliver([Part(answer=answer(assignment, _content())), b"\xff\xff\xff"])
    wire.say(failed={"task": assignment.task, "reason": "enough"})


def _floods(wire: Wire, assignment: Assignment) -> None:
    for _ in range(1000):
        wire.say(heartbeat=Heartbeat(held=[assignment.task]))


def _asks_for(sha256: str, offset: int = 0) -> Attack:
    def attack(wire: Wire, assignment: Assignment) -> None:
        with pytest.raises(grpc.RpcError):
            wire.download(sha256 or assignment.payload.sha256, offset)
        wire.say(failed={"task": assignment.task, "reason": "enough"})

    return attack


ATTACKS: dict[str, tuple[Attack, str]] = {
    "an unknown type": (_shaped(("object" * 10**4, MODEL), ("int64", 0)), "tensors must be"),
    "too many tensors": (_shaped(*[("float32", 1)] * 20_000), "tensors must be"),
    "a wrong size": (_shaped(("float32", MODEL), ("int64", 0), size_bytes=9), "take 2600 bytes, got 9"),
    "10 GB": (_shaped(("float32", 2_500_000_000), ("int64", 0), size_bytes=10**10), "tensors must be"),
    "a hash that is none": (sends(payload=Payload(sha256="../" * 30, size_bytes=2600)), "tensors must be"),
    "NaN in the vector": (sends(_content(math.nan)), "vector must be finite"),
    "NaN for a loss": (sends(train_loss=math.nan), "loss must be finite"),
    "a loss beyond all means": (sends(train_loss=1.7e308, samples=10**6), "loss must be finite and within"),
    "a weight that is a claim": (sends(weight=11.0), "weight must be its number of samples, 10, got 11"),
    "a weight beyond all means": (sends(weight=1e100), "weight must be positive and at most"),
    "2^63 samples": (sends(samples=2**63), "samples must be"),
    "another start": (_with_task(start=-1), "is not in flight"),
    "a chunk too long": (sends(_content(), chunk(_content() + b"12345678")), "a chunk must have"),
    "no header": (lambda wire, assignment: _refused_call(wire, assignment, [chunk(b"1")]), "begin with the answer's"),
    "two headers": (
        lambda wire, assignment: _reason(wire, assignment, "there must be chunks"),
        "there must be chunks",
    ),
    "a stream that stalls": (_stalls, "no message arrived for 1 s"),
    "a stream that never ends": (_never_ends, "a chunk must have"),
    "bytes that are no message": (_bytes_for_parts, "bytes that are no message"),
    "heartbeats of others' tasks": (_names_anothers, "is not in flight for it"),
    "10^4 tasks held": (_says(heartbeat={"held": [TaskId(start=1, number=1)] * 10_000}), "1000 tasks at most"),
    "a flood": (_floods, "more messages than a node needs"),
    "another joining": (_says(joining={"protocol": 1}), "joins once"),
    "a message of another version": (_says(), "does not know"),
    "scores unasked": (_says(scores=Scores(id=1, samples=1, loss=0.1)), "not asked for scores"),
    "a path": (_asks_for("../" * 20 + "etc/passwd"), "64 hexadecimal digits"),
    "an offset beyond the end": (_asks_for("", 2**64 - 1), "an offset of 18446744073709551615"),
}


def _refused_call(wire: Wire, assignment: Assignment, parts: list[Part | bytes]) -> None:
    with pytest.raises(grpc.RpcError):
        wire.deliver(parts)
    wire.say(failed={"task": assignment.task, "reason": "enough"})


def _reason(wire: Wire, assignment: Assignment, reason: str) -> None:
    header = Part(answer=answer(assignment, _content()))
    assert reason in wire.deliver([header, header]).reason


def _refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("name", ATTACKS)
def test_what_a_hostile_node_sends_changes_nothing(
    name: str, untouched: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attack, reason = ATTACKS[name]
    run = run_with(tmp_path, attack)
    assert run.summary["status"] == "finished"
    assert bits(run) == untouched
    assert run.summary["refused"] >= 1
    told = [line for line in _refusals(caplog) if re.search(reason, line)]
    assert told, _refusals(caplog)
    assert all(len(line) < 1000 for line in _refusals(caplog))


def _joins(**changed: Any) -> Any:
    """Somebody who joins like this, in the insecure run, and is sent away."""

    def bystander(port: int) -> None:
        wire = Wire(port, changed.get("name", "eve"))
        with pytest.raises(grpc.RpcError) as caught:
            list(wire.attend(FromNode(joining=wire.joining(**changed))))
        wire.outbox.put(None)
        assert caught.value.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT)

    return bystander


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"protocol": 2}, "version 1 of the protocol, got 2"),
        ({"name": "eve\nrefused 'ann'"}, "a node's name must be"),
        ({"held": [TaskId(start=1, number=1)] * 10_000}, "1000 tasks at most"),
        ({"signature": Signature(input_shape=[65], input_dtype="float64")}, "made for float32 inputs"),
        ({"signature": Signature(input_shape=[64], input_dtype="object" * 9999)}, "inputs must be of one of float32"),
    ],
)
def test_an_absurd_joining_is_refused(
    changed: dict[str, Any], reason: str, untouched: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_with(tmp_path, None, bystander=_joins(**changed))
    assert run.summary["refused"] == 1
    assert any(re.search(reason, line) for line in _refusals(caplog)), _refusals(caplog)
    assert bits(run) == untouched
    assert all(len(line) < 1000 and line.isprintable() for line in _refusals(caplog))


@pytest.mark.parametrize(
    ("size_bytes", "code", "refused"),
    [(3_000_000, "INVALID_ARGUMENT", 2), (22_000_000, "RESOURCE_EXHAUSTED", 0)],
    ids=["more than has to be", "more than gRPC hands on"],
)
def test_an_overlong_first_message_ends_the_stream(
    size_bytes: int,
    code: str,
    refused: int,
    authority: Path,
    untouched: bytes,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def bystander(port: int) -> None:
        wire = Wire(port, "mallory", authority / "nodes" / "mallory")
        unknown_field = b"\xfa\xff\x7f" + _varint(size_bytes) + bytes(size_bytes)
        with pytest.raises(grpc.RpcError, match=code):
            list(wire.attend(FromNode(joining=wire.joining()).SerializeToString() + unknown_field))
        wire.outbox.put(None)
        with pytest.raises(grpc.RpcError, match=code):
            wire.deliver([unknown_field])

    run = run_with(tmp_path, None, authority=authority, bystander=bystander)
    assert run.summary["refused"] == refused
    reason = r"refused 'mallory': a message must have at most \d+ bytes, got 30000\d\d"
    assert [bool(re.fullmatch(reason, line)) for line in _refusals(caplog)] == [True] * refused, _refusals(caplog)
    assert bits(run) == untouched


def test_broken_call_is_not_refused_but_an_empty_one_is(
    authority: Path, untouched: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def bystander(port: int) -> None:
        wire = Wire(port, "0", authority / "nodes" / "0")
        never = threading.Event()
        for path in ("Attend", "Deliver"):
            call: Any = wire.channel.stream_stream(f"/fed.v1.Coordination/{path}")
            begun = call(iter(never.wait, None), timeout=0.3)
            with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
                next(begun)
            with pytest.raises(grpc.RpcError, match="ended without one"):
                next(call(iter(()), timeout=BOUND_S))
        begun = call(iter(never.wait, None))
        wire.channel.close()
        never.set()

    run = run_with(tmp_path, None, authority=authority, bystander=bystander)
    assert run.summary["refused"] == 2
    assert bits(run) == untouched
    assert ["ended without one" in line for line in _refusals(caplog)] == [True, True], _refusals(caplog)


def _varint(number: int) -> bytes:
    """As protobuf writes numbers."""
    return bytes([number & 127 | 128, number >> 7 & 127 | 128, number >> 14 & 127 | 128, number >> 21])


@pytest.mark.parametrize("dtype", ["load", "complex64", "qint8", "__class__", ""])
def test_first_node_cannot_announce_data_no_model_takes(dtype: str) -> None:
    deployment = Deployment(Experiment(model={"kind": "logistic"}, data=None, evaluation="clients"))
    said = Signature(input_shape=[64], input_dtype=dtype, classes=10)
    assert "inputs must be of one of float32" in (deployment.accepts(Joining(signature=said)) or "")
    said.input_dtype = "float32"
    assert deployment.accepts(Joining(signature=said)) is None


def test_a_stream_without_a_join_first_is_refused(
    untouched: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def bystander(port: int) -> None:
        for first in (FromNode(heartbeat=Heartbeat()), FromNode(), b"\xff\xff\xff", b""):
            wire = Wire(port, "eve")
            with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
                list(wire.attend(first))
            wire.outbox.put(None)
        wire = Wire(port, "eve")
        download: Any = wire.channel.unary_stream("/fed.v1.Coordination/Download")
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
            list(download(b"\xff\xff\xff"))

    run = run_with(tmp_path, None, bystander=bystander)
    assert run.summary["refused"] == 5
    assert bits(run) == untouched


def test_no_node_can_say_that_the_run_has_diverged(
    untouched: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "NaN\nrefused 'ann': made up\x1b[31m" + "x" * 10_000

    def attack(wire: Wire, assignment: Assignment) -> None:
        wire.say(failed={"task": assignment.task, "reason": reason, "diverged": True})

    caplog.set_level(logging.INFO)
    assert bits(run_with(tmp_path, attack)) == untouched
    told = [record.getMessage() for record in caplog.records if "diverged" in record.getMessage()]
    assert len(told) == 2
    assert all(line.isprintable() and len(line) < 1000 for line in told)


def test_rounds_in_which_nobody_counts_are_said_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def works(wire: Wire, assignment: Assignment) -> None:
        if assignment.round in (1, 4, 5):
            honest(wire, assignment)
        else:
            wire.say(failed={"task": assignment.task, "reason": "NaN", "diverged": assignment.round > 2})

    monkeypatch.setattr("tests.server.grpc.hostile_wire.honest", works)
    run = run_with(tmp_path, None, rounds={"count": 6})
    assert [line["failed"] for line in run.metrics] == [0, 2, 2, 0, 0, 2]
    assert run.summary["unanswered_rounds"] == 3
    told = [line for line in _refusals(caplog) if "no answer counts" in line]
    words = "no answer counts, of 2 clients that were asked (0 were late, 2 failed), so no update moves the model"
    assert [line.partition(";")[0] for line in told] == [f"round 2: {words}", f"round 6: {words}"]


def test_the_certificate_says_whose_an_update_is(
    authority: Path, untouched: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def attack(wire: Wire, assignment: Assignment) -> None:
        content = wire.trained(assignment, 7)
        for by in (-2, -1, 1, 2):
            said = answer(assignment, content, task=other_task(assignment, by))
            receipt = wire.deliver([Part(answer=said), chunk(content)])
            assert "is not in flight for it" in receipt.reason
        wire.say(failed={"task": assignment.task, "reason": "enough"})

    def bystander(port: int) -> None:
        """Mallory again, who says it is node 0."""
        wire = Wire(port, "mallory", authority / "nodes" / "mallory")
        with pytest.raises(grpc.RpcError, match="must have samples"):
            list(wire.attend(FromNode(joining=wire.joining(name="0", samples=0))))
        wire.outbox.put(None)

    run = run_with(tmp_path, attack, authority=authority, bystander=bystander)
    assert run.summary["refused"] >= 9
    assert run.summary["clients"] == 3
    assert bits(run) == untouched
    assert all("refused 'mallory': " in line for line in _refusals(caplog))


def test_a_node_revoked_while_connected_is_dismissed(
    untouched: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    authority = Authority.create(keys, hosts=["127.0.0.1"])
    for name in ("0", "1", "mallory"):
        authority.issue(name)

    def attack(wire: Wire, assignment: Assignment) -> None:
        authority.revoke("mallory")
        with pytest.raises(grpc.RpcError, match="was revoked on"):
            wire.download(assignment.payload.sha256)
        with pytest.raises(grpc.RpcError, match="was revoked on"):
            wire.deliver([Part(answer=answer(assignment, _content())), chunk(_content())])

    run = run_with(tmp_path, attack, authority=keys)
    assert bits(run) == untouched
    assert len([line for line in _refusals(caplog) if "refused 'mallory': 'mallory' was revoked" in line]) == 3


def test_the_summary_shows_a_node_that_fails_each_round(authority: Path, tmp_path: Path) -> None:
    def attack(wire: Wire, assignment: Assignment) -> None:
        wire.say(scores=Scores(id=1))
        wire.say(failed={"task": assignment.task, "reason": "the disk is full"})

    nodes = run_with(tmp_path, attack, authority=authority).summary["nodes"]
    assert {name: (one["answered"], one["failed"], one["refused"]) for name, one in nodes.items()} == {
        "0": (2, 0, 0),
        "1": (2, 0, 0),
        "mallory": (0, 2, 2),
    }
    assert nodes["mallory"]["last_reason"] == "the disk is full"


def test_a_node_has_few_calls_open(authority: Path, untouched: bytes, tmp_path: Path) -> None:
    def attack(wire: Wire, assignment: Assignment) -> None:
        deliver: Any = wire.channel.stream_unary("/fed.v1.Coordination/Deliver", Part.SerializeToString)
        ended = threading.Event()

        def nothing() -> Iterator[Part]:
            ended.wait(BOUND_S)
            yield from ()

        calls = [deliver.future(nothing(), timeout=BOUND_S) for _ in range(20)]
        codes = [call.code() for call in calls]
        ended.set()
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 13  # 8 may be open, of which one attends
        wire.say(failed={"task": assignment.task, "reason": "enough"})

    assert bits(run_with(tmp_path, attack, authority=authority)) == untouched


def test_scores_count_once_and_only_if_they_were_asked_for(tmp_path: Path) -> None:
    arrivals: SimpleQueue[Any] = SimpleQueue()
    service = NodeService(
        1, tmp_path, arrivals, None, lambda _: None, clock=SYSTEM_CLOCK, refusals=Refusals(SYSTEM_CLOCK)
    )
    ann, eve = (service._joined(name, Wire(1, name).joining()) for name in ("ann", "eve"))
    assert service.examine("ann", Examination(id=3))
    assert not service.examine("ann", Examination(id=4)), "it has not answered the last one"
    assert service._problem_with(FromNode(scores=Scores(id=3, samples=1)), eve) == "it was not asked for scores 3"
    assert service._problem_with(FromNode(scores=Scores(id=3, samples=1, loss=0.5)), ann) is None
    assert service._problem_with(FromNode(scores=Scores(id=3, samples=1)), ann) == "it was not asked for scores 3"
    assert arrivals.qsize() == 1
    for said in ({"loss": math.nan}, {"metrics": [math.inf]}, {"metrics": [0.5, 1e300]}, {"samples": 2**63}):
        assert service.examine("ann", Examination(id=4))
        assert service._problem_with(FromNode(scores=Scores(id=4, **said)), ann)
    assert [arrivals.get().scores.problem == "" for _ in range(5)] == [True, False, False, False, False]


def test_node_that_never_scores_delays_one_evaluation_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scored: list[int] = []

    def examined(wire: Wire, examination: Examination) -> None:
        scored.append(examination.id)
        if wire.name == "1":
            wire.say(scores=Scores(id=examination.id, samples=4, loss=0.5, metrics=[0.5]))

    rounds = {"count": 4, "deadline_s": 5.0}
    run = run_with(tmp_path, None, examined=examined, evaluation="clients", rounds=rounds)
    assert sorted(scored) == [1, 1, 2, 3, 4]
    assert [line["test_loss"] for line in run.metrics] == [0.5] * 4
    assert [line for line in _refusals(caplog) if "scored" in line] == [
        "1 client has not scored the model within 5 s, and must do so before the next is sent: 0"
    ]


@pytest.mark.long
def test_memory_is_bounded_whatever_comes(authority: Path, tmp_path: Path) -> None:
    resident_bytes: list[int] = []

    def attack(wire: Wire, assignment: Assignment) -> None:
        large = Payload(sha256="0" * 64, size_bytes=10**10, tensors=tensors(("float32", 2_500_000_000)))
        for number in range(3000):
            name = list(ATTACKS)[number % len(ATTACKS)]
            with suppress(grpc.RpcError):
                if number % 3:
                    wire.deliver([Part(answer=answer(assignment, b"", payload=large)), chunk(bytes(1 << 20))])
                else:
                    wire.download(name.encode().hex())
            if number % 100 == 0:
                resident_bytes.append(_resident_bytes())
        wire.say(failed={"task": assignment.task, "reason": "enough"})

    run_with(tmp_path, attack, authority=authority)
    settled = resident_bytes[len(resident_bytes) // 4 :]
    assert max(settled) - settled[0] < 64 << 20, settled


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
