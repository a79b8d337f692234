"""Rules over ``mix`` from the literature, written here to hold the contract to what they need, and what moves them."""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from pydantic import PositiveFloat
from torch import Tensor

from fed.aggregators.peer_rule import Descend, Mix, PeerRule
from fed.mixing import Weights


class Moved(NamedTuple):
    """A model, and where it was one round and one gradient before."""

    model_NP: Tensor
    last_NP: Tensor
    gradient_NP: Tensor


@dataclass(frozen=True, kw_only=True)
class D2(PeerRule):
    """X₊ = W (2 X − X₋ − η (G − G₋)), at first X₊ = W (X − η G) (Tang et al. 2018, 1803.07068)."""

    needs_gradient: ClassVar[bool] = True

    def init(self, params_NP: Tensor) -> Moved:
        return Moved(params_NP, params_NP, torch.zeros_like(params_NP))

    def step(self, state: Moved, descend: Descend, mix: Mix) -> Moved:
        x_NP = state.model_NP
        gradient_NP = (x_NP - descend(x_NP)) / descend.lr
        moved_NP = 2 * x_NP - state.last_NP - descend.lr * (gradient_NP - state.gradient_NP)
        return Moved(mix(moved_NP), x_NP, gradient_NP)


class Tracked(NamedTuple):
    """A model, and what tracks the peers' mean gradient."""

    model_NP: Tensor
    tracker_NP: Tensor
    gradient_NP: Tensor


@dataclass(frozen=True, kw_only=True)
class GradientTracking(PeerRule):
    """X₊ = W (X − η Y); Y₊ = W Y + G₊ − G (Pu & Nedić 2018, 1805.11454)."""

    needs_gradient: ClassVar[bool] = True

    def init(self, params_NP: Tensor) -> Tracked:
        return Tracked(params_NP, torch.zeros_like(params_NP), torch.zeros_like(params_NP))

    def step(self, state: Tracked, descend: Descend, mix: Mix) -> Tracked:
        moved_NP, tracked_NP = mix(state.model_NP - descend.lr * state.tracker_NP, state.tracker_NP)
        gradient_NP = (moved_NP - descend(moved_NP)) / descend.lr
        return Tracked(moved_NP, tracked_NP + gradient_NP - state.gradient_NP, gradient_NP)


class Pushed(NamedTuple):
    """A model z = x / w, its numerator and its weight."""

    model_NP: Tensor
    x_NP: Tensor
    w_N1: Tensor


@dataclass(frozen=True, kw_only=True)
class PushSum(PeerRule):
    """x ← P (x − η g(z)); w ← P w; z = x / w (Assran et al. 2019, 1811.10792)."""

    def init(self, params_NP: Tensor) -> Pushed:
        return Pushed(params_NP, params_NP, torch.ones_like(params_NP[:, :1]))

    def step(self, state: Pushed, descend: Descend, mix: Mix) -> Pushed:
        z_NP = state.model_NP
        x_NP, w_N1 = mix(state.x_NP + (descend(z_NP) - z_NP), state.w_N1)
        return Pushed(x_NP / w_N1, x_NP, w_N1)


class Model(NamedTuple):
    """A model."""

    model_NP: Tensor


@dataclass(frozen=True, kw_only=True)
class ClippedGossip(PeerRule):
    """x_i ← x_i + Σ_j W_ij clip(x_j − x_i, τ) (He et al. 2022, 2202.01545)."""

    radius: PositiveFloat = 1.0

    def init(self, params_NP: Tensor) -> Model:
        return Model(params_NP)

    def step(self, state: Model, descend: Descend, mix: Mix) -> Model:
        x_NP = descend(state.model_NP)
        mixed_NP = x_NP.clone()
        for rows_K, weights_K1, theirs_KP in mix.neighbours(x_NP):
            apart_KP = theirs_KP - x_NP[rows_K]
            shrink_K1 = (self.radius / apart_KP.norm(dim=1, keepdim=True)).clamp(max=1.0)
            mixed_NP[rows_K] += weights_K1 * shrink_K1 * apart_KP
        return Model(mixed_NP)


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
    clock: float = 0.0

    @property
    def members(self) -> range:
        return range(len(self.weights.own_N1))

    def exchange(self, rows_NM: Tensor) -> Tensor:
        self.sent.append(rows_NM)
        return rows_NM


def row_alone(weights: Weights, row: int) -> tuple[Weights, Tensor]:
    """One row's weights, as the peer itself has them, and who its neighbours are."""
    is_its = weights.rows_X == row
    places_X, only = torch.arange(int(is_its.sum())), slice(row, row + 1)
    own = Weights(weights.own_N1[only], weights.degrees_N[only], places_X, weights.weights_X[is_its])
    return own, weights.senders_X[is_its]


class Alone:
    """One peer, that gets what its neighbours sent when all were together."""

    clock = 0.0

    def __init__(self, row: int, together: Together) -> None:
        self.members = together.members
        self.weights, self._neighbours = row_alone(together.weights, row)
        self._row, self._sent = row, iter(together.sent)

    def exchange(self, rows_NM: Tensor) -> Tensor:
        """Hold what it sends to what it sent among the others."""
        sent_NM = next(self._sent)
        assert torch.equal(rows_NM[0], sent_NM[self._row])
        return sent_NM[self._neighbours]
