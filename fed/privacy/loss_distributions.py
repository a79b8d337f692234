"""Privacy-loss distributions: ε of Gaussian releases to four digits, with and without Poisson sampling.

Balle & Wang, "Improving the Gaussian mechanism for differential privacy", ICML 2018 (1805.06530), in closed form;
Doroshenko et al., "Connect the dots: tighter discrete approximations of privacy loss distributions", PETS 2022
(2207.04380), as the package dp-accounting computes it. What is rounded there makes ε larger, never smaller.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fed.errors import InvalidExperiment
from fed.privacy.releases import Release

__all__ = ["gaussian_epsilon", "sampled_epsilon"]

_LARGEST_MU = 1e5
"""μ above which ε is taken as its bound, which lies a few ten-thousandths above it: its difference from μ²/2 rounds."""


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε of Gaussian noise of standard deviation 1/μ on a sum of sensitivity 1, exactly.

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ)

    Args:
        mu: μ ≥ 0; releases with z_1, z_2, … together have μ² = Σ 1/z².
        delta: δ in (0, 1).

    Example:
        >>> round(gaussian_epsilon(1.0, 1e-5), 6)
        4.377178
    """
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    if mu == 0:
        return 0.0
    # Φ(μ/2 − ε/μ) alone is less than δ there, because Φ(−t) ≤ exp(−t²/2).
    highest = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    if mu > _LARGEST_MU:
        return highest

    def log_excess(epsilon: float) -> float:
        inner = float(log_ndtr(mu / 2 - epsilon / mu))
        outer = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
        return inner + math.log(max(-math.expm1(outer - inner), 1e-300)) - math.log(delta)

    if log_excess(0.0) <= 0:
        return 0.0
    return float(brentq(log_excess, 0.0, highest, rtol=1e-13, xtol=1e-300))


def sampled_epsilon(sampled: Mapping[Release, int], mu: float, delta: float, interval: float) -> float:
    """Upper bound on ε of Poisson-sampled Gaussian releases, and of others without sampling.

    Args:
        sampled: number of times that each release with sampling was made.
        mu: μ ≥ 0 of all releases without sampling, which together are one.
        delta: δ in (0, 1).
        interval: step of the grid of privacy losses, > 0, the same for all.
    """
    composed = None
    for release, count in sampled.items():
        part = _composed(release, count, interval)
        composed = part if composed is None else composed.compose(part)
    if mu > 0:
        part = _distribution(1 / mu, 1.0, interval)
        composed = part if composed is None else composed.compose(part)
    return 0.0 if composed is None else float(composed.get_epsilon_for_delta(delta))


@lru_cache(maxsize=16)
def _composed(release: Release, count: int, interval: float) -> Any:
    alone = _distribution(release.noise_multiplier, release.sampling, interval)
    return alone if count == 1 else alone.self_compose(count)


@lru_cache(maxsize=64)
def _distribution(noise_multiplier: float, sampling: float, interval: float) -> Any:
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError as error:
        raise InvalidExperiment(f"ε is computed by dp-accounting, got {error}: pip install 'fed[privacy]'") from None
    return privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=noise_multiplier,
        sampling_prob=sampling,
        value_discretization_interval=interval,
        use_connect_dots=True,
    )
