"""``fed runs``: the runs below a folder, and how each ended."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fed.cli.tables import console, listed
from fed.errors import InvalidInput, os_errors_as
from fed.quantities import epsilon_text, score_text
from fed.storage.scores import words_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rich.console import Console
    from rich.table import Table

    from fed.storage.run_reader import KeptRun

__all__ = ["runs"]

_HEADINGS = ("run", "name", "algorithm", "status", "rounds", "score", "ε", "written", "resumes after")
_LEFT_OUT = ("name", "algorithm", "written")
"""Columns that a narrow terminal goes without, the first ones first."""
_UNBOUNDED = 10_000
"""Width in columns that no table has."""


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run, or a folder that holds some.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List runs: how they ended, how far they came, and what they could be resumed from."""
    from fed.storage.run_reader import kept_run, runs_below

    # A system's own limits: links in a circle, names too long.
    with os_errors_as(InvalidInput, f"{folder} cannot be read", "make it readable"):
        found = [kept_run(path) for path in runs_below(folder, _tell)]
    if as_json:
        typer.echo(json.dumps([_entry(run) for run in found], indent=2, ensure_ascii=False))
        return
    if not found:
        typer.echo(f"no runs in {folder}: fed simulate writes them into runs/, or where --output says")
        return
    out = console()
    out.print(_fitting([_row(run, folder) for run in found], out))
    # Below the table, whose columns a long reason would squeeze.
    for run in found:
        if run.reason:
            typer.echo(f"{run.folder}: {' '.join(run.reason.split())}")


def _fitting(rows: "Sequence[Sequence[str]]", out: "Console") -> "Table":
    """Table of the runs, without the least columns where the console is narrow."""
    unbounded = out.options.update(width=_UNBOUNDED)
    epsilons = {row[_HEADINGS.index("ε")] for row in rows}
    needless = () if epsilons - {"–"} else ("ε",)
    shown = _table(rows, needless)
    for count in range(1, len(_LEFT_OUT) + 1):
        if out.measure(shown, options=unbounded).maximum <= out.width:
            break
        shown = _table(rows, (*needless, *_LEFT_OUT[:count]))
    return shown


def _table(rows: "Sequence[Sequence[str]]", left_out: "Collection[str]") -> "Table":
    """Table of the runs without some columns."""
    places = [place for place, heading in enumerate(_HEADINGS) if heading not in left_out]
    shown = listed([_HEADINGS[place] for place in places], ([row[place] for place in places] for row in rows))
    for column in shown.columns:
        column.overflow = "fold"  # a folder that is cut could not be given to another command
        if column.header in ("rounds", "score", "ε"):
            column.justify = "right"
    return shown


def _tell(error: OSError) -> None:
    typer.echo(f"{error.filename} cannot be read ({error.strerror}): what it holds is not listed", err=True)


def _entry(run: "KeptRun") -> dict[str, Any]:
    written = run.written.isoformat(timespec="seconds") if run.written else None
    return {**vars(run), "folder": str(run.folder), "state": str(run.state), "written": written}


def _row(run: "KeptRun", folder: Path) -> tuple[str, ...]:
    from fed.storage.run_reader import RunState

    is_read = run.state is not RunState.UNREADABLE
    # A damaged experiment.yaml does not say how many were planned.
    planned = f" of {run.rounds_planned}" if run.rounds_planned is not None else ""
    return (
        str(run.folder.relative_to(folder)) if run.folder != folder else str(folder),
        str(run.name or "–"),
        str(run.algorithm or "–"),
        "unfinished: no summary" if run.state is RunState.UNFINISHED else str(run.state),
        f"{run.rounds}{planned}" if is_read else "–",
        f"{words_of(run.metric)} {score_text(run.score)}" if run.metric and run.score is not None else "–",
        epsilon_text(run.epsilon) if run.epsilon is not None else "–",
        f"{run.written.astimezone():%Y-%m-%d %H:%M}" if run.written else "–",
        f"round {run.checkpoint}" if run.checkpoint is not None else "–",
    )
