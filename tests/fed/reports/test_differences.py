"""Differences to a baseline: intervals that cover, p values of scipy and by hand, seeds that are the fewest."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from fed.reports.differences import PairedDifference, differences, holm, interval_of, seeds_to_tell_apart

CONFIDENCE = 0.95


def simulated(experiments: int, pairs: int, mean: float, seed: int = 0) -> list[list[float]]:
    """Paired differences of many comparisons, normal with a deviation of 1."""
    rows = np.random.default_rng(seed).normal(mean, 1.0, size=(experiments, pairs))
    return [[float(value) for value in row] for row in rows]


def slack(rate: float, experiments: int) -> float:
    """Distance from the rate that a binomial share exceeds once in 10,000 times: 3.9 standard deviations."""
    return 3.9 * math.sqrt(rate * (1 - rate) / experiments)


def only(values: dict[str, dict[int, float]], **keys: float) -> PairedDifference:
    (found,) = differences(values, "A", **keys)  # type: ignore[arg-type]  # confidence alone
    return found


@pytest.mark.parametrize("confidence", [0.9, 0.95])
@pytest.mark.parametrize("pairs", [2, 5, 12])
def test_intervals_of_few_seeds_cover_at_their_rate(pairs: int, confidence: float) -> None:
    # Student's t is exact where differences are normal, so that covered intervals are binomial.
    found = [interval_of(paired, confidence) for paired in simulated(1000, pairs, 0.3)]
    covered = sum(low <= 0.3 <= high for low, high, *_ in found) / len(found)
    assert {one.method for one in found} == {"student"}
    assert abs(covered - confidence) < slack(confidence, len(found))


def test_bootstrap_intervals_cover_at_their_rate() -> None:
    # Beside the binomial bound 0.01 for the bootstrap's own error of order 1/n: it is close to Student's t, not equal.
    found = [interval_of(paired, CONFIDENCE) for paired in simulated(200, 20, 0.3)]
    covered = sum(low <= 0.3 <= high for low, high, *_ in found) / len(found)
    assert {one.method for one in found} == {"bootstrap"}
    assert abs(covered - CONFIDENCE) < slack(CONFIDENCE, len(found)) + 0.01


def test_differences_of_known_size_are_found_with_the_stated_power() -> None:
    effect = 1.2
    pairs = seeds_to_tell_apart(effect)
    assert pairs is not None
    threshold = stats.t.isf(0.025, pairs - 1)
    # The power that the noncentral t gives to just so many pairs, at least 0.8.
    power = float(stats.nct.sf(threshold, pairs - 1, effect * math.sqrt(pairs)))
    found = sum(interval_of(paired, CONFIDENCE).p <= 0.05 for paired in simulated(1000, pairs, effect)) / 1000
    assert power >= 0.8
    assert abs(found - power) < slack(power, 1000)


def test_no_difference_is_claimed_falsely_more_often_than_stated() -> None:
    # Four variants that are the baseline but for noise: Holm's rule holds the rate of any false claim to 0.05 at most.
    generator = np.random.default_rng(1)
    false = 0
    for _ in range(400):
        baseline_S, *variants_S = generator.normal(size=(5, 6))
        p_values = [interval_of((row_S - baseline_S).tolist(), CONFIDENCE).p for row_S in variants_S]
        false += min(holm(p_values)) <= 0.05
    assert false / 400 < 0.05 + slack(0.05, 400)


def test_few_seeds_give_the_paired_t_test_of_scipy() -> None:
    ours, theirs = np.random.default_rng(2).normal(size=(2, 7))
    values = {"A": dict(enumerate(map(float, theirs))), "B": dict(enumerate(map(float, ours)))}
    expected = stats.ttest_rel(ours, theirs)
    interval = expected.confidence_interval(CONFIDENCE)
    found = only(values).interval
    assert found is not None
    assert found[:3] == pytest.approx((interval.low, interval.high, expected.pvalue), rel=1e-10)


def test_bootstrap_agrees_with_student_where_differences_are_normal() -> None:
    # Quantiles of 200 normal differences themselves, so that both laws are close; 3 % is the resampling's own error.
    paired = [float(value) for value in stats.norm.ppf((np.arange(200) + 0.5) / 200) + 0.1]
    found, expected = interval_of(paired, CONFIDENCE), stats.ttest_1samp(paired, 0).confidence_interval(CONFIDENCE)
    assert found.high - found.low == pytest.approx(expected.high - expected.low, rel=0.03)
    assert found == interval_of(paired, CONFIDENCE)
    assert found.p == pytest.approx(stats.ttest_1samp(paired, 0).pvalue, abs=0.02)


def test_bootstrap_of_almost_one_value_gives_way_to_student() -> None:
    assert interval_of([0.0] * 24 + [1.0], CONFIDENCE).method == "student"


def test_only_seeds_that_both_finished_are_paired() -> None:
    found = only({"A": {0: 0.1, 1: 0.2, 3: 0.9}, "B": {1: 0.4, 2: 0.8, 3: 1.0}})
    assert found.pairs == 2
    assert found.mean == pytest.approx((0.2 + 0.1) / 2)


def test_one_seed_gives_a_difference_without_an_interval() -> None:
    found = only({"A": {0: 0.1}, "B": {0: 0.4}})
    assert found.pairs == 1
    assert found.mean == pytest.approx(0.3)
    assert (found.interval, found.is_larger_than_noise, found.seeds_to_tell_apart) == (None, None, None)
    assert only({"A": {0: 0.1}, "B": {}}).mean is None


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_equal_differences_claim_nothing_for_they_show_no_noise(shift: float) -> None:
    found = only({"A": {0: 0.1, 1: 0.2, 2: 0.3}, "B": {0: 0.1 + shift, 1: 0.2 + shift, 2: 0.3 + shift}})
    assert found.mean == pytest.approx(shift)
    assert (found.interval, found.is_larger_than_noise) == (None, None)


def test_holm_multiplies_by_those_that_remain_and_never_falls() -> None:
    # 0.01 · 4, then max(0.04, 0.013 · 3), max(0.04, 0.03 · 2), max(0.06, 0.9 · 1).
    assert holm([0.03, 0.01, 0.9, 0.013]) == pytest.approx([0.06, 0.04, 0.9, 0.04])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_mark_follows_the_adjusted_p_value() -> None:
    # Without the other variants B's p value of 0.04 would do; three of them make it 0.12.
    paired = [0.6, 1.5, 0.7, 1.9, 0.1]
    other = [1.0, -1.0, 0.4, -0.5, 0.2]
    zeros = dict.fromkeys(range(5), 0.0)
    alone = differences({"A": zeros, "B": dict(enumerate(paired))}, "A")[0]
    beside = differences(
        {"A": zeros, "B": dict(enumerate(paired)), "C": dict(enumerate(other)), "D": dict(enumerate(other))}, "A"
    )[0]
    assert alone.interval == beside.interval
    assert (alone.excludes_zero, alone.is_larger_than_noise) == (True, True)
    assert (beside.excludes_zero, beside.is_larger_than_noise) == (True, False)


def brute_force_power(effect: float, n: int) -> float:
    """Power by integrating the normal mean over the law of the sample deviation, without the noncentral t."""
    threshold = stats.t.isf(0.025, n - 1) / math.sqrt(n)

    def found_given(variance: float) -> float:
        edge = threshold * math.sqrt(variance)
        mean = stats.norm(effect, 1 / math.sqrt(n))
        return float((mean.sf(edge) + mean.cdf(-edge)) * stats.chi2.pdf((n - 1) * variance, n - 1) * (n - 1))

    return float(integrate.quad(found_given, 0, 1 + 40 / math.sqrt(n), limit=200)[0])


@pytest.mark.parametrize("effect", [0.6, 1.0, 1.7])
def test_seeds_that_tell_two_apart_are_the_fewest(effect: float) -> None:
    fewest = seeds_to_tell_apart(effect)
    assert fewest is not None
    assert brute_force_power(effect, fewest) >= 0.8 > brute_force_power(effect, fewest - 1)


def test_differences_that_were_not_found_need_more_seeds() -> None:
    generator = np.random.default_rng(7)
    asked_for_less = 0
    for _ in range(15):
        pairs = int(generator.integers(2, 7))
        values = {"A": dict.fromkeys(range(pairs), 0.0)}
        for number, effect in enumerate(generator.uniform(0, 4, 4)):
            values[f"B{number}"] = dict(enumerate(generator.normal(effect, 1, pairs)))
        for one in differences(values, "A"):
            if not one.is_larger_than_noise:
                assert one.seeds_to_tell_apart is None or one.seeds_to_tell_apart > pairs
                effect = abs(one.mean or 0.0) / np.std([*values[one.name].values()], ddof=1)
                asked_for_less += (seeds_to_tell_apart(float(effect)) or math.inf) <= pairs
    assert asked_for_less > 0, "without the adjustment some would be told of seeds that they had"


def test_no_number_of_seeds_finds_no_difference() -> None:
    assert seeds_to_tell_apart(0.0) is None
    assert seeds_to_tell_apart(1e-4) is None  # some 785 million
    assert seeds_to_tell_apart(1e6) == 2


def test_folds_of_one_seed_have_the_corrected_variance() -> None:
    paired = [0.1, 0.3, 0.2, 0.6, 0.4]
    values = {"A": {(7, fold): 0.0 for fold in range(1, 6)}, "B": {(7, fold): paired[fold - 1] for fold in range(1, 6)}}
    (found,) = differences(values, "A", folds=5)
    # Nadeau & Bengio: s² (1/5 + 1/4).
    half = stats.t.isf(0.025, 4) * math.sqrt(np.var(paired, ddof=1) * (1 / 5 + 1 / 4))
    assert found.interval is not None
    assert found.interval[:2] == pytest.approx((0.32 - half, 0.32 + half), rel=1e-12)
    assert (found.interval.method, found.pairs, found.seeds_to_tell_apart) == ("folds", 5, None)


def test_folds_of_several_seeds_are_averaged_before_seeds_are_paired() -> None:
    rows = np.random.default_rng(3).normal(size=(4, 3))
    values = {
        "A": {(seed, fold): 0.0 for seed in range(4) for fold in (1, 2, 3)},
        "B": {(seed, fold): float(rows[seed, fold - 1]) for seed in range(4) for fold in (1, 2, 3)},
    }
    (found,) = differences(values, "A", folds=3)
    expected = stats.ttest_1samp(rows.mean(1), 0)
    assert found.pairs == 4
    assert found.interval is not None
    assert found.interval.p == pytest.approx(expected.pvalue, rel=1e-10)
