"""Transforms of updates, and algorithms over ``mean`` that are chains of them, in the manner of optax.

A transform may act where clients report (clip, weigh), on a round's messages before they are averaged (bucketing), in
place of their mean (median), or on the mean (a server optimiser).

Shapes: see :mod:`fed.vectors.layout`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from fed.aggregators.base import Aggregator, ClientWork, Reduced, Report
from fed.config.hyperparameters import DecayRate, Hyperparameters
from fed.vectors.tensors import Tensor, torch

__all__ = [
    "Adagrad",
    "Adam",
    "Chain",
    "Clip",
    "Composed",
    "Lookahead",
    "Messages",
    "Moments",
    "Momentum",
    "Nesterov",
    "Reducer",
    "Scale",
    "SlowWeights",
    "State",
    "Transform",
    "TrustRatio",
    "Velocity",
    "Weigh",
    "WeightDecay",
    "Yogi",
    "chain",
    "shortening",
]


@dataclass(frozen=True, kw_only=True)
class Transform(Hyperparameters):
    """A step of a chain; one that overrides nothing does nothing. The first part of messages is the update."""

    update_alone: ClassVar[bool] = True
    """True if a message stays the update alone; a class with a report of its own says so."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "report" in vars(cls):
            cls.update_alone = vars(cls).get("update_alone", False)

    def report(self, report: Report, work: ClientWork) -> Report:
        """Report in place of the one that the transforms before have made."""
        return report

    def init(self, params_P: Tensor) -> Any:
        """Server state of the transform before the first round: a named tuple of tensors, or None."""
        return None

    def update(self, mean_update_P: Tensor, state: Any, params_P: Tensor) -> tuple[Tensor, Any]:
        """Update in place of the mean update, and the transform's next state.

        Args:
            mean_update_P: the round's mean update, as the transforms before leave it.
            state: the transform's state after the round before.
            params_P: the model that the update is added to.
        """
        return mean_update_P, state


class Messages(NamedTuple):
    """Messages of a round, in the order of their tasks.

    Args:
        vectors_SM: the messages, one in each row, in float64.
        weights_S: each message's weight, > 0.
    """

    vectors_SM: Tensor
    weights_S: Tensor

    def replaced_by(self, point_M: Tensor) -> "Messages":
        """A single message in the place of all, with their weight."""
        return Messages(point_M.unsqueeze(0), self.weights_S.sum(0, keepdim=True))


@dataclass(frozen=True, kw_only=True)
class Reducer(Transform, ABC):
    """Transform that needs the single messages of a round."""

    def left(self, messages: int) -> int:
        """Number of messages that this transform leaves of a round's ``messages``.

        Raises:
            InvalidExperiment: if the round has too few.
        """
        return messages

    @abstractmethod
    def reduce(self, state: Any, messages: Messages, generator: np.random.Generator) -> tuple[Any, Messages]:
        """Next state, and fewer or other messages; a single one is the round's mean.

        Args:
            state: the transform's state after the round before.
            messages: all messages of the round.
            generator: the round's own random stream.

        Raises:
            InvalidExperiment: if there are too few messages.
        """


@dataclass(frozen=True, kw_only=True)
class Weigh(Transform):
    """Weight of each client in the mean.

    Args:
        by: rule of the weights. samples: a client's weight is the number of its samples; clients: all weights are
            equal.
    """

    update_alone: ClassVar[bool] = True

    by: Literal["samples", "clients"] = "samples"

    def report(self, report: Report, work: ClientWork) -> Report:
        """Same message with another weight."""
        weight_K1 = work.samples_K1 if self.by == "samples" else torch.ones_like(work.samples_K1)
        return report._replace(weight_K1=weight_K1)


@dataclass(frozen=True, kw_only=True)
class Clip(Transform):
    r"""Each client shortens its update to a norm.

    .. math:: Δ ← Δ · \min(1, M / ‖Δ‖_2)

    Args:
        norm: M > 0, the largest norm of an update.
    """

    update_alone: ClassVar[bool] = True

    norm: PositiveFloat = 1.0

    def report(self, report: Report, work: ClientWork) -> Report:
        """The first part of the message, shortened."""
        update_KP, *others = report.message
        return report._replace(message=(update_KP * shortening(update_KP, self.norm), *others))


def shortening(vectors_KM: Tensor, norm: float) -> Tensor:
    """Factors [K, 1] that shorten vectors to a norm; 0 where a square overflows."""
    norms_K1 = torch.linalg.vector_norm(vectors_KM, dim=1, keepdim=True)
    # a vector of zeros stays one, where 0/0 would be NaN
    factors_K1: Tensor = (norm / norms_K1.clamp(min=torch.finfo(norms_K1.dtype).tiny)).clamp(max=1)
    return factors_K1


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
        # the paper asks for v ≥ τ² at first: with 0 the first steps would be divided by τ alone
        return Moments(torch.zeros_like(params_P), torch.full_like(params_P, self.tau**2))

    def update(self, mean_update_P: Tensor, state: Moments, params_P: Tensor) -> tuple[Tensor, Moments]:
        """The first moment over the root of the second."""
        # without Adam's correction of early moments, which the paper leaves out
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
        return slow_P - params_P, SlowWeights(slow_P, torch.zeros_like(state.rounds_1))


class State(NamedTuple):
    """Server state."""

    model_P: Tensor
    kept: tuple[Any, ...]  # by each transform


class Composed(Aggregator):
    r"""An algorithm that is the chain of its transforms.

    .. math:: x ← x + (a_n ∘ … ∘ a_1)(\text{mean}_S \, (r_n ∘ … ∘ r_1)(y_i - x))

    A subclass says which with :meth:`transforms`, as a function of its hyper-parameters.
    """

    @abstractmethod
    def transforms(self) -> Sequence[Transform]:
        """The chain, from the clients to the model."""

    @cached_property
    def _transforms(self) -> tuple[Transform, ...]:
        return tuple(self.transforms())

    @property
    def linear(self) -> bool:  # type: ignore[override]  # it depends on the transforms
        """True if no transform needs single messages."""
        return not any(isinstance(transform, Reducer) for transform in self._transforms)

    @property
    def update_alone(self) -> bool:  # type: ignore[override]  # as above
        """True if no transform adds to a message."""
        return all(transform.update_alone for transform in self._transforms)

    def init(self, params_P: Tensor) -> State:
        """The model, and the transforms' states."""
        return State(params_P, tuple(transform.init(params_P) for transform in self._transforms))

    def report(self, work: ClientWork) -> Report:
        """The update, weighted by samples, through the transforms."""
        report = super().report(work)
        for transform in self._transforms:
            report = transform.report(report, work)
        return report

    def check(self, replies: int) -> None:
        """Refuse rounds in which too few messages reach a transform."""
        for transform in self._transforms:
            replies = transform.left(replies) if isinstance(transform, Reducer) else replies

    def combine(
        self, state: State, messages_SM: Tensor, weights_S: Tensor, generator: np.random.Generator
    ) -> tuple[State, Tensor]:
        """The messages through the transforms that need them; the weighted mean of the remaining messages."""
        messages = Messages(messages_SM, weights_S)
        kept = []
        for transform, its_state in zip(self._transforms, state.kept, strict=True):
            if isinstance(transform, Reducer):
                its_state, messages = transform.reduce(its_state, messages, generator)
            kept.append(its_state)
        state = state._replace(kept=tuple(kept))
        if len(messages.vectors_SM) == 1:  # the mean of one, w m / w, need not have the bits of m
            return state, messages.vectors_SM[0]
        return super().combine(state, messages.vectors_SM, messages.weights_S, generator)

    def apply(self, state: State, reduced: Reduced) -> State:
        """The model plus the mean update through the transforms."""
        update_P = reduced.update_P
        kept = []
        for transform, its_state in zip(self._transforms, state.kept, strict=True):
            update_P, its_state = transform.update(update_P, its_state, state.model_P)
            kept.append(its_state)
        return State(state.model_P + update_P, tuple(kept))


@dataclass(frozen=True, kw_only=True)
class Chain(Composed):
    """Transforms in a row.

    Args:
        of: the transforms, from the clients to the model.
    """

    of: tuple[Transform, ...]

    def transforms(self) -> tuple[Transform, ...]:
        """The transforms of the constructor."""
        return self.of


def chain(*transforms: Transform) -> Chain:
    """An algorithm from transforms.

    Args:
        transforms: the chain, from the clients to the model; the round's mean is taken between the last transform that
            changes reports and the first that changes the mean.

    Raises:
        ValueRange: if one of them is not a transform.

    Example:
        >>> import torch
        >>> rule = chain(Momentum(momentum=0.5), Scale(factor=2.0))
        >>> state = rule.init(torch.zeros(1))
        >>> for _ in range(2):
        ...     state = rule.apply(state, Reduced((torch.ones(1),), clients=1, population=1))
        >>> state.model_P
        tensor([5.])
    """
    return Chain(of=transforms)
