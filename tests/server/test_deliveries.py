"""A fleet and its nodes over real connections: what is sent, taken, called off and lost on the way."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from fed.aggregators.fedavg import FedAvg
from fed.layout import Layout
from fed.messages import Failure, Reply, Task
from fed.protocol_pb2 import FromNode, Part, Plan, Scores, TaskId, ToNode
from fed.randomness import Streams
from fed.server.coordinator import Coordinator
from fed.server.node_service import Patience
from fed.server.nodes import NodeFleet
from tests.server.hostile_wire import BOUND_S, Wire, answer, chunk

MODEL = torch.arange(6, dtype=torch.float32), torch.zeros(0, dtype=torch.int64)
CLIENTS = ("ann", "bob")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[NodeFleet]:
    patience = Patience(heartbeat_s=0.1)
    fleet = NodeFleet(
        "127.0.0.1:0",
        tmp_path / "spool",
        credentials=None,
        admits=None,
        accepts=lambda joining: None,
        patience=patience,
    )
    fleet.begin(Plan(), MODEL, reports_models=True)
    yield fleet
    fleet.close("the run is over", is_final=True)


class Attending:
    """A client that attends, and does what a test says."""

    def __init__(self, fleet: NodeFleet, name: str) -> None:
        self.wire = Wire(fleet.port, name)
        self.heard = self.wire.attend()

    def next(self, kind: str) -> Any:
        """What the server says next of a kind."""
        return getattr(next(message for message in self.heard if message.HasField(kind)), kind)

    def leave(self) -> None:
        self.wire.outbox.put(None)
        self.wire.channel.close()


@pytest.fixture
def nodes(fleet: NodeFleet) -> Iterator[list[Attending]]:
    attending = [Attending(fleet, name) for name in CLIENTS]
    fleet.await_nodes(2)
    yield attending
    for node in attending:
        node.leave()


def task(number: int, client: str, vector_V: torch.Tensor = MODEL[0]) -> Task:
    return Task(number, 1, client, vector_V, MODEL[1])


def deliver(node: Attending, assignment: Any) -> bool:
    content = bytes(24)
    return node.wire.deliver([Part(answer=answer(assignment, content)), chunk(content)]).accepted


def test_what_a_task_needs_stays_though_another_of_the_same_bits_is_over(
    fleet: NodeFleet, nodes: list[Attending]
) -> None:
    fleet.dispatch([task(0, "ann")])
    fleet.dispatch([task(1, "bob", MODEL[0].clone())])
    fleet.cancel([1])
    fleet.dispatch([task(2, "bob", MODEL[0] + 1)])
    wanted = nodes[0].next("assignment").payload.sha256
    assert nodes[0].wire.download(wanted) == MODEL[0].numpy().tobytes()
    fleet.cancel([0, 2])
    fleet.dispatch([task(3, "bob", MODEL[0] + 2)])
    with pytest.raises(grpc.RpcError, match="no such payload any more"):
        nodes[0].wire.download(wanted)
