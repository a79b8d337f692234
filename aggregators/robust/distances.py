"""Distances between messages, and pre-aggregation that averages messages before a rule judges them.

Shapes: see :mod:`fed.layout`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor
from torch.nn.functional import pdist

from fed.aggregators.robust.bounds import Outvoting
from fed.aggregators.transforms import Reducer

__all__ = ["Bucketing", "NearestNeighbourMixing", "distances"]

_COLUMNS = 2**11
"""So many columns of all messages stay in the cache while each pair is looked at."""


def distances(messages_SM: Tensor) -> Tensor:
    """Euclidean distances [S, S], from differences: a matrix product would lose small ones between long vectors.

    Example:
        >>> distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)).tolist()
        [[0.0, 5.0], [5.0, 0.0]]
    """
    pairs = torch.triu_indices(len(messages_SM), len(messages_SM), offset=1).unbind()
    squares = [pdist(part_SJ.contiguous()).square() for part_SJ in torch.split(messages_SM, _COLUMNS, dim=1)]
    distances_SS = messages_SM.new_zeros(len(messages_SM), len(messages_SM))
    distances_SS[pairs] = torch.stack(squares).sum(0).sqrt()
    return distances_SS + distances_SS.T


@dataclass(frozen=True, kw_only=True)
class Bucketing(Reducer):
    r"""Random buckets of messages; a bucket's mean stands for it (Karimireddy et al. 2022, 2006.09365).

    .. math:: y_b = \sum_{i ∈ b} w_i m_i / \sum_{i ∈ b} w_i

    The variance between honest clients falls by a factor of s, so that attackers are easier to tell from them. An
    attacker spoils one bucket: the f of the rule behind it stays the same while n falls to ⌈n/s⌉. A bucket's weight is
    the mean of its messages' weights: equal messages make equal buckets, also the last one, which may be smaller.

    Args:
        size: s ≥ 1, messages of a bucket; 1 changes nothing but their order.
    """

    size: PositiveInt = 2

    def left(self, messages: int) -> int:
        """The number of buckets."""
        return -(-messages // self.size)

    def reduce(
        self, state: None, messages_SM: Tensor, weights_S: Tensor, generator: np.random.Generator
    ) -> tuple[None, Tensor, Tensor]:
        """The buckets' means and weights."""
        order_S = torch.from_numpy(generator.permutation(len(messages_SM)))
        buckets = torch.split(order_S, self.size)
        means = [weights_S[bucket] @ messages_SM[bucket] / weights_S[bucket].sum() for bucket in buckets]
        return None, torch.stack(means), torch.stack([weights_S[bucket].mean() for bucket in buckets])


@dataclass(frozen=True, kw_only=True)
class NearestNeighbourMixing(Outvoting):
    r"""Each message becomes the mean of its nearest ones (Allouah et al. 2023, 2302.01772).

    .. math:: y_i = \sum_{j ∈ N_i} w_j m_j / \sum_{j ∈ N_i} w_j, \qquad
        N_i = \text{the } n - f \text{ nearest to } m_i \text{, itself among them}

    It removes most of the difference between honest clients, so that rules do not take them for attackers. Neighbours
    are counted as clients, and each message keeps its weight.

    Args:
        attackers: f ≥ 0; n ≥ 2f + 1 messages are asked for. With 0 every message becomes the mean of all.
    """

    attackers: NonNegativeInt = 1

    def left(self, messages: int) -> int:
        """All messages, as many as before."""
        super().left(messages)
        return messages

    def reduce(
        self, state: None, messages_SM: Tensor, weights_S: Tensor, generator: np.random.Generator
    ) -> tuple[None, Tensor, Tensor]:
        """Means of neighbours, in the order of the messages."""
        neighbours = self.left(len(messages_SM)) - self.attackers
        # stable: of equal distances the first tasks' count on every machine
        nearest_SZ = distances(messages_SM).argsort(dim=1, stable=True)[:, :neighbours]
        mixing_SS = torch.zeros(len(messages_SM), len(messages_SM), dtype=messages_SM.dtype)
        mixing_SS.scatter_(1, nearest_SZ, weights_S[nearest_SZ])
        return None, mixing_SS @ messages_SM / mixing_SS.sum(1, keepdim=True), weights_S
