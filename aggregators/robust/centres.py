"""Rules that put one point in the place of a round's messages, or bound how far a single message can move it.

Yin et al., "Byzantine-robust distributed learning: towards optimal statistical rates", ICML 2018, arXiv 1803.01498
(median and trimmed mean, each coordinate by itself); the other rules name their papers themselves.

Shapes: see :mod:`fed.vectors.layout`.
"""

import re
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from fed.aggregators.transforms import Messages, Reducer, shortening
from fed.errors import InvalidExperiment
from fed.vectors.computing_device import computing_device, parts_on
from fed.vectors.tensors import Tensor, torch

__all__ = [
    "CenteredClipping",
    "Centre",
    "Median",
    "NormBound",
    "Outvoting",
    "Point",
    "TrimmedMean",
    "ascending",
    "by_columns",
]

_COLUMNS = 2**12
"""Number of columns that are sorted and summed up at a time: those of some dozen messages stay in the cache."""


@dataclass(frozen=True, kw_only=True)
class Outvoting(Reducer):
    """Base of rules that need n ≥ a f + b messages of a round.

    Args:
        attackers: f ≥ 0, the number of attackers to expect.

    Example:
        >>> from fed.aggregators.robust.distances import Krum
        >>> Krum(attackers=2).left(5)
        Traceback (most recent call last):
        fed.errors.InvalidExperiment: krum needs n ≥ 2f + 3 messages in a round, got n=5 with attackers f=2: raise \
rounds.cohort, or lower bucketing, until there are 7, or lower attackers
    """

    per_attacker: ClassVar[int] = 2
    """a ≥ 1, messages that a round needs for each attacker."""
    beside: ClassVar[int] = 1
    """b ≥ 1, messages that a round needs beside those."""

    attackers: NonNegativeInt = 0

    def left(self, messages: int) -> int:
        """One message: the point."""
        needed = self.per_attacker * self.attackers + self.beside
        if messages < needed:
            # The class's name as experiments write it: MultiKrum is multi_krum.
            kind = re.sub(r"\B(?=[A-Z])", "_", type(self).__name__).lower()
            raise InvalidExperiment(
                f"{kind} needs n ≥ {self.per_attacker}f + {self.beside} messages in a round, got n={messages} with "
                f"attackers f={self.attackers}: raise rounds.cohort, or lower bucketing, until there are {needed}, or "
                "lower attackers"
            )
        return 1


@dataclass(frozen=True, kw_only=True)
class Point(Outvoting):
    """Base of rules that replace all messages by one point, and keep no state."""

    def reduce(self, state: None, messages: Messages, generator: np.random.Generator) -> tuple[None, Messages]:
        """The point, with the weight of all."""
        self.left(len(messages.vectors_SM))
        return None, messages.replaced_by(self.point(*messages))

    @abstractmethod
    def point(self, messages_SM: Tensor, weights_S: Tensor) -> Tensor:
        """The point: [M]."""


def by_columns(rule: Callable[[Tensor], Tensor], messages_SM: Tensor) -> Tensor:
    """Apply a rule to each column by itself, a few columns at a time.

    Args:
        rule: function from some columns of all messages, [S, C], to a number for each column, [C].
        messages_SM: all columns.
    """
    if (device := computing_device()) is not None:
        return torch.cat([rule(part_SJ) for part_SJ in parts_on(device, messages_SM)]).cpu()
    parts = torch.split(messages_SM, _COLUMNS, dim=1)
    threads = torch.get_num_threads()
    # Columns are computed apart, so that the bits do not depend on the number of threads.
    if threads == 1 or len(parts) == 1:
        return torch.cat([rule(part_SJ) for part_SJ in parts])
    with ThreadPoolExecutor(threads) as pool:  # NumPy sorts in the thread that calls it, without the GIL
        return torch.cat(list(pool.map(rule, parts)))


def ascending(part_SJ: Tensor) -> Tensor:
    """Each column's values in ascending order.

    NumPy's sort takes a sixth of the time of PyTorch's, which cannot leave out where values came from, and half of its
    time where the values of a column lie side by side.
    """
    if not part_SJ.is_cpu:
        return part_SJ.sort(dim=0).values
    columns_JS = part_SJ.numpy().T.copy()
    columns_JS.sort(axis=1)
    return torch.from_numpy(columns_JS.T.copy())


@dataclass(frozen=True, kw_only=True)
class Median(Point):
    r"""Each coordinate's weighted median, in the middle between both where there are two.

    .. math:: \tfrac12 (\min\{v: W(≤ v) ≥ W/2\} + \max\{v: W(≥ v) ≥ W/2\})

    It stays within the honest values while attackers have less than half of the weight.

    Args:
        attackers: f ≥ 0, the number of attackers to expect. A round needs n ≥ 2f + 1 messages.
    """

    def point(self, messages_SM: Tensor, weights_S: Tensor) -> Tensor:
        """The medians."""
        return by_columns(lambda part_SJ: _median(part_SJ, weights_S), messages_SM)


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Point):
    r"""Each coordinate's weighted mean without the largest and the smallest values.

    .. math:: \text{of weight } β W \text{ at either end}, \qquad β = f / n

    With equal weights f values are cut at either end. A value at the edge of the cut counts with the part of its weight
    that is left. The mean stays within the honest values while attackers have no more than β of the weight.

    Args:
        attackers: f ≥ 0, the number of attackers to expect. A round needs n ≥ 2f + 1 messages.
    """

    attackers: NonNegativeInt = 1

    def point(self, messages_SM: Tensor, weights_S: Tensor) -> Tensor:
        """The means of the remaining values."""
        share = self.attackers / len(messages_SM)
        return by_columns(lambda part_SJ: _trimmed_mean(part_SJ, weights_S, share), messages_SM)


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
        iterations: number of steps in a round, ≥ 1.
        attackers: f ≥ 0, the number of attackers to expect. A round needs n ≥ 2f + 1 messages.
    """

    radius: PositiveFloat = 1.0
    iterations: PositiveInt = 1

    def init(self, params_P: Tensor) -> Centre:
        """A centre of zero."""
        return Centre(torch.zeros_like(params_P))

    def reduce(self, state: Centre, messages: Messages, generator: np.random.Generator) -> tuple[Centre, Messages]:
        """The centre."""
        messages_SM, weights_S = messages
        self.left(len(messages_SM))
        shares_S = weights_S / weights_S.sum()
        params = len(state.centre_P)
        centre_M = torch.cat([state.centre_P, messages_SM.new_zeros(messages_SM.shape[1] - params)])
        for _ in range(self.iterations):
            away_SM = messages_SM - centre_M
            centre_M = centre_M + (shares_S * shortening(away_SM, self.radius).squeeze(1)) @ away_SM
        # A view would keep the buffers' part too.
        return Centre(centre_M[:params].clone()), messages.replaced_by(centre_M)


@dataclass(frozen=True, kw_only=True)
class NormBound(Reducer):
    r"""Each message is shortened to a norm before it counts (Sun et al. 2019, 1911.07963).

    .. math:: m_i ← m_i · \min(1, M / ‖m_i‖_2)

    The server does this, unlike :class:`fed.aggregators.transforms.Clip`, which an attacker would leave out.

    Args:
        norm: M > 0, the largest norm of a message.
    """

    norm: PositiveFloat = 1.0

    def reduce(self, state: None, messages: Messages, generator: np.random.Generator) -> tuple[None, Messages]:
        """The shortened messages, as many as before."""
        messages_SM, weights_S = messages
        return None, Messages(messages_SM * shortening(messages_SM, self.norm), weights_S)


def _median(part_SJ: Tensor, weights_S: Tensor) -> Tensor:
    values_SJ, weights_SJ = _sorted(part_SJ, weights_S)
    below_SJ = weights_SJ.cumsum(0)
    # From the sums themselves, not from weights_S.sum(): another order of sums may differ in the last bit.
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
    # The usual case, in which NumPy's faster sort of values alone is enough.
    if bool((weights_S == weights_S[0]).all()):
        return ascending(part_SJ), weights_S.unsqueeze(1).to(part_SJ.device)
    values_SJ, order_SJ = part_SJ.sort(dim=0, stable=True)
    return values_SJ, weights_S.to(part_SJ.device)[order_SJ]
