"""Runs of a comparison that its folder holds: those that have finished, and those that have to go on or begin again."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fed.clients.fingerprint import data_sha256
from fed.clients.first_exchange import as_begun
from fed.config.experiment import Experiment
from fed.errors import InvalidInput, located
from fed.reports.summary import Record
from fed.server.resume import MAY_DIFFER, Parts, check_alike, check_parts
from fed.simulations.processes import PlannedRun
from fed.simulations.simulation import Simulation
from fed.simulations.standardization import standardized
from fed.storage.measured import run_as_measured
from fed.storage.run_folder import RunFolder
from fed.storage.run_reader import RunState, is_run, kept_run, summary_of

__all__ = ["sorted_out"]

_log = logging.getLogger(__name__)


def sorted_out(
    planned: Sequence[PlannedRun], given: Mapping[str, Any]
) -> tuple[list[tuple[PlannedRun, Record]], list[PlannedRun]]:
    """The runs that have finished, with their records, and the plans of all others.

    Of each variant, the data and code of one finished run are held to those of today; a run that goes on is held to
    them when it does.

    Args:
        planned: plans of all runs, each with its folder.
        given: parts given in Python, by the names of :func:`fed.simulate`'s parameters.

    Raises:
        InvalidInput: if a run has begun with another experiment, or with other parts, data or code.
    """
    finished: list[tuple[PlannedRun, Record]] = []
    to_do: list[PlannedRun] = []
    scored: dict[str, bool] = {}
    for run in planned:
        state = _state_of(run, given)
        if state is not RunState.FINISHED:
            to_do.append(replace(run, overwrites=True, resumes=state is not None))
            continue
        assert run.directory is not None
        experiment = as_begun(Experiment(**run.experiment), RunFolder.existing(run.directory).experiment())
        if run.name not in scored:
            with located(run.name):
                scored[run.name] = _checked(run, experiment, given)
        finished.append((run, run_as_measured(run.directory, experiment, has_scores=scored[run.name])))
    return finished, to_do


def _state_of(run: PlannedRun, given: Mapping[str, Any]) -> RunState | None:
    """State of a run; None where it has to begin: it has not begun yet, or its files cannot be read."""
    path = run.directory
    assert path is not None
    # The file that marks a run's folder is written first: a run that was killed then has not begun.
    if not is_run(path) or not (path / "experiment.yaml").exists():
        return None
    folder = RunFolder.existing(path)
    kept = kept_run(path)
    try:
        begun = folder.experiment()
        summary = summary_of(path)
    except InvalidInput as error:
        _log.warning("%s begins again: %s", path, error)
        return None
    if kept.state is RunState.UNREADABLE:
        _log.warning("%s begins again: %s", path, kept.reason)
        return None
    # A loss replaces the metrics too, unless the experiment names some.
    replaced = {*given, *(["metrics"] if {"loss", "metric"} & given.keys() else [])}
    check_alike(
        as_begun(Experiment(**run.experiment), begun).dump(),
        begun.dump(),
        where=str(path / "experiment.yaml"),
        may_differ={*MAY_DIFFER, "simulation", *replaced},
    )
    # A loss of power may cost lines of the metrics that the summary counts.
    if summary is not None and kept.rounds != summary.get("rounds"):
        return RunState.UNFINISHED
    return kept.state


def _checked(run: PlannedRun, experiment: Experiment, given: Mapping[str, Any]) -> bool:
    """True if the run had samples to score models on.

    Raises:
        InvalidInput: if it began with other data or code.
    """
    assert run.directory is not None
    experiment, data = standardized(experiment, given.get("data"))  # of a run that has ended it asks nobody
    simulation = Simulation(experiment, **{**given, "data": data})
    parts = Parts(simulation.prepared, data_sha256(simulation.data, simulation.held_out))
    check_parts(parts, RunFolder.existing(run.directory))
    return simulation.held_out is not None or simulation.prepared.recipe.test is not None
