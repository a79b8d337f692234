"""``fed privacy``: what a private run will cost, what a budget allows, and the sheet of its promise."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fed.cli.documents import read_experiment
from fed.cli.kinds import show_facts
from fed.cli.options import File, Settings
from fed.cli.progress import display, saying_long_steps
from fed.cli.runs import note
from fed.cli.tables import console, listed
from fed.errors import InvalidInput, OutputExists, os_errors_as

if TYPE_CHECKING:
    import fed
    from fed.privacy.sheet import PrivacySheet

__all__ = ["privacy"]

_SUFFIXES = (".md", ".json")
_NO_COHORT = "--cohort changes ε only where Poisson sampling amplifies the promise: leave it out"


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Options of the command.

    Args:
        noises: noise multipliers of the table's rows.
        cohorts: expected cohorts of its columns.
        budget: ε to plan for; None: that of the experiment.
        clients: number of clients; None: that of the data.
        samples: numbers of samples of clients; empty: those of the data.
    """

    noises: tuple[float, ...]
    cohorts: tuple[float, ...]
    budget: float | None
    clients: int | None
    samples: tuple[int, ...]


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
    samples: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            help="Number of samples of a client, for privacy.unit sample; those of the data unless given. Repeatable.",
            min=1,
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="Write the sheet into this file as well: FILE.md or FILE.json."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Take the place of a file that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the sheet as JSON.")] = False,
) -> None:
    """Print what a private run will cost, what its budget allows, and what is promised to whom."""
    _check_file(to, overwrite=overwrite)
    experiment = read_experiment(file, settings)
    asked = _Asked(
        noises=tuple(_positive(value, "--noise") for value in noise or ()),
        cohorts=tuple(_positive(value, "--cohort") for value in cohort or ()),
        budget=None if budget is None else _positive(budget, "--budget"),
        clients=clients,
        samples=tuple(samples or ()),
    )
    with saying_long_steps(display()):
        sheet = _sheet(experiment, asked, file)
    text = json.dumps(sheet.values, indent=2, ensure_ascii=False)
    if to is not None:
        content = sheet.as_markdown() if to.suffix == ".md" else f"{text}\n"
        with os_errors_as(InvalidInput, f"{to} cannot be written", "choose another --to"):
            to.write_text(content, encoding="utf-8")
        note(f"sheet in {to}")
    if as_json:
        typer.echo(text)
        return
    _show(sheet)


def _check_file(to: Path | None, *, overwrite: bool) -> None:
    """Refuse a file that cannot take the sheet, before anything is computed."""
    if to is None:
        return
    if to.suffix not in _SUFFIXES:
        raise InvalidInput(f"--to must end in .md or .json, got {to}: choose one of them")
    if to.exists() and not overwrite:
        raise OutputExists(f"{to} exists: choose another --to, or pass --overwrite")


def _show(sheet: "PrivacySheet") -> None:
    """Print the facts of a run, and the tables of its costs."""
    before = ["", *(name for name, _ in sheet.facts)]
    show_facts(("" if name == last else name, line) for last, (name, line) in zip(before, sheet.facts, strict=False))
    out = console()
    for title, (headings, *rows) in sheet.tables.items():
        shown = listed(headings, rows)
        for column in shown.columns:
            column.justify = "right"
        out.print(f"\n{title}:")
        out.print(shown)


def _positive(value: float, option: str) -> float:
    if not value > 0:
        raise InvalidInput(f"{option} must exceed 0, got {value:g}: give another")
    return value


def _sheet(experiment: "fed.Experiment", asked: _Asked, file: Path) -> "PrivacySheet":
    """The sheet of an experiment's run.

    Args:
        experiment: the experiment.
        asked: options of the command.
        file: file of the experiment, named in errors.
    """
    from fed.privacy.kinds import privacy_of

    chosen = privacy_of(experiment)
    if chosen is None:
        raise InvalidInput(
            f"{file} must have the section privacy, got none: write one, or give "
            "--set 'privacy={kind: central, clip: 1, noise_multiplier: 1, delta: 1e-5}'"
        )
    if chosen.unit == "sample":
        return _sheet_of_samples(experiment, asked)
    if asked.samples:
        raise InvalidInput("--samples is for privacy.unit sample, got unit client: leave it out")
    return _sheet_of_clients(experiment, asked)


def _sheet_of_clients(experiment: "fed.Experiment", asked: _Asked) -> "PrivacySheet":
    """The sheet of a run whose clients are protected."""
    from fed.privacy.kinds import privacy_of
    from fed.privacy.noise_for_epsilon import with_noise
    from fed.privacy.sheet import costs_of, sheet_of

    clients = asked.clients
    if clients is None:
        from fed.simulations.simulation import Simulation

        clients = Simulation(experiment).population
    chosen = privacy_of(with_noise(experiment, clients))
    assert chosen is not None
    plan = chosen.plan(experiment.rounds.make(), clients)
    plan = replace(plan, key_multiplier=chosen.key_multiplier, budget_epsilon=asked.budget or plan.budget_epsilon)
    if asked.cohorts and plan.sampling == 1:
        raise InvalidInput(_NO_COHORT)
    if asked.cohorts and max(asked.cohorts) > plan.clients:
        raise InvalidInput(
            f"--cohort must be at most the {plan.clients} clients, got {max(asked.cohorts):g}: give a smaller one"
        )
    costs = costs_of(plan, noise_multipliers=asked.noises, cohorts=asked.cohorts)
    return sheet_of(costs, experiment.name)


def _sheet_of_samples(experiment: "fed.Experiment", asked: _Asked) -> "PrivacySheet":
    """The sheet of a run whose clients' samples are protected."""
    from fed.clients.training.private_costs import plans_of_clients
    from fed.privacy.kinds import privacy_of
    from fed.privacy.noise_for_epsilon import with_noise
    from fed.privacy.sample_sheet import sample_costs_of, sample_sheet_of

    if asked.cohorts:
        raise InvalidInput(_NO_COHORT)
    sizes = _sizes(experiment, asked)
    population = asked.clients or len(sizes)
    told = experiment if asked.samples and asked.clients is None else with_noise(experiment, population)
    plans = plans_of_clients(told, {*sizes.values()})
    if asked.budget is not None:
        plans = {size: replace(plan, budget_epsilon=asked.budget) for size, plan in plans.items()}
    chosen = privacy_of(experiment)
    assert chosen is not None
    costs = sample_costs_of(plans, sizes, noise_multipliers=asked.noises, target=chosen.epsilon)
    return sample_sheet_of(costs, experiment.name)


def _sizes(experiment: "fed.Experiment", asked: _Asked) -> dict[int | str, int]:
    """Client → number of its samples, as the options or the experiment's data say."""
    if asked.samples:
        return {f"{number} samples": number for number in asked.samples}
    if experiment.data is None:
        raise InvalidInput(
            "data: null says no client's number of samples, by which privacy.unit sample costs it: give --samples"
        )
    from fed.simulations.simulation import Simulation

    data = Simulation(experiment).data
    return {client: data.size_of(client) for client in data.clients}
