"""Transforms of the mean update, of which the optimisers of a server are made.

Shapes: see :mod:`fed.vectors.layout`.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt

from fed.aggregators.composed import Transform
from fed.config.hyperparameters import DecayRate
from fed.vectors.tensors import Tensor, torch

__all__ = [
    "Adagrad",
    "Adam",
    "Lookahead",
    "Moments",
    "Momentum",
    "Nesterov",
    "Scale",
    "SlowWeights",
    "TrustRatio",
    "Velocity",
    "WeightDecay",
    "Yogi",
]


@dataclass(frozen=True, kw_only=True)
class Scale(Transform):
    """Update times a factor.

    Args:
        factor: server's learning rate, > 0.
    """

    factor: PositiveFloat = 1.0

    def update(self, mean_update_P: Tensor, state: None, params_P: Tensor) -> tuple[Tensor, None]:
        """The update times the factor."""
        return mean_update_P * self.factor, None


class Velocity(NamedTuple):
    """State of momentum."""

    velocity_P: Tensor


@dataclass(frozen=True, kw_only=True)
class Momentum(Transform):
    r"""Heavy ball: :math:`v ← β v + Δ`, and v is what moves the model.

    Args:
        momentum: β in [0, 1), the share of the velocity that stays each round.
    """

    momentum: DecayRate = 0.9

    def init(self, params_P: Tensor) -> Velocity:
        """A velocity of zero."""
        return Velocity(torch.zeros_like(params_P))

    def update(self, mean_update_P: Tensor, state: Velocity, params_P: Tensor) -> tuple[Tensor, Velocity]:
        """The velocity."""
        velocity_P = self.momentum * state.velocity_P + mean_update_P
        return velocity_P, Velocity(velocity_P)


@dataclass(frozen=True, kw_only=True)
class Nesterov(Momentum):
    r"""Nesterov's momentum: :math:`v ← β v + Δ`, and :math:`Δ + β v` moves the model."""

    def update(self, mean_update_P: Tensor, state: Velocity, params_P: Tensor) -> tuple[Tensor, Velocity]:
        """The update, and a look ahead along the velocity."""
        velocity_P = self.momentum * state.velocity_P + mean_update_P
        return mean_update_P + self.momentum * velocity_P, Velocity(velocity_P)


class Moments(NamedTuple):
    """State of an adaptive optimiser."""

    first_P: Tensor
    second_P: Tensor


@dataclass(frozen=True, kw_only=True)
class _Adaptive(Transform):
    r"""The update, divided by the root of its second moment (Reddi et al. 2021, 2003.00295, algorithm 2).

    .. math:: m ← β_1 m + (1 - β_1) Δ, \qquad x ← x + m / (\sqrt v + τ), \qquad v_0 = τ^2

    Args:
        beta1: β₁ in [0, 1), the decay rate of the first moment.
        tau: τ > 0, a bound on adaptivity: the smaller, the more a parameter's own history sets its step.
    """

    beta1: DecayRate = 0.9
    tau: PositiveFloat = 1e-3

    def init(self, params_P: Tensor) -> Moments:
        """No first moment, and τ² as the second."""
        # The paper asks for v ≥ τ² at first: with 0 the first steps would be divided by τ alone.
        return Moments(torch.zeros_like(params_P), torch.full_like(params_P, self.tau**2))

    def update(self, mean_update_P: Tensor, state: Moments, params_P: Tensor) -> tuple[Tensor, Moments]:
        """The first moment over the root of the second."""
        # Without Adam's correction of early moments, which the paper leaves out.
        first_P = self.beta1 * state.first_P + (1 - self.beta1) * mean_update_P
        second_P = self.second(state.second_P, mean_update_P**2)
        return first_P / (second_P.sqrt() + self.tau), Moments(first_P, second_P)

    @abstractmethod
    def second(self, second_P: Tensor, square_P: Tensor) -> Tensor:
        """The second moment after an update with these squares."""


@dataclass(frozen=True, kw_only=True)
class Adagrad(_Adaptive):
    r"""The second moment is a sum: :math:`v ← v + Δ^2`.

    Args:
        beta1: β₁ in [0, 1), the decay rate of the first moment; the paper has 0.
    """

    beta1: DecayRate = 0.0

    def second(self, second_P: Tensor, square_P: Tensor) -> Tensor:
        """The sum, v + Δ²."""
        return second_P + square_P


@dataclass(frozen=True, kw_only=True)
class Adam(_Adaptive):
    r"""The second moment is a mean: :math:`v ← β_2 v + (1 - β_2) Δ^2`.

    Args:
        beta2: β₂ in [0, 1), the decay rate of the second moment.
    """

    beta2: DecayRate = 0.99

    def second(self, second_P: Tensor, square_P: Tensor) -> Tensor:
        """The mean, β₂ v + (1 − β₂) Δ²."""
        return self.beta2 * second_P + (1 - self.beta2) * square_P


@dataclass(frozen=True, kw_only=True)
class Yogi(Adam):
    r"""The second moment moves by as much as the square, whatever it was: :math:`v ← v - (1-β_2) Δ^2 sign(v - Δ^2)`."""

    def second(self, second_P: Tensor, square_P: Tensor) -> Tensor:
        """The mean, v − (1 − β₂) Δ² sign(v − Δ²)."""
        # The sign keeps v from falling fast after a large square, which would make the next steps too long.
        return second_P - (1 - self.beta2) * square_P * torch.sign(second_P - square_P)


@dataclass(frozen=True, kw_only=True)
class WeightDecay(Transform):
    r"""The server's model shrinks: :math:`Δ ← Δ - λ x`, decoupled from whatever optimiser stands before it.

    Args:
        decay: λ in [0, 1), the share of the model that is subtracted in each round.
    """

    decay: DecayRate = 1e-4

    def update(self, mean_update_P: Tensor, state: None, params_P: Tensor) -> tuple[Tensor, None]:
        """The update less a share of the model."""
        return mean_update_P - self.decay * params_P, None


@dataclass(frozen=True, kw_only=True)
class TrustRatio(Transform):
    r"""The update becomes as long as the model: :math:`Δ ← Δ ‖x‖ / ‖Δ‖` (You et al. 2017, 1708.03888).

    This is LARS's ratio, and LAMB's where Adam stands before it (You et al. 2020, 1904.00962); a scale behind it is the
    learning rate. The papers take each layer's own ratio, here it is the whole model's. Where either norm is 0 the
    update stays as it is.
    """

    def update(self, mean_update_P: Tensor, state: None, params_P: Tensor) -> tuple[Tensor, None]:
        """The update, as long as the model."""
        update_norm = torch.linalg.vector_norm(mean_update_P)
        model_norm = torch.linalg.vector_norm(params_P)
        # A model of zeros would never leave its place.
        if update_norm > 0 and model_norm > 0:
            mean_update_P = mean_update_P * (model_norm / update_norm)
        return mean_update_P, None


class SlowWeights(NamedTuple):
    """State of Lookahead."""

    slow_P: Tensor
    rounds_1: Tensor  # since the slow weights moved


@dataclass(frozen=True, kw_only=True)
class Lookahead(Transform):
    r"""Slow weights follow the model, which returns to them every k rounds (Zhang et al. 2019, 1907.08610).

    .. math:: φ ← φ + α (x + Δ - φ), \qquad x ← φ \qquad \text{every } k \text{ rounds; else } x ← x + Δ

    Args:
        step: α in (0, 1], the share of the way that the slow weights go to the model.
        period: k ≥ 1, rounds from one move of the slow weights to the next; 1 shortens every round by α.
    """

    step: Annotated[float, Field(gt=0, le=1)] = 0.5
    period: PositiveInt = 5

    def init(self, params_P: Tensor) -> SlowWeights:
        """Slow weights equal to the model."""
        return SlowWeights(params_P, params_P.new_zeros(1))  # a state's parts are tensors

    def update(self, mean_update_P: Tensor, state: SlowWeights, params_P: Tensor) -> tuple[Tensor, SlowWeights]:
        """The update, or the way to the slow weights."""
        if state.rounds_1 + 1 < self.period:
            return mean_update_P, state._replace(rounds_1=state.rounds_1 + 1)
        slow_P = state.slow_P + self.step * (params_P + mean_update_P - state.slow_P)
        # The move is given as an update, for the chain adds it to the model that clients had.
        return slow_P - params_P, SlowWeights(slow_P, torch.zeros_like(state.rounds_1))
