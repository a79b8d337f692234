"""Plans: the releases that a run will make."""

import math
from typing import Any

import pytest

from fed.privacy.plan import PrivacyPlan
from fed.privacy.releases import Release


def _plan(**changes: Any) -> PrivacyPlan:
    keys: dict[str, Any] = {"noise_multiplier": 2.0, "rounds": 10, "delta": 1e-5, **changes}
    return PrivacyPlan(kind="central", mechanism="Gaussian noise", **keys)


@pytest.mark.parametrize(
    ("plan", "rounds", "expected"),
    [
        (_plan(sampling=0.1), None, {Release(noise_multiplier=2.0, sampling=0.1): 10}),
        (_plan(sampling=0.1, releases_a_round=5), 3, {Release(noise_multiplier=2.0, sampling=0.1): 15}),
        (_plan(participations=4), None, {Release(noise_multiplier=2.0): 4}),
        (_plan(participations=4), 3, {Release(noise_multiplier=2.0): 3}),
        (_plan(participations=4), 25, {Release(noise_multiplier=2.0): 12}),
        (_plan(), 0, {}),
        (
            _plan(skellam_l2=50.0, skellam_l1=90.0),
            1,
            {Release(noise_multiplier=2.0, skellam_l2=50.0, skellam_l1=90.0): 1},
        ),
    ],
)
def test_plan_counts_each_release(plan: PrivacyPlan, rounds: int | None, expected: dict[Release, int]) -> None:
    assert plan.releases(rounds) == expected


@pytest.mark.parametrize("rounds", [1, 3, 4])
def test_matrix_mechanism_costs_its_sensitivity(rounds: int) -> None:
    plan = _plan(rounds=4, sensitivities=(1.0, 1.0, 1.25, 1.5))
    inverse_squares = math.fsum(count / release.noise_multiplier**2 for release, count in plan.releases(rounds).items())
    assert inverse_squares == pytest.approx(plan.sensitivities[rounds - 1] ** 2 / 2.0**2, rel=1e-12)


def test_matrix_mechanism_refuses_more_rounds() -> None:
    with pytest.raises(ValueError, match="made for 2 rounds, got 3"):
        _plan(sensitivities=(1.0, 1.5)).releases(3)


@pytest.mark.parametrize(
    ("plan", "sampling"),
    [(_plan(clients=100, cohort=10, sampling=0.1), 0.3), (_plan(clients=100, cohort=10), 1.0)],
)
def test_cohort_moves_sampling_only_where_amplified(plan: PrivacyPlan, sampling: float) -> None:
    assert plan.with_cohort(30).sampling == sampling


def test_union_adds_counts_of_equal_releases() -> None:
    once = _plan().releases
    assert PrivacyPlan.union(once(3), once(4)) == once(7)
