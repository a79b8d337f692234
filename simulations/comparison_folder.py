"""Folder of a comparison: its description, its results, and each run's own folder beneath it."""

import csv
import io
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fed.aggregators.peer_rule import PeerRule
from fed.clients.data import FederatedData, load
from fed.clients.data.describe import partition_of
from fed.config import yaml
from fed.config.comparison import Comparison, Repetition, repetition_text
from fed.errors import InvalidExperiment, InvalidInput, RunFailed, os_errors_as
from fed.reports.client_scores import pooled
from fed.reports.html import comparison_report, comparison_svg
from fed.reports.population import Partition
from fed.reports.summary import ComparisonResult, has_finished
from fed.reports.text_tables import latex, markdown
from fed.server.resume import MAY_DIFFER, check_alike
from fed.simulations.simulation import topology_of
from fed.storage.atomic_files import LOCK, held, unfinished, write_atomically
from fed.storage.comparison_reader import slugs
from fed.storage.run_folder import clear_run, environment, refuse_taken, to_json, written_to
from fed.vectors.randomness import Streams

if TYPE_CHECKING:
    import networkx as nx
    import numpy as np
    from numpy.typing import NDArray

    from fed.config.experiment import Experiment

__all__ = ["ComparisonFolder", "kept_comparison"]

_PARTITIONS = 4
"""Largest number of partitions that a report draws, of variants whose data differ."""
_GRAPHS = 8
"""Largest number of graphs of peers that a report draws."""
_PLAN = "comparison.yaml"
_GIVEN = ("data", "model", "loss", "metrics")
"""Sections in whose place parts may be given in Python."""


class ComparisonFolder:
    """Folder of a comparison.

    Args:
        path: path of the folder, which is made if it does not exist.
        comparison: comparison that is run.
        replaced: sections of its experiments in whose place parts are given in Python.
        overwrite: True if an earlier comparison is replaced: its files are removed, all others stay.
        resume: True if the comparison that the folder holds goes on.
        places: variant → seed, or (seed, fold) → folder of the run, where the runs exist already, elsewhere; None: they
            are beneath this folder.

    Raises:
        OutputExists: if the folder holds anything and neither ``overwrite`` nor ``resume`` is given.
        InvalidInput: if there can be no such folder, or it holds no comparison to resume.
    """

    FILES = (
        *(_PLAN, "comparison.json", "comparison.csv", "comparison.md", "comparison.tex", "comparison.svg"),
        *("report.html", "tracking.json"),
    )

    def __init__(
        self,
        path: Path,
        comparison: Comparison,
        replaced: Collection[str] = (),
        *,
        overwrite: bool = False,
        resume: bool = False,
        places: Mapping[str, Mapping[Any, Path]] | None = None,
    ) -> None:
        self.path = path
        self._places = places
        self._comparison = comparison
        self._variants = comparison.variants()
        self._replaced = frozenset(replaced)
        self._slugs = slugs(self._variants)
        self._overwrite = overwrite
        self._resume = resume
        self._hold_usable()

    def _hold_usable(self) -> None:
        if self._resume:
            self._hold_same()
            return
        path = self.path
        with written_to(path):
            # A lock and the remains of a killed process are no comparison: the folder counts as empty.
            if path.is_dir() and set(path.iterdir()) <= {*unfinished(path, self.FILES), path / LOCK}:
                return
            # A comparison that was killed has no comparison.json yet.
            is_ours = any((path / name).is_file() for name in (_PLAN, "comparison.json"))
            is_ours = is_ours or any(path.glob("runs/*/seed-*/environment.json"))
            refuse_taken(path, overwrite=self._overwrite and is_ours)

    def _hold_same(self) -> None:
        """Refuse to go on with another comparison than the folder's."""
        kept = kept_comparison(self.path)
        where = str(self.path / _PLAN)
        now = self._comparison
        self._hold_same_parts(kept)
        for what, ours, theirs in (
            ("variants", [*self._variants], [*kept.variants()]),
            ("seeds", now.seeds, kept.seeds),
            ("vary", now.vary, kept.vary),
            ("folds", now.folds, kept.folds),
        ):
            if ours != theirs:
                raise InvalidExperiment(
                    f"a comparison is resumed as it began, but {what} are {theirs} in {where}, got {ours}: take that "
                    "back, or run the comparison anew in another folder"
                )
        for name, variant in kept.variants().items():
            check_alike(
                self._variants[name].dump(),
                variant.dump(),
                where=f"{where} for {name}",
                may_differ={*MAY_DIFFER, *self._replaced},
            )

    def _hold_same_parts(self, kept: Comparison) -> None:
        """Refuse other parts given in Python than the comparison began with, whose sections are null."""
        variants = [variant.dump() for variant in kept.variants().values()]
        begun_with = [name for name in _GIVEN if all(variant[name] is None for variant in variants)]
        if self._replaced != set(begun_with):
            again = "".join(f"{'metric' if name == 'metrics' else name}=…, " for name in begun_with)
            now = " and ".join(name for name in _GIVEN if name in self._replaced) or "nothing"
            raise InvalidInput(
                f"a comparison is resumed as it began: {self.path} with {' and '.join(begun_with) or 'nothing'} given "
                f"in Python, got {now}: call fed.compare(comparison, {again}output=…, resume=True)"
            )

    def held(self) -> AbstractContextManager[None]:
        """Lock the folder against all other processes that would write to it.

        Raises:
            InvalidInput: if another process has it, or there can be no such folder.
        """
        return held(self.path, "choose another --output")

    @property
    def plan(self) -> Path:
        """File that describes the comparison."""
        return self.path / _PLAN

    def begin(self) -> None:
        """Make the folder, which must be locked, and remove an earlier comparison's files unless it goes on.

        Raises:
            OutputExists: if another process has written to the folder since it was found empty.
            InvalidInput: if it cannot be written to.
        """
        self._hold_usable()
        with written_to(self.path):
            if not self._resume:
                self._clear()
            if self._places is not None:  # there is nothing to resume
                return
            write_atomically(self.path / _PLAN, yaml.dump(self._plan()).encode())

    def _plan(self) -> dict[str, Any]:
        """The comparison in force, which has the same keys when it is resumed."""
        plan = self._comparison.in_force()
        # What is given in Python beside it stands in no file: without it, the comparison cannot go on.
        for section in (plan["base"], *plan["compare"]):
            section.update({name: None for name in self._replaced if name in section})
        return plan

    def _clear(self) -> None:
        for run in self.path.glob("runs/*/seed-*"):
            with held(run, "choose another --output"):  # another process may be writing to it
                clear_run(run)
        for path in (*unfinished(self.path, self.FILES), *map(self.path.joinpath, self.FILES)):
            path.unlink(missing_ok=True)
        # Inner folders first: only empty ones can be removed.
        for folder in (*self.path.glob("runs/*/seed-*"), *self.path.glob("runs/*"), self.path / "runs"):
            with suppress(OSError):  # it holds something that is not ours
                folder.rmdir()
        self.path.mkdir(parents=True, exist_ok=True)

    def of_run(self, name: str, repetition: Repetition) -> Path:
        """The folder of a variant's run with a seed, or (seed, fold)."""
        if self._places is not None:
            return self._places[name][repetition]
        return self.path / "runs" / self._slugs[name] / f"seed-{repetition_text(repetition)}"

    def write(self, result: ComparisonResult, data: FederatedData | None = None) -> None:
        """Write all files, each whole, and ``comparison.json`` last.

        Args:
            result: result of the comparison, finished or interrupted.
            data: data that were given in place of the experiments' own; None if none were.

        Raises:
            RunFailed: if there is no room; the runs are kept.
        """
        kept = f"{self.path} cannot be written to any more, the runs that it holds are kept"
        with os_errors_as(RunFailed, kept, f"make room, then go on with fed compare --resume {self.path}"):
            self._write(result, data)

    def _write(self, result: ComparisonResult, data: FederatedData | None) -> None:
        picture = comparison_svg(result)
        if picture is not None:
            write_atomically(self.path / "comparison.svg", picture.encode())
        page = comparison_report(result, self._partitions(data), self._graphs(result), self._clients(result))
        write_atomically(self.path / "report.html", page.encode())
        write_atomically(self.path / "comparison.csv", _csv(result).encode())
        write_atomically(self.path / "comparison.md", markdown(result).encode())
        write_atomically(self.path / "comparison.tex", latex(result).encode())
        # Written last: fed report takes it for the sign that all is there.
        contents = _contents(result, self._plan() if self._places is None else result.comparison.dump())
        if self._places is not None:
            contents["folders"] = {
                name: {repetition_text(repetition): str(place.resolve()) for repetition, place in of_it.items()}
                for name, of_it in self._places.items()
            }
        write_atomically(self.path / "comparison.json", (to_json(contents, indent=2) + "\n").encode())

    def _graphs(self, result: ComparisonResult) -> "dict[str, nx.Graph[int]]":
        """Names of variants with finished runs → the graph of their peers; variants with one graph share an entry."""
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
        if self._places is not None:  # their data need not be on this machine
            return {}
        sections: dict[str, tuple[str, Experiment]] = {}
        for name, variant in self._variants.items():
            if variant.data is not None:
                sections.setdefault(to_json(variant.data.model_dump(mode="json")), (name, variant))
        partitions: dict[str, Partition | None] = {}
        for name, variant in list(sections.values())[:_PARTITIONS]:
            heading = f"Who holds what: {name}" if len(sections) > 1 else "Who holds what"
            if variant.data is not None:
                schema = None if variant.table is None else variant.table.before_exchange()
                partitions[heading] = partition_of(load(variant.data, variant.data_streams, schema))
        return partitions


def kept_comparison(path: Path) -> Comparison:
    """The comparison that a folder holds, finished or not.

    Args:
        path: folder of the comparison.

    Raises:
        InvalidInput: if there is none, or its description cannot be read.
    """
    file = path / _PLAN
    if not file.is_file():
        raise InvalidInput(
            f"{path} must hold a comparison to resume, got no {_PLAN}: fed compare FILE --output {path} begins one"
        )
    return Comparison.load(file)


def _contents(result: ComparisonResult, comparison: Mapping[str, Any]) -> dict[str, object]:
    return {
        "name": result.comparison.name,
        "status": result.status,
        "comparison": comparison,
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
