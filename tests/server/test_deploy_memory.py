"""A server keeps no module while nodes train."""

import math

import torch
from torch import Tensor, nn

import fed
from fed.clients.data import load
from fed.clients.setup import Preparation
from fed.clients.training.work_items import Evaluate, Evaluated
from fed.server.grpc.deployment import _free_memory, _scoring
from fed.vectors.layout import Layout


class Tied(nn.Module):
    """Weights used twice, numbers to be averaged and counted, a fixed part, and a buffer that is no state."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def test_released_module_takes_no_memory_and_returns_unchanged() -> None:
    module, layout = Tied(), Layout.of(Tied())
    vector_V, integers_I = layout.pack(module)
    restore_memory = _free_memory(module)
    sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in module.state_dict().items()}
    assert {name for name, size_bytes in sizes.items() if size_bytes} == {"fixed"}, "it comes from nowhere else"
    for _ in range(2):
        restore_memory()
    layout.unpack(vector_V, integers_I, module)
    assert [torch.equal(*pair) for pair in zip(layout.pack(module), (vector_V, integers_I), strict=True)] == [True] * 2
    assert module.second.weight is module.first.weight
    assert module.table.tolist() == [0, 1, 2, 3]
    assert module.fixed.tolist() == [1, 1]


def test_models_of_several_devices_are_scored_without_their_module() -> None:
    given = fed.Experiment(local={"devices": 2})
    assert given.data is not None
    prepared = Preparation(given, load(given.data, given.data_streams))
    vector_V, integers_I = prepared.layout.pack(prepared.module)
    work = _scoring(prepared.recipe)(torch.device("cpu"))
    _free_memory(prepared.module)
    scored, _ = work(Evaluate(0, 50), [vector_V[None], integers_I[None]])
    assert isinstance(scored, Evaluated)
    assert math.isfinite(scored.scores[0].loss)
