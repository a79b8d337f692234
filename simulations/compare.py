"""``fed.compare``: every variant of a comparison, with every seed."""

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fed.clients.data import FederatedData
from fed.clients.scoring.measures import Loss, Metric, Metrics
from fed.config.comparison import Comparison, repetition_text
from fed.config.experiment import Experiment, check_given_once
from fed.errors import InvalidInput, is_interrupt, located
from fed.reports.summary import ComparisonResult, Runs, row_of
from fed.server.tracking import RunLabel, trackings_of
from fed.simulations.choice import leave_rerun
from fed.simulations.comparison_folder import ComparisonFolder
from fed.simulations.comparison_tracking import group_of, track
from fed.simulations.kept_runs import sorted_out
from fed.simulations.processes import ComparisonObserver, Ended, PlannedRun, jobs_of, one_by_one, side_by_side
from fed.simulations.ray_runs import on_ray, section_of

if TYPE_CHECKING:
    from fed.vectors.tensors import nn

__all__ = ["compare"]


def compare(
    comparison: Comparison,
    *,
    data: FederatedData | None = None,
    model: "Callable[[], nn.Module] | None" = None,
    loss: Loss | None = None,
    metric: Metric | Metrics | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    jobs: int | Literal["auto"] | None = None,
    observer: ComparisonObserver | None = None,
) -> ComparisonResult:
    """Run every variant with every seed, and summarise them side by side.

    A run's results depend on neither ``jobs`` nor the order of the runs, to the bit, but for its wall time. A failed
    run is a row that says why; the others continue.

    Args:
        comparison: variants to compare, and the seeds.
        data: training data by client, where the experiments name none; None for those of the experiments.
        model: factory of modules, where the experiments name none.
        loss: (output, target) → scalar, where the experiments name none.
        metric: (output, target) → number, reported as accuracy, or a mapping of names to several.
        output: folder for ``comparison.json``, ``.csv``, ``.md``, ``.tex`` and ``.svg``, ``report.html`` and each run's
            own folder, ``runs/<variant>/seed-<seed>``, with folds ``seed-<seed>-fold-<fold>``; None: nothing is
            written.
        overwrite: True if an earlier comparison in the folder is replaced.
        resume: True if the comparison that the folder holds goes on. Runs that have finished are taken from it. Others
            resume from their newest checkpoint, or begin again without one; so do those that had failed. The result is
            that of an undisturbed comparison, to the bit, but for wall time. Data, model, loss and metric that were
            given must be given again.
        jobs: number of runs at a time, at least 1, each in a process of its own with one thread; "auto": one for each
            core, at most four for each GPU that trains, or 1 where a part given in Python cannot be pickled; None: the
            comparison's own, or 1. Where all variants have the same executor ray, more than one means runs on the nodes
            of its cluster, and "auto" as many as there is room for. A program that asks for more than one must call
            under ``if __name__ == "__main__":``, because those processes import it.
        observer: observer that is told of every run and round; None for none.

    Raises:
        InvalidInput: if the folder, or what an experiment names, cannot be used, or the comparison to resume is another
            than the folder's, or began with other data or code.
        RunFailed: if there is no room for the results; the runs are kept, and the comparison can be resumed.
        KeyboardInterrupt: on Ctrl-C; what was done by then is in the folder, and no process is left.

    Example:
        >>> import fed
        >>> base = {"rounds": {"count": 1, "cohort": 2}, "data": {"clients": 10}}
        >>> result = fed.compare(fed.Comparison(base=base, grid={"local.lr": [0.1, 0.01]}))
        >>> [row["name"] for row in result.rows]
        ['local.lr=0.1', 'local.lr=0.01']
    """
    leave_rerun()  # without a main guard every process for runs side by side runs this line
    given = {"data": data, "model": model, "loss": loss, "metric": metric}
    given = {name: part for name, part in given.items() if part is not None}
    _hold_written(comparison)
    _hold_tracked(comparison, output)
    if comparison.folds is not None and data is not None:
        raise InvalidInput(
            f"folds need data that the experiment names, got folds={comparison.folds} and data given in Python: name "
            "their source in data.kind, as python:package.module:name"
        )
    for name, variant in comparison.variants().items():
        with located(name):
            check_given_once(variant, given)
    replaced = {"metrics" if name == "metric" else name for name in given}
    without = {name: None for name in ("data", "model", "loss") if name in replaced}
    comparison = comparison.model_copy(update={"base": {**comparison.base, **without}})
    asked = jobs if jobs is not None else comparison.jobs or 1
    processes = jobs_of(asked, given, {variant.simulation.device for variant in comparison.variants().values()})
    cluster = section_of(comparison) if asked != 1 else None
    folder = _folder(comparison, replaced, output, overwrite=overwrite, resume=resume)
    with contextlib.ExitStack() as stack:
        if folder:
            # Until the end: a second comparison in this folder ends at once.
            stack.enter_context(folder.held())
        planned = list(_planned(comparison, folder))
        runs: Runs = {name: {} for name in comparison.variants()}
        if resume:
            ended, planned = sorted_out(planned, given)
            for run, record in ended:
                runs[run.name][run.repetition] = record
        if observer:
            # Before the folder is touched, so that what it finds wrong costs no earlier comparison.
            observer.begin([(run.name, run.repetition) for run in planned])
        if folder:
            folder.begin()
        if cluster is None or not planned:
            running = _running(planned, processes, given, observer)
        else:
            shared = folder.plan if folder else None
            most = None if asked == "auto" else processes
            running = on_ray(_longest_first(planned), cluster, most, observer, shared, **given)
        # A generator left open keeps its processes until it is collected.
        ended_later = stack.enter_context(contextlib.closing(running))
        try:
            _gather(ended_later, runs, observer)
        except BaseException as error:
            # A failure before the first run has ended leaves no results that would have to be overwritten.
            if folder and (any(runs.values()) or is_interrupt(error)):
                ended_later.close()
                folder.write(_result(comparison, runs, "interrupted", folder.path), data)
            raise
        result = _result(comparison, runs, "finished", folder.path if folder else None)
        if folder:
            folder.write(result, data)
        track(result)
        return result


def _folder(
    comparison: Comparison, replaced: Collection[str], output: str | Path | None, *, overwrite: bool, resume: bool
) -> ComparisonFolder | None:
    if output is None:
        if resume:
            raise InvalidInput("resume needs the folder of a comparison, got none: give fed.compare(…, output=…)")
        return None
    return ComparisonFolder(Path(output), comparison, replaced, overwrite=overwrite, resume=resume)


def _hold_written(comparison: Comparison) -> None:
    """Refuse objects that no file of the comparison could name."""
    for name, variant in comparison.variants().items():
        if held := variant.objects():
            raise InvalidInput(
                f"experiments of a comparison must be ones that a file can hold, got {' and '.join(held)} of {name} "
                "given in Python as objects: name them as python:package.module:name, or give a loss or metrics to "
                "fed.compare"
            )


def _hold_tracked(comparison: Comparison, output: str | Path | None) -> None:
    """Refuse trackers that cannot track a run, before any run begins."""
    for name, variant in comparison.variants().items():
        with located(name):
            trackings_of(variant, None if output is None else Path(output))


def _planned(comparison: Comparison, folder: "ComparisonFolder | None") -> Iterator[PlannedRun]:
    for name, experiment in comparison.variants().items():
        for repetition in comparison.repetitions():
            keys = comparison.repeated(experiment, repetition).given_keys()
            directory = folder.of_run(name, repetition) if folder else None
            group = group_of(comparison, folder.path if folder else None)
            part = RunLabel(f"{name} seed {repetition_text(repetition, ' ')}", group, {"variant": name})
            yield PlannedRun(name, repetition, experiment=keys, directory=directory, part=part)


def _work(experiment: Experiment) -> int:
    """Work of a run: rounds times the clients that train in each."""
    rounds = experiment.rounds.make()
    algorithm = experiment.algorithm.make()
    clients = (experiment.data.clients if experiment.data else None) or sys.maxsize
    all_train = algorithm.primitive != "mean" or algorithm.pools_data
    trainees = clients if all_train else rounds.cohort_of(clients)
    return int(rounds.count * trainees)


def _running(
    planned: Sequence[PlannedRun], processes: int, given: Mapping[str, Any], observer: ComparisonObserver | None
) -> Ended:
    """Runs as they end: one after the other in this process, or side by side in others."""
    if processes == 1:
        return one_by_one(planned, observer, **given)
    return side_by_side(_longest_first(planned), processes, observer, **given)


def _longest_first(planned: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Runs in an order in which none that takes long is alone at the end."""
    return sorted(planned, key=lambda run: -_work(Experiment(**run.experiment)))


def _gather(ended: Ended, runs: Runs, observer: ComparisonObserver | None) -> None:
    for run, record in ended:
        runs[run.name][run.repetition] = record
        if observer:
            observer.end(run.name, run.repetition, record["summary"])


def _result(comparison: Comparison, runs: Runs, status: str, directory: Path | None) -> ComparisonResult:
    kinds: dict[str, Any] = {name: variant.algorithm.kind for name, variant in comparison.variants().items()}
    repetitions = comparison.repetitions()
    target = comparison.target
    rows = [row_of(name, kinds[name], records, repetitions, target) for name, records in runs.items()]
    in_order = {name: dict(sorted(by_seed.items())) for name, by_seed in runs.items()}
    return ComparisonResult(comparison, rows, in_order, status=status, directory=directory)
