"""Releases: what the publication of one noisy sum costs those whose data are in it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

__all__ = ["LARGEST_MULTIPLIER", "SMALLEST_DELTA", "SMALLEST_MULTIPLIER", "Release"]

SMALLEST_MULTIPLIER = 1e-12
"""Smallest noise multiplier of an experiment."""

LARGEST_MULTIPLIER = 1e12
"""Largest noise multiplier of an experiment."""

SMALLEST_DELTA = 1e-30
"""Smallest δ of an experiment."""

_LEAST_NOISE = 1e-50  # its square is a number, and so is one over it
_MOST_NOISE = 1e50
_MOST_UNITS = 1e50  # of the fixed point


@dataclass(frozen=True, kw_only=True)
class Release:
    """Publication of a sum with noise, as far as its cost in privacy goes.

    A client, or a sample, changes the sum by a vector of L2 norm Δ₂ at most. The noise has standard deviation z·Δ₂ in
    each number. Two releases without sampling compose by adding 1/z², which also holds for the rounds of a matrix
    mechanism: round t counts as a release with 1/z_t² = (s_t² − s_{t−1}²)/z², where s_t is the sensitivity of the first
    t rounds.

    Args:
        noise_multiplier: z > 0.
        sampling: q in (0, 1], the probability with which each client or sample is in the sum, drawn by Poisson
            sampling in secret; 1: no amplification.
        skellam_l2: Δ₂ in whole units, where the noise is Skellam noise of variance (z·Δ₂)² on those units; None where
            it is Gaussian.
        skellam_l1: Δ₁ in whole units, the bound on the L1 norm; with ``skellam_l2`` alone.

    Example:
        >>> Release.from_keys(Release(noise_multiplier=1.0, sampling=0.01).keys())
        Release(noise_multiplier=1.0, sampling=0.01, skellam_l2=None, skellam_l1=None)
    """

    noise_multiplier: float
    sampling: float = 1.0
    skellam_l2: float | None = None
    skellam_l1: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is no mechanism."""
        if not (_LEAST_NOISE <= self.noise_multiplier <= _MOST_NOISE and 0 < self.sampling <= 1):
            raise ValueError(
                f"a release must have noise_multiplier from {_LEAST_NOISE:g} to {_MOST_NOISE:g} and sampling in (0, "
                f"1], got {self.noise_multiplier} and {self.sampling}"
            )
        if (self.skellam_l2 is None) != (self.skellam_l1 is None):
            raise ValueError(
                f"a release has both skellam_l2 and skellam_l1, or neither, got {self.skellam_l2} and {self.skellam_l1}"
            )
        if self.skellam_l2 is None or self.skellam_l1 is None:
            return
        # A bound below 0 would take other releases back.
        if not (0 < self.skellam_l2 <= _MOST_UNITS and 0 < self.skellam_l1 <= _MOST_UNITS):
            raise ValueError(
                f"skellam_l2 and skellam_l1 must be above 0, and at most {_MOST_UNITS:g}, got {self.skellam_l2} and "
                f"{self.skellam_l1}"
            )

    def keys(self) -> dict[str, float]:
        """The fields that are not None, as numbers that JSON keeps to the bit."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_keys(cls, keys: Mapping[str, Any]) -> Self:
        """The release that :meth:`keys` wrote down."""
        return cls(**keys)
