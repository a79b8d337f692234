"""``fed privacy``: what a private run will cost, what a budget allows, and the sheet of its promise."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fed.cli.documents import read_experiment
from fed.cli.kinds import show_facts
from fed.cli.options import File, Settings
from fed.cli.tables import console, listed
from fed.errors import InvalidInput, OutputExists, os_errors_as
from fed.quantities import counted

if TYPE_CHECKING:
    import fed
    from fed.privacy.plan import PrivacyPlan
    from fed.privacy.sheet import Costs

__all__ = ["privacy"]

_SUFFIXES = (".md", ".json")


def privacy(
    file: File,
    settings: Settings = None,
    noise: Annotated[
        list[float] | None,
        typer.Option(metavar="Z", help="A noise multiplier for a row of the table. Repeatable.", min=0.0),
    ] = None,
    cohort: Annotated[
        list[float] | None,
        typer.Option(metavar="M", help="An expected cohort for a column of the table. Repeatable.", min=0.0),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(metavar="EPSILON", help="The ε to plan for; privacy.budget_epsilon unless given.", min=0.0),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of clients on the roster; that of the data unless given.", min=1),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="Write the sheet into this file as well: FILE.md or FILE.json."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Take the place of a file that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the sheet as JSON.")] = False,
) -> None:
    """Print what a private run will cost, what its budget allows, and what is promised to whom."""
    from fed.privacy.sheet import as_json as values_of
    from fed.privacy.sheet import as_markdown, costs_of

    _check_file(to, overwrite=overwrite)
    experiment = read_experiment(file, settings)
    plan = _plan_of(experiment, clients, file)
    if budget is not None:
        plan = replace(plan, budget_epsilon=_positive(budget, "--budget"))
    _check_cohorts(plan, cohort or ())
    costs = costs_of(
        plan,
        noise_multipliers=[_positive(value, "--noise") for value in noise or ()],
        cohorts=[_positive(value, "--cohort") for value in cohort or ()],
    )
    text = json.dumps(values_of(costs, experiment.name), indent=2, ensure_ascii=False)
    if to is not None:
        content = as_markdown(costs, experiment.name) if to.suffix == ".md" else f"{text}\n"
        with os_errors_as(InvalidInput, f"{to} cannot be written", "choose another --to"):
            to.write_text(content, encoding="utf-8")
    if as_json:
        typer.echo(text)
        return
    _show(costs)


def _check_file(to: Path | None, *, overwrite: bool) -> None:
    """Refuse a file that cannot take the sheet, before anything is computed."""
    if to is None:
        return
    if to.suffix not in _SUFFIXES:
        raise InvalidInput(f"--to must end in .md or .json, got {to}: choose one of them")
    if to.exists() and not overwrite:
        raise OutputExists(f"{to} exists: choose another --to, or pass --overwrite")


def _show(costs: "Costs") -> None:
    """Print the facts of a run, and the table of its costs."""
    from fed.privacy.sheet import facts_of, table_of

    facts = facts_of(costs)
    before = ["", *(name for name, _ in facts)]
    show_facts(("" if name == last else name, line) for last, (name, line) in zip(before, facts, strict=False))
    headings, *rows = table_of(costs)
    shown = listed(headings, rows)
    for column in shown.columns:
        column.justify = "right"
    out = console()
    out.print(f"\nε of {counted(costs.plan.rounds, 'round')}:")
    out.print(shown)


def _check_cohorts(plan: "PrivacyPlan", cohorts: Sequence[float]) -> None:
    if cohorts and plan.sampling == 1:
        raise InvalidInput("--cohort changes ε only where Poisson sampling amplifies the promise: leave it out")
    if cohorts and max(cohorts) > plan.clients:
        raise InvalidInput(
            f"--cohort must be at most the {plan.clients} clients, got {max(cohorts):g}: give a smaller one"
        )


def _positive(value: float, option: str) -> float:
    if not value > 0:
        raise InvalidInput(f"{option} must exceed 0, got {value:g}: give another")
    return value


def _plan_of(experiment: "fed.Experiment", clients: int | None, file: Path) -> "PrivacyPlan":
    """The plan of an experiment's run.

    Args:
        experiment: the experiment.
        clients: number of clients on the roster; None: that of the experiment's data, which are loaded.
        file: file of the experiment, named in the error.
    """
    from fed.privacy.kinds import privacy_of
    from fed.privacy.noise_for_epsilon import with_noise

    if privacy_of(experiment) is None:
        raise InvalidInput(
            f"{file} must have the section privacy, got none: write one, or give "
            "--set 'privacy={kind: central, clip: 1, noise_multiplier: 1, delta: 1e-5}'"
        )
    if clients is None:
        from fed.simulations.simulation import Simulation

        clients = Simulation(experiment).population
    chosen = privacy_of(with_noise(experiment, clients))
    assert chosen is not None
    plan = chosen.plan(experiment.rounds.make(), clients)
    return replace(plan, key_multiplier=chosen.multiplier_of_plan)
