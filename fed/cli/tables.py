"""Tables of the command line and their console; and ``fed data``: the clients' samples by class."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fed
from fed.cli.documents import read
from fed.cli.options import File, Settings
from fed.cli.runs import note
from fed.errors import InvalidInput, os_errors_as
from fed.quantities import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["console", "data", "listed"]

_TABLES = (".csv", ".parquet")
_WIDE = 160
"""Width in columns where standard output is no terminal: a line of a table stays a line."""


def console() -> "Console":
    """Standard output, for tables."""
    from rich.console import Console

    # A user who sets COLUMNS wants that width in a pipe, too.
    is_file = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=_WIDE if is_file else None)


def listed(headings: Iterable[str], rows: Iterable[Iterable[str]], whole: int = 0) -> "Table":
    """Table of texts as they stand: a name may look like markup.

    Args:
        headings: headings of the columns.
        rows: texts of each row.
        whole: number of columns, from the first, whose texts are never broken.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        shown.add_row(*map(Text, row))
    for column in shown.columns[:whole]:
        column.no_wrap = True
    return shown


def data(
    file: File,
    settings: Settings = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw it into this file as well, as SVG.", metavar="FILE.svg")
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print an experiment's section table for FILE, a .csv or .parquet.")
    ] = False,
    target: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="With --schema: the column to predict; label unless given.")
    ] = None,
) -> None:
    """Print and draw who holds what, class by client; or the schema of a table."""
    if schema:
        _print_schema(file, target)
        return
    if target is not None:
        raise InvalidInput("--target goes with --schema, which is not given: add it")
    if file.suffix in _TABLES:
        raise InvalidInput(
            f"fed data shows the data of an experiment, got the table {file}: give the experiment's file, or add "
            "--schema for the table's schema"
        )
    from fed.clients.data import load
    from fed.clients.data.describe import heat_map

    _refuse_files_of_nodes(file)
    document = read(file, settings)
    if picture is not None and picture.suffix.lower() != ".svg":
        raise InvalidInput(f"--picture {picture} must end in .svg: pictures are written as SVG alone")
    experiment = document if isinstance(document, fed.Experiment) else fed.Experiment(**document.base)
    if experiment.data is None:
        raise InvalidInput("data: null stands for data given in Python: there is nothing to draw")
    table = None if experiment.table is None else experiment.table.before_exchange()
    dealt = load(experiment.data, experiment.data_streams, table)
    if picture is not None:
        _draw(dealt, picture)
    console().print(_in_words(dealt), markup=False, soft_wrap=True)
    console().print(heat_map(dealt))


def _refuse_files_of_nodes(file: Path) -> None:
    from fed.config import yaml

    if "client" in yaml.load(file):
        raise InvalidInput(
            f"fed data shows the data of an experiment, got {file}, which describes one node by its key client: "
            "fed client --data FILE --dry-run shows what that node holds"
        )


def _print_schema(file: Path, target: str | None) -> None:
    """Print the section ``table`` for a table, as YAML, columns of numbers in short."""
    from fed.clients.data.sources.suggested_schema import notes_on, schema_of
    from fed.config import yaml

    if file.is_dir():
        raise InvalidInput(f"--schema is of one table, got the folder {file}: give one of its files")
    if file.suffix not in _TABLES:
        raise InvalidInput(f"--schema is of a table, FILE.csv or FILE.parquet, got {file}: give one")
    if not file.is_file():
        raise InvalidInput(f"no such file: {file}")
    found = schema_of(file, target)
    features = {name: "real" if column.values is None else [*column.values] for name, column in found.features.items()}
    classes = {} if found.classes is None else {"classes": [*found.classes]}
    notes = notes_on(file, found)
    # The default, in view where it matters.
    rule = {"missing": found.missing} if any("missing: " in words for words in notes) else {}
    typer.echo(yaml.dump({"table": {"target": found.target, **classes, **rule, "features": features}}), nl=False)
    for words in notes:
        note(f"note: {words}")


def _in_words(dealt: "fed.FederatedData") -> str:
    from fed.clients.data.describe import looked_at

    # Clients on demand are not all read, which could take hours.
    clients = looked_at(dealt)
    is_whole = len(clients) == len(dealt.clients)
    trained_on = counted(sum(map(dealt.size_of, clients)), "sample") if is_whole else "samples on demand"
    test = dealt.with_test_set().test
    tested_on = "none" if test is None else len(test[1])
    return f"{counted(len(dealt.clients), 'client')}, {trained_on} to train on, {tested_on} to test on"


def _draw(dealt: "fed.FederatedData", picture: Path) -> None:
    from fed.clients.data.describe import class_counts
    from fed.reports import heat_maps
    from fed.reports.plot_style import for_file

    with os_errors_as(InvalidInput, f"--picture {picture} cannot be written", "give another file"):
        picture.write_text(for_file(heat_maps.partition(*class_counts(dealt))), encoding="utf-8")
