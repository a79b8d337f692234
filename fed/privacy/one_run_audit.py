"""Audit of differential privacy in one run: from guesses on many secret bits to a lower bound on ε.

Steinke, Nasr & Jagielski, "Privacy auditing with one (1) training run", NeurIPS 2023 (2305.08846): the test is Theorem
5.2, in the form of Appendix D. Names that end in _m have a number for each of m canaries.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

__all__ = ["Guesses", "best_guesses", "lower_bound", "p_value"]

_Numbers = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
_Bits = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

_SHARES = (1 / 2, 1 / 4, 1 / 10)
"""Shares of the canaries that are guessed: few where the noise hides all but the clearest, many where it is small."""
_LARGEST_EPSILON = 100.0
_HALVINGS = 40


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """Guesses on which canaries were in a run, and what they say of its ε.

    Args:
        canaries: m, number of canaries.
        made: number of canaries that were guessed, those with the clearest scores.
        right: number of guesses that were right.
        epsilon: ε ≥ 0 of which the run has at least as much, with the confidence that was asked for.
        largest_epsilon: largest bound that so many canaries can give, with all guesses right.
    """

    canaries: int
    made: int
    right: int
    epsilon: float
    largest_epsilon: float


def best_guesses(scores_m: _Numbers, included_m: _Bits, *, delta: float, confidence: float) -> Guesses:
    """Guesses that give the largest bound, on a half, a quarter and a tenth of the canaries.

    Canaries with the largest scores are guessed to be in, as many with the smallest to be out. Three numbers of guesses
    are tried, so that each bound has a third of the chance of error.

    Args:
        scores_m: score of each canary, larger for those that are in.
        included_m: True for canaries that were in, each by a fair coin of its own.
        delta: δ of the claim.
        confidence: probability with which the bound is true, in (0, 1).
    """
    canaries = len(scores_m)
    order_m = np.argsort(scores_m, kind="stable")
    halves = [max(int(canaries * share / 2), 1) for share in _SHARES]
    bound = partial(lower_bound, canaries=canaries, delta=delta, chance=(1 - confidence) / len(_SHARES))
    largest_epsilon = max(bound(made=2 * half, right=2 * half) for half in halves)
    found = []
    for half in halves:
        right = int(included_m[order_m[-half:]].sum() + (~included_m[order_m[:half]]).sum())
        epsilon = bound(made=2 * half, right=right)
        found.append(
            Guesses(canaries=canaries, made=2 * half, right=right, epsilon=epsilon, largest_epsilon=largest_epsilon)
        )
    return max(found, key=lambda guesses: (guesses.epsilon, guesses.right / guesses.made))


def lower_bound(*, canaries: int, made: int, right: int, delta: float, chance: float) -> float:
    """Largest ε under which so many right guesses are less probable than a chance.

    Args:
        canaries: m, number of canaries, each of them in by a fair coin.
        made: r ≤ m, number of guesses.
        right: v ≤ r, number of right guesses.
        delta: δ ≥ 0.
        chance: probability of a wrong bound, in (0, 1).

    Example:
        >>> round(lower_bound(canaries=100, made=100, right=100, delta=0.0, chance=0.05), 3)
        3.493
    """

    def is_refuted(epsilon: float) -> bool:
        return p_value(canaries=canaries, made=made, right=right, epsilon=epsilon, delta=delta) < chance

    if not is_refuted(0.0):
        return 0.0
    low = 0.0
    high = _LARGEST_EPSILON
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if is_refuted(middle):
            low = middle
        else:
            high = middle
    return low


def p_value(*, canaries: int, made: int, right: int, epsilon: float, delta: float) -> float:
    r"""Bound on the probability of so many right guesses, if the run is (ε, δ)-differentially private.

    .. math::
        P[V ≥ v] ≤ P[B ≥ v] + 2 m δ \max_{i ≤ v} \frac{P[v - i ≤ B < v]}{i}, \qquad
        B ∼ Binomial\left(r, \frac{e^ε}{e^ε + 1}\right)

    Args:
        canaries: m, number of canaries.
        made: r, number of guesses.
        right: v, number of right guesses.
        epsilon: ε ≥ 0.
        delta: δ ≥ 0.
    """
    probabilities = _binomial(made, epsilon)
    at_least = float(probabilities[right:].sum())
    if right == 0 or delta == 0:
        return min(at_least, 1.0)
    below = np.cumsum(probabilities[:right][::-1])
    steepest = float((below / np.arange(1, right + 1)).max())
    return min(at_least + 2 * canaries * delta * steepest, 1.0)


def _binomial(count: int, epsilon: float) -> _Numbers:
    """Probabilities of 0 … r right guesses, each right with probability e^ε / (e^ε + 1), [r + 1]."""
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    numbers = np.arange(count + 1)
    log_choices = log_factorials[-1] - log_factorials - log_factorials[::-1]
    log_wrong = -np.logaddexp(0.0, epsilon)
    # log p = ε + log(1 - p), so that neither logarithm loses digits where ε is large.
    logs = log_choices + numbers * epsilon + count * log_wrong
    found: _Numbers = np.exp(logs)
    return found
