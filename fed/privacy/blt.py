"""The buffered linear Toeplitz (BLT) mechanism: noise that is correlated over all rounds, from a few buffers.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from fed.privacy.matrix_mechanism import MatrixMechanism
from fed.privacy.participation import ParticipationRule
from fed.privacy.toeplitz import error_weights, filtered, repeated
from fed.vectors.tensors import Tensor, torch

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

__all__ = ["BufferedToeplitz", "optimal_blt"]

_CLOSEST_TO_ONE = 20.0  # as a logit: 1 − θ ≥ 2e-9, of which float64 has 7 digits
_LOG_GAPS = (-7.0, 4.0)  # between neighbouring logits: closer ones would cancel, more distant ones leave float64
_LAST_LOGITS = (-4.0, -1.0, 2.0)


@dataclass(frozen=True, kw_only=True)
class BufferedToeplitz(MatrixMechanism):
    r"""Matrix mechanism whose matrix C has a rational generating function.

    .. math::
        \sum_k c_k x^k = \prod_i \frac{1 - \hat\theta_i x}{1 - \theta_i x}, \qquad
        c_k = \sum_i \omega_i \theta_i^{k-1} \; (k \ge 1)

    With 1 > θ_1 > θ̂_1 > θ_2 > … > θ̂_D > 0 all ω_i are positive and their sum is below 1, hence the coefficients fall.

    Args:
        decays: θ_1, …, θ_D, the decays of the buffers.
        inverse_decays: θ̂_1, …, θ̂_D, the decays of the inverse.

    Raises:
        ValueError: if they do not alternate.

    Reference: Dvijotham et al. 2024, 2404.16706, lemma 5.2; McMahan et al. 2024, 2408.08868, algorithm 3; the
    alternation: McMahan & Pillutla 2025, 2504.21413, theorem 1.
    """

    decays: tuple[float, ...]
    inverse_decays: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse decays for which the coefficients need not fall."""
        ordered = [1.0]
        for decay, inverse_decay in zip(self.decays, self.inverse_decays, strict=True):
            ordered += [decay, inverse_decay]
        if not (np.diff([*ordered, 0.0]) < 0).all():
            raise ValueError(
                f"decays and inverse_decays must alternate and fall between 1 and 0, got {self.decays} and "
                f"{self.inverse_decays}"
            )

    @property
    def rows(self) -> int:
        """The number of buffers."""
        return len(self.decays)

    @cached_property
    def scales(self) -> tuple[float, ...]:
        """ω_1, …, ω_D: how much of each buffer is taken off the noise of a round."""
        theta_D = np.array(self.decays)
        differences_DD = theta_D[:, None] - theta_D
        np.fill_diagonal(differences_DD, 1.0)
        hat_D = np.array(self.inverse_decays)
        return tuple(((theta_D[:, None] - hat_D) / differences_DD).prod(axis=1).tolist())

    def column(self, rounds: int) -> np.ndarray:
        """First column of C [T]."""
        return _column(self.decays, self.inverse_decays, rounds)

    def inverse_column(self, rounds: int) -> np.ndarray:
        """First column of C⁻¹ [T], in which the two lists of decays change places."""
        return _column(self.inverse_decays, self.decays, rounds)

    def step(self, kept_DM: Tensor, noise_M: Tensor, number: int) -> Tensor:
        """w_t = z_t − Σ_i ω_i s_i, where s_i ← θ_i s_i + w_t.

        Args:
            kept_DM: buffers s_1, …, s_D.
            noise_M: z_t.
            number: t, from 1.
        """
        noise_M = noise_M.clone()
        for scale, buffer_M in zip(self.scales, kept_DM, strict=True):
            # A product and a difference, each rounded: fused they could differ with the number of threads.
            noise_M -= buffer_M * scale
        kept_DM *= torch.tensor(self.decays, dtype=kept_DM.dtype)[:, None]
        kept_DM += noise_M
        return noise_M


@lru_cache(maxsize=16)
def optimal_blt(
    buffers: int, participation: ParticipationRule, error: Literal["mean", "max"] = "max"
) -> BufferedToeplitz:
    r"""The BLT mechanism of least error with a number of buffers.

    .. math::
        \min_{\theta, \hat\theta} \; \| \mathrm{repeated}(c) \|^2 \cdot \sum_k \mathrm{weight}_k \, b_k^2, \qquad
        b = \mathrm{cumsum}(c^{-1})

    The logits of θ_1, θ̂_1, θ_2, … are a first one and positive gaps. There are several local minima; the best of a few
    beginnings is taken.

    Args:
        buffers: D ≥ 1. Two to four are enough for thousands of rounds.
        participation: rule that clients keep to.
        error: error that is least: ``max`` for the largest of the errors of all prefix sums, ``mean`` for their root
            mean square.

    Raises:
        ValueError: if there is no buffer.

    Reference: McMahan et al. 2024, 2408.08868.
    """
    from scipy.optimize import minimize  # it is slow to import, and a section is read without it

    if buffers < 1:
        raise ValueError(f"buffers must be at least 1, got {buffers}")
    rounds = participation.rounds
    weights_T = error_weights(rounds, error)

    def log_loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        decays = _decays(parameters)
        column_T = _column(decays[::2].tolist(), decays[1::2].tolist(), rounds)
        inverse_T = _column(decays[1::2].tolist(), decays[::2].tolist(), rounds)
        moved_T = repeated(column_T, participation)
        b_T = np.cumsum(inverse_T)
        squared_sensitivity = moved_T @ moved_T
        squared_error = weights_T @ b_T**2
        gradient = np.empty(2 * buffers)
        for place, decay in enumerate(decays):
            # The derivative of log (1 − θx)⁻¹ is x / (1 − θx).
            sign = 1 if place % 2 == 0 else -1
            by_column = moved_T @ repeated(_delayed(column_T, decay), participation) / squared_sensitivity
            by_inverse = (weights_T * b_T) @ np.cumsum(_delayed(inverse_T, decay)) / squared_error
            gradient[place] = 2 * sign * (by_column - by_inverse) * decay * (1 - decay)
        # A gap moves all logits after it.
        after = gradient[::-1].cumsum()[::-1]
        after[1:] *= -np.exp(parameters[1:])
        return float(np.log(squared_sensitivity * squared_error)), after

    def descended(start: np.ndarray, most_steps: int) -> "OptimizeResult":
        return minimize(
            log_loss,
            x0=start,
            jac=True,
            method="L-BFGS-B",
            bounds=[(-_CLOSEST_TO_ONE, _CLOSEST_TO_ONE)] + [_LOG_GAPS] * (2 * buffers - 1),
            # Until the loss falls no more: the decays are then exact to about the root of a rounding.
            options={"maxcor": 50, "ftol": 0.0, "gtol": 1e-12, "maxiter": most_steps},
        )

    valleys = [descended(start, most_steps=50) for start in _beginnings(buffers, participation)]
    best = min(valleys, key=lambda valley: float(valley.fun))
    decays = _decays(descended(best.x, most_steps=300).x).tolist()
    return BufferedToeplitz(decays=tuple(decays[::2]), inverse_decays=tuple(decays[1::2]))


def _beginnings(buffers: int, participation: ParticipationRule) -> list[np.ndarray]:
    """Evenly spread logits, whose largest belongs to a memory of all rounds, of one separation or of less."""
    horizons = {participation.rounds, participation.min_separation, max(participation.min_separation // 4, 1)}
    beginnings = []
    for horizon in sorted(horizons):
        for last in _LAST_LOGITS:
            first = max(np.log(horizon), last + 1)
            gap = (first - last) / (2 * buffers - 1)
            beginnings.append(np.array([first] + [np.log(gap)] * (2 * buffers - 1)))
    return beginnings


def _decays(parameters: np.ndarray) -> np.ndarray:
    """θ_1, θ̂_1, θ_2, … [2D]."""
    gaps = np.concatenate([[0.0], np.exp(parameters[1:])])
    return np.asarray(1 / (1 + np.exp(np.cumsum(gaps) - parameters[0])))


def _column(decays: Sequence[float], zeros: Sequence[float], rounds: int) -> np.ndarray:
    """Coefficients of the product of (1 − zero·x) / (1 − decay·x) [T], one factor after the other."""
    column_T = np.zeros(rounds)
    column_T[0] = 1.0
    for decay, zero in zip(decays, zeros, strict=True):
        column_T = filtered([1.0, -zero], [1.0, -decay], column_T)
    return column_T


def _delayed(column_T: np.ndarray, decay: float) -> np.ndarray:
    """Coefficients of x / (1 − decay·x) times a generating function [T]."""
    return filtered([0.0, 1.0], [1.0, -decay], column_T)
