"""``fed compare``: run a comparison, go on with one, or set runs that exist side by side."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fed
from fed.cli.documents import read_comparison
from fed.cli.options import Json, Output, Overwrite, Settings
from fed.cli.progress import ComparisonProgress, Lines, display, saying_long_steps
from fed.cli.runs import all_to_standard_error, folder, note, print_file, stopped_in_order, watched
from fed.cli.tables import console
from fed.errors import InvalidInput, located
from fed.processes.machine import usable_cores

if TYPE_CHECKING:
    from fed.server.observer import Expectation

__all__ = ["compare"]


def _jobs(text: str) -> str:
    """Number of runs side by side, or ``auto``, as it is written."""
    if text != "auto" and (not text.isdecimal() or int(text) < 1):
        raise typer.BadParameter(f"{text!r} is neither auto nor a number of at least 1")
    return text


def compare(
    what: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE | RUN RUN …",
            help="A comparison's YAML file; or folders of runs that exist, or of comparisons, to set side by side.",
        ),
    ] = None,
    settings: Settings = None,
    output: Output = None,
    overwrite: Overwrite = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Go on with the comparison in this folder: finished runs are kept, others resume from their last "
            "checkpoint.",
        ),
    ] = None,
    jobs: Annotated[
        str | None,
        typer.Option(
            parser=_jobs,
            metavar="N|auto",
            help="Runs side by side; auto: as many as cores, on Ray those of the cluster.",
            show_default="the file's jobs, else auto",
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Run the variants of an experiment with several seeds, and write a report; or compare runs that exist.

    Returns:
        The exit code, 1 if a run failed.
    """
    if what and what[0].is_dir():
        _refuse_options_of_runs(settings, resume)
        return _existing(what, output, overwrite=overwrite, json=json)
    shown = display()
    with stopped_in_order(), contextlib.ExitStack() as bar:
        # Before PyTorch is loaded, which takes seconds.
        bar.enter_context(shown.running())
        shown.doing("loading PyTorch, and the comparison")
        comparison = _asked_for(what or [], settings, output, overwrite=overwrite, resume=resume)
        asked = jobs or str(comparison.jobs or "auto")
        # Of this process: in a container they are fewer than the machine's.
        processes = usable_cores() if asked == "auto" else int(asked)
        _load(processes)
        total = len(comparison.variants()) * len(comparison.repetitions())
        watch = ComparisonProgress(shown, lambda name: _expect(name, comparison), total=total, jobs=processes)
        with folder(comparison.name, resume or output, overwrite) as directory, watched(watch, bar, directory, json):
            bar.enter_context(saying_long_steps(shown))
            _say_what_comes_first(shown, resume)
            result = fed.compare(
                comparison,
                output=directory,
                overwrite=overwrite,
                resume=resume is not None,
                jobs="auto" if asked == "auto" else processes,
                observer=watch,
            )
    return _tell(result, directory, json=json)


def _load(jobs: int) -> None:
    """Begin to load what the runs' own processes need, beside this one."""
    from fed.processes.child_processes import load_for_children

    if jobs > 1:
        load_for_children("fed.simulations.processes")


def _say_what_comes_first(shown: Lines, resume: Path | None) -> None:
    shown.doing("loading PyTorch" if resume is None else f"looking at the runs in {resume}")


def _asked_for(
    what: Sequence[Path], settings: list[str] | None, output: Path | None, *, overwrite: bool, resume: Path | None
) -> "fed.Comparison":
    """The comparison of a file, or the one to resume, which a file may repeat."""
    if len(what) > 1:
        raise InvalidInput(
            f"fed compare takes one file, or folders of runs, got {len(what)} of which {what[0]} is no folder: give "
            "one comparison, or the folders of the runs"
        )
    if resume is None:
        if not what:
            raise InvalidInput("fed compare needs a comparison, got none: give a file, runs' folders, or --resume DIR")
        return read_comparison(what[0], settings)
    if output is not None or overwrite or (settings and not what):
        raise InvalidInput(
            "--resume takes the comparison and the folder from DIR: give no --output, --overwrite or, without the "
            "file, --set"
        )
    if what:
        return read_comparison(what[0], settings)
    from fed.simulations.comparison_folder import kept_comparison

    return kept_comparison(resume)


def _expect(name: str, comparison: "fed.Comparison") -> "Expectation":
    """Expected time and bytes of one run of a variant; a variant that cannot run is refused here."""
    import torch

    from fed.simulations.estimate import expect
    from fed.simulations.simulation import Simulation

    torch.set_num_threads(1)  # as each run will have
    with located(name):
        return expect(Simulation(comparison.variants()[name]))


def _refuse_options_of_runs(settings: list[str] | None, resume: Path | None) -> None:
    if settings or resume is not None:
        raise InvalidInput("runs that exist are compared as they are: give no --set and no --resume with their folders")


def _existing(places: Sequence[Path], output: Path | None, *, overwrite: bool, json: bool) -> int:
    from fed.simulations.existing_runs import compare_runs, found

    runs = found(places)
    with folder("comparison", output, overwrite) as directory, all_to_standard_error(json):
        result = compare_runs(runs, output=directory, overwrite=overwrite)
    return _tell(result, directory, json=json)


def _tell(result: "fed.ComparisonResult", directory: Path, *, json: bool) -> int:
    """Print a result and its folder."""
    from fed.reports.conclusions import failures, unlike
    from fed.reports.difference_texts import difference_notes
    from fed.reports.private_runs import privacy_note
    from fed.reports.tables import columns, difference_columns, table

    if json:
        print_file(directory / "comparison.json")
        note(f"report in {directory / 'report.html'}")
    else:
        terminal = console()
        terminal.print(table(columns(result), terminal.width))
        if differences := difference_columns(result):
            terminal.print(table(differences, terminal.width))
            terminal.print("\n".join(difference_notes(result)), markup=False)
        if spent := privacy_note(result.runs):
            terminal.print(spent, markup=False)
        typer.echo(directory / "report.html")
    # Notes go to standard error: standard output holds the table or the JSON alone.
    if difference := unlike(result):
        note(f"note: {difference}")
    for line in (failed := failures(result)):
        note(f"error: {line}")
    return 1 if failed else 0
