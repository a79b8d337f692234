"""Hostile nodes: whatever they send is refused, counted and logged, and changes nothing."""

import logging
import math
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fed.keys import Authority
from fed.protocol_pb2 import Assignment, Chunk, FromNode, Heartbeat, Part, Payload, Scores, Signature, TaskId
from tests.server.hostile_wire import (
    BOUND_S,
    PATIENCE,
    Attack,
    Wire,
    answer,
    bits,
    chunk,
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


def _twice(wire: Wire, assignment: Assignment) -> None:
    """A good answer's header with a bad one behind it."""
    wire.say(failed={"task": assignment.task, "reason": "enough"})
    content = wire.trained(assignment, 7)
    time_s = time.monotonic()
    while True:
        receipt = wire.deliver([Part(answer=answer(assignment, content, weight=math.nan)), chunk(content)])
        if "not in flight" in receipt.reason or time.monotonic() > time_s + BOUND_S:
            return


def _damaged(wire: Wire, assignment: Assignment) -> None:
    content = _content()
    bad = Part(chunk=Chunk(data=content, crc32=1))
    receipts = [wire.deliver([Part(answer=answer(assignment, content)), bad]) for _ in range(3)]
    assert [receipt.reason == "" for receipt in receipts] == [True, True, False]


def _another_hash(wire: Wire, assignment: Assignment) -> None:
    content = wire.trained(assignment, 7)
    said = answer(assignment, content)
    said.payload.sha256 = "1" * 64
    receipts = [wire.deliver([Part(answer=said), chunk(content)]) for _ in range(3)]
    assert [receipt.reason == "" for receipt in receipts] == [True, True, False]


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
    "a wrong shape": (_shaped(("float32", MODEL - 1), ("int64", 0)), "tensors must be"),
    "a wrong type": (_shaped(("float64", MODEL), ("int64", 0)), "tensors must be"),
    "an unknown type": (_shaped(("object" * 10**4, MODEL), ("int64", 0)), "tensors must be"),
    "too many tensors": (_shaped(*[("float32", 1)] * 20_000), "tensors must be"),
    "a wrong size": (_shaped(("float32", MODEL), ("int64", 0), size_bytes=9), "take 2600 bytes, got 9"),
    "10 GB": (_shaped(("float32", 2_500_000_000), ("int64", 0), size_bytes=10**10), "tensors must be"),
    "a hash that is none": (sends(payload=Payload(sha256="../" * 30, size_bytes=2600)), "tensors must be"),
    "NaN in the vector": (sends(_content(math.nan)), "vector must be finite"),
    "infinity in the vector": (sends(_content(-math.inf)), "vector must be finite"),
    "NaN for a weight": (sends(weight=math.nan), "weight must be positive"),
    "infinity for a weight": (sends(weight=math.inf), "weight must be positive"),
    "no weight": (sends(weight=0.0), "weight must be positive"),
    "a negative weight": (sends(weight=-1.0), "weight must be positive"),
    "NaN for a loss": (sends(train_loss=math.nan), "loss must be finite"),
    "infinity for a loss": (sends(train_loss=math.inf), "loss must be finite"),
    "no samples": (sends(samples=0), "samples must be"),
    "2^63 samples": (sends(samples=2**63), "samples must be"),
    "another task": (_with_task(number=1000), "task 100. is not in flight"),
    "another start": (_with_task(start=-1), "is not in flight"),
    "twice": (_twice, "is not in flight"),
    "a wrong checksum": (_damaged, "came damaged 3 times"),
    "another hash": (_another_hash, "the whole has another hash"),
    "a chunk too long": (sends(_content(), chunk(_content() + b"12345678")), "a chunk must have"),
    "a chunk too small": (sends(_content(), chunk(b"1")), "a chunk must have"),
    "no header": (lambda wire, assignment: _refused_call(wire, assignment, [chunk(b"1")]), "begin with the answer's"),
    "two headers": (
        lambda wire, assignment: _reason(wire, assignment, "there must be chunks"),
        "there must be chunks",
    ),
    "a stream that stalls": (_stalls, "nothing moved for 1 s"),
    "a stream that never ends": (_never_ends, "a chunk must have"),
    "bytes that are no message": (_bytes_for_parts, "bytes that are no message"),
    "heartbeats of others' tasks": (_names_anothers, "is not in flight for it"),
    "10^4 tasks held": (_says(heartbeat={"held": [TaskId(start=1, number=1)] * 10_000}), "1000 tasks at most"),
    "a flood": (_floods, "more than a node has to say"),
    "another joining": (_says(joining={"protocol": 1}), "joins once"),
    "a message of another version": (_says(), "nothing that is known"),
    "scores unasked": (_says(scores=Scores(id=1, samples=1, loss=0.1)), "not asked for scores"),
    "a path": (_asks_for("../" * 20 + "etc/passwd"), "64 hexadecimal digits"),
    "a long path": (_asks_for("a" * 60_000), "64 hexadecimal digits"),
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
