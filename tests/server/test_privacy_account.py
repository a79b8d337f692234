"""Account of a run's privacy: whose loss it tells, where clients have lost by releases of several kinds."""

import pytest

from fed.errors import BudgetSpent
from fed.privacy.accounting import epsilon
from fed.privacy.central import CentralPrivacy
from fed.privacy.entries import Cost
from fed.privacy.ledger import Ledger
from fed.privacy.releases import Release
from fed.server.privacy_account import PrivacyAccount

GAUSSIAN = Release(noise_multiplier=1.0)
COARSE = Release(noise_multiplier=1.01, skellam_l2=16.0, skellam_l1=256.0)
"""Skellam noise of few units: it costs more than Gaussian noise of a little less."""


def federation() -> Ledger:
    """Ledger of two runs of other clients, one by Gaussian and one by Skellam noise."""
    ledger = Ledger.in_memory("federation of a test", run="earlier")
    ledger.append(1, [Cost(releases={GAUSSIAN: 2}, clients=("ann",))])
    ledger.append(2, [Cost(releases={COARSE: 2}, clients=("bob",))])
    return ledger


def test_the_client_that_has_lost_most_is_found_by_epsilon() -> None:
    most = epsilon({COARSE: 2}, 1e-5)
    assert most > 1.05 * epsilon({GAUSSIAN: 2}, 1e-5)
    account = PrivacyAccount(CentralPrivacy(noise_multiplier=1.0), federation(), rounds=9)
    assert account.epsilon() == account.estimate() == account.summary()["epsilon"] == most


def test_no_client_passes_the_budget_unseen() -> None:
    budget = 1.001 * epsilon({GAUSSIAN: 3}, 1e-5)
    assert budget < epsilon({COARSE: 2, GAUSSIAN: 1}, 1e-5)
    settings = CentralPrivacy(noise_multiplier=1.0, budget_epsilon=budget)
    PrivacyAccount(settings, federation(), rounds=9).begin(1, ["ann"], sampling=1.0, expected=1.0)
    with pytest.raises(BudgetSpent):
        PrivacyAccount(settings, federation(), rounds=9).begin(1, ["ann", "bob"], sampling=1.0, expected=2.0)


@pytest.mark.parametrize(("sampling", "bears"), [(1.0, ["ann", "bob", "cy"]), (0.1, None)])
def test_all_who_are_asked_bear_a_round(sampling: float, bears: list[str] | None) -> None:
    """Where chance hides who is, all clients do, and the ledger names nobody."""
    ledger = Ledger.in_memory("federation of a test", run="this one")
    account = PrivacyAccount(CentralPrivacy(noise_multiplier=1.0), ledger, rounds=9)
    account.begin(1, ["cy", "ann", "bob"], sampling=sampling, expected=3.0)
    (entry,) = ledger.entries
    release = Release(noise_multiplier=1.0, sampling=sampling)
    assert entry.costs == (Cost(releases={release: 1}, clients=bears),)
