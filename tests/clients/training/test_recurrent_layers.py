"""Recurrent layers of a group of clients against PyTorch's own, for each client alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from fed.clients.training.recurrent_layers import RecurrentLayers
from tests.clients.training.client_groups import assert_computed_alike

MADE: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **keys: nn.RNN(*sizes, nonlinearity="relu", **keys),
}
KEYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "without bias": {"bias": False},
    "two layers": {"num_layers": 2},
    "both directions": {"bidirectional": True, "num_layers": 2, "batch_first": True},
}


class Reads(nn.Module):
    """All that a recurrent layer returns, in one tensor."""

    def __init__(self, layer: nn.RNNBase, *, begins: bool = False) -> None:
        super().__init__()
        self.layer, self._begins = layer, begins

    def forward(self, inputs: Tensor) -> Tensor:
        samples = inputs.shape[0 if self.layer.batch_first else 1]
        half = torch.full((self.layer.num_layers, samples, 3), 0.5, dtype=inputs.dtype, device=inputs.device)
        begin: Any = (half, -half) if isinstance(self.layer, nn.LSTM) else half
        outputs, end = self.layer(inputs, begin if self._begins else None)
        ends = end if isinstance(end, tuple) else (end,)
        return torch.cat([part.flatten() for part in (outputs, *ends)])


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("is_common", [False, True], ids=["own samples", "common samples"])
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_outputs_and_gradients_are_those_of_each_client(
    make: Callable[..., nn.RNNBase], keys: dict[str, Any], is_common: bool
) -> None:
    torch.manual_seed(0)
    module = Reads(make(4, 3, **keys), begins=keys.get("num_layers") != 2).double()
    assert_computed_alike(module, (6, 4), RecurrentLayers(), is_common=is_common)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_dropout_between_layers_is_random(make: Callable[..., nn.RNNBase]) -> None:
    layer = make(4, 3, num_layers=2, dropout=0.5)
    with RecurrentLayers(), pytest.raises(RuntimeError, match="random"):
        vmap(layer)(torch.zeros(2, 5, 6, 4))
    with RecurrentLayers():
        vmap(layer.eval())(torch.zeros(2, 5, 6, 4))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_packed_sequences_and_projections_stay_pytorchs() -> None:
    torch.manual_seed(0)
    projecting, reading = nn.LSTM(4, 3, proj_size=2), nn.GRU(4, 3)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(6, 2, 4), torch.tensor([6, 3]))
    x = torch.randn(6, 2, 4)
    expected = [projecting(x)[0], reading(packed)[0].data]
    with RecurrentLayers():
        found = [projecting(x)[0], reading(packed)[0].data]
    assert all(map(torch.equal, found, expected))


def test_long_sequences_stay_pytorchs() -> None:
    layer = nn.GRU(1, 2)
    with RecurrentLayers():
        vmap(layer)(torch.zeros(2, 256, 5, 1))
    with RecurrentLayers(), pytest.raises(RuntimeError, match="Batching rule not implemented for aten::gru"):
        vmap(layer)(torch.zeros(2, 257, 5, 1))
