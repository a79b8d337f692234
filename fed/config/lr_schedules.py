"""Learning-rate schedules over the rounds of a run: factors in [0, 1] of ``local.lr``."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from fed.config.hyperparameters import Hyperparameters

__all__ = ["ConstantSchedule", "Cosine", "Schedule", "Step"]


@dataclass(frozen=True, kw_only=True)
class Schedule(Hyperparameters, ABC):
    r"""Factor of the learning rate for each round, after a linear warm-up.

    .. math:: η_t = η · t / (w + 1) \text{ for } t ≤ w, \qquad η_t = η · s(t - w) \text{ after it}

    Args:
        warm_up: w ≥ 0, rounds in which the step size rises in equal parts: η t / (w + 1) in round t ≤ w (Goyal et al.
            2017, 1706.02677). From round w + 1 on it is η s(t − w), the full η at first.
    """

    warm_up: NonNegativeInt = 0

    def factor(self, number: int, count: int) -> float:
        """The factor in a round.

        Args:
            number: number of the round, from 1.
            count: number of rounds of the run.
        """
        if number <= self.warm_up:  # w + 1, so that the first round of s has the full step size, and no round has 0
            return number / (self.warm_up + 1)
        return self.decay(number - self.warm_up, count - self.warm_up)

    @abstractmethod
    def decay(self, number: int, count: int) -> float:
        """The factor in a round of those after the warm-up."""


@dataclass(frozen=True, kw_only=True)
class ConstantSchedule(Schedule):
    """The learning rate stays as it is: s(t) = 1."""

    def decay(self, number: int, count: int) -> float:
        """One."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a cosine: s(t) = e + (1 − e) (1 + cos(π (t − 1) / T)) / 2 (Loshchilov & Hutter 2017, 1608.03983).

    Args:
        end: e in [0, 1], the factor after the last of T rounds; T does not count the warm-up.

    Example:
        >>> [round(Cosine().factor(number, 5), 3) for number in range(1, 6)]
        [1.0, 0.905, 0.655, 0.345, 0.095]
    """

    end: Annotated[float, Field(ge=0, le=1)] = 0.0

    def decay(self, number: int, count: int) -> float:
        """Half a cosine at round t of T."""
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * (number - 1) / count)) / 2


@dataclass(frozen=True, kw_only=True)
class Step(Schedule):
    """The learning rate falls by a factor every few rounds: s(t) = γ^⌊(t − 1) / E⌋.

    Args:
        every: E ≥ 1, rounds from one fall to the next.
        gamma: γ in (0, 1], the factor of each fall.

    Example:
        >>> [Step(every=2, gamma=0.5).factor(number, 5) for number in range(1, 6)]
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    every: PositiveInt = 10
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.5

    def decay(self, number: int, count: int) -> float:
        """Power of γ by the number of falls."""
        return float(self.gamma ** ((number - 1) // self.every))
