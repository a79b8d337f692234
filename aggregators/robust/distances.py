"""Rules by the distances between messages: those that average near ones, and those that choose the nearest ones.

Karimireddy et al., "Byzantine-robust learning on heterogeneous datasets via bucketing", ICLR 2022, arXiv 2006.09365
(bucketing, which needs no distance and stands before such rules); Allouah et al., "Fixing by mixing", AISTATS 2023,
arXiv 2302.01772; Blanchard et al., "Machine learning with adversaries: Byzantine tolerant gradient descent", NeurIPS
2017 (Krum, Multi-Krum); El Mhamdi et al., "The hidden vulnerability of distributed learning in Byzantium", ICML 2018,
arXiv 1802.07927 (Bulyan).

Shapes: see :mod:`fed.vectors.layout`.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from fed.aggregators.robust.centres import Outvoting, Point, ascending, by_columns
from fed.aggregators.robust.gram import Gram, differences_from, squared_distances
from fed.aggregators.transforms import Messages, Reducer
from fed.errors import InvalidExperiment
from fed.vectors.tensors import Tensor, torch

__all__ = [
    "Bucketing",
    "Bulyan",
    "GeometricMedian",
    "Gram",
    "Krum",
    "MultiKrum",
    "NearestNeighbourMixing",
    "squared_distances",
]


@dataclass(frozen=True, kw_only=True)
class Bucketing(Reducer):
    r"""Random buckets of messages; a bucket's mean stands for it (Karimireddy et al. 2022, 2006.09365).

    .. math:: y_b = \sum_{i ∈ b} w_i m_i / \sum_{i ∈ b} w_i

    The variance between honest clients falls by a factor of s, so that attackers are easier to tell from them. An
    attacker spoils one bucket: the f of the rule behind it stays the same while n falls to ⌈n/s⌉. A bucket's weight is
    the mean of its messages' weights: equal messages make equal buckets, also the last one, which may be smaller.
    Before a mean it is their sum, so that each client counts as it would without buckets.

    Args:
        size: s ≥ 1, messages of a bucket; 1 changes nothing but their order.
        counts_clients: True if a bucket's weight is the sum of its messages' weights, not their mean.
    """

    size: PositiveInt = 2
    counts_clients: bool = False

    def left(self, messages: int) -> int:
        """The number of buckets."""
        return -(-messages // self.size)

    def reduce(self, state: None, messages: Messages, generator: np.random.Generator) -> tuple[None, Messages]:
        """The buckets' means and weights."""
        messages_SM, weights_S = messages
        order_S = torch.from_numpy(generator.permutation(len(messages_SM)))
        buckets = torch.split(order_S, self.size)
        means = [weights_S[bucket] @ messages_SM[bucket] / weights_S[bucket].sum() for bucket in buckets]
        weigh = torch.sum if self.counts_clients else torch.mean
        return None, Messages(torch.stack(means), torch.stack([weigh(weights_S[bucket]) for bucket in buckets]))


@dataclass(frozen=True, kw_only=True)
class NearestNeighbourMixing(Outvoting):
    r"""Each message becomes the mean of its nearest ones (Allouah et al. 2023, 2302.01772).

    .. math:: y_i = \sum_{j ∈ N_i} w_j m_j / \sum_{j ∈ N_i} w_j, \qquad
        N_i = \text{the } n - f \text{ nearest to } m_i \text{, itself among them}

    It removes most of the difference between honest clients, so that rules do not take them for attackers. Neighbours
    are counted as clients, and each message keeps its weight.

    Args:
        attackers: f ≥ 0, the number of attackers to expect. A round needs n ≥ 2f + 1 messages. With 0 every message
            becomes the mean of all.
    """

    attackers: NonNegativeInt = 1

    def left(self, messages: int) -> int:
        """All messages, as many as before."""
        super().left(messages)
        return messages

    def reduce(self, state: None, messages: Messages, generator: np.random.Generator) -> tuple[None, Messages]:
        """Means of neighbours, in the order of the messages."""
        messages_SM, weights_S = messages
        # A message counts among its own neighbours, at distance 0, as in the paper.
        neighbours = self.left(len(messages_SM)) - self.attackers
        # A stable sort: of equal distances the first tasks' count on every machine.
        nearest_SZ = squared_distances(messages_SM).argsort(dim=1, stable=True)[:, :neighbours]
        mixing_SS = torch.zeros(len(messages_SM), len(messages_SM), dtype=messages_SM.dtype)
        mixing_SS.scatter_(1, nearest_SZ, weights_S[nearest_SZ])
        return None, Messages(mixing_SS @ messages_SM / mixing_SS.sum(1, keepdim=True), weights_S)


@dataclass(frozen=True, kw_only=True)
class GeometricMedian(Point):
    r"""The point with the least sum of distances to the messages (RFA: Pillutla et al. 2022, 1912.13445).

    .. math:: v ← \sum_i β_i m_i / \sum_i β_i, \qquad β_i = w_i / \max(ν, ‖m_i - v‖)

    These are Weiszfeld's steps, smoothed. They end when the gradient of the weighted mean distance, whose norm is 1 far
    away, is no longer than the tolerance. They begin near the message that has the nearest half of the others, rather
    than, as in the authors' code, at the mean, which attackers can move without limit. Each of these points is a mean
    of the messages: steps are taken in the space of :class:`Gram`, and the last ones among the messages themselves,
    which gives distances all their digits.

    Args:
        nu: ν > 0, the distance below which a message attracts no more strongly.
        iterations: largest number of steps, ≥ 1.
        tolerance: norm of the gradient, > 0, at which the steps end.
        attackers: f ≥ 0, the number of attackers to expect. A round needs n ≥ 2f + 1 messages.
    """

    nu: PositiveFloat = 1e-6
    iterations: PositiveInt = 1000
    tolerance: PositiveFloat = 1e-8

    def point(self, messages_SM: Tensor, weights_S: Tensor) -> Tensor:
        """The smoothed geometric median."""
        shares_S = weights_S / weights_S.sum()
        # Almost all steps are taken on the S² products: there a step's cost does not grow with the messages' length.
        mix_S, left = self._mix(Gram.of(messages_SM), shares_S)
        point_M = mix_S @ messages_SM
        for _ in range(left):
            squares_S = torch.stack(
                [away_SJ.square_().sum(1) for away_SJ in differences_from(messages_SM, point_M)]
            ).sum(0)
            attraction_S = shares_S / squares_S.sqrt().clamp(min=self.nu)
            step_M = attraction_S @ messages_SM / attraction_S.sum() - point_M
            point_M = point_M + step_M
            if torch.linalg.vector_norm(step_M) * attraction_S.sum() <= self.tolerance:  # the gradient's length
                break
        return point_M

    def _mix(self, gram: Gram, shares_S: Tensor) -> tuple[Tensor, int]:
        """Each message's part in the point, and the number of steps that are left."""
        near = gram.products_SS.diagonal().isfinite().nonzero().squeeze(1)  # the others attract no more
        products_NN = gram.products_SS[near][:, near]
        shares_N = shares_S[near]
        squares_N = products_NN.diagonal()
        away_N = squares_N.sqrt()
        attraction_N = shares_N / (away_N + away_N.median()).clamp(min=self.nu)  # no message draws more than its share
        mix_N = attraction_N / attraction_N.sum()
        left = self.iterations
        while left:
            left -= 1
            cross_N = products_NN @ mix_N
            # Rounding may leave a small negative square where the point is on a message.
            away_N = (squares_N - 2 * cross_N + mix_N @ cross_N).clamp(min=0).sqrt()
            attraction_N = shares_N / away_N.clamp(min=self.nu)
            step_N = attraction_N / attraction_N.sum() - mix_N
            mix_N = mix_N + step_N
            if (step_N @ products_NN @ step_N).clamp(min=0).sqrt() * attraction_N.sum() <= self.tolerance:
                break
        return torch.zeros_like(shares_S).scatter_(0, near, mix_N), left


@dataclass(frozen=True, kw_only=True)
class _Selection(Outvoting):
    """Base of rules whose guarantee counts clients, each of them as one.

    Args:
        attackers: f ≥ 0, the number of attackers to expect.
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
        lightest = float(weights_S.min())
        heaviest = float(weights_S.max())
        if lightest < heaviest:
            raise InvalidExperiment(
                f"{type(self).__name__} counts clients and so must get equal weights, got some from {lightest:g} to "
                f'{heaviest:g}: put Weigh(by="clients") before it, or use Median, TrimmedMean or GeometricMedian'
            )
        chosen_ZM = self.choose(messages_SM, squared_distances(messages_SM))
        return None, Messages(chosen_ZM, weights_S[: len(chosen_ZM)])  # all are equal

    @abstractmethod
    def choose(self, messages_SM: Tensor, squares_SS: Tensor) -> Tensor:
        """Chosen messages, which count alike, given the squares of their distances."""


@dataclass(frozen=True, kw_only=True)
class Krum(_Selection):
    r"""The one message that is nearest to its n − f − 2 nearest others.

    .. math:: \arg\min_i \sum_{j ∈ N_i} ‖m_i - m_j‖^2

    Args:
        attackers: f ≥ 0, the number of attackers to expect. A round needs n ≥ 2f + 3 messages.
    """

    def choose(self, messages_SM: Tensor, squares_SS: Tensor) -> Tensor:
        """The message with the best score."""
        return messages_SM[_by_score(squares_SS, self.attackers)[:1]]


@dataclass(frozen=True, kw_only=True)
class MultiKrum(_Selection):
    r"""The mean of the m messages with the best scores of :class:`Krum`.

    Args:
        attackers: f ≥ 0, the number of attackers to expect. A round needs n ≥ 2f + 3 messages.
        selected: m, the number of messages in the mean, from 1 to n − f − 2 (the default).
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
        attackers: f ≥ 0, the number of attackers to expect. A round needs n ≥ 4f + 3 messages.
    """

    per_attacker: ClassVar[int] = 4

    def choose(self, messages_SM: Tensor, squares_SS: Tensor) -> Tensor:
        """The mean about the medians, of those chosen."""
        rest = list(range(len(messages_SM)))
        chosen: list[int] = []
        while len(chosen) < len(messages_SM) - 2 * self.attackers:
            # Scores are found anew after each choice: a chosen message no longer counts as a neighbour.
            best = _by_score(squares_SS[rest][:, rest], self.attackers)[0]
            chosen.append(rest.pop(best))
        count = len(messages_SM) - 4 * self.attackers
        rows_Z = torch.tensor(sorted(chosen))
        return by_columns(
            lambda part_SJ: _about_the_median(part_SJ.index_select(0, rows_Z.to(part_SJ.device)), count), messages_SM
        ).unsqueeze(0)


def _by_score(squares_SS: Tensor, attackers: int) -> list[int]:
    """Rows of the messages, the best score first.

    Of two that are each other's only neighbour, as at Bulyan's end, the scores are equal. The one whose next neighbour
    is nearer then comes first, so that the order of clients does not decide.
    """
    # 1 at least, for Bulyan's last choices are among too few for Krum's number.
    neighbours = max(len(squares_SS) - attackers - 2, 1)
    sorted_SS = squares_SS.sort(1).values[:, 1:]  # without the distance to itself
    scores_S1 = sorted_SS[:, :neighbours].sum(1, keepdim=True)
    # Lists are compared entry by entry: a tie is decided by the next distance.
    keys = torch.cat([scores_S1, sorted_SS[:, neighbours:]], 1).tolist()
    return sorted(range(len(keys)), key=keys.__getitem__)


def _about_the_median(part_ZJ: Tensor, count: int) -> Tensor:
    """Mean of the ``count`` values nearest to each column's median."""
    if not part_ZJ.is_cpu:
        return _about_the_median_on_a_device(part_ZJ, count)
    values_ZJ = ascending(part_ZJ).numpy()
    middle = len(values_ZJ) // 2
    median_J = (values_ZJ[middle] + values_ZJ[-1 - middle]) / 2
    # The nearest stand side by side: of all such windows that whose farther end is nearest.
    farther_WJ = values_ZJ[count - 1 :] - median_J
    np.maximum(farther_WJ, median_J - values_ZJ[: len(farther_WJ)], out=farther_WJ)
    first_J = torch.from_numpy(farther_WJ.argmin(0))  # in half of PyTorch's time
    return torch.from_numpy(values_ZJ).gather(0, first_J + torch.arange(count).unsqueeze(1)).mean(0)


def _about_the_median_on_a_device(part_ZJ: Tensor, count: int) -> Tensor:
    """The same mean by PyTorch's operations, which a device has."""
    values_ZJ = ascending(part_ZJ)
    middle = len(values_ZJ) // 2
    median_J = (values_ZJ[middle] + values_ZJ[-1 - middle]) / 2
    farther_WJ = values_ZJ[count - 1 :] - median_J
    farther_WJ = torch.maximum(farther_WJ, median_J - values_ZJ[: len(farther_WJ)])
    window_C1 = torch.arange(count, device=part_ZJ.device).unsqueeze(1)
    return values_ZJ.gather(0, farther_WJ.argmin(0) + window_C1).mean(0)
