"""Models that people bring: small ones of each kind, with data of their shapes, each with an optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from fed.clients.models import char_gru, logistic, mlp
from fed.vectors.randomness import seeded_torch

__all__ = ["CASES", "Case"]

CLIENTS = 50
COHORT = 10
_FEATURES = 30
_LETTERS = 40
_LENGTH = 20

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its data and its optimizer.

    Args:
        title: name in the table.
        model: the module.
        sample: number of samples → (inputs, targets), drawn from PyTorch's generator.
        local: keys of the experiment's section of that name, beside batch size and epochs.
        samples: number of samples of each client.
        batch_size: samples of a step.
        epochs: passes over a client's samples in a round.
        channels_last: True if the lean loop lays convolutions out with channels last, as few write by hand.
    """

    title: str
    model: Callable[[], nn.Module]
    sample: Callable[[int], Pair]
    local: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 50
    batch_size: int = 10
    epochs: int = 1
    channels_last: bool = True

    @property
    def keys(self) -> dict[str, Any]:
        """The experiment's section ``local``."""
        return {"lr": 0.05, "batch_size": self.batch_size, "epochs": self.epochs, **self.local}

    def made(self) -> nn.Module:
        """The first model, always the same."""
        with seeded_torch(0, torch.device("cpu")):
            return self.model()

    def clients(self) -> dict[int, Pair]:
        """Samples of all clients."""
        with seeded_torch(1, torch.device("cpu")):
            return {client: self.sample(self.samples) for client in range(CLIENTS)}


def _rows(count: int) -> Pair:
    inputs = torch.randn(count, _FEATURES)
    return inputs, (inputs[:, :3].sum(1) > 0).long()


def _images(count: int) -> Pair:
    targets = torch.randint(10, (count,))
    return torch.randn(count, 3, 32, 32) + 0.1 * targets[:, None, None, None], targets


def _texts(count: int) -> Pair:
    texts = torch.randint(_LETTERS, (count, _LENGTH + 1))
    return texts[:, :-1].contiguous(), texts[:, 1:].contiguous()


def _perceptron(*between: Callable[[], nn.Module]) -> nn.Module:
    """MLP 30-64-64-2 with these layers behind each hidden one."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((_FEATURES, 64), (64, 64)):
        layers += [nn.Linear(inputs, outputs), *(layer() for layer in between)]
    return nn.Sequential(*layers, nn.Linear(64, 2))


def _with_dropout() -> nn.Module:
    """MLP 30-64-64-2 with one dropout layer."""
    first = nn.Sequential(nn.Linear(_FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    return nn.Sequential(*first, nn.Dropout(0.2), nn.Linear(64, 2))


class _Block(nn.Module):
    """Two 3×3 convolutions, each normalised, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        stride = outputs // inputs
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([norm(outputs), norm(outputs)])
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        inner = relu(self.norms[0](self.first(images)))
        return relu(self.norms[1](self.second(inner)) + self.shortcut(images))


def _residual(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Residual CNN of 8 layers."""
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), norm(16), nn.ReLU())
    blocks = [_Block(16, 16, norm), _Block(16, 32, norm), _Block(32, 64, norm)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class _Transformer(nn.Module):
    """Causal transformer over letters, 2 layers of width 32."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(_LETTERS, 32)
        self.position = nn.Parameter(torch.randn(_LENGTH, 32) * 0.02)
        block = nn.TransformerEncoderLayer(32, 4, 128, dropout, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, norm=nn.LayerNorm(32), enable_nested_tensor=False)
        self.read = nn.Linear(32, _LETTERS)
        later = torch.triu(torch.ones(_LENGTH, _LENGTH, dtype=torch.bool), 1)
        self.register_buffer("later", later, persistent=False)

    def forward(self, letters: Tensor) -> Tensor:
        states = self.blocks(self.embed(letters) + self.position, mask=self.get_buffer("later"), is_causal=True)
        scores: Tensor = self.read(states).transpose(1, 2)
        return scores


_MOMENTUM = {"momentum": 0.9}
_ADAM = {"optimizer": "adam", "lr": 0.001}


def _mlp() -> nn.Module:
    return mlp((_FEATURES,), 2, hidden=(64, 64))


CASES = {
    "mlp": Case(title="MLP 30-64-64-2", model=_mlp, sample=_rows),
    "mlp-momentum": Case(title="MLP, momentum", model=_mlp, sample=_rows, local=_MOMENTUM),
    "mlp-nesterov": Case(
        title="MLP, Nesterov, weight decay",
        model=_mlp,
        sample=_rows,
        local={"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
    ),
    "mlp-adam": Case(title="MLP, Adam", model=_mlp, sample=_rows, local=_ADAM),
    "mlp-adamw": Case(
        title="MLP, AdamW", model=_mlp, sample=_rows, local={**_ADAM, "optimizer": "adamw", "weight_decay": 0.01}
    ),
    "layer-norm": Case(
        title="MLP with LayerNorm and GELU, momentum",
        model=lambda: _perceptron(lambda: nn.LayerNorm(64), nn.GELU),
        sample=_rows,
        local=_MOMENTUM,
    ),
    "silu": Case(
        title="MLP with LayerNorm and SiLU, momentum",
        model=lambda: _perceptron(lambda: nn.LayerNorm(64), nn.SiLU),
        sample=_rows,
        local=_MOMENTUM,
    ),
    "dropout": Case(title="MLP with dropout", model=_with_dropout, sample=_rows),
    "dropout-momentum": Case(title="MLP with dropout, momentum", model=_with_dropout, sample=_rows, local=_MOMENTUM),
    "dropout-adam": Case(title="MLP with dropout, Adam", model=_with_dropout, sample=_rows, local=_ADAM),
    "logistic": Case(title="logistic regression", model=lambda: logistic((_FEATURES,), 2), sample=_rows),
    "gru": Case(
        title="GRU(32, 64) over 20 letters", model=lambda: char_gru(_LETTERS, embedding=32, hidden=64), sample=_texts
    ),
    "group-norm": Case(
        title="residual CNN with GroupNorm",
        model=lambda: _residual(lambda channels: nn.GroupNorm(channels // 8, channels)),
        sample=_images,
        samples=32,
        batch_size=16,
    ),
    "batch-norm": Case(
        title="residual CNN with BatchNorm",
        model=lambda: _residual(nn.BatchNorm2d),
        sample=_images,
        samples=32,
        batch_size=16,
    ),
    "transformer": Case(title="transformer, 2 layers of width 32", model=lambda: _Transformer(0.0), sample=_texts),
    "transformer-dropout": Case(title="transformer with dropout", model=lambda: _Transformer(0.1), sample=_texts),
}
CASES |= {
    f"{name}-usual-order": replace(
        CASES[name], title=f"{CASES[name].title}, loop in the usual order", channels_last=False
    )
    for name in ("group-norm", "batch-norm")
}
