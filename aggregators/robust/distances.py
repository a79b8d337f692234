"""Rules by the distances between messages: those that average near ones, and those that choose the nearest ones.

Karimireddy et al., "Byzantine-robust learning on heterogeneous datasets via bucketing", ICLR 2022, arXiv 2006.09365
(bucketing, which needs no distance and stands before such rules); Allouah et al., "Fixing by mixing", AISTATS 2023,
arXiv 2302.01772; Blanchard et al., "Machine learning with adversaries: Byzantine tolerant gradient descent", NeurIPS
2017 (Krum, Multi-Krum); El Mhamdi et al., "The hidden vulnerability of distributed learning in Byzantium", ICML 2018,
arXiv 1802.07927 (Bulyan).

Shapes: see :mod:`fed.layout`.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from fed.aggregators.robust.centres import Outvoting, by_columns
from fed.aggregators.transforms import Messages, Reducer
from fed.errors import InvalidExperiment
from fed.tensors import Tensor, nn, torch

__all__ = ["Bucketing", "Bulyan", "Krum", "MultiKrum", "NearestNeighbourMixing", "distances"]

_COLUMNS_OF_PAIRS = 2**11
"""So many columns of all messages stay in the cache while each pair is looked at."""


def distances(messages_SM: Tensor) -> Tensor:
    """Euclidean distances [S, S], from differences: a matrix product would lose small ones between long vectors.

    Example:
        >>> distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)).tolist()
        [[0.0, 5.0], [5.0, 0.0]]
    """
    pairs = torch.triu_indices(len(messages_SM), len(messages_SM), offset=1).unbind()
    parts = torch.split(messages_SM, _COLUMNS_OF_PAIRS, dim=1)
    squares = [nn.functional.pdist(part_SJ.contiguous()).square() for part_SJ in parts]
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

    def reduce(self, state: None, messages: Messages, generator: np.random.Generator) -> tuple[None, Messages]:
        """The buckets' means and weights."""
        messages_SM, weights_S = messages
        order_S = torch.from_numpy(generator.permutation(len(messages_SM)))
        buckets = torch.split(order_S, self.size)
        means = [weights_S[bucket] @ messages_SM[bucket] / weights_S[bucket].sum() for bucket in buckets]
        return None, Messages(torch.stack(means), torch.stack([weights_S[bucket].mean() for bucket in buckets]))


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

    def reduce(self, state: None, messages: Messages, generator: np.random.Generator) -> tuple[None, Messages]:
        """Means of neighbours, in the order of the messages."""
        messages_SM, weights_S = messages
        neighbours = self.left(len(messages_SM)) - self.attackers
        # stable: of equal distances the first tasks' count on every machine
        nearest_SZ = distances(messages_SM).argsort(dim=1, stable=True)[:, :neighbours]
        mixing_SS = torch.zeros(len(messages_SM), len(messages_SM), dtype=messages_SM.dtype)
        mixing_SS.scatter_(1, nearest_SZ, weights_S[nearest_SZ])
        return None, Messages(mixing_SS @ messages_SM / mixing_SS.sum(1, keepdim=True), weights_S)


@dataclass(frozen=True, kw_only=True)
class _Selection(Outvoting):
    """Base of rules whose guarantee counts clients, each of them as one.

    Args:
        attackers: f ≥ 0.
    """

    beside: ClassVar[int] = 3

    attackers: NonNegativeInt = 1

    def reduce(self, state: None, messages: Messages, generator: np.random.Generator) -> tuple[None, Messages]:
        """The chosen messages, after a check that there are enough to choose from.

        Raises:
            InvalidExperiment: if there are too few messages, or they are not weighed alike.
        """
        messages_SM, weights_S = messages
        self.left(len(messages_SM))
        lightest, heaviest = float(weights_S.min()), float(weights_S.max())
        if lightest < heaviest:
            raise InvalidExperiment(
                f"{type(self).__name__} counts clients and so must get equal weights, got some from {lightest:g} to "
                f'{heaviest:g}: put Weigh(by="clients") before it, or use Median, TrimmedMean or GeometricMedian'
            )
        chosen_ZM = self.choose(messages_SM, distances(messages_SM).square())
        return None, Messages(chosen_ZM, weights_S[: len(chosen_ZM)])  # all are equal

    @abstractmethod
    def choose(self, messages_SM: Tensor, squares_SS: Tensor) -> Tensor:
        """Chosen messages, which count alike, given the squares of their distances."""


@dataclass(frozen=True, kw_only=True)
class Krum(_Selection):
    r"""The one message that is nearest to its n − f − 2 nearest others.

    .. math:: \arg\min_i \sum_{j ∈ N_i} ‖m_i - m_j‖^2

    Args:
        attackers: f ≥ 0; n ≥ 2f + 3 messages are asked for.
    """

    def choose(self, messages_SM: Tensor, squares_SS: Tensor) -> Tensor:
        """The message with the best score."""
        return messages_SM[_by_score(squares_SS, self.attackers)[:1]]


@dataclass(frozen=True, kw_only=True)
class MultiKrum(_Selection):
    r"""The mean of the m messages with the best scores of :class:`Krum`.

    Args:
        attackers: f ≥ 0; n ≥ 2f + 3 messages are asked for.
        selected: m, from 1 to n − f − 2; n − f − 2 unless given.
    """

    selected: PositiveInt | None = None

    def left(self, messages: int) -> int:
        """The number selected."""
        super().left(messages)
        most = messages - self.attackers - 2
        if self.selected is not None and self.selected > most:
            raise InvalidExperiment(
                f"selected must be at most n − f − 2 = {most}, got {self.selected} with n={messages} messages in a "
                f"round and attackers f={self.attackers}: lower it, or set it to null"
            )
        return self.selected or most

    def choose(self, messages_SM: Tensor, squares_SS: Tensor) -> Tensor:
        """The m messages with the best scores, in the order of their tasks."""
        chosen = _by_score(squares_SS, self.attackers)[: self.left(len(messages_SM))]
        return messages_SM[sorted(chosen)]


@dataclass(frozen=True, kw_only=True)
class Bulyan(_Selection):
    r"""Mean around each coordinate's median, of θ = n − 2f messages that Krum chooses one after the other.

    .. math:: \frac 1 {θ - 2f} \sum_{i ∈ B_c} m_{i,c}, \qquad
        B_c = \text{the } θ - 2f \text{ nearest to the median of coordinate } c

    A single coordinate can hide in Krum's distances; here it cannot. The last choices are from fewer than the 2f + 3
    messages that Krum asks for, so that an attacker may be among the θ; the median holds against it.

    Args:
        attackers: f ≥ 0; n ≥ 4f + 3 messages are asked for.
    """

    per_attacker: ClassVar[int] = 4

    def choose(self, messages_SM: Tensor, squares_SS: Tensor) -> Tensor:
        """The mean about the medians, of those chosen."""
        rest, chosen = list(range(len(messages_SM))), list[int]()
        while len(chosen) < len(messages_SM) - 2 * self.attackers:
            best = _by_score(squares_SS[rest][:, rest], self.attackers)[0]
            chosen.append(rest.pop(best))
        count = len(messages_SM) - 4 * self.attackers
        return by_columns(lambda part_ZJ: _about_the_median(part_ZJ, count), messages_SM[sorted(chosen)]).unsqueeze(0)


def _by_score(squares_SS: Tensor, attackers: int) -> list[int]:
    """Rows of the messages, the best score first.

    Of two that are each other's only neighbour, as at Bulyan's end, the scores are equal. The one whose next neighbour
    is nearer then comes first, so that the order of clients does not decide.
    """
    # 1 at least, for Bulyan's last choices are among too few for Krum's number
    neighbours = max(len(squares_SS) - attackers - 2, 1)
    sorted_SS = squares_SS.sort(1).values[:, 1:]  # without the distance to itself
    scores_S1 = sorted_SS[:, :neighbours].sum(1, keepdim=True)
    keys = torch.cat([scores_S1, sorted_SS[:, neighbours:]], 1).tolist()
    return sorted(range(len(keys)), key=keys.__getitem__)


def _about_the_median(part_ZJ: Tensor, count: int) -> Tensor:
    """Mean of the ``count`` values nearest to each column's median."""
    values_ZJ = torch.from_numpy(np.sort(part_ZJ.numpy(), axis=0))
    middle = len(values_ZJ) // 2
    median_J = (values_ZJ[middle] + values_ZJ[-1 - middle]) / 2
    # The nearest stand side by side: of all such windows that whose farther end is nearest.
    ends = median_J - values_ZJ[: len(values_ZJ) - count + 1], values_ZJ[count - 1 :] - median_J
    first_J = torch.maximum(*ends).argmin(0)
    return values_ZJ.gather(0, first_J + torch.arange(count).unsqueeze(1)).mean(0)
