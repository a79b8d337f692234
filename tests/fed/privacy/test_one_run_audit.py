"""Lower bounds on ε from guesses: closed forms, and the test as its paper computes it."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from fed.privacy.one_run_audit import best_guesses, lower_bound, p_value


@pytest.mark.parametrize(("canaries", "chance"), [(1, 0.3), (100, 0.05), (1000, 0.01)])
def test_all_right_guesses_give_the_closed_form(canaries: int, chance: float) -> None:
    """With δ = 0 all guesses are right with probability (e^ε / (e^ε + 1))^m at most."""
    share = chance ** (1 / canaries)
    expected = max(math.log(share / (1 - share)), 0)
    found = lower_bound(canaries=canaries, made=canaries, right=canaries, delta=0, chance=chance)
    assert found == pytest.approx(expected, rel=1e-9)


def by_the_paper(canaries: int, made: int, right: int, epsilon: float, delta: float) -> float:
    """The paper's Appendix D, on SciPy's binomial."""
    accuracy = 1 / (1 + math.exp(-epsilon))
    steepest = total = 0.0
    for number in range(1, right + 1):
        total += binom.pmf(right - number, made, accuracy)
        steepest = max(steepest, total / number)
    return min(float(binom.sf(right - 1, made, accuracy)) + 2 * canaries * delta * steepest, 1)


@pytest.mark.parametrize("made", [1, 40, 400])
@pytest.mark.parametrize("share", [0.0, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0, 9.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3])
def test_p_values_are_those_of_the_paper(made: int, share: float, epsilon: float, delta: float) -> None:
    right = round(share * made)
    found = p_value(canaries=1000, made=made, right=right, epsilon=epsilon, delta=delta)
    assert found == pytest.approx(by_the_paper(1000, made, right, epsilon, delta), rel=1e-9, abs=1e-12)


def test_guesses_by_chance_bound_nothing() -> None:
    assert lower_bound(canaries=100, made=100, right=53, delta=1e-5, chance=0.05) == 0


def scored(canaries: int, distance: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of canaries, of which those that are in stand out by so many standard deviations."""
    generator = np.random.default_rng(seed)
    included_m = generator.integers(0, 2, canaries).astype(bool)
    return generator.standard_normal(canaries) + distance * included_m, included_m


def test_few_clear_guesses_say_more_than_many() -> None:
    guesses = best_guesses(*scored(1000, 0.8, seed=1), delta=1e-5, confidence=0.95)
    assert guesses.made == 100
    assert 0.5 < guesses.epsilon < guesses.largest_epsilon


def test_clear_scores_give_the_largest_bound() -> None:
    guesses = best_guesses(*scored(1000, 50, seed=1), delta=1e-5, confidence=0.95)
    assert (guesses.right, guesses.made) == (500, 500)
    assert guesses.epsilon == guesses.largest_epsilon > 4


def test_bounds_are_true_as_often_as_they_say() -> None:
    """Randomised response of ε = 1 tells as much as a claim of 1 allows: 5 % of bounds may pass it.

    Of 400 audits 20 may; 39 or more have a probability of 1e-4, by the binomial distribution.
    """
    keeps = math.e / (1 + math.e)
    wrong = 0
    for seed in range(400):
        generator = np.random.default_rng(seed)
        included_m = generator.integers(0, 2, 200).astype(bool)
        told_m = np.where(generator.random(200) < keeps, included_m, ~included_m)
        scores_m = told_m + 1e-3 * generator.random(200)
        wrong += best_guesses(scores_m, included_m, delta=0.0, confidence=0.95).epsilon > 1
    assert wrong < 39
