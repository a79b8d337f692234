r"""Paired differences of variants to a baseline: their means, intervals, p values, and the seeds that tell two apart.

A *pair* is a seed with which both variants came to their end, and d is the difference of their values with it:

.. math::
    d_i = x_i - b_i, \qquad \bar d \pm t_{1-\alpha/2,\,n-1}\, s / \sqrt n

- **Fewer than 20 pairs**: Student's t, exact where differences are normal.
- **20 pairs or more**: the studentised bootstrap over seeds, with 9,999 resamples, which needs no normal differences:
  quantiles of :math:`(\bar d^* - \bar d)/(s^*/\sqrt n)` take the place of Student's.
- **Folds**: those of one seed train on overlapping samples and are not independent. A seed's value is the mean of the
  folds that both variants finished, and seeds are paired. Where there is one seed alone, folds are paired, by Student's
  t with the corrected variance :math:`s^2 (1/J + n_{test}/n_{train})` of J pairs, where
  :math:`n_{test}/n_{train} = 1/(K-1)`.

Intervals are of one difference each. p values of several differences to one baseline are adjusted by Holm's step-down
rule, so that with probability ``confidence`` no true difference of 0 is called larger than the noise.

References:
    Efron & Tibshirani, An Introduction to the Bootstrap, 1993, section 12.5. Holm, A simple sequentially rejective
    multiple test procedure, 1979. Nadeau & Bengio, Inference for the generalization error, Machine Learning 52, 2003.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from fed.config.comparison import seed_of
from fed.vectors.randomness import Streams

__all__ = ["Interval", "PairedDifference", "differences", "holm", "interval_of", "seeds_to_tell_apart"]

_BOOTSTRAP_PAIRS = 20
"""Number of pairs from which on the bootstrap takes the place of Student's t."""
_RESAMPLES = 9_999
_MOST_SEEDS = 1_000_000
_ENOUGH_POWER = 0.8  # Cohen's convention, 1988

_Method: TypeAlias = Literal["student", "bootstrap", "folds"]


class Interval(NamedTuple):
    """Confidence interval of a mean difference.

    Args:
        low: lower end of the interval.
        high: upper end of the interval.
        p: probability of a difference at least as far from 0 if the true difference were 0, in [0, 1].
        method: "student", "bootstrap", or "folds": Student's t with the variance corrected for overlapping folds.
    """

    low: float
    high: float
    p: float
    method: _Method


@dataclass(frozen=True)
class PairedDifference:
    """Difference of a variant to the baseline, in the mean over pairs.

    Args:
        name: name of the variant.
        pairs: number of seeds, or of one seed's folds, with which both came to their end.
        mean: mean of the differences; None without a pair.
        interval: interval of the mean; None where there is one pair, or all differ by the same, so that the noise is
            not known.
        p_adjusted: p value of the interval after Holm's adjustment for all differences to the baseline.
        is_larger_than_noise: True if the adjusted p value is at most 1 − confidence; None without an interval.
        seeds_to_tell_apart: smallest number of paired seeds with which a difference of this mean and deviation is found
            with power 0.8, among as many differences; None where it is not known, or above a million.
    """

    name: str
    pairs: int
    mean: float | None
    interval: Interval | None = None
    p_adjusted: float | None = None
    is_larger_than_noise: bool | None = None
    seeds_to_tell_apart: int | None = None

    @property
    def excludes_zero(self) -> bool:
        """True if the interval does not hold 0, whatever is said of other variants."""
        return self.interval is not None and not self.interval.low <= 0 <= self.interval.high

    def flat(self) -> dict[str, float | int | str | bool | None]:
        """Figures as cells of a row; all but the pairs are None where they are not known."""
        low, high, p, method = self.interval or (None, None, None, None)
        return {
            "difference": self.mean,
            "difference_low": low,
            "difference_high": high,
            "difference_p": p,
            "difference_p_adjusted": self.p_adjusted,
            "difference_is_larger_than_noise": self.is_larger_than_noise,
            "difference_method": method,
            "difference_pairs": self.pairs,
            "seeds_to_tell_apart": self.seeds_to_tell_apart,
        }


def differences(
    values: Mapping[str, Mapping[Any, float]],
    baseline: str,
    *,
    confidence: float = 0.95,
    folds: int | None = None,
    streams: Streams | None = None,
) -> list[PairedDifference]:
    """Differences of all variants but the baseline to it, in order.

    Args:
        values: name of a variant → seed, or with folds (seed, fold) → its value, of finished runs.
        baseline: name of the variant that differences are taken to.
        confidence: rate at which an interval covers the true difference, in (0.5, 1).
        folds: K of a cross-validation; None: repetitions are seeds.
        streams: random streams of the bootstrap's resamples, one for each variant; those of seed 0 unless given.

    Example:
        >>> values = {"A": {0: 0.80, 1: 0.82, 2: 0.81}, "B": {0: 0.85, 1: 0.88, 2: 0.85}}
        >>> found = differences(values, "A")[0]
        >>> round(found.mean, 3), found.is_larger_than_noise, found.seeds_to_tell_apart
        (0.05, True, 3)
    """
    streams = streams or Streams(0)
    found = []
    effects: dict[str, float] = {}
    for name in values:
        if name == baseline:
            continue
        paired, is_of_folds = _paired(values[name], values[baseline])
        correction = 1 / (folds - 1) if is_of_folds and folds is not None else 0.0
        mean = statistics.fmean(paired) if paired else None
        one = PairedDifference(name, len(paired), mean)
        if _varies(paired):
            interval = interval_of(paired, confidence, correction=correction, streams=streams, name=name)
            one = replace(one, interval=interval)
            # More folds of one seed are no more independent data.
            if not is_of_folds:
                # The observed effect: the number of seeds is a guide to the next comparison, and no test.
                effects[name] = abs(statistics.fmean(paired)) / statistics.stdev(paired)
        found.append(one)
    found = _adjusted(found, confidence)
    # The level at which Holm's rule holds the smallest p value: fewer seeds could be too few beside other differences.
    level = 1 - (1 - confidence) / max(1, sum(one.interval is not None for one in found))
    return [
        replace(one, seeds_to_tell_apart=seeds_to_tell_apart(effects[one.name], level)) if one.name in effects else one
        for one in found
    ]


def interval_of(
    paired: Sequence[float],
    confidence: float,
    *,
    correction: float = 0.0,
    streams: Streams | None = None,
    name: str = "",
) -> Interval:
    """Interval and p value of the mean of paired differences.

    Args:
        paired: differences, at least two, not all equal.
        confidence: rate at which the interval covers the true mean.
        correction: n_test / n_train of folds; 0: pairs are independent.
        streams: random streams of the bootstrap's resamples; those of seed 0 unless given.
        name: key of the stream.
    """
    from scipy import special

    n = len(paired)
    mean = statistics.fmean(paired)
    deviation = statistics.stdev(paired)
    # Folds overlap, so that resampling them would make the interval too short.
    if n >= _BOOTSTRAP_PAIRS and not correction:
        found = _bootstrapped(paired, confidence, streams=streams or Streams(0), name=name)
        if found is not None:
            return found
    error = deviation * math.sqrt(1 / n + correction)
    half = -float(special.stdtrit(n - 1, (1 - confidence) / 2)) * error
    p = 2 * float(special.stdtr(n - 1, -abs(mean) / error))
    return Interval(low=mean - half, high=mean + half, p=p, method="folds" if correction else "student")


def _bootstrapped(paired: Sequence[float], confidence: float, streams: Streams, name: str) -> Interval | None:
    """Interval of the studentised bootstrap; None where too many resamples are of one value alone."""
    import numpy as np
    from scipy import stats

    values = np.asarray(paired)
    mean = values.mean()

    def studentised(resamples: "np.ndarray", axis: int = -1) -> "np.ndarray":
        errors = resamples.std(axis, ddof=1) / np.sqrt(resamples.shape[axis])
        return np.asarray((resamples.mean(axis) - mean) / errors)

    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hold one value alone
        drawn = stats.bootstrap(
            (values,),
            studentised,
            n_resamples=_RESAMPLES,
            method="percentile",
            confidence_level=confidence,
            random_state=streams.generator("bootstrap", name),
        )
    low, high = drawn.confidence_interval
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    error = values.std(ddof=1) / math.sqrt(len(values))
    resampled_t = drawn.bootstrap_distribution
    t = mean / error
    tail = min(int((resampled_t >= t).sum()), int((resampled_t <= t).sum()))
    # One is added above and below, for the sample itself: p is never 0.
    p = min(1.0, 2 * (tail + 1) / (_RESAMPLES + 1))
    # The quantiles trade places: a resampled mean above the sample's suggests a true mean below it.
    return Interval(low=float(mean - high * error), high=float(mean - low * error), p=p, method="bootstrap")


def holm(p_values: Sequence[float]) -> list[float]:
    r"""Holm's adjusted p values, which are at most 1.

    .. math::
        \tilde p_{(i)} = \max_{j \le i} (m - j + 1)\, p_{(j)} \quad \text{for the i-th smallest of m}

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        # An adjusted p is never below one with a smaller p: else a weaker difference could pass alone.
        highest = max(highest, (len(p_values) - rank) * p_values[index])
        adjusted[index] = min(1.0, highest)
    return adjusted


def seeds_to_tell_apart(effect: float, confidence: float = 0.95) -> int | None:
    r"""Fewest pairs n with which the two-sided paired t-test finds a difference with power 0.8.

    .. math::
        P(|T| > t_{1-\alpha/2,\,n-1}) \ge 0.8, \qquad T \sim t_{n-1}(\delta\sqrt n)

    Args:
        effect: δ ≥ 0, the true mean difference over the standard deviation of differences.
        confidence: 1 − α.

    Returns:
        n ≥ 2, or None above a million.

    Example:
        >>> seeds_to_tell_apart(1.0), seeds_to_tell_apart(0.5), seeds_to_tell_apart(0.0)
        (10, 34, None)
    """
    fails = 1
    enough = 2
    while _power(effect, enough, confidence) < _ENOUGH_POWER:
        if enough > _MOST_SEEDS:
            return None
        fails = enough
        enough *= 2
    while enough - fails > 1:  # power grows with n
        middle = (fails + enough) // 2
        if _power(effect, middle, confidence) >= _ENOUGH_POWER:
            enough = middle
        else:
            fails = middle
    return enough if enough <= _MOST_SEEDS else None


def _power(effect: float, n: int, confidence: float) -> float:
    """Probability that the test of n pairs finds the difference."""
    from scipy import stats

    threshold = float(stats.t.isf((1 - confidence) / 2, n - 1))
    # T² is F distributed. SciPy's noncentral t gives NaN in the far tail, which once passed for enough power.
    return float(stats.ncf.sf(threshold**2, 1, n - 1, n * effect**2))


def _paired(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> tuple[list[float], bool]:
    """Differences of the repetitions that both have, by seed; by fold where there is one seed with folds."""
    by_seed: dict[int, list[float]] = {}
    has_folds = False
    for repetition in sorted(ours.keys() & theirs.keys(), key=lambda key: key if isinstance(key, tuple) else (key, 0)):
        has_folds = isinstance(repetition, tuple)
        by_seed.setdefault(seed_of(repetition), []).append(ours[repetition] - theirs[repetition])
    if has_folds and len(by_seed) == 1:
        return next(iter(by_seed.values())), True
    return [statistics.fmean(folds) for folds in by_seed.values()], False


def _varies(paired: Sequence[float]) -> bool:
    """True if differences are not all the same but for rounding, so that they show their noise."""
    return len(paired) > 1 and max(paired) - min(paired) > 1e-12 * max(map(abs, paired))


def _adjusted(found: Sequence[PairedDifference], confidence: float) -> list[PairedDifference]:
    """The differences with their p values after Holm's adjustment over those that have an interval."""
    p_of = {one.name: one.interval.p for one in found if one.interval is not None}
    p_of = dict(zip(p_of, holm([*p_of.values()]), strict=True))
    return [
        replace(one, p_adjusted=p_of[one.name], is_larger_than_noise=p_of[one.name] <= 1 - confidence)
        if one.name in p_of
        else one
        for one in found
    ]
