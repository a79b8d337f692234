"""Accounting: ε of all that was released, the noise that an ε needs, and the rounds that a budget allows."""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TypeVar

from fed.privacy.loss_distributions import gaussian_epsilon, sampled_epsilon
from fed.privacy.plan import PrivacyPlan
from fed.privacy.releases import Release
from fed.privacy.renyi import epsilon_rdp

__all__ = ["Accountant", "epsilon", "epsilon_rdp", "most_costly", "noise_multiplier_for", "rounds_within"]

_UNSPENT = 1e-3
"""Share of ε that a noise multiplier which is found may leave unspent."""
_LEAST_DELTA = 1e-10
"""δ below which the rounding of Fourier transforms counts, and Rényi's bound is taken."""
_MOST_ROUNDS = 10_000_000
_Key = TypeVar("_Key")
_LEAST_NOISE = 0.01
_MOST_NOISE = 1e6
_LOG_OF_NOTHING = math.log(1e-9)  # of an ε of 0, where logarithms of ε are compared; no smaller one is sought


def epsilon(releases: Mapping[Release, int], delta: float) -> float:
    """ε of a multiset of releases, for neighbours that differ by one unit more or less.

    Gaussian releases without sampling are one, with 1/z² = Σ 1/z_i², and exact. With sampling ε is computed from
    privacy-loss distributions, within 0.1 % and never too low. Where a release has Skellam noise, it is Rényi's bound.

    Args:
        releases: number of times that each release was made; an empty one costs 0.
        delta: δ in (0, 1).

    Raises:
        InvalidExperiment: if the package dp-accounting is needed and not installed.
        ValueError: if δ or a count is out of range.

    Example:
        >>> round(epsilon({Release(noise_multiplier=1.0, sampling=0.01): 100}, delta=1e-5), 2)
        0.72
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    if any(count < 0 for count in releases.values()):
        raise ValueError(f"a release is made 0 times or more, got {min(releases.values())}")
    return _epsilon(frozenset((release, count) for release, count in releases.items() if count), delta)


@lru_cache(maxsize=4096)
def _epsilon(releases: frozenset[tuple[Release, int]], delta: float) -> float:
    counts = dict(sorted(releases, key=repr))  # one order, and so the same bits whatever the mapping's
    if any(release.skellam_l2 is not None for release in counts):
        return epsilon_rdp(counts, delta)
    # With hardly any noise a sampled release costs as much as any other, and its distribution is too wide to compute.
    sampled = {
        release: count
        for release, count in counts.items()
        if release.sampling < 1 and release.noise_multiplier >= _LEAST_NOISE
    }
    alone = [count / release.noise_multiplier**2 for release, count in counts.items() if release not in sampled]
    mu = math.sqrt(math.fsum(alone))
    if not sampled:
        return gaussian_epsilon(mu, delta)
    bound = epsilon_rdp(counts, delta)
    if bound == 0 or delta < _LEAST_DELTA:
        return bound
    return min(bound, sampled_epsilon(sampled, mu=mu, delta=delta, interval=_interval(sampled, bound)))


def _interval(sampled: Mapping[Release, int], bound: float) -> float:
    """Step of the grid of privacy losses, a power of 2 so that many sums share their distributions.

    Rounding to the grid adds a variance of about step²/4 for each release, and a mean of half of that: ε grows by about
    n·step²/ε where it is small, and by n·step²/8 where it is large.
    """
    count = sum(sampled.values())
    step = min(1e-3 * bound, 0.005 * bound / math.sqrt(count), 0.02 * math.sqrt(bound / count), 2.0**-4)
    least_noise = min(release.noise_multiplier for release in sampled)
    widest_loss = 1 / (2 * least_noise**2) + 10 / least_noise
    step = max(step, widest_loss * 1e-6, 2.0**-18)
    return 2.0 ** math.floor(math.log2(step))


def most_costly(candidates: Mapping[_Key, Mapping[Release, int]], delta: float) -> _Key:
    """Key of the releases that cost most, where Rényi's bound, which is cheap, tells which cannot be these.

    Args:
        candidates: key → number of times that each release was made, of one key at least.
        delta: δ in (0, 1).

    Example:
        >>> one = Release(noise_multiplier=1.0)
        >>> most_costly({"a": {one: 2}, "b": {one: 3}}, delta=1e-5)
        'b'
    """
    bounds = {key: epsilon_rdp(releases, delta) for key, releases in candidates.items()}
    descending = sorted(bounds, key=lambda key: -bounds[key])
    found = descending[0]
    most = -1.0
    for key in descending:
        if bounds[key] <= most:
            break
        own = epsilon(candidates[key], delta)
        if own > most:
            most = own
            found = key
    return found


def noise_multiplier_for(plan: PrivacyPlan, epsilon: float) -> float:
    """Smallest noise multiplier with which all rounds of a plan cost an ε at most.

    Args:
        plan: the plan, whose own noise multiplier does not count.
        epsilon: ε > 0, of which 99.9 % at least are spent.

    Raises:
        ValueError: if ε is out of range, or no noise multiplier from 0.01 to 1,000,000 spends it.
    """
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must exceed 0, got {epsilon}")

    def bound(noise: float) -> float:
        return epsilon_rdp(plan.with_noise(noise).releases(), plan.delta)

    # Rényi's bound is cheap and never below ε: its root lies above the one that is sought, and near it.
    aim = math.log(epsilon * (1 - _UNSPENT / 2))
    unspent = (
        f"no noise multiplier from {_LEAST_NOISE} to {_MOST_NOISE:,.0f} spends epsilon = {epsilon:g}: "
        "choose another epsilon"
    )
    if aim <= _LOG_OF_NOTHING:
        raise ValueError(unspent)
    low = _LEAST_NOISE
    if bound(low) > epsilon >= bound(_MOST_NOISE):
        high = _root(bound, aim, low=low, high=_MOST_NOISE, tolerance=0.02) * 1.05
        low = high / 2
    while low > _LEAST_NOISE and _spent(plan, low) <= epsilon:
        low /= 2
    if low <= _LEAST_NOISE:
        raise ValueError(unspent)
    noise = _root(lambda noise: _spent(plan, noise), aim, low=low, high=high, tolerance=_UNSPENT / 10)
    while _spent(plan, noise) > epsilon:
        noise *= 1 + _UNSPENT / 10
    return noise


def _spent(plan: PrivacyPlan, noise_multiplier: float) -> float:
    return epsilon(plan.with_noise(noise_multiplier).releases(), plan.delta)


def _root(
    spent: Callable[[float], float],
    aim: float,
    *,
    low: float,
    high: float,
    tolerance: float,
) -> float:
    """Noise multiplier that spends an ε of a given logarithm; on logarithms the curve is nearly straight."""
    from scipy.optimize import brentq

    def excess(log_noise: float) -> float:
        found = spent(math.exp(log_noise))
        return (math.log(found) if found > 0 else _LOG_OF_NOTHING) - aim

    return math.exp(float(brentq(excess, math.log(low), math.log(high), xtol=tolerance)))


def rounds_within(plan: PrivacyPlan, budget: float, most: int = _MOST_ROUNDS) -> int:
    """Largest number of rounds of a plan that cost a budget at most.

    Args:
        plan: the plan; one of a matrix mechanism has no more rounds than it was made for.
        budget: ε ≥ 0.
        most: number of rounds beyond which none is sought.
    """
    if plan.sensitivities:
        most = min(most, len(plan.sensitivities))
    return _most_within(lambda rounds: epsilon(plan.releases(rounds), plan.delta) <= budget, most)


def _most_within(allows: Callable[[int], bool], most: int) -> int:
    """Largest number up to a bound that is allowed, where all numbers below an allowed one are."""
    refused = 1
    while refused <= most and allows(refused):
        refused *= 2
    allowed = refused // 2
    refused = min(refused, most + 1)
    while refused - allowed > 1:
        middle = (allowed + refused) // 2
        if allows(middle):
            allowed = middle
        else:
            refused = middle
    return allowed


class Accountant:
    """ε of a run, or of a federation, whose releases come one round after the other.

    A round adds a bundle of releases, most often the same as the round before. ε is computed for some numbers of such
    rounds, and interpolated between them: a thousand rounds take a few dozen computations of milliseconds.

    Args:
        delta: δ in (0, 1).
        releases: number of times that each release was made before; none unless given.

    Attributes:
        delta: δ in (0, 1).

    Example:
        >>> accountant = Accountant(delta=1e-5)
        >>> for _ in range(100):
        ...     accountant.add({Release(noise_multiplier=1.0, sampling=0.01): 1})
        >>> round(accountant.epsilon(), 2)
        0.72
    """

    def __init__(self, delta: float, releases: Mapping[Release, int] | None = None) -> None:
        self.delta = delta
        self._before = dict(releases or {})
        self._bundle: dict[Release, int] = {}
        self._repeats = 0
        self._room: dict[float, int] = {}  # budget → number of bundles that it allows
        self._knots: dict[int, float] = {}  # number of bundles → ε

    @property
    def releases(self) -> dict[Release, int]:
        """Number of times that each release was made, those before the first :meth:`add` included."""
        return self._after(self._bundle, self._repeats)

    def _after(self, bundle: Mapping[Release, int], repeats: int) -> dict[Release, int]:
        added = {release: count * repeats for release, count in bundle.items()}
        return PrivacyPlan.union(self._before, added)

    def add(self, releases: Mapping[Release, int]) -> None:
        """Add the releases of one round; an empty bundle is no release."""
        if not releases:
            return
        if dict(releases) != self._bundle:
            self._before = self.releases
            self._bundle = dict(releases)
            self._repeats = 0
            self._room.clear()
            self._knots.clear()
        self._repeats += 1

    def epsilon(self) -> float:
        """ε of all releases, in some milliseconds where some of them are sampled; for the summary."""
        return epsilon(self.releases, self.delta)

    def estimate(self) -> float:
        """ε of all releases within 0.2 %, for the line of each round."""
        return self._interpolated(self._repeats)

    def affords(self, releases: Mapping[Release, int], budget: float) -> bool:
        """True if ε is within a budget after one more round with these releases.

        Args:
            releases: bundle of the round.
            budget: ε ≥ 0.
        """
        after = PrivacyPlan.union(self.releases, releases)
        if epsilon_rdp(after, self.delta) <= budget:
            return True
        if dict(releases) != self._bundle or self._is_cheap(releases):
            return epsilon(after, self.delta) <= budget
        if budget not in self._room:
            self._room[budget] = _most_within(lambda repeats: self._at(repeats) <= budget, _MOST_ROUNDS)
        return self._repeats < self._room[budget]

    def _is_cheap(self, releases: Mapping[Release, int]) -> bool:
        """True if ε of the bundle and all before is in closed form, or Rényi's bound."""
        release_kinds = [*self._before, *releases]
        unsampled = all(release.sampling == 1 for release in release_kinds)
        return unsampled or any(release.skellam_l2 is not None for release in release_kinds)

    def _at(self, repeats: int) -> float:
        """ε after a number of bundles."""
        if repeats not in self._knots:
            self._knots[repeats] = epsilon(self._after(self._bundle, repeats), self.delta)
        return self._knots[repeats]

    def _interpolated(self, repeats: int) -> float:
        """ε after a number of bundles, from a cubic through those of four numbers near, on logarithms of both."""
        if repeats <= 4 or self._is_cheap(self._bundle):
            return epsilon(self._after(self._bundle, repeats), self.delta)
        knots = _knots_around(repeats)
        if repeats == knots[1]:
            return self._at(repeats)
        values = [self._at(knot) for knot in knots]
        if values[0] == 0:
            return values[2]
        logarithm = 0.0
        for knot, value in zip(knots, values, strict=True):
            weight = 1.0
            for other in knots:
                if other != knot:
                    weight *= math.log(repeats / other) / math.log(knot / other)
            logarithm += weight * math.log(value)
        return min(max(math.exp(logarithm), values[1]), values[2])


def _knots_around(number: int) -> tuple[int, int, int, int]:
    """Two powers of 2 up to a number > 4, and two above it.

    Example:
        >>> _knots_around(7), _knots_around(8)
        ((2, 4, 8, 16), (4, 8, 16, 32))
    """
    power = 1 << (number.bit_length() - 1)
    return (power // 2, power, 2 * power, 4 * power)
