"""Rules that look at each coordinate by itself.

Yin et al., "Byzantine-robust distributed learning: towards optimal statistical rates", ICML 2018, arXiv 1803.01498.
Shapes: S, clients of a round; M, numbers of a message; C, some of its columns.
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
    """A rule of each column by itself, a few columns at a time.

    Args:
        rule: [S, C] → [C].
        messages_SM: the whole.
    """
    return torch.cat([rule(part_SC) for part_SC in torch.split(messages_SM, _COLUMNS, dim=1)])


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
        return by_columns(lambda part_SC: _median(part_SC, weights_S), messages_SM)


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
        return by_columns(lambda part_SC: _trimmed_mean(part_SC, weights_S, share), messages_SM)


def _median(part_SC: Tensor, weights_S: Tensor) -> Tensor:
    values_SC, weights_SC = _sorted(part_SC, weights_S)
    below_SC = weights_SC.cumsum(0)
    half_C = below_SC[-1] / 2
    middle = [below.sum(0, keepdim=True) for below in (below_SC < half_C, below_SC <= half_C)]
    low_1C, high_1C = (torch.take_along_dim(values_SC, index_1C, 0) for index_1C in middle)
    return (low_1C + high_1C).squeeze(0) / 2


def _trimmed_mean(part_SC: Tensor, weights_S: Tensor, share: float) -> Tensor:
    values_SC, weights_SC = _sorted(part_SC, weights_S)
    end_SC = weights_SC.cumsum(0)
    cut = share * float(weights_S.sum())
    kept_SC = torch.minimum(end_SC, end_SC[-1] - cut) - (end_SC - weights_SC).clamp(min=cut)
    # What rounding leaves of a value that is cut is nothing: it may be the attacker's 1e200.
    kept_SC = torch.where(kept_SC > 1e-9 * weights_SC, kept_SC, 0)
    return (kept_SC * values_SC).sum(0) / kept_SC.sum(0)


def _sorted(part_SC: Tensor, weights_S: Tensor) -> tuple[Tensor, Tensor]:
    """Each column's values in ascending order, and their weights, of equal ones in one column for all."""
    if bool((weights_S == weights_S[0]).all()):
        # NumPy's sort takes a sixth of the time of PyTorch's, which cannot leave out where values came from.
        return torch.from_numpy(np.sort(part_SC.numpy(), axis=0)), weights_S.unsqueeze(1)
    values_SC, order_SC = part_SC.sort(dim=0, stable=True)
    return values_SC, weights_S[order_SC]
