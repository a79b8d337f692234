"""Reference of a node whose matrices move by factors: lies are refused, and what is torn is asked for again.

Shapes: see :mod:`fed.vectors.layout`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fed.aggregators.client_side import format_of
from fed.aggregators.fedex_lora import FedExLoRA
from fed.aggregators.reports import Reduced
from fed.clients.node.reference import KeptReference
from fed.errors import InvalidPayload
from fed.protocol import protocol_pb2 as pb
from fed.server.downlink import Downlink
from fed.vectors.layout import Layout
from fed.vectors.randomness import Streams
from fed.wire.messages import Answer, Failure, GlobalModel, Task
from fed.wire.reference import _digest
from tests.lora_models import adapted

CLIENTS = 3


class Server:
    """A coordinator of one client that answers each task, whose messages move a model with adapters."""

    def __init__(self) -> None:
        module = adapted(rank=1)
        rule = FedExLoRA()
        self.layout = Layout.of(module, moved=rule.moves(module))
        self.rule: Any = rule.for_model(module, self.layout)
        self.first_V, self.integers_I = self.layout.pack(module)
        self.state = self.rule.init(self.first_V[: self.layout.parameters].double())
        self.message = format_of(self.rule, self.layout, CLIENTS)
        self.downlink = Downlink(self.message, Streams(0), self.rule.movement)
        self.version = 0

    def task(self) -> Task:
        moved_J = self.first_V[self.layout.returned_size :].double() + self.rule.moved(self.state)
        params_V = torch.cat([self.state.model_P, moved_J]).float()
        model = self.downlink.model(GlobalModel(self.version, params_V, self.integers_I), self.rule.factors(self.state))
        task = Task(self.version, self.version + 1, 0, model, differences=self.downlink.missing(0))
        self.downlink.note(Answer((task.id,), task.round, (0,), Failure("none is needed")), {task.id: task})
        self._move()
        return task

    def _move(self) -> None:
        generator = torch.Generator().manual_seed(self.version)
        messages_SM = torch.randn(CLIENTS, self.layout.parameters, generator=generator, dtype=torch.float64)
        self.state, mean_M = self.rule.combine(self.state, messages_SM, torch.ones(CLIENTS).double(), None)
        self.state = self.rule.apply(self.state, Reduced((mean_M,), clients=CLIENTS, population=CLIENTS))
        self.version += 1


def assignment(task: Task) -> pb.Assignment:
    differences = task.differences or ()
    return pb.Assignment(
        reference=task.model.reference,
        since=differences[0].before if differences else "",
        differences=[pb.Difference(number=one.number, after=one.after) for one in differences],
    )


def test_a_node_follows_factors_and_refuses_others(tmp_path: Path) -> None:
    server = Server()
    node = KeptReference(server.message, Streams(0), tmp_path, server.rule.movement)

    def taken(task: Task, tensors: list[Tensor]) -> Any:
        return node.model(assignment(task), tensors)

    first = server.task()
    assert taken(first, [*first.tensors]) is not None
    task = server.task()
    assert task.differences
    factors, *beside = task.tensors
    assert factors.numel() == (CLIENTS - 1) * sum(server.layout.trained[place].size for place in (0, 1, 4, 5))
    for lie in (factors + 1e-3, factors[:-1], factors.flip(0), torch.zeros(0)):
        with pytest.raises(InvalidPayload, match="does not lead to the version of the model that was announced"):
            taken(task, [lie, *beside])
    found = taken(task, [factors, *beside])  # no lie has moved what the node keeps
    assert all(map(torch.equal, found, task.model.tensors))
    assert not torch.equal(found[0], first.model.params_V)


def test_factors_that_agree_with_their_name_must_be_factors(tmp_path: Path) -> None:
    server = Server()
    node = KeptReference(server.message, Streams(0), tmp_path, server.rule.movement)
    first = server.task()
    node.model(assignment(first), [*first.tensors])
    good = server.task()
    for lie, said in ((good.tensors[0] * torch.inf, "finite numbers"), (good.tensors[0][:-1], "a multiple of")):
        with pytest.raises(InvalidPayload, match=said):
            node.model(_renamed(first, good, lie), [lie, *good.tensors[1:]])


def _renamed(first: Task, task: Task, factors: Tensor) -> pb.Assignment:
    """The assignment of a server whose names fit its lie."""
    after = _digest(first.model.reference, [factors])
    made = assignment(task)
    made.differences[0].after = made.reference = after
    return made


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_node_whose_matrices_are_torn_asks_for_all(is_removed: bool, tmp_path: Path) -> None:
    server = Server()
    node = KeptReference(server.message, Streams(0), tmp_path, server.rule.movement)
    first = server.task()
    node.model(assignment(first), [*first.tensors])
    for file in [path for path in tmp_path.rglob("*") if path.is_file()]:
        content = file.read_bytes()
        file.unlink() if is_removed else file.write_bytes(content[: len(content) // 2])
    task = server.task()
    assert node.model(assignment(task), [*task.tensors]) is None
    whole = task._replace(differences=None)
    found = node.model(assignment(whole), [*whole.tensors])
    assert found is not None
    assert torch.equal(found[0], task.model.params_V)
