"""The generated code is that of the protocol, and no bytes crash what reads them."""

import json
import random
import zlib
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from google.protobuf.message import DecodeError, Message
from grpc_tools import protoc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fed.clients.node.edge_node import EdgeNode
from fed.clients.node.plans import part_of_nodes
from fed.config.experiment import Experiment
from fed.errors import FedError, InvalidPayload
from fed.processes.clock import SYSTEM_CLOCK
from fed.protocol import protocol_pb2
from fed.protocol.limits import PROTOCOL
from fed.protocol.protocol_pb2 import (
    Answer,
    Assignment,
    Chunk,
    Examination,
    FromNode,
    Heartbeat,
    Joining,
    Part,
    Payload,
    Plan,
    Receipt,
    Scores,
    Signature,
    TaskId,
    ToNode,
    Wanted,
)
from fed.protocol.protocol_pb2 import Tensor as TensorMessage
from fed.server.grpc.service import NodeService
from fed.server.way_in import received
from fed.vectors.randomness import Streams
from fed.wire.agreed_format import header_of
from fed.wire.calls import TurnedAway
from fed.wire.dialling import DialPatience
from fed.wire.format import Format, TaskSpec
from fed.wire.messages import GlobalModel, Task
from fed.wire.payloads import Incoming, TensorSpec
from fed.wire.rate_limits import Refusals

ROOT = Path(__file__).resolve().parents[3]
FORMAT = Format(torch.float32, (4,), integers=1, parameters=4, sends_models=True)
SPEC = (TensorSpec(torch.float32, 4), TensorSpec(torch.int64, 1))
TENSORS = [TensorMessage(dtype="float32", numbers=4), TensorMessage(dtype="int64", numbers=1)]
PAYLOAD = Payload(sha256="0" * 64, size_bytes=24, tensors=TENSORS)
TASK = TaskId(start=1, number=2)
SIGNATURE = Signature(input_shape=[4], input_dtype="float32", classes=3)
VALID: list[Message] = [
    FromNode(joining=Joining(protocol=1, name="ann", samples=3, signature=SIGNATURE, held=[TASK])),
    FromNode(accepted=TASK),
    FromNode(heartbeat=Heartbeat(held=[TASK, TASK])),
    FromNode(failed=protocol_pb2.Failed(task=TASK, reason="a reason", diverged=True)),
    FromNode(scores=Scores(id=1, samples=2, loss=0.5, metrics=[0.25])),
    ToNode(
        plan=Plan(run="r", experiment='{"seed": 1}', signature=SIGNATURE, heartbeat_s=1.0, format=header_of(FORMAT))
    ),
    ToNode(
        assignment=Assignment(task=TASK, round=1, lr=0.5, steps=3, payload=PAYLOAD, kept_after=TASK, kept_discount=0.5)
    ),
    ToNode(assignment=Assignment(task=TASK, round=1, payload=PAYLOAD, deadline_s=0.5, takes_parts=True)),
    ToNode(
        assignment=Assignment(
            task=TASK,
            round=2,
            payload=PAYLOAD,
            reference="b",
            since="a",
            differences=[protocol_pb2.Difference(number=1, after="b")],
        )
    ),
    ToNode(withdrawal=protocol_pb2.Withdrawal(task=TASK)),
    ToNode(examination=Examination(id=1, payload=PAYLOAD)),
    ToNode(farewell=protocol_pb2.Farewell(reason="bye", is_final=True)),
    Part(answer=Answer(task=TASK, payload=PAYLOAD, weight=1.0, samples=3, train_loss=0.5)),
    Part(chunk=Chunk(data=bytes(24), crc32=zlib.crc32(bytes(24)))),
    Wanted(sha256="0" * 64, offset=3),
    Receipt(received_bytes=3, reason="no"),
]


def test_the_generated_code_is_that_of_the_protocol(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    assert protoc.main(["", f"-I{ROOT}", *outputs, "fed/protocol/protocol.proto"]) == 0
    for made in (tmp_path / "fed" / "protocol").iterdir():
        assert made.read_text() == (ROOT / "fed" / "protocol" / made.name).read_text(), "run make protocol"


def test_the_documented_plan_is_what_nodes_get() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    said = page[page.index("```json") + 7 :]
    experiment = Experiment(model={"kind": "logistic"})
    assert json.loads(said[: said.index("```")]) == json.loads(json.dumps(part_of_nodes(experiment)))


def test_every_message_and_field_is_documented() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    for name, message in protocol_pb2.DESCRIPTOR.message_types_by_name.items():
        if name in ("ToNode", "FromNode", "Part", "Tensor"):
            continue
        assert name in page
        assert [field.name for field in message.fields if f"`{field.name}`" not in page] == []


class Reader:
    """Everything that reads what came over the wire, with a task of ann's in flight."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.counts: dict[str, int] = {}

        class Training:
            spec = TaskSpec(SPEC)
            needs_schema = ""

            def describe(self) -> Joining:
                return Joining(protocol=PROTOCOL, samples=3, signature=SIGNATURE)

        self._training: Any = Training()
        self._begin()

    def _begin(self) -> None:
        self._arrivals: SimpleQueue[Any] = SimpleQueue()
        self._service = NodeService(
            1, self._folder, self._arrivals, None, lambda _: None, clock=SYSTEM_CLOCK, refusals=Refusals(SYSTEM_CLOCK)
        )
        self._service._deliveries.spec = SPEC
        self._service._joined("ann", Joining(protocol=1, samples=3))
        self._service.assign([("ann", Assignment(task=TASK, payload=PAYLOAD))])
        self._service.examine("ann", Examination(id=1, payload=PAYLOAD))
        self._node = EdgeNode("s:1", None, "ann", "ann", self._training, self._folder, patience=DialPatience())
        self._node._described = self._training.describe()
        self._incoming = Incoming(self._folder / "file", PAYLOAD, SPEC)

    def read(self, kind: type[Message], content: bytes) -> None:
        """May raise nothing but what it says."""
        try:
            message = kind.FromString(content)
        except DecodeError:
            self._note("no message")
            return
        try:
            self._take(message)
            self._note("taken")
        except (FedError, TurnedAway) as error:
            self._note(type(error).__name__)
        if sum(self.counts.values()) % 1000 == 0:
            self._begin()

    def _note(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _take(self, message: Any) -> None:
        if isinstance(message, FromNode) and message.HasField("joining"):
            client = "eve"
            if self._service._reason_against(message.joining, is_named=False) is None:
                self._service._joined(client, message.joining)
        elif isinstance(message, FromNode):
            problem = self._service._problem_with(message, self._service.nodes["ann"])
            assert problem is None or len(problem) < 1000
        elif isinstance(message, ToNode):
            self._node.take(message)
            problem_of_node = self._node.problem
            assert problem_of_node is None or len(str(problem_of_node)) < 1000
            if message.HasField("assignment"):
                Incoming(self._folder / "assigned", message.assignment.payload, SPEC)
        elif isinstance(message, Part) and message.HasField("answer"):
            self._answered(message.answer)
        elif isinstance(message, Part):
            self._incoming.add(message.chunk)
            if self._incoming.is_complete:
                self._incoming = Incoming(self._folder / "file", PAYLOAD, SPEC)

    def _answered(self, answer: Answer) -> None:
        task = Task(2, 1, "ann", GlobalModel(0, torch.zeros(4), torch.zeros(1, dtype=torch.int64)))
        orders = self._service._leases
        order = orders.own("ann", answer.task)
        reason = ""
        try:
            received(task, answer, (torch.ones(4), torch.ones(1).long()), FORMAT, Streams(0))
        except InvalidPayload as error:
            reason = str(error)
        assert len(reason) < 1000
        if order is not None:
            orders.incoming(order, answer, SPEC)


def mutated(draw: random.Random) -> tuple[type[Message], bytes]:
    """Random bytes, or a message that was valid until a few bytes were changed, left out, doubled or cut off."""
    message = draw.choice(VALID)
    if draw.random() < 0.2:
        return type(message), draw.randbytes(draw.randrange(60))
    content = bytearray(message.SerializeToString())
    for _ in range(draw.randrange(4)):
        place = draw.randrange(len(content) + 1)
        what = draw.randrange(4)
        if what == 0 and place < len(content):
            content[place] = draw.randrange(256)
        elif what == 1:
            content[place:place] = draw.randbytes(draw.randrange(1, 9))
        elif what == 2:
            del content[place : place + draw.randrange(1, 9)]
        else:
            content += content[place:]
    return type(draw.choice(VALID)) if draw.random() < 0.1 else type(message), bytes(content)


@given(st.sampled_from(VALID), st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_crash_what_reads_them(tmp_path: Path, message: Message, content: bytes) -> None:
    reader = Reader(tmp_path)
    reader.read(type(message), content)
    reader.read(type(message), message.SerializeToString() + content)
    assert sum(reader.counts.values()) == 2


def test_a_valid_message_that_was_damaged_crashes_nothing(tmp_path: Path) -> None:
    reader, draw = Reader(tmp_path), random.Random(0)
    for _ in range(5000):
        reader.read(*mutated(draw))
    assert reader.counts.keys() >= {"no message", "taken", "InvalidPayload"}, reader.counts
