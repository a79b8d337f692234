"""``fed.compare``: every variant of a comparison, with every seed; and its folder, with each run's own beneath it."""

import csv
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fed.aggregators.peer_rule import PeerRule
from fed.clients.data import FederatedData, load
from fed.clients.data.describe import partition_of
from fed.clients.scoring.measures import Loss, Metric, Metrics
from fed.config.comparison import Comparison, Repetition, repetition_text
from fed.config.experiment import Experiment
from fed.errors import InvalidInput
from fed.reports.client_scores import pooled
from fed.reports.html import comparison_report, comparison_svg
from fed.reports.population import Partition
from fed.reports.summary import ComparisonResult, Runs, has_finished, row_of
from fed.reports.text_tables import latex, markdown
from fed.simulations.processes import ComparisonObserver, Ended, PlannedRun, one_by_one, side_by_side
from fed.simulations.simulation import topology_of
from fed.storage.atomic_files import held, write_atomically
from fed.storage.comparison_reader import slugs
from fed.storage.run_folder import clear_run, environment, refuse_taken, to_json, written_to
from fed.vectors.randomness import Streams

if TYPE_CHECKING:
    import networkx as nx
    import numpy as np
    from numpy.typing import NDArray

    from fed.vectors.tensors import nn

__all__ = ["ComparisonFolder", "compare"]

_PARTITIONS = 4
"""Largest number of partitions that a report draws, of variants whose data differ."""
_GRAPHS = 8
"""Largest number of graphs of peers that a report draws."""


def compare(
    comparison: Comparison,
    *,
    data: FederatedData | None = None,
    model: "Callable[[], nn.Module] | None" = None,
    loss: Loss | None = None,
    metric: Metric | Metrics | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    jobs: int = 1,
    observer: ComparisonObserver | None = None,
) -> ComparisonResult:
    """Run every variant with every seed, and summarise them side by side.

    A run's results depend on neither ``jobs`` nor the order of the runs, to the bit, but for its wall time. A failed
    run is a row that says why; the others continue.

    Args:
        comparison: variants to compare, and the seeds.
        data: training data by client, in place of the experiments' own; None for those of the experiments.
        model: factory of modules, in place of the experiments' own models.
        loss: (output, target) → scalar, in place of the experiments' own.
        metric: (output, target) → number, reported as accuracy, or a mapping of names to several.
        output: folder for ``comparison.json``, ``.csv``, ``.md``, ``.tex`` and ``.svg``, ``report.html`` and each run's
            own folder, ``runs/<variant>/seed-<seed>``, with folds ``seed-<seed>-fold-<fold>``; None: nothing is
            written.
        overwrite: True if an earlier comparison in the folder is replaced.
        jobs: number of runs at a time, at least 1, each in a process of its own with one thread. A program that asks
            for more than one must call under ``if __name__ == "__main__":``, because those processes import it.
        observer: observer that is told of every run and round; None for none.

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
    _hold_written(comparison)
    if comparison.folds is not None and data is not None:
        raise InvalidInput(
            f"folds need data that the experiment names, got folds={comparison.folds} and data given in Python: name "
            "their source in data.kind, as python:package.module:name"
        )
    replaced = {name: None for name in ("data", "model", "loss") if given[name] is not None}
    comparison = comparison.model_copy(update={"base": {**comparison.base, **replaced}})
    folder = None if output is None else ComparisonFolder(Path(output), comparison.variants(), overwrite=overwrite)
    planned = list(_planned(comparison, folder))
    runs: Runs = {name: {} for name in comparison.variants()}
    if jobs == 1:
        running = one_by_one(planned, observer, **given)
    else:
        # The longest first: a long run that began last would be alone at the end.
        longest_first = sorted(planned, key=lambda run: -_work(Experiment(**run.experiment)))
        running = side_by_side(longest_first, jobs, observer)
    if folder:
        folder.begin()
    try:
        with closing(running) as ended:  # a generator left open keeps its processes until it is collected
            _gather(ended, runs, planned, observer)
    except BaseException as error:
        # A failure before the first run has ended leaves no results that would have to be overwritten.
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


def _hold_written(comparison: Comparison) -> None:
    """Refuse objects that no file of the comparison could name."""
    for name, variant in comparison.variants().items():
        if held := variant.objects():
            raise InvalidInput(
                f"experiments of a comparison must be ones that a file can hold, got {' and '.join(held)} of {name} "
                "given in Python as objects: name them as python:package.module:name, or give a loss or metrics to "
                "fed.compare"
            )


def _planned(comparison: Comparison, folder: "ComparisonFolder | None") -> Iterator[PlannedRun]:
    for name, experiment in comparison.variants().items():
        for repetition in comparison.repetitions():
            keys = comparison.repeated(experiment, repetition).given_keys()
            directory = folder.of_run(name, repetition) if folder else None
            yield PlannedRun(name, repetition, experiment=keys, directory=directory)


def _work(experiment: Experiment) -> int:
    """Work of a run: rounds times the clients that train in each."""
    rounds = experiment.rounds.make()
    algorithm = experiment.algorithm.make()
    clients = (experiment.data.clients if experiment.data else None) or sys.maxsize
    all_train = algorithm.primitive != "mean" or algorithm.pools_data
    trainees = clients if all_train else rounds.cohort_of(clients)
    return int(rounds.count * trainees)


def _gather(ended: Ended, runs: Runs, planned: list[PlannedRun], observer: ComparisonObserver | None) -> None:
    if observer:
        observer.begin([(run.name, run.repetition) for run in planned])
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


class ComparisonFolder:
    """Folder of a comparison.

    Args:
        path: path of the folder, which is made if it does not exist.
        variants: name → experiment of each variant.
        overwrite: True if an earlier comparison is replaced: its files are removed, all others stay.

    Raises:
        OutputExists: if the folder holds anything and ``overwrite`` is not given.
        InvalidInput: if there can be no such folder.
    """

    FILES = ("comparison.json", "comparison.csv", "comparison.md", "comparison.tex", "comparison.svg", "report.html")

    def __init__(self, path: Path, variants: Mapping[str, Experiment], *, overwrite: bool = False) -> None:
        self.path = path
        self._variants = variants
        self._slugs = slugs(variants)
        with written_to(path):
            # A comparison that was killed has no comparison.json yet.
            is_ours = (path / "comparison.json").is_file() or any(path.glob("runs/*/seed-*/environment.json"))
            refuse_taken(path, overwrite=overwrite and is_ours)

    def begin(self) -> None:
        """Make the folder, and remove an earlier comparison's files."""
        with written_to(self.path):
            for run in self.path.glob("runs/*/seed-*"):
                with held(run, "choose another --output"):  # another process may be writing to it
                    clear_run(run)
            for name in self.FILES:
                (self.path / name).unlink(missing_ok=True)
            # Inner folders first: only empty ones can be removed.
            for folder in (*self.path.glob("runs/*/seed-*"), *self.path.glob("runs/*"), self.path / "runs"):
                with suppress(OSError):  # it holds something that is not ours
                    folder.rmdir()
            self.path.mkdir(parents=True, exist_ok=True)

    def of_run(self, name: str, repetition: Repetition) -> Path:
        """The folder of a variant's run with a seed, or (seed, fold)."""
        return self.path / "runs" / self._slugs[name] / f"seed-{repetition_text(repetition)}"

    def write(self, result: ComparisonResult, data: FederatedData | None = None) -> None:
        """Write all files, each whole, and ``comparison.json`` last.

        Args:
            result: result of the comparison, finished or interrupted.
            data: data that were given in place of the experiments' own; None if none were.
        """
        picture = comparison_svg(result)
        if picture is not None:
            write_atomically(self.path / "comparison.svg", picture.encode())
        page = comparison_report(result, self._partitions(data), self._graphs(result), self._clients(result))
        write_atomically(self.path / "report.html", page.encode())
        write_atomically(self.path / "comparison.csv", _csv(result).encode())
        write_atomically(self.path / "comparison.md", markdown(result).encode())
        write_atomically(self.path / "comparison.tex", latex(result).encode())
        # Written last: fed report takes it for the sign that all is there.
        write_atomically(self.path / "comparison.json", (to_json(_contents(result), indent=2) + "\n").encode())

    def _graphs(self, result: ComparisonResult) -> "dict[str, nx.Graph[int]]":
        """Names of variants → the graph of their peers, each graph once, of those with finished runs."""
        import networkx as nx

        found: list[tuple[list[str], nx.Graph[int]]] = []
        for name, variant in self._variants.items():
            peers = next((run["summary"]["clients"] for run in result.runs[name].values() if has_finished(run)), None)
            rule = variant.algorithm.make()
            if peers is None or not isinstance(rule, PeerRule):
                continue
            topology = topology_of(rule, variant.topology, peers, Streams(variant.seed))
            if topology is None:
                continue
            graph = topology.graph(1)
            alike = next((names for names, other in found if nx.utils.graphs_equal(graph, other)), None)
            if alike is None:
                found.append(([name], graph))
            else:
                alike.append(name)
        return {", ".join(names): graph for names, graph in found[:_GRAPHS]}

    def _clients(self, result: ComparisonResult) -> "dict[str, NDArray[np.float64]]":
        """Names of variants → the last value of the first metric of each client, over all seeds that finished."""
        metric = result.metrics()[0]
        return {
            name: pooled((self.of_run(name, seed) for seed, run in by_seed.items() if has_finished(run)), metric.name)
            for name, by_seed in result.runs.items()
        }

    def _partitions(self, data: FederatedData | None) -> dict[str, Partition | None]:
        """Heading → samples by client, one for each section ``data`` that differs, with the first seed."""
        if data is not None:
            return {"Who holds what": partition_of(data)}
        sections: dict[str, tuple[str, Experiment]] = {}
        for name, variant in self._variants.items():
            if variant.data is not None:
                sections.setdefault(to_json(variant.data.model_dump(mode="json")), (name, variant))
        partitions: dict[str, Partition | None] = {}
        for name, variant in list(sections.values())[:_PARTITIONS]:
            heading = f"Who holds what: {name}" if len(sections) > 1 else "Who holds what"
            if variant.data is not None:
                partitions[heading] = partition_of(load(variant.data, variant.data_streams))
        return partitions


def _contents(result: ComparisonResult) -> dict[str, object]:
    return {
        "name": result.comparison.name,
        "status": result.status,
        "comparison": result.comparison.dump(),
        "rows": result.rows,
        "differences": {
            "baseline": result.comparison.baseline_in_force(),
            "metric": result.metrics()[0].name,
            "confidence": result.comparison.confidence,
            "to_the_baseline": {one.name: one.flat() for one in result.differences},
        },
        "runs": {
            name: {repetition_text(repetition): run["summary"] for repetition, run in runs.items()}
            for name, runs in result.runs.items()
        },
        "environment": environment(),
    }


def _csv(result: ComparisonResult) -> str:
    text = io.StringIO()
    differences = {one.name: one.flat() for one in result.differences}
    rows = [{**row, **differences.get(row["name"], {})} for row in result.rows]
    keys = dict.fromkeys(key for row in rows for key in row)  # some variants may have metrics that others lack
    writer = csv.DictWriter(text, list(keys), lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "seeds": " ".join(map(str, row["seeds"]))} for row in rows)
    return text.getvalue()
