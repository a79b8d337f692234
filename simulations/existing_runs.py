"""Comparison of runs that exist, each in its own folder, wherever and however it ran."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fed.config.comparison import Comparison, Repetition, seed_of
from fed.config.experiment import Experiment
from fed.errors import InvalidInput
from fed.reports.summary import ComparisonResult, Record, Runs, has_finished, row_of
from fed.server.resume import MAY_DIFFER
from fed.simulations.comparison_folder import ComparisonFolder
from fed.storage.measured import run_as_measured
from fed.storage.run_folder import RunFolder
from fed.storage.run_reader import RunState, is_run, metrics_lines, runs_below, state_of, summary_of

__all__ = ["compare_runs", "found"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kept:
    """A run that exists: its folder, and its experiment."""

    folder: Path
    experiment: Experiment

    @property
    def variant(self) -> dict[str, Any]:
        """The experiment's keys but for its name, its seeds and its fold, and those that change no result."""
        apart = {"name", "seed", "data_seed", "simulation", *(key for key in MAY_DIFFER if "." not in key)}
        keys = {key: value for key, value in self.experiment.dump().items() if key not in apart}
        if keys["data"] is not None:
            keys["data"] = {**keys["data"], "fold": None}
        return keys


def found(places: Sequence[str | Path]) -> list[Path]:
    """The folders of all runs in these places, in order, each once.

    Args:
        places: folders of runs, or folders that hold some, such as a comparison's.

    Raises:
        InvalidInput: if a place holds none, or there are fewer than two.
    """
    folders: dict[Path, Path] = {}
    for place in map(Path, places):
        of_it = [place] if is_run(place) else list(runs_below(place, lambda error: _log.warning("%s", error)))
        if not of_it:
            raise InvalidInput(f"{place} must hold runs, got none: give folders that fed simulate has written")
        for folder in of_it:
            folders.setdefault(folder.resolve(), folder)
    if len(folders) < 2:
        raise InvalidInput("a comparison of runs needs two of them, got one: give the folders of several runs")
    return list(folders.values())


def compare_runs(paths: Sequence[str | Path], *, output: str | Path, overwrite: bool = False) -> ComparisonResult:
    """Set runs that exist side by side, and write the report. The runs stay where they are, as they are.

    Runs whose experiments differ in their seed alone are one variant. A variant has the name of its experiment, or the
    name of its runs' folder where several experiments have one name.

    Args:
        paths: folders of the runs, or folders that hold some, such as a comparison's.
        output: folder of the comparison.
        overwrite: True if an earlier comparison in the folder is replaced.

    Raises:
        InvalidInput: if a place holds no run, two are the same run, none has finished, or one cannot be read.
    """
    output = Path(output)
    folders = found(paths)
    if inside := [folder for folder in folders if folder.resolve().is_relative_to(output.resolve())]:
        raise InvalidInput(f"{output} must be another folder than those of the runs, got {inside[0]} in it: choose one")
    runs = [_Kept(folder, RunFolder.existing(folder).experiment_to_read()) for folder in folders]
    groups: dict[str, list[_Kept]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.variant, sort_keys=True), []).append(run)
    by_name = dict(zip(_names(list(groups.values())), groups.values(), strict=True))
    what_varies = _what_varies([run.experiment for run in runs])
    folds = _folds(runs)
    places = {name: _places(of_it, what_varies, is_folded=folds is not None) for name, of_it in by_name.items()}
    experiments = {run.folder: run.experiment for run in runs}
    repetitions = [repetition for of_it in places.values() for repetition in of_it]
    keys: dict[str, Any] = {
        "name": "comparison of runs",
        "base": what_varies,
        "compare": [{"name": name, **of_it[0].variant} for name, of_it in by_name.items()],
        "seeds": sorted(set(map(seed_of, repetitions))),
        "vary": {"data_seed": "training", "seed": "data"}.get(next(iter(what_varies), ""), "both"),
        "folds": folds,
    }
    comparison = Comparison(**keys)
    _warn_of_other_data(places)
    records: Runs = {name: _records(of_it, experiments) for name, of_it in places.items()}
    if not any(has_finished(record) for of_it in records.values() for record in of_it.values()):
        raise InvalidInput("a comparison needs a run that has finished, got none: fed runs lists how each has ended")
    kinds: Mapping[str, Any] = {name: of_it[0].experiment.algorithm.kind for name, of_it in by_name.items()}
    rows = [row_of(name, kinds[name], records[name], list(places[name]), None) for name in records]
    result = ComparisonResult(comparison, rows, records, directory=output)
    folder = ComparisonFolder(output, comparison, overwrite=overwrite, places=places)
    with folder.held():
        folder.begin()
        folder.write(result)
    return result


def _names(groups: Sequence[Sequence[_Kept]]) -> list[str]:
    """A name for each variant: its experiment's, its folder's or its path, the first that tell all of them apart."""
    folders = [_folder_of(group, groups) for group in groups]
    for names in ([group[0].experiment.name for group in groups], [folder.name for folder in folders]):
        if len(set(names)) == len(names):
            return names
    return [*map(str, folders)]


def _folder_of(group: Sequence[_Kept], groups: Sequence[Sequence[_Kept]]) -> Path:
    """The folder that holds a variant's runs and no other's; else that of its first run."""
    first = group[0].folder
    own = [run.folder for run in group]
    others = [run.folder for other in groups if other is not group for run in other]
    for place in (first, *first.parents):
        if all(folder.is_relative_to(place) for folder in own):
            return first if any(folder.is_relative_to(place) for folder in others) else place
    return first


def _what_varies(experiments: Sequence[Experiment]) -> dict[str, int]:
    """Key and value of the seed that all runs share; empty where no run has a ``data_seed``."""
    data_seeds = {experiment.data_seed for experiment in experiments}
    seeds = {experiment.seed for experiment in experiments}
    if data_seeds == {None}:
        return {}
    if len(data_seeds) == 1:
        return {"data_seed": data_seeds.pop() or 0}
    if len(seeds) == 1 and None not in data_seeds:
        return {"seed": seeds.pop()}
    raise InvalidInput(
        "runs of a comparison must have one data_seed, or differ in it alone, got runs that differ in both: their "
        "differences would be those of the data too: leave some out"
    )


def _folds(runs: Sequence[_Kept]) -> int | None:
    """Number of folds that all runs are of; None without folds."""
    folds = {run.experiment.data.fold.of if run.experiment.data and run.experiment.data.fold else None for run in runs}
    if len(folds) > 1:
        raise InvalidInput("runs of a comparison must all be folds of one number, or none, got both: leave some out")
    return folds.pop()


def _places(runs: Sequence[_Kept], what_varies: Mapping[str, int], *, is_folded: bool) -> dict[Repetition, Path]:
    """Seed, or (seed, fold), of each run of a variant → its folder."""
    places: dict[Repetition, Path] = {}
    for run in runs:
        experiment = run.experiment
        seed = (experiment.data_seed or 0) if "seed" in what_varies else experiment.seed
        repetition: Repetition = seed
        if is_folded and experiment.data is not None and experiment.data.fold is not None:
            repetition = (seed, experiment.data.fold.number)
        if repetition in places:
            raise InvalidInput(
                f"{places[repetition]} and {run.folder} are runs of one experiment with one seed: leave one out"
            )
        places[repetition] = run.folder
    return dict(sorted(places.items()))


def _warn_of_other_data(places: Mapping[str, Mapping[Repetition, Path]]) -> None:
    """Say which variants had other data than the first with the same seed, where both runs know theirs."""
    known: dict[Repetition, tuple[str, str]] = {}
    for name, of_it in places.items():
        for repetition, folder in of_it.items():
            sha256 = RunFolder.existing(folder).parts("sha256").get("data")
            if not sha256:
                continue
            first, expected = known.setdefault(repetition, (name, sha256))
            if sha256 != expected:
                _log.warning("%s has other data than %s: their difference is that of the data, too", name, first)
                break


def _records(places: Mapping[Repetition, Path], experiments: Mapping[Path, Experiment]) -> dict[Repetition, Record]:
    """Records of the runs that have finished or failed; a run that was interrupted is missing."""
    found = {repetition: _record(folder, experiments[folder]) for repetition, folder in places.items()}
    return {repetition: record for repetition, record in found.items() if record is not None}


def _record(folder: Path, experiment: Experiment) -> Record | None:
    state = state_of(folder)
    lines = [line for line, _ in metrics_lines(folder)]
    if state is RunState.FINISHED:
        # Where no round has a score there was nothing to score models on.
        has_scores = any(line.get("test_loss") is not None for line in lines)
        return run_as_measured(folder, experiment, has_scores=has_scores)
    if state is RunState.FAILED:
        return {"metrics": lines, "summary": {"reason": "it has failed", **(summary_of(folder) or {})}}
    _log.warning("%s has not ended (it is %s), and is left out", folder, state.value)
    return None
