"""Models that several devices train in tests, in float64, each with samples."""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fed.clients.models import char_transformer, cnn, mlp

__all__ = [
    "CLASSES",
    "MODELS",
    "Blocks",
    "Counting",
    "Deadly",
    "Drawing",
    "Raising",
    "Residual",
    "Scaled",
    "Unreached",
    "double_cnn",
    "double_mlp",
    "double_transformer",
    "samples_of",
]


def double_mlp() -> nn.Module:
    """A perceptron."""
    return mlp((5,), 3, hidden=(8, 6)).double()


def double_transformer() -> nn.Module:
    """A transformer."""
    return char_transformer((7,), 11, width=8, heads=2, layers=3).double()


def double_cnn() -> nn.Module:
    """A network of convolutions."""
    return cnn((1, 8, 8), 3, channels=(4, 6), hidden=10).double()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": double_mlp,
    "transformer": double_transformer,
    "cnn": double_cnn,
}
CLASSES = {"mlp": 3, "transformer": 11, "cnn": 3}


def samples_of(name: str, count: int) -> tuple[Tensor, Tensor]:
    """Samples of a model; some targets of the transformer do not count, and not as many in each sample."""
    generator = torch.Generator().manual_seed(count)
    if name == "transformer":
        characters = torch.randint(11, (count, 8), generator=generator)
        targets = characters[:, 1:].clone()
        targets[::3, :4] = -100
        return characters[:, :-1], targets
    shape = (1, 8, 8) if name == "cnn" else (5,)
    inputs = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (count,), generator=generator)


class _OneLayer(nn.Module):
    """A linear layer, the base of models that do something beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs_BD: Tensor) -> Tensor:
        scores_BC: Tensor = self.layer(inputs_BD)
        return scores_BC


class Deadly(_OneLayer):
    """Ends its process by a signal where an input is 13."""

    def forward(self, inputs_BD: Tensor) -> Tensor:
        if bool((inputs_BD == 13).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(inputs_BD)


class Raising(_OneLayer):
    """Raises where an input is 13."""

    def forward(self, inputs_BD: Tensor) -> Tensor:
        if bool((inputs_BD == 13).any()):
            raise ZeroDivisionError("thirteen")
        return super().forward(inputs_BD)


class Counting(_OneLayer):
    """Has a buffer that counts batches, and one that keeps the sum of a batch where it is told to."""

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(()))
        self.keeps = keeps

    def forward(self, inputs_BD: Tensor) -> Tensor:
        self.get_buffer("batches").add_(1)
        if self.keeps:
            self.get_buffer("seen").add_(inputs_BD.detach().sum())
        return super().forward(inputs_BD)


class Residual(_OneLayer):
    """Adds an input of its second layer to that layer's output; its first layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(3, 3)

    def forward(self, inputs_BD: Tensor) -> Tensor:
        scores_BC = super().forward(inputs_BD)
        more_BC: Tensor = self.second(scores_BC)
        return scores_BC + more_BC


class Blocks(nn.Module):
    """Attention with a mask and padding, and a layer between column and row, over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.norm = nn.LayerNorm(12)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.up = nn.Linear(12, 5)
        self.scale = _Scale()
        self.down = nn.Linear(5, 12)
        self.batches = nn.BatchNorm1d(12)
        self.read = nn.Linear(12, 11)

    def forward(self, characters_BT: Tensor) -> Tensor:
        states_BTD = self.norm(self.embed(characters_BT))
        causal_TT = torch.triu(torch.ones(7, 7, dtype=torch.bool), 1)
        padding_BT = (characters_BT == 0) & (torch.arange(7) > 0)
        mixed_BTD, _ = self.attention(
            states_BTD, states_BTD, states_BTD, attn_mask=causal_TT, key_padding_mask=padding_BT, need_weights=False
        )
        states_BTD = states_BTD + self.down(torch.relu(self.scale(self.up(mixed_BTD))))
        scores_BCT: Tensor = self.read(self.batches(states_BTD.transpose(1, 2)).transpose(1, 2)).transpose(1, 2)
        return scores_BCT


class _Scale(nn.Module):
    """A factor for all columns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight


class Scaled(_OneLayer):
    """Has a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs_BD: Tensor) -> Tensor:
        return self.scale * super().forward(inputs_BD)


class Unreached(_OneLayer):
    """Has a parameter that the loss does not reach, a fixed one, and two tied ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.spare = nn.Parameter(torch.ones(2, 3))
        self.fixed = nn.Linear(5, 5)
        self.fixed.requires_grad_(False)

    def forward(self, inputs_BD: Tensor) -> Tensor:
        return super().forward(self.fixed(self.second(torch.tanh(self.first(inputs_BD)))))


class Drawing(_OneLayer):
    """Has dropout."""

    def forward(self, inputs_BD: Any) -> Tensor:
        return super().forward(nn.functional.dropout(inputs_BD, 0.5, self.training))
