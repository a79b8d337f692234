"""Rules that treat each coordinate by itself: median and trimmed mean.

Yin et al., "Byzantine-robust distributed learning: towards optimal statistical rates", ICML 2018, arXiv 1803.01498.

Shapes: see :mod:`fed.layout`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import NonNegativeInt
from torch import Tensor

from fed.aggregators.robust.bounds import Point

__all__ = ["Median", "TrimmedMean", "by_columns"]

_COLUMNS = 2**15
"""So many columns of a few dozen messages, sorted and summed up, stay in the cache."""


def by_columns(rule: Callable[[Tensor], Tensor], messages_SM: Tensor) -> Tensor:
    """Apply a rule to each column by itself, a few columns at a time.

    Args:
        rule: [S, C] → [C].
        messages_SM: the whole.
    """
    return torch.cat([rule(part_SJ) for part_SJ in torch.split(messages_SM, _COLUMNS, dim=1)])


@dataclass(frozen=True, kw_only=True)
class Median(Point):
    r"""Each coordinate's weighted median, in the middle between both where there are two.

    .. math:: \tfrac12 (\min\{v: W(≤ v) ≥ W/2\} + \max\{v: W(≥ v) ≥ W/2\})

    It stays within the honest values while attackers have less than half of the weight.

    Args:
        attackers: f ≥ 0; n ≥ 2f + 1 messages are asked for.
    """

    def point(self, messages_SM: Tensor, weights_S: Tensor) -> Tensor:
        """The medians."""
        return by_columns(lambda part_SJ: _median(part_SJ, weights_S), messages_SM)


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Point):
    r"""Each coordinate's weighted mean without the largest and the smallest values.

    .. math:: \text{of weight } β W \text{ at either end}, \qquad β = f / n

    Equal weights lose f values at either end. A value at the edge of what is cut counts with the part of its weight
    that is left. It stays within the honest values while attackers have no more than β of the weight.

    Args:
        attackers: f ≥ 0; n ≥ 2f + 1 messages are asked for.
    """

    attackers: NonNegativeInt = 1

    def point(self, messages_SM: Tensor, weights_S: Tensor) -> Tensor:
        """The means of what is left."""
        share = self.attackers / len(messages_SM)
        return by_columns(lambda part_SJ: _trimmed_mean(part_SJ, weights_S, share), messages_SM)


def _median(part_SJ: Tensor, weights_S: Tensor) -> Tensor:
    values_SJ, weights_SJ = _sorted(part_SJ, weights_S)
    below_SJ = weights_SJ.cumsum(0)
    half_J = below_SJ[-1] / 2
    middle = [below.sum(0, keepdim=True) for below in (below_SJ < half_J, below_SJ <= half_J)]
    low_1J, high_1J = (torch.take_along_dim(values_SJ, index_1J, 0) for index_1J in middle)
    return (low_1J + high_1J).squeeze(0) / 2


def _trimmed_mean(part_SJ: Tensor, weights_S: Tensor, share: float) -> Tensor:
    values_SJ, weights_SJ = _sorted(part_SJ, weights_S)
    end_SJ = weights_SJ.cumsum(0)
    cut = share * float(weights_S.sum())
    kept_SJ = torch.minimum(end_SJ, end_SJ[-1] - cut) - (end_SJ - weights_SJ).clamp(min=cut)
    # What rounding leaves of a value that is cut is nothing: it may be the attacker's 1e200.
    kept_SJ = torch.where(kept_SJ > 1e-9 * weights_SJ, kept_SJ, 0)
    return (kept_SJ * values_SJ).sum(0) / kept_SJ.sum(0)


def _sorted(part_SJ: Tensor, weights_S: Tensor) -> tuple[Tensor, Tensor]:
    """Each column's values in ascending order, and their weights; equal weights have one column for all."""
    if bool((weights_S == weights_S[0]).all()):
        # NumPy's sort takes a sixth of the time of PyTorch's, which cannot leave out where values came from.
        return torch.from_numpy(np.sort(part_SJ.numpy(), axis=0)), weights_S.unsqueeze(1)
    values_SJ, order_SJ = part_SJ.sort(dim=0, stable=True)
    return values_SJ, weights_S[order_SJ]
