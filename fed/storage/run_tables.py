"""Tables of a run's folder, row by row and as columns. It does not load PyTorch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fed.errors import InvalidInput
from fed.storage.run_reader import metrics_lines

__all__ = ["TABLES", "arrays", "columns_of", "participation_of", "rows_of"]

TABLES = ("metrics", "clients", "participation")
_EVENTS = ("asked", "replied", "late", "failed")


def rows_of(folder: Path, what: str) -> list[dict[str, Any]]:
    """The lines of one of a run's files, up to the last round that has metrics; none where there is no file.

    Args:
        folder: folder of the run.
        what: name of the table, one of ``TABLES``.

    Raises:
        InvalidInput: if the file cannot be read, or ``what`` is no table.
    """
    if what not in TABLES:
        raise InvalidInput(f"a table must be {', '.join(TABLES[:-1])} or {TABLES[-1]}, got {what!r}")
    metrics = [line for line, _ in metrics_lines(folder)]
    if what == "metrics":
        return metrics
    # A round's other lines are written before its metrics, and a crash may come in between.
    last = metrics[-1]["round"] if metrics else 0
    return [line for line, _ in metrics_lines(folder, f"{what}.jsonl") if line["round"] <= last]


def participation_of(folder: Path) -> list[dict[str, Any]]:
    """Participation of a run's clients, a mapping a round with all four lists.

    Args:
        folder: folder of the run.

    Raises:
        InvalidInput: if the file cannot be read.
    """
    lines = rows_of(folder, "participation")
    return [{"round": line["round"], **{event: line.get(event, []) for event in _EVENTS}} for line in lines]


def columns_of(folder: Path, what: str) -> dict[str, list[Any]]:
    """Columns of a table, of equal length; None where a row has no such value.

    Args:
        folder: folder of the run.
        what: name of the table, one of ``TABLES``; ``participation`` has a row for each round, client and event.

    Raises:
        InvalidInput: if the file cannot be read, or ``what`` is no table.
    """
    rows = rows_of(folder, what)
    if what != "participation":
        # The names of all rows, since a metric may begin in a later round.
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}
    found = [(row["round"], client, event) for row in rows for event in _EVENTS for client in row.get(event, ())]
    columns = zip(*found, strict=True) if found else ((), (), ())
    return {name: [*column] for name, column in zip(("round", "client", "event"), columns, strict=True)}


def arrays(columns: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
    """Columns as arrays: int64, float64 with NaN for None, or objects.

    Example:
        >>> arrays({"round": [1, 2], "loss": [0.5, None], "client": [7, "ann"]})
        {'round': array([1, 2]), 'loss': array([0.5, nan]), 'client': array([7, 'ann'], dtype=object)}
    """
    return {name: _array(values) for name, values in columns.items()}


def _array(values: Sequence[Any]) -> np.ndarray:
    kinds = {type(value) for value in values}
    if kinds == {int}:
        return np.array(values, np.int64)
    if kinds <= {int, float, type(None)}:
        return np.array(values, np.float64)  # None becomes NaN
    found = np.empty(len(values), object)
    found[:] = values  # lists would else become dimensions
    return found
