"""``fed export``: the results of a run or of a comparison, as one table for other programs."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fed.errors import InvalidInput, OutputExists, os_errors_as

__all__ = ["export"]


class _Table(StrEnum):
    """Tables of a run."""

    METRICS = "metrics"
    CLIENTS = "clients"
    PARTICIPATION = "participation"


def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or of a comparison.")],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The file to write: FILE.csv or FILE.parquet.")],
    what: Annotated[
        _Table,
        typer.Option(
            help="metrics: a row a round. clients: a row for each client and evaluated round. participation: a row for "
            "each round, client and event (asked, replied, late, failed)."
        ),
    ] = _Table.METRICS,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Take the place of a file that is there.")] = False,
) -> None:
    """Write a table of a run as CSV or Parquet; of a comparison with the columns variant, seed and, of folds, fold."""
    formats = {".csv": _csv, ".parquet": _parquet}
    if to.suffix not in formats:
        raise InvalidInput(f"--to must end in .csv or .parquet, got {to}: choose one of them")
    if to.exists() and not overwrite:
        raise OutputExists(f"{to} exists: choose another --to, or pass --overwrite")
    columns = _columns(folder, what)
    if not columns or not next(iter(columns.values())):
        raise InvalidInput(
            f"{folder} must hold {what} to export, got none: choose another --what, or a folder that fed runs lists"
        )
    with os_errors_as(InvalidInput, f"{to} cannot be written", "choose another --to"):
        formats[to.suffix](to, columns)
    typer.echo(to)


def _columns(folder: Path, what: str) -> dict[str, list[Any]]:
    """Columns of a run's table, or of those of a comparison's runs one below the other."""
    from fed.config.comparison import repetition_of
    from fed.storage.comparison_reader import contents_of, run_folders
    from fed.storage.run_reader import is_run
    from fed.storage.run_tables import columns_of

    if is_run(folder):
        return columns_of(folder, what)
    if not (folder / "comparison.json").is_file():
        raise InvalidInput(f"{folder} must hold a run or a comparison that has ended, got none: see fed runs")
    columns: dict[str, list[Any]] = {"variant": [], "seed": []}
    for name, text, place in run_folders(folder, contents_of(folder)):
        own = columns_of(place, what)
        repetition = repetition_of(text)
        before = len(columns["seed"])
        rows = len(next(iter(own.values()), []))
        seed_and_fold = repetition if isinstance(repetition, tuple) else (repetition,)
        own |= {"variant": [name] * rows}
        own |= {key: [number] * rows for key, number in zip(("seed", "fold"), seed_and_fold, strict=False)}
        for key in {**columns, **own}:
            # Runs may have other metrics than those before them: their rows above are empty.
            columns.setdefault(key, [None] * before).extend(own.get(key, [None] * rows))
    return columns


def _csv(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write RFC 4180, but for ends of lines: nothing where there is no value, and JSON for what is nested."""
    from fed.storage.atomic_files import replaced

    # Whole or not at all: another program may read the file meanwhile.
    with replaced(path) as file:
        text = io.TextIOWrapper(file, "utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*(map(_flat, column) for column in columns.values()), strict=True))
        text.detach()  # it is written, and closed by its owner


def _parquet(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write Parquet; a column that mixes numbers and text is text."""
    import pyarrow
    from pyarrow import parquet

    from fed.storage.atomic_files import replaced

    table = pyarrow.table({name: _alike([*map(_flat, column)]) for name, column in columns.items()})
    with replaced(path) as file:
        parquet.write_table(table, file)


def _flat(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _alike(values: list[Any]) -> list[Any]:
    # A column of Parquet has one type.
    if any(isinstance(value, str) for value in values):
        return [None if value is None else str(value) for value in values]
    return values
