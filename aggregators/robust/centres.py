"""Rules that bound a single message's influence on the result.

Shapes: see :mod:`fed.layout`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from fed.aggregators.robust.bounds import Outvoting, Point
from fed.aggregators.robust.coordinates import Median
from fed.aggregators.transforms import Reducer

__all__ = ["CenteredClipping", "Centre", "GeometricMedian", "NormBound"]


@dataclass(frozen=True, kw_only=True)
class GeometricMedian(Point):
    r"""The point with the least sum of distances to the messages (RFA: Pillutla et al. 2022, 1912.13445).

    .. math:: v ← \sum_i β_i m_i / \sum_i β_i, \qquad β_i = w_i / \max(ν, ‖m_i - v‖)

    These are Weiszfeld's steps, smoothed. They end when the gradient of the weighted mean distance, whose norm is 1 far
    away, is no longer than the tolerance. They begin at the coordinates' medians rather than, as in the authors' code,
    at the mean, which attackers can move without limit.

    Args:
        nu: ν > 0, the distance below which messages attract no more strongly.
        iterations: the most steps.
        tolerance: where they end, above 0.
        attackers: f ≥ 0; n ≥ 2f + 1 messages are asked for.
    """

    nu: PositiveFloat = 1e-6
    iterations: PositiveInt = 100
    tolerance: PositiveFloat = 1e-8

    def point(self, messages_SM: Tensor, weights_S: Tensor) -> Tensor:
        """The smoothed geometric median."""
        point_M, shares_S = Median().point(messages_SM, weights_S), weights_S / weights_S.sum()
        for _ in range(self.iterations):
            attraction_S = shares_S / _norms(messages_SM - point_M).clamp(min=self.nu)
            step_M = attraction_S @ messages_SM / attraction_S.sum() - point_M
            point_M = point_M + step_M
            if torch.linalg.vector_norm(step_M) * attraction_S.sum() <= self.tolerance:  # the gradient's length
                break
        return point_M


class Centre(NamedTuple):
    """State of centred clipping."""

    centre_P: Tensor


@dataclass(frozen=True, kw_only=True)
class CenteredClipping(Outvoting):
    r"""Each message draws a lasting centre by no more than a radius (Karimireddy et al. 2021).

    .. math:: v ← v + \sum_i p_i (m_i - v) \min(1, τ / ‖m_i - v‖), \qquad p_i = w_i / \sum_j w_j

    The step is repeated, from the centre of the round before (arXiv 2012.10333). Parts of a message beside the update,
    such as float buffers, have no lasting centre and are drawn from 0.

    Args:
        radius: τ > 0, about the distance of honest updates from their mean.
        iterations: how often in a round.
        attackers: f ≥ 0; n ≥ 2f + 1 messages are asked for.
    """

    radius: PositiveFloat = 1.0
    iterations: PositiveInt = 1

    def init(self, params_P: Tensor) -> Centre:
        """A centre of zero."""
        return Centre(torch.zeros_like(params_P))

    def reduce(
        self, state: Centre, messages_SM: Tensor, weights_S: Tensor, generator: np.random.Generator
    ) -> tuple[Centre, Tensor, Tensor]:
        """The centre."""
        self.left(len(messages_SM))
        shares_S, params = weights_S / weights_S.sum(), len(state.centre_P)
        centre_M = torch.cat([state.centre_P, messages_SM.new_zeros(messages_SM.shape[1] - params)])
        for _ in range(self.iterations):
            away_SM = messages_SM - centre_M
            centre_M = centre_M + (shares_S * _shortening(away_SM, self.radius)) @ away_SM
        # a view would keep the buffers' part too
        return Centre(centre_M[:params].clone()), centre_M.unsqueeze(0), weights_S.sum(0, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class NormBound(Reducer):
    r"""Each message is shortened to a norm before it counts (Sun et al. 2019, 1911.07963).

    .. math:: m_i ← m_i · \min(1, M / ‖m_i‖_2)

    On the server, unlike :class:`fed.aggregators.transforms.Clip`, which an attacker would leave out.

    Args:
        norm: M > 0.
    """

    norm: PositiveFloat = 1.0

    def reduce(
        self, state: None, messages_SM: Tensor, weights_S: Tensor, generator: np.random.Generator
    ) -> tuple[None, Tensor, Tensor]:
        """The shortened messages, as many as before."""
        return None, messages_SM * _shortening(messages_SM, self.norm).unsqueeze(1), weights_S


def _norms(vectors_SM: Tensor) -> Tensor:
    norms_S: Tensor = torch.linalg.vector_norm(vectors_SM, dim=1)
    return norms_S


def _shortening(vectors_SM: Tensor, norm: float) -> Tensor:
    """Factor that shortens each vector to a norm; 0 where its square overflows."""
    # a vector of zeros stays one, where 0/0 would be NaN
    return (norm / _norms(vectors_SM).clamp(min=torch.finfo(vectors_SM.dtype).tiny)).clamp(max=1)
