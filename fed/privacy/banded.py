"""The banded matrix mechanism: noise that is correlated over as many rounds as the matrix has bands.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from fed.privacy.matrix_mechanism import MatrixMechanism
from fed.privacy.participation import ParticipationRule
from fed.privacy.toeplitz import error_weights, filtered, inverse, prefix_root, repeated, repeated_adjoint
from fed.vectors.tensors import Tensor

__all__ = ["Banded", "banded_root", "optimal_banded"]


@dataclass(frozen=True, kw_only=True)
class Banded(MatrixMechanism):
    r"""Matrix mechanism with a banded Toeplitz matrix C.

    .. math::
        w_t = z_t - \sum_{k=1}^{B-1} c_k w_{t-k}

    Args:
        coefficients: c_0 = 1, c_1, …, c_{B−1}, which fall and are nowhere negative.

    Raises:
        ValueError: if they are others.

    Reference: Choquette-Choo et al. 2023, 2306.08153, algorithm 9.
    """

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse coefficients for which the sensitivity has no closed form."""
        followed = np.diff([*self.coefficients, 0.0])
        if self.coefficients[0] != 1 or not (followed <= 0).all():
            raise ValueError(f"coefficients must begin with 1, fall and be at least 0, got {self.coefficients}")

    @property
    def rows(self) -> int:
        """The number of rounds whose noise is kept."""
        return len(self.coefficients) - 1

    def column(self, rounds: int) -> np.ndarray:
        """First column of C [T]."""
        column_T = np.zeros(rounds)
        leading = self.coefficients[:rounds]
        column_T[: len(leading)] = leading
        return column_T

    def inverse_column(self, rounds: int) -> np.ndarray:
        """First column of C⁻¹ [T]."""
        return inverse(self.column(rounds))

    def step(self, kept_DM: Tensor, noise_M: Tensor, number: int) -> Tensor:
        """w_t, which takes the place of the oldest vector that is kept.

        Args:
            kept_DM: w of the last D rounds; that of round t is in row t mod D.
            noise_M: z_t.
            number: t, from 1.
        """
        noise_M = noise_M.clone()
        for back, coefficient in enumerate(self.coefficients[1:], 1):
            # A product and a difference, each rounded: fused they could differ with the number of threads.
            noise_M -= kept_DM[(number - back) % self.rows] * coefficient
        if self.rows:
            kept_DM[number % self.rows] = noise_M
        return noise_M

    def changed_rows(self, number: int) -> slice:
        """The row of the round, if any is kept."""
        row = number % max(self.rows, 1)
        return slice(row, row + 1)


def banded_root(bands: int) -> Banded:
    """The mechanism whose coefficients are the first ones of the square root of the prefix sums.

    Args:
        bands: B ≥ 1.

    Reference: Kalinin & Lampert 2024, 2405.13763.
    """
    return Banded(coefficients=tuple(prefix_root(bands).tolist()))


@lru_cache(maxsize=16)
def optimal_banded(bands: int, participation: ParticipationRule, error: Literal["mean", "max"] = "mean") -> Banded:
    r"""The banded mechanism of least error.

    .. math::
        \min_c \; \| \mathrm{repeated}(c) \|^2 \cdot \sum_k \mathrm{weight}_k \, b_k^2, \qquad b = C^{-1} 1

    The coefficients are sums of steps that are at least 0, so that they fall.

    Args:
        bands: B ≥ 1, at most the number of rounds.
        participation: rule that clients keep to. If its separation is below the bands, columns of one client overlap,
            which is counted.
        error: error that is least: ``mean`` for the root mean square of the errors of all prefix sums, ``max`` for the
            largest.

    Raises:
        ValueError: if the bands are fewer than 1 or more than the rounds.

    Reference: Choquette-Choo et al. 2023, 2306.08153.
    """
    from scipy.optimize import minimize  # it is slow to import, and a section is read without it

    rounds = participation.rounds
    if not 1 <= bands <= rounds:
        raise ValueError(f"bands must be between 1 and the {rounds} rounds, got {bands}")
    ones_T = np.ones(rounds)
    weights_T = error_weights(rounds, error)

    def log_loss(steps_J: np.ndarray) -> tuple[float, np.ndarray]:
        column_T = np.zeros(rounds)
        column_T[:bands] = _sums_from_here(steps_J)
        moved_T = repeated(column_T, participation)
        squared_sensitivity = moved_T @ moved_T
        b_T = filtered([1.0], column_T[:bands], ones_T)
        squared_error = weights_T @ b_T**2
        slope_T = filtered([1.0], column_T[:bands], (2 * weights_T * b_T)[::-1])[::-1]
        error_J = -np.array([slope_T[lag:] @ b_T[: rounds - lag] for lag in range(bands)])
        sensitivity_J = 2 * repeated_adjoint(moved_T, participation)[:bands]
        gradient_J = sensitivity_J / squared_sensitivity + error_J / squared_error
        return float(np.log(squared_sensitivity * squared_error)), np.cumsum(gradient_J)

    root_J = prefix_root(bands)
    found = minimize(
        log_loss,
        x0=-np.diff([*root_J, 0.0]),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, None)] * bands,
        # Until the loss falls no more: the coefficients are then exact to about the root of a rounding.
        options={"maxcor": 50, "ftol": 0.0, "gtol": 1e-12, "maxiter": 5000, "maxfun": 20000},
    )
    column_J = _sums_from_here(found.x)
    return Banded(coefficients=tuple((column_J / column_J[0]).tolist()))


def _sums_from_here(steps_J: np.ndarray) -> np.ndarray:
    return np.asarray(steps_J[::-1].cumsum()[::-1])
