"""The sheet of a plan: its numbers are the accountant's, and its words are the plan's."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from fed.privacy.accounting import epsilon
from fed.privacy.plan import PrivacyPlan
from fed.privacy.sheet import costs_of, facts_of, sheet_of, table_of


def _plan(**changes: Any) -> PrivacyPlan:
    keys: dict[str, Any] = {
        "kind": "central",
        "mechanism": "Gaussian noise, added by the coordinator",
        "noise_multiplier": 2.0,
        "rounds": 50,
        "delta": 1e-5,
        "sampling": 0.1,
        "amplification": "Poisson sampling in secret",
        "clients": 100,
        "cohort": 10.0,
        "trust": ("the coordinator is trusted",),
        "not_covered": ("that a client takes part", "scores"),
    }
    return PrivacyPlan(**{**keys, **changes})


def test_each_cell_is_the_cost_of_such_a_run() -> None:
    costs = costs_of(_plan(), noise_multipliers=[1.0, 4.0], cohorts=[5, 20, 200])
    assert [(cell.noise_multiplier, cell.cohort) for cell in costs.cells] == [(1, 5), (1, 20), (4, 5), (4, 20)]
    for cell in costs.cells:
        assert cell.cohort is not None
        plan = _plan(noise_multiplier=cell.noise_multiplier, sampling=cell.cohort / 100)
        assert cell.epsilon == epsilon(plan.releases(), 1e-5)
    assert costs.epsilon == epsilon(_plan().releases(), 1e-5)


def test_table_has_the_plan_itself_and_one_column_without_amplification() -> None:
    amplified = table_of(costs_of(_plan()))
    assert amplified[0] == ["noise_multiplier", "5 clients", "10 clients", "20 clients", "40 clients"]
    assert [row[0] for row in amplified[1:]] == ["1", "1.4", "2", "2.8", "4"]
    alone = table_of(costs_of(_plan(sampling=1.0)))
    assert alone[0] == ["noise_multiplier", "ε"]
    by_row = [float(row[1]) for row in alone[1:]]
    assert by_row == sorted(by_row, reverse=True)


def test_key_counts_where_the_sensitivity_is_twice_the_clip() -> None:
    plan = _plan(sampling=1.0, neighbourhood="replace-one", key_multiplier=2.0, budget_epsilon=10.0)
    costs = costs_of(plan, noise_multipliers=[4.0])
    assert costs.cells[0].epsilon == costs.epsilon
    assert costs.noise_for_budget is not None
    spent = epsilon(plan.with_noise(costs.noise_for_budget / 2).releases(), plan.delta)
    assert spent == pytest.approx(10.0, rel=1e-3)
    assert "noise_multiplier 4" in dict(facts_of(costs))["mechanism"]


def test_budget_allows_what_spends_it() -> None:
    plan = _plan(budget_epsilon=1.5)
    costs = costs_of(plan)
    rounds = costs.rounds_within_budget
    noise = costs.noise_for_budget
    assert rounds is not None
    assert noise is not None
    assert epsilon(plan.releases(rounds), 1e-5) <= 1.5 < epsilon(plan.releases(rounds + 1), 1e-5)
    text = dict(facts_of(costs))["budget"]
    assert f"allows {rounds} rounds" in text
    printed = float(text.rpartition(" ")[2])
    assert noise <= printed <= noise * 1.001
    assert epsilon(plan.with_noise(printed).releases(), 1e-5) <= 1.5
    assert "budget" not in dict(facts_of(costs_of(_plan())))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "privacy-loss distributions"),
        ({"sampling": 1.0}, "closed form"),
        ({"skellam_l2": 100.0, "skellam_l1": 900.0}, "Rényi"),
    ],
)
def test_sheet_says_all_that_a_guarantee_needs(changes: dict[str, Any], words: str) -> None:
    plan = _plan(participations=20, **changes)
    costs = costs_of(plan, noise_multipliers=[2.0])
    page = sheet_of(costs, "digits").as_markdown()
    for fact in ("ε", "δ", "unit of privacy", "neighbourhood", "mechanism", "amplification", "composition"):
        assert f"- **{fact}**: " in page
    neighbours = "one client more or less, where the others take part in the same rounds"
    texts = plan.mechanism, plan.amplification, *plan.trust, *plan.not_covered, words, neighbours, "20 rounds at most"
    for text in texts:
        assert text in page
    kept = json.loads(json.dumps(sheet_of(costs, "digits").values))
    assert kept["epsilon"] == costs.epsilon
    assert kept["table"][0]["epsilon"] == costs.cells[0].epsilon
    assert math.isclose(kept["delta"], 1e-5)
    assert "budget_epsilon" not in kept
    assert sheet_of(replace(costs, rounds_within_budget=3), "digits").values["rounds_within_budget"] == 3
