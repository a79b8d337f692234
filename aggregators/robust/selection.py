"""Rules that choose the messages nearest to the others, and give them equal weights: Krum, Multi-Krum, Bulyan.

Blanchard et al., "Machine learning with adversaries: Byzantine tolerant gradient descent", NeurIPS 2017 (Krum,
Multi-Krum); El Mhamdi et al., "The hidden vulnerability of distributed learning in Byzantium", ICML 2018, arXiv
1802.07927 (Bulyan).

Shapes: see :mod:`fed.layout`.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from fed.aggregators.robust.bounds import Outvoting
from fed.aggregators.robust.coordinates import by_columns
from fed.aggregators.robust.distances import distances
from fed.errors import InvalidExperiment

__all__ = ["Bulyan", "Krum", "MultiKrum"]


@dataclass(frozen=True, kw_only=True)
class _Selection(Outvoting):
    """Base of rules whose guarantee counts clients, each of them as one.

    Args:
        attackers: f ≥ 0.
    """

    beside: ClassVar[int] = 3

    attackers: NonNegativeInt = 1

    def reduce(
        self, state: None, messages_SM: Tensor, weights_S: Tensor, generator: np.random.Generator
    ) -> tuple[None, Tensor, Tensor]:
        """The chosen messages, after a check that there are enough to choose from.

        Raises:
            InvalidExperiment: if there are too few messages, or they are not weighed alike.
        """
        self.left(len(messages_SM))
        lightest, heaviest = float(weights_S.min()), float(weights_S.max())
        if lightest < heaviest:
            raise InvalidExperiment(
                f"{type(self).__name__} counts clients and so must get equal weights, got some from {lightest:g} to "
                f'{heaviest:g}: put Weigh(by="clients") before it, or use Median, TrimmedMean or GeometricMedian'
            )
        chosen_ZM = self.choose(messages_SM, distances(messages_SM).square())
        return None, chosen_ZM, weights_S[: len(chosen_ZM)]  # all are equal

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
        """The best."""
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
        """The best m, in the order of their tasks."""
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
    """Messages from the best on.

    Of two that are each other's only neighbour, as at Bulyan's end, the scores are equal. The one whose next neighbour
    is nearer then comes first, so that the order of clients does not decide.
    """
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
