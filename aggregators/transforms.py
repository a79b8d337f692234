"""Transforms of updates, and algorithms over ``mean`` that are chains of them, in the manner of optax.

A transform may act where clients report (clip, weigh), on a round's messages before they are averaged (bucketing), in
place of their mean (median), or on the mean (a server optimiser).

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import PositiveFloat

from fed.aggregators.base import ClientWork, Report
from fed.aggregators.composed import Composed, Messages, Reducer, State, Transform
from fed.aggregators.server_optimizers import (
    Adagrad,
    Adam,
    Lookahead,
    Moments,
    Momentum,
    Nesterov,
    Scale,
    SlowWeights,
    TrustRatio,
    Velocity,
    WeightDecay,
    Yogi,
)
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
    # A vector of zeros stays one, where 0/0 would be NaN.
    factors_K1: Tensor = (norm / norms_K1.clamp(min=torch.finfo(norms_K1.dtype).tiny)).clamp(max=1)
    return factors_K1


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
        >>> from fed.aggregators.reports import Reduced
        >>> rule = chain(Momentum(momentum=0.5), Scale(factor=2.0))
        >>> state = rule.init(torch.zeros(1))
        >>> for _ in range(2):
        ...     state = rule.apply(state, Reduced((torch.ones(1),), clients=1, population=1))
        >>> state.model_P
        tensor([5.])
    """
    return Chain(of=transforms)
