"""The pieces that algorithms over ``mean`` are chained from: what clients clip and weigh, and server optimisers.

Shapes: K, clients of a group; P, the model's parameters.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from pydantic import PositiveFloat
from torch import Tensor

from fed.aggregators.base import ClientWork, Report
from fed.aggregators.composition import Piece
from fed.config.hyperparameters import DecayRate

__all__ = ["Adagrad", "Adam", "Clip", "Moments", "Momentum", "Nesterov", "Scale", "Velocity", "Weigh", "Yogi"]


@dataclass(frozen=True, kw_only=True)
class Weigh(Piece):
    """How much each client counts in the mean.

    Args:
        by: samples: as much as it holds; clients: all alike.
    """

    by: Literal["samples", "clients"] = "samples"

    def report(self, report: Report, work: ClientWork) -> Report:
        """The same message, weighted so."""
        weight_K1 = work.samples_K1 if self.by == "samples" else torch.ones_like(work.samples_K1)
        return report._replace(weight_K1=weight_K1)


@dataclass(frozen=True, kw_only=True)
class Clip(Piece):
    r"""Each client shortens its update to a norm.

    .. math:: Δ ← Δ · \min(1, M / ‖Δ‖_2)

    Args:
        norm: M > 0.
    """

    norm: PositiveFloat = 1.0

    def report(self, report: Report, work: ClientWork) -> Report:
        """The first part of the message, shortened."""
        update_KP, *others = report.message
        norms_K1 = torch.linalg.vector_norm(update_KP, dim=1, keepdim=True)
        factor_K1 = (self.norm / norms_K1.clamp(min=torch.finfo(norms_K1.dtype).tiny)).clamp(max=1)
        return report._replace(message=(update_KP * factor_K1, *others))


@dataclass(frozen=True, kw_only=True)
class Scale(Piece):
    """The update, so many times.

    Args:
        factor: above 0; a server's learning rate.
    """

    factor: PositiveFloat = 1.0

    def apply(self, state: None, update_P: Tensor) -> tuple[None, Tensor]:
        """The update times the factor."""
        return None, update_P * self.factor


class Velocity(NamedTuple):
    """What momentum keeps."""

    velocity_P: Tensor


@dataclass(frozen=True, kw_only=True)
class Momentum(Piece):
    r"""Heavy ball: :math:`v ← β v + Δ`, and v is what moves the model.

    Args:
        momentum: β in [0, 1).
    """

    momentum: DecayRate = 0.9

    def init(self, params_P: Tensor) -> Velocity:
        """A velocity of zero."""
        return Velocity(torch.zeros_like(params_P))

    def apply(self, state: Velocity, update_P: Tensor) -> tuple[Velocity, Tensor]:
        """The velocity."""
        velocity_P = self.momentum * state.velocity_P + update_P
        return Velocity(velocity_P), velocity_P


@dataclass(frozen=True, kw_only=True)
class Nesterov(Momentum):
    r"""Nesterov's momentum: :math:`v ← β v + Δ`, and :math:`Δ + β v` moves the model."""

    def apply(self, state: Velocity, update_P: Tensor) -> tuple[Velocity, Tensor]:
        """The update, and a look ahead along the velocity."""
        velocity_P = self.momentum * state.velocity_P + update_P
        return Velocity(velocity_P), update_P + self.momentum * velocity_P


class Moments(NamedTuple):
    """What an adaptive optimiser keeps."""

    first_P: Tensor
    second_P: Tensor


@dataclass(frozen=True, kw_only=True)
class _Adaptive(Piece):
    r"""The update, divided by the root of its second moment (Reddi et al. 2021, 2003.00295, algorithm 2).

    .. math:: m ← β_1 m + (1 - β_1) Δ, \qquad x ← x + m / (\sqrt v + τ), \qquad v_0 = τ^2

    Args:
        beta1: β₁ in [0, 1).
        tau: τ > 0, how adaptive: the smaller the more.
    """

    beta1: DecayRate = 0.9
    tau: PositiveFloat = 1e-3

    def init(self, params_P: Tensor) -> Moments:
        """No first moment, and τ² as the second."""
        return Moments(torch.zeros_like(params_P), torch.full_like(params_P, self.tau**2))

    def apply(self, state: Moments, update_P: Tensor) -> tuple[Moments, Tensor]:
        """The first moment over the root of the second."""
        first_P = self.beta1 * state.first_P + (1 - self.beta1) * update_P
        second_P = self.second(state.second_P, update_P**2)
        return Moments(first_P, second_P), first_P / (second_P.sqrt() + self.tau)

    @abstractmethod
    def second(self, second_P: Tensor, square_P: Tensor) -> Tensor:
        """The second moment after an update with these squares."""


@dataclass(frozen=True, kw_only=True)
class Adagrad(_Adaptive):
    r"""The second moment is a sum: :math:`v ← v + Δ^2`.

    Args:
        beta1: β₁ in [0, 1); the paper has 0.
    """

    beta1: DecayRate = 0.0

    def second(self, second_P: Tensor, square_P: Tensor) -> Tensor:
        """The sum, v + Δ²."""
        return second_P + square_P


@dataclass(frozen=True, kw_only=True)
class Adam(_Adaptive):
    r"""The second moment is a mean: :math:`v ← β_2 v + (1 - β_2) Δ^2`.

    Args:
        beta2: β₂ in [0, 1).
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
