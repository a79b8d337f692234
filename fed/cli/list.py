"""``fed runs``: the runs below a folder, and how each ended."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fed.cli.tables import console, listed
from fed.errors import InvalidInput, os_errors_as
from fed.quantities import score_text
from fed.storage.scores import words_of

if TYPE_CHECKING:
    from fed.storage.run_reader import KeptRun

__all__ = ["runs"]


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
    headings = ("run", "name", "algorithm", "status", "rounds", "score", "written", "resumes after")
    shown = listed(headings, (_row(run, folder) for run in found))
    for column in shown.columns[4:6]:
        column.justify = "right"
    console().print(shown)
    # Below the table, whose columns a long reason would squeeze.
    for run in found:
        if run.reason:
            typer.echo(f"{run.folder}: {' '.join(run.reason.split())}")


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
        f"{run.written.astimezone():%Y-%m-%d %H:%M}" if run.written else "–",
        f"round {run.checkpoint}" if run.checkpoint is not None else "–",
    )
