"""Kinds of ``privacy.mechanism``: the matrix by which the noise of dp_ftrl is correlated over rounds."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from pydantic import PositiveInt

from fed.config.hyperparameters import Hyperparameters
from fed.privacy.banded import optimal_banded
from fed.privacy.blt import optimal_blt
from fed.privacy.matrix_mechanism import MatrixMechanism
from fed.privacy.participation import ParticipationRule

__all__ = ["BandedNoise", "BufferedNoise", "CorrelatedNoise"]


@dataclass(frozen=True, kw_only=True)
class CorrelatedNoise(Hyperparameters, ABC):
    """Base of the kinds."""

    @abstractmethod
    def mechanism(self, rule: ParticipationRule) -> MatrixMechanism:
        """Mechanism of least error, in the root mean square over all rounds.

        Args:
            rule: rounds of the run, and who may take part in them.
        """


@dataclass(frozen=True, kw_only=True)
class BandedNoise(CorrelatedNoise):
    """Noise that is correlated over a number of rounds (Choquette-Choo et al. 2023, 2306.08153).

    It keeps ``bands`` − 1 vectors of the model's size, in float64. As many bands as ``min_separation`` has rounds are
    best; fewer need less memory.

    Args:
        bands: number of rounds, the present one included, over which noise is correlated; 1: independent noise.
    """

    bands: PositiveInt = 8

    def mechanism(self, rule: ParticipationRule) -> MatrixMechanism:
        """Banded mechanism; bands beyond the last round are left out, for they change nothing."""
        return optimal_banded(min(self.bands, rule.rounds), rule)


@dataclass(frozen=True, kw_only=True)
class BufferedNoise(CorrelatedNoise):
    """Noise that is correlated over all rounds by buffered linear Toeplitz matrices (McMahan et al. 2024, 2408.08868).

    It keeps ``buffers`` vectors of the model's size, in float64.

    Args:
        buffers: number of buffers; more than three gain little.
    """

    buffers: PositiveInt = 3

    def mechanism(self, rule: ParticipationRule) -> MatrixMechanism:
        """BLT mechanism."""
        return optimal_blt(self.buffers, rule, "mean")
