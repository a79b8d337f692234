"""Rules over ``mix`` from the literature, written here to hold the contract to what they need, and what moves them."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from pydantic import PositiveFloat
from torch import Tensor

from fed.aggregators.peer_rule import Descend, Mix, PeerRule
from fed.mixing import Weights


class Model(NamedTuple):
    """A model."""

    model_NP: Tensor


class Compressed(NamedTuple):
    """A model, the copy of it that all neighbours have, and the weighted mean of theirs."""

    model_NP: Tensor
    public_NP: Tensor
    mixed_NP: Tensor


@dataclass(frozen=True, kw_only=True)
class Choco(PeerRule):
    """q = C(x − x̂); x̂ ← x̂ + q; x ← x + γ Σ_j W_ij (x̂_j − x̂_i) (Koloskova et al. 2019, 1902.00340).

    C keeps the larger half. Only q travels: Σ_j W_ij x̂_j is the sum of what has come so far.
    """

    consensus: PositiveFloat = 0.4

    def init(self, params_NP: Tensor) -> Compressed:
        return Compressed(params_NP, torch.zeros_like(params_NP), torch.zeros_like(params_NP))

    def step(self, state: Compressed, descend: Descend, mix: Mix) -> Compressed:
        x_NP = descend(state.model_NP)
        apart_NP = x_NP - state.public_NP
        median_N1 = apart_NP.abs().median(1, keepdim=True).values
        sent_NP = torch.where(apart_NP.abs() >= median_N1, apart_NP, 0.0)
        public_NP, mixed_NP = state.public_NP + sent_NP, state.mixed_NP + mix(sent_NP)
        return Compressed(x_NP + self.consensus * (mixed_NP - public_NP), public_NP, mixed_NP)


# What takes the place of local training and of the network.


@dataclass(frozen=True)
class Quadratics:
    """Steps of gradient descent on f_i = ½ Σ a_i (x − b_i)², of some peers a row each."""

    curvature_NP: Tensor
    centre_NP: Tensor
    step_size: float
    steps: int = 1

    @classmethod
    def random(cls, peers: int, size: int, step_size: float, steps: int = 1) -> "Quadratics":
        generator = torch.Generator().manual_seed(peers)
        curvature_NP = 0.5 + torch.rand(peers, size, generator=generator, dtype=torch.float64)
        return cls(curvature_NP, torch.randn(peers, size, generator=generator, dtype=torch.float64), step_size, steps)

    @property
    def lr(self) -> float:
        return self.step_size * self.steps

    @property
    def optimum_P(self) -> Tensor:  # noqa: N802  # a shape suffix
        return (self.curvature_NP * self.centre_NP).sum(0) / self.curvature_NP.sum(0)

    def gradient(self, x_NP: Tensor) -> Tensor:
        return self.curvature_NP * (x_NP - self.centre_NP)

    def __call__(self, x_NP: Tensor) -> Tensor:
        for _ in range(self.steps):
            x_NP = x_NP - self.step_size * self.gradient(x_NP)
        return x_NP

    def of(self, row: int) -> "Quadratics":
        only = slice(row, row + 1)
        return Quadratics(self.curvature_NP[only], self.centre_NP[only], self.step_size, self.steps)


@dataclass
class Together:
    """All peers at once, whose messages are kept."""

    weights: Weights
    sent: list[Tensor] = field(default_factory=list)

    def exchange(self, rows_NM: Tensor) -> tuple[Weights, Tensor]:
        self.sent.append(rows_NM)
        return self.weights, rows_NM


def row_alone(weights: Weights, row: int) -> tuple[Weights, Tensor]:
    """One row's weights, as the peer itself has them, and who its neighbours are."""
    is_its = weights.rows_X == row
    places_X, only = torch.arange(int(is_its.sum())), slice(row, row + 1)
    own = Weights(weights.own_N1[only], weights.degrees_N[only], places_X, weights.weights_X[is_its])
    return own, weights.senders_X[is_its]


class Alone:
    """One peer, that gets what its neighbours sent when all were together."""

    def __init__(self, row: int, together: Together) -> None:
        self.weights, self._neighbours = row_alone(together.weights, row)
        self._row, self._sent = row, iter(together.sent)

    def exchange(self, rows_NM: Tensor) -> tuple[Weights, Tensor]:
        """Hold what it sends to what it sent among the others."""
        sent_NM = next(self._sent)
        assert torch.equal(rows_NM[0], sent_NM[self._row])
        return self.weights, sent_NM[self._neighbours]
