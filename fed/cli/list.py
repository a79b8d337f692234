"""``fed runs``: the runs below a folder, and how each ended."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fed.cli.tables import console
from fed.errors import InvalidInput
from fed.storage.run_reader import KeptRun, RunState, kept_run, runs_below

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["runs"]


def runs(folder: Path, *, as_json: bool) -> None:
    """Print the runs at a folder and below it, as a table or as JSON.

    Raises:
        InvalidInput: if there is no such folder, or it cannot be read.
    """
    try:
        found = [kept_run(path) for path in runs_below(folder, _tell)]
    except OSError as error:  # a system's own limits: links in a circle, names too long
        raise InvalidInput(f"{folder} cannot be read ({error.strerror}): make it readable") from None
    if as_json:
        typer.echo(json.dumps([_entry(run) for run in found], indent=2, ensure_ascii=False))
        return
    if not found:
        typer.echo(f"no runs in {folder}: fed simulate writes them into runs/, or where --output says")
        return
    console().print(_table(found, folder))
    for run in found:
        if run.reason:
            typer.echo(f"{run.folder}: {' '.join(run.reason.split())}")


def _tell(error: OSError) -> None:
    typer.echo(f"{error.filename} cannot be read ({error.strerror}): what it holds is not listed", err=True)


def _entry(run: KeptRun) -> dict[str, Any]:
    written = run.written.isoformat(timespec="seconds") if run.written else None
    return {**vars(run), "folder": str(run.folder), "state": str(run.state), "written": written}


def _table(found: list[KeptRun], folder: Path) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "name", "algorithm", "status", "rounds", "accuracy", "written", "resumes after"):
        shown.add_column(name, justify="right" if name in ("rounds", "accuracy") else "left")
    for run in found:
        shown.add_row(*map(Text, _row(run, folder)))
    return shown


def _row(run: KeptRun, folder: Path) -> tuple[str, ...]:
    is_read = run.state is not RunState.UNREADABLE
    planned = f" of {run.rounds_planned}" if run.rounds_planned is not None else ""
    return (
        str(run.folder.relative_to(folder)) if run.folder != folder else str(folder),
        str(run.name or "–"),
        str(run.algorithm or "–"),
        "unfinished: no summary" if run.state is RunState.UNFINISHED else str(run.state),
        f"{run.rounds}{planned}" if is_read else "–",
        f"{run.test_accuracy:.4f}" if run.test_accuracy is not None else "–",
        f"{run.written.astimezone():%Y-%m-%d %H:%M}" if run.written else "–",
        f"round {run.checkpoint}" if run.checkpoint is not None else "–",
    )
