"""Rényi differential privacy: bounds on releases that compose by adding, and the ε that they give at a δ.

Mironov, "Rényi differential privacy", CSF 2017 (1702.07476); Mironov, Talwar & Zhang, "Rényi differential privacy of
the sampled Gaussian mechanism" (1908.10530); Agarwal, Kairouz & Liu, "The Skellam mechanism for differentially private
federated learning", NeurIPS 2021 (2110.04995); Zhu & Wang, "Poisson subsampled Rényi differential privacy", ICML 2019.
"""

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from fed.privacy.releases import Release

__all__ = ["epsilon_rdp"]

_Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

# Fine where ε is large and the best α is small; whole numbers beyond, because some bounds hold for these alone.
_ORDERS: _Array = np.array(
    sorted(
        {1 + step / 10 for step in range(1, 100)} | set(range(11, 65)) | {round(64 * 1.12**step) for step in range(45)}
    )
)
_LEAST_NOISE = 0.1
"""Noise multiplier below which no amplification is claimed here: a sampled release costs as much as any other."""
_MOST_TERMS = 256
"""Whole order above which a sampled Skellam release is bounded as if it were not sampled."""


def epsilon_rdp(releases: Mapping[Release, int], delta: float) -> float:
    """Upper bound on ε of a multiset of releases, in microseconds once each of them has been seen.

    It holds for neighbours that differ by one unit more or less.

    Args:
        releases: number of times that each release was made.
        delta: δ in (0, 1).
    """
    total = _divergences(releases)
    return _epsilon_at(total, delta)


def _divergences(releases: Mapping[Release, int]) -> _Array:
    """Sum of the releases' Rényi divergences, at each order."""
    total = np.zeros_like(_ORDERS)
    for release, count in releases.items():
        if count:
            total += count * _divergence(release)
    return total


def _epsilon_at(total: _Array, delta: float) -> float:
    """Conversion of Canonne, Kamath & Steinke (2004.00010, proposition 12), or 0 where the divergence allows it."""
    if np.any(-np.expm1(-total) < delta**2):  # the total variation distance is at most √(1 − exp(−KL)) < δ
        return 0.0
    epsilon = total + np.log1p(-1 / _ORDERS) - np.log(delta * _ORDERS) / (_ORDERS - 1)
    return max(0.0, float(epsilon.min()))


@lru_cache(maxsize=4096)
def _divergence(release: Release) -> _Array:
    """The Rényi divergence of one release at each order, an upper bound."""
    z = release.noise_multiplier
    if release.skellam_l2 is not None and release.skellam_l1 is not None:
        alone = _skellam(_ORDERS, z, release.skellam_l2, release.skellam_l1)
        if release.sampling == 1.0:
            return alone
        return np.minimum(alone, _sampled_skellam(release))
    alone = _ORDERS / (2 * z**2)
    if release.sampling == 1.0 or z < _LEAST_NOISE:
        return alone
    # Far above these orders a sampled release costs as much as any other, and no ε has its minimum there.
    amplified = np.full_like(_ORDERS, math.inf)
    for index, order in enumerate(_ORDERS):
        if order <= 200 * max(1.0, z**2):
            amplified[index] = _sampled_gaussian(float(order), z, release.sampling)
    return np.minimum(alone, amplified)


def _sampled_gaussian(alpha: float, z: float, q: float) -> float:
    """The Rényi divergence of (1 − q)·N(0, z²) + q·N(1, z²) from N(0, z²), by the trapezoidal rule.

    Series for orders that are no whole numbers (1908.10530, section 3.3) lose all digits at small z. This integral
    loses none: its integrand is analytic and falls like a Gaussian, and so the rule's error falls exponentially in
    1/step.
    """
    step = min(z / 6, z**2 / 2)
    x = np.arange(-12 * z, alpha + 12 * z, step)
    log_ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z**2))
    log_terms = alpha * log_ratio - x**2 / (2 * z**2)
    largest = log_terms.max()
    log_integral = largest + math.log(np.exp(log_terms - largest).sum() * step / (z * math.sqrt(2 * math.pi)))
    return max(0.0, float(log_integral)) / (alpha - 1)


def _skellam(alpha: _Array, z: float, l2: float, l1: float) -> _Array:
    """The bound of Agarwal et al. for noise of variance μ = (z·Δ₂)²; infinite off the whole numbers."""
    variance = (z * l2) ** 2
    first = ((2 * alpha - 1) * l2**2 + 6 * l1) / (4 * variance**2)
    bound = alpha * l2**2 / (2 * variance) + np.minimum(first, 3 * l1 / (2 * variance))
    return np.where((alpha >= 2) & (alpha == np.floor(alpha)), bound, math.inf)


def _sampled_skellam(release: Release) -> _Array:
    """Amplification of any mechanism by Poisson sampling (Zhu & Wang); infinite off the whole numbers."""
    q = release.sampling
    assert release.skellam_l2 is not None
    assert release.skellam_l1 is not None
    terms = np.arange(2.0, _MOST_TERMS + 1)
    alone = _skellam(terms, release.noise_multiplier, release.skellam_l2, release.skellam_l1)
    log_factor = np.where(terms == 2, 0.0, math.log(3))
    bound = np.full_like(_ORDERS, math.inf)
    for index, order in enumerate(_ORDERS):
        if not (2 <= order <= _MOST_TERMS and float(order).is_integer()):
            continue
        alpha = int(order)
        within = slice(0, alpha - 1)
        log_choices = np.array([math.log(math.comb(alpha, k)) for k in range(2, alpha + 1)])
        log_share = terms[within] * math.log(q) + (alpha - terms[within]) * math.log1p(-q)
        log_terms = log_choices + log_share + log_factor[within] + (terms[within] - 1) * alone[within]
        log_first = (alpha - 1) * math.log1p(-q) + math.log(alpha * q - q + 1)
        log_sum = np.logaddexp(log_first, np.logaddexp.reduce(log_terms))
        bound[index] = max(0.0, float(log_sum)) / (alpha - 1)
    return bound
