"""Lower triangular Toeplitz matrices, each written as its first column, in float64.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence

import numpy as np

from fed.privacy.participation import ParticipationRule

__all__ = ["error_weights", "filtered", "inverse", "prefix_errors", "prefix_root", "repeated", "repeated_adjoint"]


def prefix_root(rounds: int) -> np.ndarray:
    r"""The square root of the matrix of prefix sums, as its first column [T].

    .. math::
        c_k = \binom{2k}{k} / 4^k

    Of all Toeplitz matrices it has the least largest error of a prefix sum, where each client takes part once.

    Reference: Fichtenberger, Henzinger & Upadhyay 2022, 2202.11205; Dvijotham et al. 2024, 2404.16706.

    Example:
        >>> prefix_root(4).tolist()
        [1.0, 0.5, 0.375, 0.3125]
    """
    places_T = np.arange(1, rounds)
    return np.concatenate([[1.0], np.cumprod((2 * places_T - 1) / (2 * places_T))])


def filtered(
    numerator: Sequence[float] | np.ndarray, denominator: Sequence[float] | np.ndarray, column_T: np.ndarray
) -> np.ndarray:
    """Product of a column, as a power series, and a rational function [T].

    Args:
        numerator: coefficients of the function's numerator, that of x⁰ first.
        denominator: coefficients of its denominator, the first of which is not 0.
        column_T: coefficients of the series.

    Example:
        >>> filtered([1.0], [1.0, -0.5], np.array([1.0, 0.0, 0.0])).tolist()
        [1.0, 0.5, 0.25]
    """
    from scipy.signal import lfilter  # it is slow to import, and a section is read without it

    return np.asarray(lfilter(numerator, denominator, column_T))


def inverse(column_T: np.ndarray) -> np.ndarray:
    """The inverse of a Toeplitz matrix whose diagonal is not 0, as its first column [T]."""
    impulse_T = np.zeros(len(column_T))
    impulse_T[0] = 1.0
    return filtered([1.0], column_T, impulse_T)


def repeated(column_T: np.ndarray, participation: ParticipationRule) -> np.ndarray:
    """The sum of the columns 1, 1 + b, …, 1 + (k − 1)·b of a Toeplitz matrix [T].

    If the first column falls and is nowhere negative, no client that keeps to the rule moves the first t numbers of
    the matrix product by more than this sum does, in the L2 norm, for each t alike.

    Args:
        column_T: first column of the matrix [T].
        participation: rule with b and k.

    Reference: Kalinin & Lampert 2024, 2405.13763, theorem 2.
    """
    rounds = len(column_T)
    separation = min(participation.min_separation, rounds)
    padded = np.zeros(-(-rounds // separation) * separation)
    padded[:rounds] = column_T
    stacked = padded.reshape(-1, separation).cumsum(axis=0)
    if participation.times < len(stacked):
        stacked[participation.times :] -= stacked[: -participation.times].copy()
    return stacked.reshape(-1)[:rounds]


def repeated_adjoint(row_T: np.ndarray, participation: ParticipationRule) -> np.ndarray:
    """Gradient, in the first column c, of x·repeated(c) [T].

    Args:
        row_T: x [T].
        participation: rule with b and k.
    """
    return repeated(row_T[::-1], participation)[::-1]


def prefix_errors(inverse_T: np.ndarray) -> np.ndarray:
    r"""Standard deviation of the error of each prefix sum [T], for noise of standard deviation 1.

    The noise of the prefix sums is B z with B = A C⁻¹, where A is the matrix of prefix sums:

    .. math::
        \mathrm{error}_t^2 = \sum_{k \le t} b_k^2, \qquad b = \mathrm{cumsum}(c^{-1})

    Args:
        inverse_T: first column of C⁻¹ [T].
    """
    squared_T = np.cumsum(np.cumsum(inverse_T) ** 2)
    return np.asarray(np.sqrt(squared_T))


def error_weights(rounds: int, error: str) -> np.ndarray:
    """Weights of the numbers b_k² in the error to be least [T].

    Args:
        rounds: T.
        error: ``mean`` for the mean of the squared errors of all prefix sums, ``max`` for the largest, which is the
            last.
    """
    if error == "max":
        return np.ones(rounds)
    return 1 - np.arange(rounds) / rounds
