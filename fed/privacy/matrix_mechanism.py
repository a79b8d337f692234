"""Matrix mechanisms: Gaussian noise that is correlated over rounds, so that sums over rounds carry little of it.

Shapes: see :mod:`fed.vectors.layout`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fed.privacy.participation import ParticipationRule
from fed.privacy.releases import Release
from fed.privacy.toeplitz import prefix_errors, repeated
from fed.vectors.tensors import Tensor

__all__ = ["MatrixMechanism"]


@dataclass(frozen=True, kw_only=True)
class MatrixMechanism(ABC):
    r"""Factorisation A = B C of the matrix of prefix sums, whose factor C is lower triangular and Toeplitz.

    The mechanism releases C x + z and from it A x + B z, where row t of x is the sum of round t and z is independent
    noise. Round by round that is x_t + (C⁻¹ z)_t. C has ones on its diagonal, and its first column falls and is nowhere
    negative, so that the sensitivity has a closed form.

    Reference: Denisov et al. 2022, 2202.08312; Choquette-Choo et al. 2023, 2306.08153.
    """

    @abstractmethod
    def column(self, rounds: int) -> np.ndarray:
        """First column of C [T]."""

    @abstractmethod
    def inverse_column(self, rounds: int) -> np.ndarray:
        """First column of C⁻¹ [T]."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """D, the number of vectors that are kept from round to round."""

    @abstractmethod
    def step(self, kept_DM: Tensor, noise_M: Tensor, number: int) -> Tensor:
        """The row (C⁻¹ z)_t of a round, in float64; changes what is kept.

        Args:
            kept_DM: vectors of the rounds before, in float64; zeros before the first round.
            noise_M: z_t, independent noise of this round, in float64.
            number: t, number of the round, from 1; one round follows the other.
        """

    def changed_rows(self, number: int) -> slice:
        """Rows of what is kept that a round changes.

        Args:
            number: t, number of the round, from 1.
        """
        return slice(None)

    def row_norms(self, participation: ParticipationRule) -> np.ndarray:
        r"""The root of s_t² − s_{t−1}² for each round [T], where s_t is the sensitivity of the first t rounds.

        A client's message has norm 1 at most. One and the same pattern of participation is the worst for every t,
        hence the sum of its columns has these numbers.
        """
        return repeated(self.column(participation.rounds), participation)

    def sensitivities(self, participation: ParticipationRule) -> np.ndarray:
        """s_t, the L2 sensitivity of the first t rounds, for each t [T]; the last one is that of the run."""
        squared_T = np.cumsum(self.row_norms(participation) ** 2)
        return np.asarray(np.sqrt(squared_T))

    def added_by(self, number: int, earlier: Sequence[int], rounds: int) -> float:
        r"""Squared sensitivity that one more participation of a client adds, in all rounds until the last.

        .. math:: ‖c_t‖² + 2 \sum_{s} ⟨c_s, c_t⟩

        c_t is column t of C, and s are the rounds before in which the client took part. A number beyond the last round
        counts as the last.

        Args:
            number: t, number of the round, from 1.
            earlier: s, numbers of rounds; one that is there twice counts twice.
            rounds: T, number of rounds.
        """
        column_T = self.column(rounds)

        def shifted(number: int) -> np.ndarray:
            place = min(max(number, 1), rounds) - 1
            return np.concatenate([np.zeros(place), column_T[: rounds - place]])

        own_T = shifted(number)
        together = sum((shifted(before) for before in earlier), np.zeros(rounds))
        return float(own_T @ own_T + 2 * together @ own_T)

    def errors(self, rounds: int) -> np.ndarray:
        """Standard deviation of the noise in each prefix sum [T], where that of z is 1."""
        return prefix_errors(self.inverse_column(rounds))

    def release(
        self, noise_multiplier: float, participation: ParticipationRule, number: int, *, is_repeated: bool = False
    ) -> Release | None:
        """Cost of one round; None: it costs nothing, since no client of the worst pattern has left a trace in it.

        A round that is done again, from a checkpoint of before, releases another row. Then the pattern of the rounds
        that were lost and the pattern of those that follow can differ. The row that was lost is bounded alone: no
        client moves it by more than u_t = c_0 + c_b + c_2b + …, with k numbers at most.

        Args:
            noise_multiplier: standard deviation of z, over the largest norm of a client's message.
            participation: rule that clients keep to.
            number: t, number of the round, from 1.
            is_repeated: True if the round has been released before, with other noise.
        """
        if is_repeated:
            apart = self.column(participation.rounds)[:number][:: participation.min_separation]
            norm = float(apart[: participation.times].sum())
        else:
            norm = float(self.row_norms(participation)[number - 1])
        return Release(noise_multiplier=noise_multiplier / norm) if norm > 0 else None
