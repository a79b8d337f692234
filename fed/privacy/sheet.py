"""Sheet of a private run: what it costs and what is promised to whom, in the terms of NIST SP 800-226.

Near et al., "Guidelines for Evaluating Differential Privacy Guarantees", NIST SP 800-226, 2025.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fed.privacy.accounting import epsilon, noise_multiplier_for, rounds_within
from fed.privacy.plan import PrivacyPlan
from fed.quantities import counted, epsilon_text

__all__ = [
    "Cell",
    "Costs",
    "PrivacySheet",
    "costs_of",
    "facts_of",
    "near",
    "sheet_of",
    "table_of",
    "upward",
    "values_of",
]

_NOISE_FACTORS = (0.5, 0.7, 1.4, 2.0)
_COHORT_FACTORS = (0.5, 1.0, 2.0, 4.0)
_MOST_ROUNDS = 1_000_000
"""Rounds beyond which no budget is followed."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """ε of a run with another noise multiplier and cohort.

    Args:
        noise_multiplier: value of the experiment's key, > 0.
        cohort: expected number of clients of a round; None where ε does not depend on it.
        epsilon: ε of all rounds.
    """

    noise_multiplier: float
    cohort: float | None
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a plan, and of others near it.

    Args:
        plan: the plan.
        epsilon: ε of all its rounds.
        cells: ε for each noise multiplier and, within it, each cohort.
        rounds_within_budget: largest number of rounds that the budget allows; None without a budget.
        noise_for_budget: smallest value of the key ``noise_multiplier`` with which all rounds stay within the budget;
            None without a budget, or where there is none.
    """

    plan: PrivacyPlan
    epsilon: float
    cells: tuple[Cell, ...]
    rounds_within_budget: int | None = None
    noise_for_budget: float | None = None


@dataclass(frozen=True, kw_only=True)
class PrivacySheet:
    """Sheet of a run, to be printed or written.

    Args:
        name: name of the experiment.
        facts: names and texts of the lines.
        tables: title → rows, the headings first.
        values: all of it, as values that JSON has.
    """

    name: str
    facts: tuple[tuple[str, str], ...]
    tables: Mapping[str, Sequence[Sequence[str]]]
    values: Mapping[str, Any]

    def as_markdown(self) -> str:
        """The sheet as a page in Markdown."""
        lines = [
            f"# Differential privacy of {self.name}",
            "",
            "In the terms of NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees.",
            "",
            *(f"- **{fact}**: {text}" for fact, text in self.facts),
        ]
        for title, (headings, *rows) in self.tables.items():
            lines += ["", f"## {title}", "", f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
            lines += [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join(lines) + "\n"


def costs_of(plan: PrivacyPlan, noise_multipliers: Sequence[float] = (), cohorts: Sequence[float] = ()) -> Costs:
    """Costs of a plan, and of all pairs of a noise multiplier and a cohort.

    Args:
        plan: the plan.
        noise_multipliers: values > 0 of the key ``noise_multiplier``, for the rows; some near the plan's unless given.
        cohorts: expected number of clients of each column; some near the plan's unless given. Where ε does not
            depend on the cohort there is one column.
    """
    noises = sorted(set(noise_multipliers)) or near([plan.noise_multiplier * plan.key_multiplier])
    columns: list[float | None] = [None]
    if plan.sampling < 1 and plan.clients > 0:
        usual = [plan.cohort, *(max(1.0, float(round(plan.cohort * factor))) for factor in _COHORT_FACTORS)]
        columns = [*sorted({cohort for cohort in (cohorts or usual) if cohort <= plan.clients})]
    budget = plan.budget_epsilon
    return Costs(
        plan=plan,
        epsilon=epsilon(plan.releases(), plan.delta),
        cells=tuple(_cell(plan, noise, cohort) for noise in noises for cohort in columns),
        rounds_within_budget=None if budget is None else rounds_within(plan, budget, most=_MOST_ROUNDS),
        noise_for_budget=None if budget is None else _noise_for(plan, budget),
    )


def _cell(plan: PrivacyPlan, noise_multiplier: float, cohort: float | None) -> Cell:
    other = plan.with_noise(noise_multiplier / plan.key_multiplier)
    if cohort is not None:
        other = other.with_cohort(cohort)
    return Cell(noise_multiplier=noise_multiplier, cohort=cohort, epsilon=epsilon(other.releases(), plan.delta))


def _noise_for(plan: PrivacyPlan, budget: float) -> float | None:
    try:
        return noise_multiplier_for(plan, budget) * plan.key_multiplier
    except ValueError:
        return None


def near(noise_multipliers: Sequence[float]) -> list[float]:
    """Noise multipliers, and some below the least and above the largest of them, in ascending order."""
    below = [_rounded(min(noise_multipliers) * factor) for factor in _NOISE_FACTORS if factor < 1]
    above = [_rounded(max(noise_multipliers) * factor) for factor in _NOISE_FACTORS if factor > 1]
    return sorted({*below, *noise_multipliers, *above})


def _rounded(value: float) -> float:
    """A number to two digits."""
    return float(f"{value:.2g}")


def facts_of(costs: Costs) -> list[tuple[str, str]]:
    """Names and texts of the sheet's lines: the promise, the mechanism, the trust model, and what is left out."""
    plan = costs.plan
    unit = "all data of one client" if plan.unit == "client" else "one sample of one client"
    # A cohort of a fixed size would have another client in its place.
    same_rounds = ", where the others take part in the same rounds" if plan.unit == "client" else ""
    neighbours = {
        "add-or-remove-one": f"data sets with {unit} more or less{same_rounds}",
        "replace-one": f"data sets in which {unit} is replaced by other data",
    }
    facts = [
        ("ε", f"{epsilon_text(costs.epsilon)} for {_rounds(plan.rounds)}"),
        ("δ", f"{plan.delta:g}"),
        ("unit of privacy", unit),
        ("neighbourhood", f"{plan.neighbourhood}: {neighbours[plan.neighbourhood]}"),
        ("mechanism", f"{plan.mechanism}; noise_multiplier {plan.noise_multiplier * plan.key_multiplier:.4g}"),
        ("amplification", plan.amplification),
        ("composition", _composition(plan)),
    ]
    if plan.participations is not None and plan.participations < plan.rounds:
        facts.append(("participation", f"a unit takes part in {_rounds(plan.participations)} at most"))
    if plan.budget_epsilon is not None:
        facts.append(("budget", _budget(costs)))
    facts += [("trust model", line) for line in plan.trust]
    facts += [("not covered", line) for line in plan.not_covered]
    return facts


def _rounds(count: int) -> str:
    return counted(count, "round")


def _composition(plan: PrivacyPlan) -> str:
    if plan.skellam_l2 is not None:
        return "Rényi divergences of Skellam noise, added up and converted: an upper bound on ε"
    if plan.sampling < 1:
        return "privacy-loss distributions, rounded upward (package dp-accounting), within 0.1 % of the exact ε"
    return "closed form of the Gaussian mechanism, exact"


def _budget(costs: Costs) -> str:
    text = f"ε = {costs.plan.budget_epsilon:g} allows {_rounds(costs.rounds_within_budget or 0)} at this noise"
    if costs.noise_for_budget is None:
        return text
    return f"{text}, or {_rounds(costs.plan.rounds)} at noise_multiplier {upward(costs.noise_for_budget)}"


def upward(noise_multiplier: float) -> str:
    """A noise multiplier to four digits, rounded up, so that it spends no more."""
    unit = 10.0 ** (math.floor(math.log10(noise_multiplier)) - 3)
    return f"{math.ceil(noise_multiplier / unit - 1e-9) * unit:.12g}"


def table_of(costs: Costs) -> list[list[str]]:
    """Rows of the table of ε, the headings first: a row for each noise multiplier, a column for each cohort."""
    cohorts = list(dict.fromkeys(cell.cohort for cell in costs.cells))
    headings = ["ε" if cohort is None else f"{cohort:g} clients" for cohort in cohorts]
    rows: dict[float, list[str]] = {}
    for cell in costs.cells:
        rows.setdefault(cell.noise_multiplier, []).append(epsilon_text(cell.epsilon))
    return [["noise_multiplier", *headings], *([f"{noise:.4g}", *texts] for noise, texts in rows.items())]


def sheet_of(costs: Costs, name: str) -> PrivacySheet:
    """The sheet of a run.

    Args:
        costs: costs of its plan.
        name: name of the experiment.
    """
    values = {
        "experiment": name,
        "epsilon": costs.epsilon,
        **values_of(costs.plan),
        "rounds_within_budget": costs.rounds_within_budget,
        "noise_for_budget": costs.noise_for_budget,
        "table": [asdict(cell) for cell in costs.cells],
    }
    title = f"ε of {_rounds(costs.plan.rounds)}"
    return PrivacySheet(name=name, facts=tuple(facts_of(costs)), tables={title: table_of(costs)}, values=values)


def values_of(plan: PrivacyPlan) -> dict[str, Any]:
    """Values of a plan that are given, as JSON has them."""
    values = {key: value for key, value in asdict(plan).items() if value not in (None, ())}
    return {**values, "noise_multiplier": plan.noise_multiplier * plan.key_multiplier}
