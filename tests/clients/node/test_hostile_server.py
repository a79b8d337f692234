"""A node whose server is hostile: it says so in a sentence, imports nothing, and its samples stay where they are."""

import hashlib
import json
import math
import queue
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from fed.clients.data import FederatedData
from fed.clients.node.edge_node import EdgeNode
from fed.clients.node.plans import as_experiment, names_sha256
from fed.clients.node.training import NodeTraining
from fed.config.experiment import Experiment
from fed.errors import FedError, InvalidData, InvalidExperiment, InvalidPayload
from fed.processes.clock import SYSTEM_CLOCK
from fed.protocol.limits import PROTOCOL
from fed.protocol.protocol_pb2 import (
    Answer,
    Assignment,
    Chunk,
    Code,
    Examination,
    Failed,
    Farewell,
    FromNode,
    Joining,
    Payload,
    Plan,
    Scores,
    Signature,
    TaskId,
    ToNode,
    Wanted,
)
from fed.protocol.protocol_pb2 import Tensor as TensorMessage
from fed.protocol.protocol_pb2_grpc import CoordinationServicer, add_CoordinationServicer_to_server
from fed.secure_aggregation.reasons import Reason
from fed.wire.dialling import DialPatience
from fed.wire.format import TaskSpec
from fed.wire.payloads import Incoming, TensorSpec

BOUND_S = 60.0
KEYS = {"model": {"kind": "logistic"}, "local": {"lr": 0.1}}
SIGNATURE = Signature(input_shape=[64], input_dtype="float32", classes=10)
ACCEPTED = "python:tests.clients.apps.arrays_only:Regression"
MODEL = bytes(4 * 650)
MODEL_TENSORS = [TensorMessage(dtype="float32", numbers=650), TensorMessage(dtype="int64")]


class Training:
    """What a node would train with, which takes down what it is asked."""

    spec = TaskSpec((TensorSpec(torch.float32, 650), TensorSpec(torch.int64, 0)))
    needs_schema = ""

    def __init__(self) -> None:
        self.prepared: list[Experiment] = []
        self.trained: list[Assignment] = []

    def describe(self) -> Joining:
        return Joining(protocol=PROTOCOL, samples=10, signature=SIGNATURE)

    def prepare(self, experiment: Experiment, signature: bytes) -> None:
        self.prepared.append(experiment)

    def train(self, assignment: Assignment, path: Path, until_s: float | None = None) -> Answer | Failed:
        self.trained.append(assignment)
        return Failed(task=assignment.task, reason="trained")

    def score(self, examination: Examination, path: Path) -> Scores:
        return Scores(id=examination.id, samples=1, loss=0.5)


class BusyTraining(Training):
    """Takes until the end to prepare, so that all else waits."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def prepare(self, experiment: Experiment, signature: bytes) -> None:
        super().prepare(experiment, signature)
        self.over.wait(BOUND_S)


class Server(CoordinationServicer):
    """Says what it is told to, and takes down what it hears."""

    def __init__(self, says: Callable[["Server"], Iterator[ToNode]], chunks: Sequence[Chunk]) -> None:
        self.heard: queue.Queue[FromNode] = queue.Queue()
        self.delivered: list[Any] = []
        self._says = says
        self._chunks = chunks

    def Attend(self, request_iterator: Iterator[FromNode], context: Any) -> Iterator[ToNode]:  # noqa: N802
        threading.Thread(target=self._listen, args=(request_iterator,), daemon=True).start()
        yield from self._says(self)

    def Download(self, request: Wanted, context: Any) -> Iterator[Chunk]:  # noqa: N802
        yield from self._chunks

    def _listen(self, said: Iterator[FromNode]) -> None:
        try:
            for message in said:
                self.heard.put(message)
        except grpc.RpcError:
            return

    def failure(self) -> str:
        """What the node says of the next task that it gives up."""
        while True:
            message = self.heard.get(timeout=BOUND_S)
            if message.HasField("failed"):
                return message.failed.reason


def plan(**changed: Any) -> ToNode:
    said: dict[str, Any] = {"experiment": json.dumps(KEYS), "signature": SIGNATURE, "heartbeat_s": 0.5}
    return ToNode(plan=Plan(**{**said, **changed}))


def payload(content: bytes = MODEL, **changed: Any) -> Payload:
    said = {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content), "tensors": MODEL_TENSORS}
    return Payload(**{**said, **changed})


def assignment(number: int = 1, **changed: Any) -> ToNode:
    return ToNode(assignment=Assignment(task=TaskId(start=1, number=number), round=1, **changed))


def served(
    tmp_path: Path,
    says: Callable[[Server], Iterator[ToNode]],
    chunks: Sequence[Chunk] = (),
    training: Training | None = None,
    *,
    secure: Any = None,
    allowed: Sequence[str] = (),
) -> tuple[str, Training]:
    """What a node says last that dials such a server, and what it has trained with."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    add_CoordinationServicer_to_server(Server(says, chunks), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    training = training or Training()
    trains: Any = training
    node = EdgeNode(
        f"127.0.0.1:{port}",
        None,
        "0",
        0,
        trains,
        tmp_path,
        allowed,
        patience=DialPatience(backoff_s=0.01),
        secure=secure,
    )
    try:
        words = node.run()
    except FedError as error:
        words = str(error)
    finally:
        server.stop(0).wait()
    assert words.isprintable()
    assert len(words) < 1000
    return words, training


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["python:antigravity:fly"], "runs only code that --allow names, got python:antigravity:fly: if you trust it"),
        (["antigravity:fly"], "runs only code that --allow names, got antigravity:fly"),
        (["python:one:model", "python:two:Rule"], "--allow python:one:model --allow python:two:Rule"),
        (["python:missing_here:model"], "python:missing_here:model, which the run's experiment names: cannot import"),
    ],
    ids=["unknown", "unmarked", "two", "missing"],
)
def test_a_node_that_refuses_the_code_never_joins(
    names: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fed.clients.node.edge_node._FAREWELL_S", 0.1)
    heard: list[FromNode] = []

    def says(server: Server) -> Iterator[ToNode]:
        heard.append(server.heard.get(timeout=BOUND_S))
        yield ToNode(code=Code(names=names))
        heard.append(server.heard.get(timeout=BOUND_S))

    words, _ = served(tmp_path, says, allowed=["python:missing_here:model"])
    assert reason in words
    assert [message.WhichOneof("what") for message in heard] == ["joining", "farewell"]
    assert heard[1].farewell.reason == words
    assert "antigravity" not in sys.modules


def test_a_node_that_accepts_the_code_joins_anew(tmp_path: Path) -> None:
    heard: list[FromNode] = []

    def says(server: Server) -> Iterator[ToNode]:
        heard.append(server.heard.get(timeout=BOUND_S))
        yield ToNode(code=Code(names=[ACCEPTED]))
        heard.append(server.heard.get(timeout=BOUND_S))
        yield ToNode(farewell=Farewell(reason="enough", is_final=True))

    assert served(tmp_path, says, allowed=[ACCEPTED])[0] == "enough"
    assert [message.joining.code_sha256 for message in heard] == [b"", names_sha256([ACCEPTED])]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (plan(experiment=""), "plan must be JSON"),
        (plan(experiment="[]"), "plan must be a mapping"),
        (plan(experiment='{"seed": ' + "9" * 10_000 + "}"), "plan must be JSON"),
        (plan(experiment=json.dumps({"x" * 100_000: 1})), "only keys that nodes use, got 'xxx"),
        (plan(experiment=json.dumps({"model": "x" * 1_000_000})), "model.kind"),
        (plan(experiment=json.dumps({"model": "x" * 2_000_000})), "at most 1048576 letters"),
        (
            plan(experiment=json.dumps({**KEYS, "data": {"kind": "npz", "path": "/etc/passwd"}})),
            "only keys that nodes use, got 'data'",
        ),
        (plan(experiment=json.dumps({"model": {"kind": "python:antigravity:fly"}})), "--allow python:antigravity:fly"),
        (plan(experiment=json.dumps({"local": {"x": [{"y": "python:antigravity:fly"}]}})), "--allow python:antig"),
        (plan(experiment=json.dumps({"algorithm": {"kind": "no\x1b[31m\nsuch"}})), "algorithm.kind"),
        (plan(signature=Signature(input_shape=[2**40], input_dtype="float32", classes=10)), "other samples"),
        (plan(heartbeat_s=math.nan), "a heartbeat every nan s"),
        (plan(heartbeat_s=0.0), "a heartbeat every 0.0 s"),
    ],
)
def test_an_invalid_plan_ends_the_node_with_one_sentence(said: ToNode, reason: str, tmp_path: Path) -> None:
    def says(server: Server) -> Iterator[ToNode]:
        yield said
        threading.Event().wait(0.5)

    words, training = served(tmp_path, says)
    assert reason in words
    assert training.prepared == []
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("said", "chunks", "reason"),
    [
        (payload(tensors=[*MODEL_TENSORS, TensorMessage(dtype="float32", numbers=2**40)]), (), "the tensors must be"),
        (payload(size_bytes=10**10), (), "take 2600 bytes, got 10000000000"),
        (payload(tensors=[TensorMessage(dtype="object", numbers=1)] * 9999), (), "the tensors must be"),
        (payload(sha256="../../etc/passwd"), (), "64 hexadecimal digits"),
        (payload(), (Chunk(data=MODEL, crc32=1),), "damaged"),
        (payload(sha256="0" * 64), (Chunk(data=MODEL, crc32=zlib.crc32(MODEL)),), "another hash"),
        (payload(), (Chunk(data=MODEL * 2, crc32=zlib.crc32(MODEL * 2)),), "a chunk must have"),
        (payload(), (Chunk(),) * 1000, "a chunk must have"),
    ],
)
def test_a_task_that_does_not_fit_is_given_up(
    said: Payload, chunks: Sequence[Chunk], reason: str, tmp_path: Path
) -> None:
    reasons = []

    def says(server: Server) -> Iterator[ToNode]:
        yield plan()
        yield assignment(payload=said)
        reasons.append(server.failure())
        yield ToNode(farewell=Farewell(reason="enough", is_final=True))

    words, training = served(tmp_path, says, chunks)
    assert words == "enough"
    assert reason in reasons[0]
    assert training.trained == []
    assert list(tmp_path.iterdir()) == []


class UnfitTraining(Training):
    """Samples that do not fit the plan."""

    def prepare(self, experiment: Experiment, signature: bytes) -> None:
        raise InvalidData("label 7 of 59 samples is out of range")


@pytest.mark.parametrize("is_private", [True, False])
def test_a_private_plan_hears_no_number_of_the_data(
    is_private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fed.clients.node.edge_node._FAREWELL_S", 0.1)
    heard: list[FromNode] = []

    def says(server: Server) -> Iterator[ToNode]:
        keys = {**KEYS, "privacy": {"kind": "local", "noise_multiplier": 1.0}} if is_private else KEYS
        yield plan(experiment=json.dumps(keys))
        while not heard or not heard[-1].HasField("farewell"):
            heard.append(server.heard.get(timeout=BOUND_S))

    words, _ = served(tmp_path, says, training=UnfitTraining())
    assert words == "label 7 of 59 samples is out of range"  # for the node's owner
    assert (heard[-1].farewell.reason == Reason.CANNOT_FOLLOW) is is_private


@pytest.mark.parametrize(
    "flood",
    [
        lambda number: assignment(number, payload=payload()),
        lambda number: ToNode(examination=Examination(id=number, payload=payload())),
        lambda _: plan(),
    ],
    ids=["assignments", "examinations", "plans"],
)
def test_a_flood_ends_the_node_in_a_sentence(flood: Callable[[int], ToNode], tmp_path: Path) -> None:
    def says(server: Server) -> Iterator[ToNode]:
        yield plan()
        for number in range(100_000):
            yield flood(number)

    training = BusyTraining()
    words, _ = served(tmp_path, says, training=training)
    training.over.set()
    assert "more than 100 things at once" in words


def test_a_farewell_is_one_line(tmp_path: Path) -> None:
    def says(server: Server) -> Iterator[ToNode]:
        yield ToNode(farewell=Farewell(reason="bye\n\x1b[31m" + "x" * 10_000, is_final=True))

    words, _ = served(tmp_path, says)
    assert words.startswith("bye??[31mxxx")


def test_code_is_allowed_by_its_whole_name() -> None:
    text = json.dumps({**KEYS, "model": {"kind": "python:antigravity:fly"}})
    for allowed in ([], ["python:antigravity:"], ["python:antigravity:flying"], ["antigravity:fly"]):
        with pytest.raises(InvalidExperiment, match="runs only code that --allow names"):
            as_experiment(text, allowed)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "ditto", "mimelite", "afl"])
def test_a_node_knows_what_a_task_brings(algorithm: str, tmp_path: Path) -> None:
    samples = torch.randn(20, 64), torch.arange(20) % 10
    experiment = Experiment(**KEYS, algorithm=algorithm)
    spec = NodeTraining(
        FederatedData({0: samples}), experiment, Plan(signature=SIGNATURE), tmp_path, SYSTEM_CLOCK
    ).spec()
    assert spec.model[:2] == Training.spec.model
    brings = {"fedavg": 0, "scaffold": 1, "ditto": 0, "mimelite": 1, "afl": 1}[algorithm]
    assert len(spec.model) == 2 + brings, spec
    said = Payload(sha256="0" * 64, size_bytes=4, tensors=[TensorMessage(dtype="float32", numbers=1)])
    with pytest.raises(InvalidPayload, match="the tensors must be"):
        Incoming(tmp_path / "file", said, spec.model)
