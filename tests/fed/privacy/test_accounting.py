"""Accounting of privacy: known answers, independent routes to the same ε, and properties that any ε must have."""

import math
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from fed.errors import InvalidExperiment
from fed.privacy import accounting, loss_distributions
from fed.privacy.accounting import Accountant, epsilon, epsilon_rdp, noise_multiplier_for, rounds_within
from fed.privacy.loss_distributions import gaussian_epsilon
from fed.privacy.plan import PrivacyPlan
from fed.privacy.releases import Release
from fed.privacy.renyi import _ORDERS, _divergence


def _plan(**changes: Any) -> PrivacyPlan:
    keys: dict[str, Any] = {"noise_multiplier": 1.0, "rounds": 100, "delta": 1e-5, **changes}
    return PrivacyPlan(kind="central", mechanism="Gaussian noise", **keys)


@pytest.mark.parametrize(
    ("sampling", "noise_multiplier", "rounds", "delta", "by_renyi", "by_losses"),
    [
        (0.01, 1.0, 1000, 1e-5, 2.101367, 1.828244),
        (0.1, 1.0, 100, 1e-5, 7.903850, 7.046603),
        (1.0, 1.0, 1, 1e-5, 4.728507, 4.377178),
        (256 / 60000, 1.1, 14062, 1e-5, 2.596556, 2.381686),
        (0.01, 1.0, 100, 1e-5, None, 0.72),
        (1.0, 1.0, 100, 1e-5, 96.1, None),
        (0.1, 1.0, 50, 1e-5, None, 5.15),
        (1.0, 1.0, 50, 1e-5, 57.3, None),
        (0.001, 1.0, 1000, 1e-6, None, 0.19),
        (1.0, 1.0, 1000, 1e-6, 666.0, None),
    ],
)
def test_epsilon_equals_known_answers(
    sampling: float,
    noise_multiplier: float,
    rounds: int,
    delta: float,
    by_renyi: float | None,
    by_losses: float | None,
) -> None:
    releases = {Release(noise_multiplier=noise_multiplier, sampling=sampling): rounds}
    if by_renyi is not None:
        assert epsilon_rdp(releases, delta) == pytest.approx(by_renyi, rel=1e-3)
    if by_losses is not None:
        digits = len(str(by_losses).partition(".")[2])  # an answer of two digits is known to half of its last
        assert epsilon(releases, delta) == pytest.approx(by_losses, rel=1e-3, abs=0.5 * 10**-digits)


@pytest.mark.parametrize(
    ("noise_multiplier", "sampling", "delta"), [(1.0, 0.1, 1e-3), (0.5, 0.3, 1e-5), (2.0, 0.02, 1e-6), (0.3, 0.9, 1e-5)]
)
def test_sampled_epsilon_equals_an_integral(noise_multiplier: float, sampling: float, delta: float) -> None:
    step = noise_multiplier / 5000
    x = np.arange(-9 * noise_multiplier, 1 + 9 * noise_multiplier, step)
    without = norm.pdf(x, 0, noise_multiplier)
    with_unit = (1 - sampling) * without + sampling * norm.pdf(x, 1, noise_multiplier)

    def distance(value: float) -> float:
        """The larger hockey-stick distance of the two neighbours at ε."""
        added = np.maximum(without - math.exp(value) * with_unit, 0).sum() * step
        removed = np.maximum(with_unit - math.exp(value) * without, 0).sum() * step
        return float(max(added, removed))

    expected = brentq(lambda value: distance(value) - delta, 0, 60, xtol=1e-6)
    found = epsilon({Release(noise_multiplier=noise_multiplier, sampling=sampling): 1}, delta)
    assert expected * (1 - 1e-5) <= found <= expected * (1 + 1e-3)


@pytest.mark.parametrize(
    ("noise_multiplier", "sampling", "count", "fine_interval"),
    [(1.0, 0.001, 1000, 2**-15), (0.5, 0.5, 1000, 2**-8), (1.0, 0.01, 100, 2**-13), (0.3, 0.9, 1, 2**-10)],
)
def test_grid_of_losses_is_fine_enough(
    noise_multiplier: float, sampling: float, count: int, fine_interval: float
) -> None:
    releases = {Release(noise_multiplier=noise_multiplier, sampling=sampling): count}
    fine = loss_distributions.sampled_epsilon(releases, mu=0.0, delta=1e-6, interval=fine_interval)
    assert epsilon(releases, 1e-6) == pytest.approx(fine, rel=1e-3)


@pytest.mark.parametrize(("noise_multiplier", "count"), [(0.5, 1), (1.0, 3), (20.0, 1000), (300.0, 1)])
def test_gaussian_epsilon_equals_closed_form_and_losses(noise_multiplier: float, count: int) -> None:
    delta = 1e-6
    mu = math.sqrt(count) / noise_multiplier
    found = epsilon({Release(noise_multiplier=noise_multiplier): count}, delta)
    closed = norm.cdf(mu / 2 - found / mu) - math.exp(found) * norm.cdf(-mu / 2 - found / mu)
    assert closed == pytest.approx(delta, rel=1e-6)
    by_losses = loss_distributions.sampled_epsilon({}, mu=mu, delta=delta, interval=found * 1e-4)
    assert found <= by_losses * (1 + 1e-6) <= found * (1 + 1e-3)


@pytest.mark.parametrize(("noise_multiplier", "sampling"), [(1.0, 0.01), (1.0, 0.1), (4.0, 0.5), (0.4, 0.001)])
def test_sampled_divergence_equals_sums_of_dp_accounting(noise_multiplier: float, sampling: float) -> None:
    whole = [order for order in _ORDERS if 2 <= order <= 40 and float(order).is_integer()]
    accountant = RdpAccountant(orders=whole)
    accountant.compose(PoissonSampledDpEvent(sampling, GaussianDpEvent(noise_multiplier)))
    found = _divergence(Release(noise_multiplier=noise_multiplier, sampling=sampling))
    expected = accountant.rdp
    np.testing.assert_allclose(found[np.isin(_ORDERS, whole)], expected, rtol=1e-9, atol=1e-14)


def test_skellam_divergence_is_the_papers() -> None:
    release = Release(noise_multiplier=2.0, skellam_l2=10.0, skellam_l1=70.0)
    variance = 400.0
    order = 3
    found = _divergence(release)[list(_ORDERS).index(order)]
    correction = min((5 * 100 + 6 * 70) / (4 * variance**2), 3 * 70 / (2 * variance))
    assert found == pytest.approx(order * 100 / (2 * variance) + correction, rel=1e-12)
    assert np.isinf(_divergence(release)[_ORDERS == 2.5]).all(), "proven for whole orders alone"


def test_sampled_skellam_divergence_is_the_papers() -> None:
    q = 0.1
    of_two, of_three = (
        _divergence(Release(noise_multiplier=1.0, skellam_l2=10.0, skellam_l1=70.0))[list(_ORDERS).index(order)]
        for order in (2, 3)
    )
    sampled = Release(noise_multiplier=1.0, sampling=q, skellam_l2=10.0, skellam_l1=70.0)
    found = _divergence(sampled)[list(_ORDERS).index(3)]
    terms = (1 - q) ** 2 * (2 * q + 1), 3 * q**2 * (1 - q) * math.exp(of_two), 3 * q**3 * math.exp(2 * of_three)
    assert found == pytest.approx(math.log(math.fsum(terms)) / 2, rel=1e-12)


def test_fine_skellam_noise_costs_as_much_as_gaussian() -> None:
    fine = {Release(noise_multiplier=2.0, skellam_l2=1e6, skellam_l1=1e8): 20}
    gaussian = {Release(noise_multiplier=2.0): 20}
    assert epsilon(fine, 1e-5) == pytest.approx(epsilon_rdp(gaussian, 1e-5), rel=0.01)  # whole orders alone
    sampled = {Release(noise_multiplier=2.0, sampling=0.05, skellam_l2=1e6, skellam_l1=1e8): 20}
    assert epsilon_rdp({Release(noise_multiplier=2.0, sampling=0.05): 20}, 1e-5) < epsilon(sampled, 1e-5)
    assert epsilon(sampled, 1e-5) < epsilon(fine, 1e-5) / 3


_RELEASES = st.builds(
    lambda z, q, l2: Release(noise_multiplier=z, sampling=q, skellam_l2=l2, skellam_l1=l2 and 3 * l2),
    st.floats(0.3, 30).map(lambda z: float(f"{z:.2g}")),
    st.sampled_from([1.0, 1.0, 0.5, 0.02]),
    st.sampled_from([None, None, None, 40.0]),
)
_LARGER = 1 + 2e-4
"""Room for the grid, which another multiset may round otherwise."""


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    releases=st.dictionaries(_RELEASES, st.integers(1, 60), max_size=3),
    more=_RELEASES,
    delta=st.sampled_from([1e-7, 1e-5, 1e-3]),
)
def test_epsilon_is_monotone(releases: dict[Release, int], more: Release, delta: float) -> None:
    alone = epsilon(releases, delta)
    assert alone <= epsilon_rdp(releases, delta) * (1 + 1e-9)
    assert alone <= epsilon(PrivacyPlan.union(releases, {more: 1}), delta) * _LARGER
    assert alone <= epsilon(releases, delta / 10) * _LARGER
    louder = {
        Release(**{**release.keys(), "noise_multiplier": 1.1 * release.noise_multiplier}): count
        for release, count in releases.items()
    }
    assert epsilon(louder, delta) <= alone * _LARGER
    always = {Release(**{**release.keys(), "sampling": 1.0}): 0 for release in releases}
    for release, count in releases.items():
        always[Release(**{**release.keys(), "sampling": 1.0})] += count
    assert alone <= epsilon(always, delta) * _LARGER


def test_epsilon_of_nothing_is_zero() -> None:
    release = Release(noise_multiplier=1.0, sampling=0.1)
    assert epsilon({}, 1e-5) == epsilon({release: 0}, 1e-5) == epsilon_rdp({}, 1e-5) == Accountant(1e-5).estimate() == 0
    assert epsilon({Release(noise_multiplier=1e6): 1}, 1e-3) == 0


@pytest.mark.parametrize("noise", [1e-50, 1e-20, 1e-5, 1e-3, 1e20, 1e50])
def test_any_noise_has_an_epsilon(noise: float) -> None:
    """By its bound where there is hardly any noise, for which sampling does not count."""
    always = epsilon({Release(noise_multiplier=noise): 3}, 1e-5)
    sampled = epsilon({Release(noise_multiplier=noise, sampling=0.1): 3}, 1e-5)
    assert sampled == always == pytest.approx(1.5 / noise**2, rel=0.02, abs=1e-9)


def test_epsilon_of_hardly_any_noise_follows_the_closed_form() -> None:
    """Above the last z that has it by less than the ten-thousandth that the bound may be too high."""
    exact, bound = (gaussian_epsilon(mu, 1e-5) / mu**2 for mu in (1e5, 1.0001e5))
    assert exact <= bound <= exact * (1 + 1e-4)


def test_tiny_delta_takes_the_bound() -> None:
    releases = {Release(noise_multiplier=1.0, sampling=0.1): 20}
    assert epsilon(releases, 1e-11) == epsilon_rdp(releases, 1e-11)
    assert epsilon(releases, 1e-9) < epsilon_rdp(releases, 1e-9)


@pytest.mark.parametrize(("count", "delta"), [(1, 0.0), (1, 1.0), (-1, 1e-5)])
def test_impossible_accounts_are_refused(count: int, delta: float) -> None:
    with pytest.raises(ValueError, match=r"must be in|0 times or more"):
        epsilon({Release(noise_multiplier=1.0): count}, delta)


def test_interrupted_and_changed_runs_compose() -> None:
    first = Release(noise_multiplier=1.0, sampling=0.02)
    second = Release(noise_multiplier=2.0, sampling=0.05)
    alone = Release(noise_multiplier=9.0)
    account = Accountant(1e-5, {first: 10})
    for bundle in [{first: 1}] * 30 + [{second: 2}] * 20 + [{alone: 1}] * 5 + [{first: 1}] * 10:
        account.add(bundle)
    whole = {first: 50, second: 40, alone: 5}
    assert account.releases == whole
    assert account.epsilon() == epsilon(dict(reversed(whole.items())), 1e-5)
    resumed = Accountant(1e-5, account.releases)
    assert resumed.epsilon() == resumed.estimate() == account.epsilon()


@pytest.mark.parametrize("before", [{}, {Release(noise_multiplier=2.0, sampling=0.1): 300}])
def test_estimates_are_near_and_rise(before: dict[Release, int]) -> None:
    release = Release(noise_multiplier=1.0, sampling=0.05)
    account = Accountant(1e-5, before)
    curve = []
    for _ in range(200):
        account.add({release: 1})
        curve.append(account.estimate())
    assert all(later > earlier for earlier, later in pairwise(curve))
    for rounds in (1, 5, 23, 90, 181):
        exact = epsilon(PrivacyPlan.union(before, {release: rounds}), 1e-5)
        assert curve[rounds - 1] == pytest.approx(exact, rel=2e-3)


def test_other_releases_begin_a_new_count() -> None:
    cheap = Release(noise_multiplier=1.0, sampling=0.05)
    dear = Release(noise_multiplier=1.0, sampling=0.3)
    account = Accountant(1e-5)
    budget = epsilon({cheap: 10}, 1e-5) * 1.001
    for _ in range(9):
        account.add({cheap: 1})
        account.estimate()
    assert account.affords({cheap: 1}, budget)
    for repeats in range(1, 8):
        account.add({dear: 1})
        whole = {cheap: 9, dear: repeats}
        assert account.estimate() == pytest.approx(epsilon(whole, 1e-5), rel=2e-3)
        assert not account.affords({dear: 1}, budget)


def test_a_thousand_rounds_take_few_computations(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[float] = []

    def counting(*_: Any, mu: float, delta: float, interval: float) -> float:
        computed.append(interval)
        return 0.01 * math.sqrt(len(computed))

    monkeypatch.setattr(accounting, "sampled_epsilon", counting)
    release = Release(noise_multiplier=1.0625, sampling=0.0625)  # of no other test
    account = Accountant(1e-5)
    for _ in range(1000):
        assert account.affords({release: 1}, 1e3)
        account.add({release: 1})
        account.estimate()
    assert len(computed) <= 14, "those of powers of 2, and of 3 rounds"


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": 0.1},
        {},
        {"skellam_l2": 300.0, "skellam_l1": 5000.0},
        {"sensitivities": (1.0, 1.3, 1.5), "rounds": 3},
    ],
    ids=["sampled", "gaussian", "skellam", "matrix"],
)
@pytest.mark.parametrize("target", [0.5, 8.0])
def test_noise_spends_its_epsilon(changes: dict[str, Any], target: float) -> None:
    plan = _plan(**changes)
    found = plan.with_noise(noise_multiplier_for(plan, target))
    assert target * 0.999 <= epsilon(found.releases(), plan.delta) <= target
    assert plan.rounds <= rounds_within(found, target) <= plan.rounds + 1


@pytest.mark.parametrize(
    ("target", "message"),
    [(0.0, "must exceed 0"), (1e7, "no noise multiplier from 0.01"), (1e-9, "to 1,000,000"), (1e-300, "to 1,000,000")],
)
def test_epsilons_without_noise_are_refused(target: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        noise_multiplier_for(_plan(delta=1e-12), target)


@pytest.mark.parametrize("sampling", [1.0, 0.1])
def test_budget_is_kept_to_the_last_round(sampling: float) -> None:
    plan = _plan(sampling=sampling, noise_multiplier=2.0)
    budget = 3.0
    account = Accountant(plan.delta)
    rounds = 0
    while account.affords(plan.releases(1), budget):
        account.add(plan.releases(1))
        rounds += 1
    assert rounds == rounds_within(plan, budget) > 0
    assert epsilon(plan.releases(rounds), plan.delta) <= budget < epsilon(plan.releases(rounds + 1), plan.delta)
    assert rounds_within(plan, 0.0) == 0
    assert rounds_within(plan, 1e9, most=5) == 5


def test_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    with pytest.raises(InvalidExperiment, match=r"pip install 'fed\[privacy\]'"):
        epsilon({Release(noise_multiplier=1.23456, sampling=0.1): 1}, 1e-5)
