"""``fed.compare``: every variant of a comparison, with every seed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import nn

from fed.clients.data import FederatedData
from fed.clients.evaluation import Metric
from fed.clients.training.losses import Loss
from fed.config.comparison import Comparison
from fed.config.experiment import Experiment
from fed.errors import InvalidInput
from fed.reports.summary import ComparisonResult, Runs, row_of
from fed.simulations.comparison_folder import ComparisonFolder
from fed.simulations.processes import ComparisonObserver, Ended, PlannedRun, one_by_one, side_by_side

__all__ = ["compare"]


def compare(
    comparison: Comparison,
    *,
    data: FederatedData | None = None,
    model: Callable[[], nn.Module] | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    jobs: int = 1,
    observer: ComparisonObserver | None = None,
) -> ComparisonResult:
    """Run every variant with every seed, and summarise them side by side.

    A run's results depend on neither ``jobs`` nor the order of the runs, to the bit, but for its wall time. A failed
    run
    is a row that says why; the others continue.

    Args:
        comparison: what to compare.
        data: in place of the experiments' own data.
        model: makes the model, in place of the experiments' own.
        loss: (output, target) → scalar.
        metric: (output, target) → number, in place of accuracy.
        output: a folder for ``comparison.json``, ``comparison.csv``, ``comparison.svg``, ``report.html`` and each
            run's own folder, ``runs/<variant>/seed-<seed>``; None: nothing is written.
        overwrite: take the place of an earlier comparison.
        jobs: how many runs at a time, each in a process of its own with one thread. A program that asks for more than
            one must call under ``if __name__ == "__main__":``, because those processes import it.
        observer: told of every run and round.

    Raises:
        InvalidInput: if the folder, or what an experiment names, cannot be used.
        KeyboardInterrupt: on Ctrl-C; what was done by then is in the folder, and no process is left.

    Example:
        >>> import fed
        >>> base = {"rounds": {"count": 1, "cohort": 2}, "data": {"clients": 10}}
        >>> result = fed.compare(fed.Comparison(base=base, grid={"local.lr": [0.1, 0.01]}))
        >>> [row["name"] for row in result.rows]
        ['local.lr=0.1', 'local.lr=0.01']
    """
    given = {"data": data, "model": model, "loss": loss, "metric": metric}
    _hold_jobs(jobs, [name for name, value in given.items() if value is not None])
    replaced = {name: None for name in ("data", "model") if given[name] is not None}
    comparison = comparison.model_copy(update={"base": {**comparison.base, **replaced}})
    folder = None if output is None else ComparisonFolder(Path(output), comparison.variants(), overwrite=overwrite)
    planned = list(_planned(comparison, folder))
    runs: Runs = {name: {} for name in comparison.variants()}
    if jobs == 1:
        running = one_by_one(planned, observer, **given)
    else:  # no long run begins last and keeps others waiting
        running = side_by_side(sorted(planned, key=lambda run: -_work(Experiment(**run.experiment))), jobs, observer)
    if folder:
        folder.begin()
    try:
        with closing(running) as ended:  # a generator left open keeps its processes until it is collected
            _gather(ended, runs, planned, observer)
    except BaseException as error:
        if folder and (any(runs.values()) or isinstance(error, KeyboardInterrupt)):
            folder.write(_result(comparison, runs, "interrupted", folder.path), data)
        raise
    result = _result(comparison, runs, "finished", folder.path if folder else None)
    if folder:
        folder.write(result, data)
    return result


def _hold_jobs(jobs: int, given: list[str]) -> None:
    if jobs < 1:
        raise InvalidInput(f"jobs must be at least 1, got {jobs}")
    if jobs > 1 and given:
        raise InvalidInput(
            f"jobs must be 1 with {' and '.join(given)} given in Python, got jobs={jobs}: leave jobs out; "
            "data and model may be named in the experiment instead, as python:package.module:name"
        )


def _planned(comparison: Comparison, folder: ComparisonFolder | None) -> Iterator[PlannedRun]:
    for name, experiment in comparison.variants().items():
        for seed in comparison.seeds:
            directory = folder.of_run(name, seed) if folder else None
            overwrite = folder is not None and folder.overwrite
            yield PlannedRun(name, seed, experiment.override({"seed": seed}).dump(), directory, overwrite)


def _work(experiment: Experiment) -> int:
    """Rounds times the clients that train in each."""
    rounds, algorithm = experiment.rounds.make(), experiment.algorithm.make()
    clients = (experiment.data.clients if experiment.data else None) or sys.maxsize
    all_train = algorithm.primitive != "mean" or algorithm.pools_data
    return int(rounds.count * (clients if all_train else rounds.cohort_of(clients)))


def _gather(ended: Ended, runs: Runs, planned: list[PlannedRun], observer: ComparisonObserver | None) -> None:
    if observer:
        observer.begin([(run.name, run.seed) for run in planned])
    for run, record in ended:
        runs[run.name][run.seed] = record
        if observer:
            observer.end(run.name, run.seed, record["summary"])


def _result(comparison: Comparison, runs: Runs, status: str, directory: Path | None) -> ComparisonResult:
    kinds: dict[str, Any] = {name: variant.algorithm.kind for name, variant in comparison.variants().items()}
    target = comparison.target_accuracy
    rows = [row_of(name, kinds[name], by_seed, comparison.seeds, target) for name, by_seed in runs.items()]
    in_order = {name: dict(sorted(by_seed.items())) for name, by_seed in runs.items()}
    return ComparisonResult(comparison, rows, in_order, status, directory)
