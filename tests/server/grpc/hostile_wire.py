"""What tests of hostile nodes share: a run whose honest nodes answer by arithmetic, and a wire to write anything on."""

import hashlib
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from fed.config.experiment import Experiment
from fed.identity.credentials import NodeCredentials
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
    Signature,
    TaskId,
    ToNode,
    Wanted,
)
from fed.protocol.protocol_pb2 import Tensor as TensorMessage
from fed.server.grpc.deploy import serve
from fed.server.grpc.service import Patience
from fed.storage.run import Run

BOUND_S = 60.0
PATIENCE = Patience(heartbeat_s=0.2, silence_s=3.0, lease_s=3.0, stall_s=1.0)
EXPERIMENT: dict[str, Any] = {
    "data": {"kind": "digits", "clients": 3},
    "model": {"kind": "logistic"},
    "local": {"lr": 0.1},
    "rounds": {"count": 2},
    "simulation": {"batching": "off"},
}


@dataclass
class Wire:
    """A node's end of the protocol, by hand."""

    port: int
    name: str
    credentials: Path | None = None
    plan: Plan | None = None
    outbox: "queue.Queue[FromNode | bytes | None]" = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        options = (("grpc.use_local_subchannel_pool", 1),)
        if self.credentials is None:
            self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}", options)
        else:
            loaded = NodeCredentials.load(self.credentials).for_dialling()
            self.channel = grpc.secure_channel(f"127.0.0.1:{self.port}", loaded, options)

    def joining(self, **changed: Any) -> Joining:
        said: dict[str, Any] = {
            "protocol": 1,
            "name": self.name,
            "samples": 10,
            "signature": Signature(input_shape=[64], input_dtype="float32", classes=10),
        }
        return Joining(**{**said, **changed})

    def attend(self, first: FromNode | bytes | None = None) -> Iterator[ToNode]:
        """The stream; what is put into the outbox is said on it."""
        self.outbox.put(FromNode(joining=self.joining()) if first is None else first)
        attend: Any = self.channel.stream_stream("/fed.v1.Coordination/Attend", _bytes, ToNode.FromString)
        stream: Iterator[ToNode] = attend(iter(self.outbox.get, None), timeout=BOUND_S)
        return stream

    def say(self, **what: Any) -> None:
        self.outbox.put(FromNode(**what))

    def download(self, sha256: str, offset: int = 0) -> bytes:
        download = self.channel.unary_stream("/fed.v1.Coordination/Download", _bytes, Chunk.FromString)
        return b"".join(chunk.data for chunk in download(Wanted(sha256=sha256, offset=offset), timeout=BOUND_S))

    def deliver(self, parts: Iterator[Part | bytes] | Sequence[Part | bytes]) -> Receipt:
        deliver = self.channel.stream_unary("/fed.v1.Coordination/Deliver", _bytes, Receipt.FromString)
        receipt: Receipt = deliver(iter(parts), timeout=BOUND_S)
        return receipt

    def trained(self, assignment: Assignment, by: float) -> bytes:
        """An honest answer's bytes: the model, moved."""
        model, *integers = arrays(self.download(assignment.payload.sha256), assignment.payload)
        moved = (model * np.float32(0.9) + np.float32(0.01 * by)).astype(model.dtype)
        content: bytes = moved.tobytes() + integers[0].tobytes()
        return content


def arrays(content: bytes, payload: Payload) -> list[Any]:
    found, offset = [], 0
    for part in payload.tensors:
        dtype = np.dtype(part.dtype)
        found.append(np.frombuffer(content, dtype, part.numbers, offset))
        offset += part.numbers * dtype.itemsize
    return found


def answer(assignment: Assignment, content: bytes, **changed: Any) -> Answer:
    """The header of an honest answer, but for what is changed."""
    payload = Payload(
        sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content), tensors=assignment.payload.tensors[:2]
    )
    said: dict[str, Any] = {"weight": 10.0, "samples": 10, "train_loss": 1.0, "payload": payload}
    return Answer(**{"task": assignment.task, **said, **changed})


def chunk(data: bytes) -> Part:
    return Part(chunk=Chunk(data=data, crc32=zlib.crc32(data)))


def tensors(*said: tuple[str, int]) -> list[TensorMessage]:
    return [TensorMessage(dtype=dtype, numbers=numbers) for dtype, numbers in said]


def other_task(assignment: Assignment, by: int = 1) -> TaskId:
    return TaskId(start=assignment.task.start, number=assignment.task.number + by)


Attack = Callable[[Wire, Assignment], None]


def honest(wire: Wire, assignment: Assignment) -> None:
    content = wire.trained(assignment, int(wire.name))
    receipt = wire.deliver([Part(answer=answer(assignment, content)), chunk(content)])
    assert receipt.accepted, receipt.reason


def _scores_nothing(wire: Wire, examination: Examination) -> None:
    pass


def work(
    wire: Wire,
    on_assignment: Attack,
    on_examination: Callable[[Wire, Examination], None] = _scores_nothing,
    *,
    comes_back: bool = False,
) -> None:
    """Do what a node does, until the server says farewell for good; with ``comes_back`` whatever happens."""
    while True:
        held: list[TaskId] = []
        wire.outbox = queue.Queue()
        try:
            for message in wire.attend():
                if message.HasField("plan"):
                    wire.plan = message.plan
                if message.HasField("assignment"):
                    held = [message.assignment.task]
                    wire.say(accepted=message.assignment.task)
                    on_assignment(wire, message.assignment)
                if message.HasField("examination"):
                    on_examination(wire, message.examination)
                if message.HasField("heartbeat"):
                    wire.say(heartbeat=Heartbeat(held=held))
                if message.HasField("farewell") and message.farewell.is_final:
                    return
        except grpc.RpcError as error:
            if not comes_back or error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED):
                return
        finally:
            wire.outbox.put(None)
        if not comes_back:
            return


def run_with(
    folder: Path,
    attack: Attack | None,
    *,
    authority: Path | None = None,
    bystander: Callable[[int], None] | None = None,
    examined: Callable[[Wire, Examination], None] = _scores_nothing,
    **changed: Any,
) -> Run:
    """A run with the honest nodes 0 and 1, mallory where there is an attack, and before them all a bystander."""
    from fed.identity.credentials import ServerCredentials

    threads: list[threading.Thread] = []

    def begin(port: int) -> None:
        if bystander is not None:
            bystander(port)
        names = ["0", "1", *(["mallory"] if attack else [])]
        for name in names:
            own = authority / "nodes" / name if authority else None
            does = honest if name != "mallory" else attack
            assert does is not None
            node = partial(work, Wire(port, name, own), does, examined, comes_back=does is honest)
            threads.append(threading.Thread(target=node, daemon=True))
        for thread in threads:
            thread.start()

    run = serve(
        Experiment(**{**EXPERIMENT, **changed}),
        listen="127.0.0.1:0",
        output=folder / "run",
        credentials=ServerCredentials.load(authority) if authority else None,
        min_nodes=3 if attack else 2,
        patience=PATIENCE,
        on_listen=begin,
    )
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    return run


def bits(run: Run) -> bytes:
    return b"".join(part.detach().numpy().tobytes() for part in run.model.state_dict().values())


def _bytes(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
