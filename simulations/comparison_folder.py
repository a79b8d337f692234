"""Folder of a comparison: tables, a chart and a report, and beneath them each run's own folder."""

import csv
import io
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from fed.clients.data import FederatedData, load
from fed.clients.data.describe import partition_of
from fed.config.experiment import Experiment
from fed.randomness import Streams
from fed.reports.charts import Partition
from fed.reports.html import comparison_report, comparison_svg
from fed.reports.summary import ComparisonResult
from fed.storage.atomic_files import held, write_atomically
from fed.storage.run_folder import clear_run, environment, refuse_taken, to_json, written_to

__all__ = ["ComparisonFolder", "slugs"]

_PARTITIONS = 4
"""How many partitions of variants whose data differ a report draws."""


class ComparisonFolder:
    """Folder of a comparison.

    Args:
        path: the folder; it is made where it does not exist.
        variants: by name.
        overwrite: take an earlier comparison's place: its files go, all others stay.

    Raises:
        OutputExists: if the folder holds anything and ``overwrite`` is not given.
        InvalidInput: if there can be no such folder.
    """

    FILES = ("comparison.json", "comparison.csv", "comparison.svg", "report.html")

    def __init__(self, path: Path, variants: Mapping[str, Experiment], *, overwrite: bool = False) -> None:
        self.path, self.overwrite = path, overwrite
        self._variants = variants
        self._slugs = slugs(variants)
        with written_to(path):
            is_ours = (path / "comparison.json").is_file() or any(path.glob("runs/*/seed-*/environment.json"))
            refuse_taken(path, overwrite=overwrite and is_ours)

    def begin(self) -> None:
        """Make the folder, and remove an earlier comparison's files."""
        with written_to(self.path):
            self._clear()
            self.path.mkdir(parents=True, exist_ok=True)

    def _clear(self) -> None:
        for run in self.path.glob("runs/*/seed-*"):
            with held(run, "choose another --output"):  # another process may be writing to it
                clear_run(run)
        for name in self.FILES:
            (self.path / name).unlink(missing_ok=True)
        for folder in (*self.path.glob("runs/*/seed-*"), *self.path.glob("runs/*"), self.path / "runs"):
            with suppress(OSError):  # it holds something that is not ours
                folder.rmdir()

    def of_run(self, name: str, seed: int) -> Path:
        """The folder of a variant's run with a seed."""
        return self.path / "runs" / self._slugs[name] / f"seed-{seed}"

    def write(self, result: ComparisonResult, data: FederatedData | None = None) -> None:
        """Write all files, each whole, and ``comparison.json`` last.

        Args:
            result: what was found.
            data: those that were given in place of the experiments' own.
        """
        picture = comparison_svg(result)
        if picture is not None:
            write_atomically(self.path / "comparison.svg", picture.encode())
        write_atomically(self.path / "report.html", comparison_report(result, self._partitions(data)).encode())
        write_atomically(self.path / "comparison.csv", _csv(result).encode())
        write_atomically(self.path / "comparison.json", (to_json(_contents(result), indent=2) + "\n").encode())

    def _partitions(self, data: FederatedData | None) -> dict[str, Partition | None]:
        """Heading → samples by client, one for each section ``data`` that differs, with the first seed."""
        if data is not None:
            return {"Who holds what": partition_of(data)}
        sections: dict[str, tuple[str, Experiment]] = {}
        for name, variant in self._variants.items():
            if variant.data is not None:
                sections.setdefault(to_json(variant.data.model_dump(mode="json")), (name, variant))
        shown = list(sections.values())[:_PARTITIONS]
        return {
            "Who holds what" + (f": {name}" if len(sections) > 1 else ""): partition_of(
                load(variant.data, Streams(variant.seed))
            )
            for name, variant in shown
            if variant.data is not None
        }


def _contents(result: ComparisonResult) -> dict[str, object]:
    return {
        "name": result.comparison.name,
        "status": result.status,
        "comparison": result.comparison.dump(),
        "rows": result.rows,
        "runs": {name: {str(seed): run["summary"] for seed, run in runs.items()} for name, runs in result.runs.items()},
        "environment": environment(),
    }


def _csv(result: ComparisonResult) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(result.rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "seeds": " ".join(map(str, row["seeds"]))} for row in result.rows)
    return text.getvalue()


def slugs(names: Iterable[str]) -> dict[str, str]:
    """A folder's name for each variant's: lower case, short, without what separates or hides folders, and distinct.

    Example:
        >>> slugs(["D-PSGD, ring", "d-psgd ring", "../é"])
        {'D-PSGD, ring': 'd-psgd-ring', 'd-psgd ring': 'd-psgd-ring-2', '../é': 'variant'}
    """
    chosen: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^a-z0-9.=]+", "-", name.lower()).strip("-.=")[:60] or "variant"
        number = 1
        while (slug := plain if number == 1 else f"{plain}-{number}") in chosen.values():
            number += 1
        chosen[name] = slug
    return chosen
