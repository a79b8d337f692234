"""Comparisons that have been run, read from their folders, and their figures as texts."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from fed.errors import InvalidInput
from fed.quantities import bytes_text, count_text, duration_text, mean_text
from fed.reports.summary import Record, spread
from fed.storage.comparison_reader import contents_of, run_folders
from fed.storage.run_reader import metrics_lines

__all__ = ["Compared", "Row", "bytes_of", "cells", "markdown", "mean_of", "share_of", "time_of", "to_target"]

Row: TypeAlias = Mapping[str, Any]
"""The figures of a variant, as ``comparison.json`` has them."""
_Text: TypeAlias = Callable[[Row], str]
"""A cell of a table, from the figures of a variant."""


@dataclass(frozen=True)
class Compared:
    """A comparison that has been run to its end.

    Args:
        folder: place of the comparison.
        rows: name of a variant → its figures.
        runs: name of a variant → seed → its run.
    """

    folder: Path
    rows: dict[str, Row]
    runs: dict[str, dict[int, Record]]

    @classmethod
    def read(cls, folder: Path) -> "Compared":
        """The comparison in a folder, or the runs of those below it that have a seed each.

        Raises:
            InvalidInput: if there is none, or one that has not finished in all its runs.
        """
        if parts := [cls.read(part) for part in sorted(folder.glob("seed-*"))]:
            runs = {
                name: {seed: run for part in parts for seed, run in part.runs[name].items()} for name in parts[0].rows
            }
            return cls(folder, {}, runs)
        contents = contents_of(folder)
        rows = {row["name"]: row for row in contents["rows"]}
        unfinished = [name for name, row in rows.items() if row["status"] != "finished"]
        if contents["status"] != "finished" or unfinished:
            missing = ", ".join(unfinished) or contents["status"]
            raise InvalidInput(f"{folder}: every run must have finished, got {missing}: run the comparison again")
        runs: dict[str, dict[int, Record]] = {name: {} for name in rows}
        for name, seed, place in run_folders(folder, contents):
            metrics = [line for line, _ in metrics_lines(place)]
            runs[name][int(seed)] = {"metrics": metrics, "summary": contents["runs"][name][seed]}
        return cls(folder, rows, runs)

    @property
    def training_s(self) -> float:
        """Wall time of all runs, one after the other."""
        return sum(run["summary"]["wall_s"] for runs in self.runs.values() for run in runs.values())

    def finals(self, name: str, key: str) -> list[float]:
        """Values of a key in the summaries of a variant's runs, by seed."""
        return [run["summary"][key] for _, run in sorted(self.runs[name].items())]

    def first_round_as_good(self, name: str, accuracy: float) -> int | None:
        """The first evaluated round in which the mean accuracy over the seeds is as high; None where none is."""
        for lines in zip(*(run["metrics"] for run in self.runs[name].values()), strict=True):
            mean = spread(line["test_accuracy"] for line in lines)[0]
            if mean is not None and mean >= accuracy:
                return int(lines[0]["round"])
        return None


def cells(found: Compared, labels: Mapping[str, str], texts: Sequence[_Text]) -> Iterator[list[str]]:
    """Lines of a table, one a variant.

    Args:
        found: the comparison.
        labels: name of a variant → how the table calls it.
        texts: one for each column, from a row to its cell.
    """
    for name, label in labels.items():
        yield [label, *(text(found.rows[name]) for text in texts)]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Table in Markdown.

    Example:
        >>> print(markdown(["", "accuracy"], [["`fedavg`", "0.929"]]))
        | | accuracy |
        |---|---|
        | `fedavg` | 0.929 |
    """
    lines = (re.sub(" {2,}", " ", f"| {' | '.join(line)} |") for line in (head, *rows))
    first = next(lines)
    return "\n".join([first, f"|{'---|' * len(head)}", *lines])


def mean_of(key: str) -> _Text:
    """Mean and standard deviation of a key; where a key has no deviation over seeds, that over clients."""

    def text(row: Row) -> str:
        deviation = row.get(f"{key}_std")
        if key.endswith("_mean"):
            deviation = row[f"{key.removesuffix('_mean')}_std"]
        return mean_text(row[key], deviation)

    return text


def bytes_of(*keys: str) -> _Text:
    """Sum of some keys as bytes; a dash where nothing was sent."""
    return lambda row: bytes_text(sum(row[key] or 0 for key in keys)) if any(row[key] for key in keys) else "–"


def time_of(key: str) -> _Text:
    """Simulated time."""
    return lambda row: "–" if row[key] is None else duration_text(row[key])


def share_of(key: str) -> _Text:
    """Share in per cent, with a decimal where it is almost all; a dash where there is none."""

    def text(row: Row) -> str:
        share = row[key]
        return "–" if not share else f"{100 * share:.1f} %" if 0.99 < share < 1 else f"{100 * share:.0f} %"

    return text


def to_target(key: str) -> _Text:
    """Rounds, bytes or time to the target, and of how many seeds where not of all."""
    written = {"rounds": count_text, "bytes": bytes_text, "virtual_s": duration_text}[key]

    def text(row: Row) -> str:
        if not row["reached"]:
            return "–"
        part = "" if row["reached"] == len(row["seeds"]) else f", {row['reached']} of {len(row['seeds'])} seeds"
        return written(row[f"{key}_to_target"]) + part

    return text
