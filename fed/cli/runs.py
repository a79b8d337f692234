"""``fed simulate`` and ``fed compare``: run, show progress, print the outcome, and choose the folder."""

import contextlib
import itertools
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

import fed
from fed.cli.documents import read_comparison, read_experiment
from fed.cli.options import File, FileUnlessResumed, Json, Output, Overwrite, Report, Resume, RunOptions, Settings
from fed.cli.progress import ComparisonProgress, Lines, SimulationProgress, display, say_all
from fed.cli.tables import console
from fed.errors import InvalidInput, located, os_errors_as
from fed.processes.machine import usable_cores
from fed.quantities import bytes_text, duration_text, score_text
from fed.storage.scores import LOSS, metrics_of

if TYPE_CHECKING:
    from fed.server.observer import Expectation

__all__ = ["compare", "folder", "report", "simulate", "tell", "to_run"]

_RUNS = Path("runs")
_Progress: TypeAlias = SimulationProgress | ComparisonProgress


def simulate(
    file: FileUnlessResumed = None,
    settings: Settings = None,
    output: Output = None,
    overwrite: Overwrite = False,
    resume: Resume = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say what rounds wait for, and which clients fail and why.")
    ] = False,
    report: Report = False,
    json: Json = False,
) -> int:
    """Run an experiment on simulated clients, on this machine; or resume a run that was interrupted.

    Args:
        file: file of the experiment; None: that of the run to resume.
        settings: values in place of the file's.
        output: folder of the run; None: a new one below ``runs``.
        overwrite: True to replace a run that is there.
        resume: folder of a run to resume; the outcome of a finished one is printed.
        verbose: True to show all that is logged.
        report: True to draw the run at its end.
        json: True to print the summary as JSON.
    """
    options = RunOptions(
        file=file, settings=settings, output=output, overwrite=overwrite, resume=resume, report=report, json=json
    )
    experiment = to_run("simulate", options)
    if experiment is None:
        return 0
    shown = display()
    if verbose:
        say_all(shown)
    with folder(experiment.name, resume or output, overwrite) as directory:
        watch = SimulationProgress(shown, directory)
        with _watched(watch, shown, directory, json):
            run = fed.simulate(
                experiment, output=directory, overwrite=overwrite, resume=resume is not None, observers=[watch]
            )
        tell(directory, run.summary, options)
    return 0


def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, however it ended or far it is.")],
) -> None:
    """Draw the report of a run: its curves, who held what, and what it was run with."""
    from fed.reports.html import write_run_report

    typer.echo(write_run_report(folder))


def to_run(command: str, options: RunOptions) -> "fed.Experiment | None":
    """Experiment to run or to resume; None where the run to resume has finished, whose outcome is then printed.

    Args:
        command: command that asks, for the error.
        options: options of that command.
    """
    resume = options.resume
    if resume is None:
        if options.file is None:
            raise InvalidInput(f"fed {command} needs an experiment, got none: give a file, or --resume DIR")
        return read_experiment(options.file, options.settings)
    # The run goes on with the experiment in its folder: other values would not be those of its checkpoints.
    if options.file is not None or options.settings or options.output is not None or options.overwrite:
        raise InvalidInput("--resume takes the experiment from the run's folder: give that folder and no other options")
    from fed.storage.run_folder import RunFolder, state_of
    from fed.storage.run_reader import RunState, summary_of

    kept = RunFolder.existing(resume)
    if state_of(resume) is not RunState.FINISHED:
        return kept.experiment()
    tell(resume, summary_of(resume) or {}, replace(options, report=False))
    return None


def tell(directory: Path, summary: Mapping[str, Any], options: RunOptions) -> None:
    """Print the outcome of a run and its folder, and draw its report where the options say so.

    Args:
        directory: folder of the run.
        summary: summary of the run.
        options: options of the command that ran it.
    """
    if options.report:
        from fed.reports.html import write_run_report

        write_run_report(directory)
    if options.json:
        _print_file(directory / "summary.json")
        _note(f"kept in {directory}")
    else:
        typer.echo(f"{_outcome(summary)}\n{directory}")


def compare(
    file: File,
    settings: Settings = None,
    output: Output = None,
    overwrite: Overwrite = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Runs side by side; as many as cores unless given.")
    ] = None,
    json: Json = False,
) -> int:
    """Run the variants of an experiment with several seeds, and write a report.

    Args:
        file: file of the comparison.
        settings: values in place of the file's.
        output: folder of the comparison; None: a new one below ``runs``.
        overwrite: True to replace a comparison that is there.
        jobs: number of runs side by side; None: one for each core.
        json: True to print the result as JSON.

    Returns:
        The exit code, 1 if a run failed.
    """
    from fed.processes.child_processes import load_for_children
    from fed.reports.conclusions import failures, unlike
    from fed.reports.difference_texts import difference_notes
    from fed.reports.tables import columns, difference_columns, table

    comparison = read_comparison(file, settings)
    load_for_children("fed.simulations.processes")
    # Of this process: in a container they are fewer than the machine's.
    jobs = jobs or usable_cores()
    shown = display()
    with _all_to_standard_error(json):
        expected = {name: _expect(name, experiment) for name, experiment in comparison.variants().items()}
    watch = ComparisonProgress(shown, expected=expected, repetitions=len(comparison.repetitions()), jobs=jobs)
    with folder(comparison.name, output, overwrite) as directory, _watched(watch, shown, directory, json):
        result = fed.compare(comparison, output=directory, overwrite=overwrite, jobs=jobs, observer=watch)
    if json:
        _print_file(directory / "comparison.json")
        _note(f"report in {directory / 'report.html'}")
    else:
        terminal = console()
        terminal.print(table(columns(result), terminal.width))
        if differences := difference_columns(result):
            terminal.print(table(differences, terminal.width))
            terminal.print("\n".join(difference_notes(result)), markup=False)
        typer.echo(directory / "report.html")
    # Notes go to standard error: standard output holds the table or the JSON alone.
    if difference := unlike(result):
        _note(f"note: {difference}")
    for line in (failed := failures(result)):
        _note(f"error: {line}")
    return 1 if failed else 0


@contextlib.contextmanager
def folder(name: str, output: Path | None, overwrite: bool) -> Iterator[Path]:
    """Folder of a run: ``output``, or else a new one, ``runs/NAME`` or ``runs/NAME-2`` and so on.

    A new folder is made at once, so that no other run takes it, and is removed if it stays empty.

    Args:
        name: name of the experiment.
        output: folder that the user named, or None.
        overwrite: True if a run in the folder may be replaced.
    """
    if output is not None or overwrite:
        yield output or _RUNS / _as_file_name(name)
        return
    directory = _new_folder(_as_file_name(name))
    try:
        yield directory
    finally:
        with contextlib.suppress(OSError):  # it holds something, as it should
            directory.rmdir()
            _RUNS.rmdir()


def _new_folder(name: str) -> Path:
    with os_errors_as(InvalidInput, f"{_RUNS / name} cannot be made", "give another folder by --output"):
        _RUNS.mkdir(exist_ok=True)
        for suffix in itertools.chain([""], (f"-{number}" for number in itertools.count(2))):
            directory = _RUNS / f"{name}{suffix}"
            with contextlib.suppress(FileExistsError):  # another run has just made it: no two share a name
                directory.mkdir(parents=True)
                return directory
    raise AssertionError("there is always a next number")


def _as_file_name(name: str) -> str:
    """Name without characters that separate folders, hide them or climb out of them."""
    return re.sub(r"[^\w.+=,-]+", "-", name).strip("-.") or "run"


@contextlib.contextmanager
def _watched(watch: _Progress, shown: Lines, directory: Path, as_json: bool) -> Iterator[None]:
    """Show progress; when a run is broken off, print what is kept of it."""
    try:
        with _all_to_standard_error(as_json), shown.running():
            yield
    except (KeyboardInterrupt, Exception) as error:
        # An error before the first round says all: nothing is kept of such a run.
        if watch.has_begun or isinstance(error, KeyboardInterrupt):
            _say_what_is_kept(directory, watch, as_json)
        raise


def _all_to_standard_error(as_json: bool) -> contextlib.AbstractContextManager[object]:
    """Redirect a user's own prints to standard error with ``--json``."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def _expect(name: str, experiment: "fed.Experiment") -> "Expectation":
    """Expected time and bytes of one run of a variant; a variant that cannot run is refused here."""
    import torch

    from fed.simulations.estimate import expect
    from fed.simulations.simulation import Simulation

    torch.set_num_threads(1)  # as each run will have
    with located(name):
        return expect(Simulation(experiment))


def _outcome(summary: Mapping[str, Any]) -> str:
    parts = [f"{summary['rounds']} round{'' if summary['rounds'] == 1 else 's'} in {duration_text(summary['wall_s'])}"]
    for metric in dict.fromkeys((*metrics_of(summary), LOSS)):
        score = summary.get(metric.final)
        parts += [f"test {metric.words} {score_text(score)}"] if score is not None else []
    parts += [f"{bytes_text(summary['bytes_up'])} up", f"{bytes_text(summary['bytes_down'])} down"]
    parts += [f"{summary['rounds_alone']} mixed with nobody"] if summary.get("rounds_alone") else []
    return ", ".join(parts)


def _say_what_is_kept(directory: Path, watch: _Progress, as_json: bool) -> None:
    has_checkpoints = any((directory / "checkpoints").glob("*"))
    if not watch.has_begun:
        as_it_was = f"stopped before another round; {directory} is as it was"
        _note(as_it_was if has_checkpoints else "stopped before the first round")
        return
    _note(f"stopped after {watch.done()}; what was done is kept in {directory}")
    if has_checkpoints:
        _note(f"go on with: fed simulate --resume {shlex.quote(str(directory))}")
    # With --json a program reads standard output, and gets what there is.
    for name in ("summary.json", "comparison.json"):
        if as_json and (directory / name).is_file():
            _print_file(directory / name)


def _print_file(path: Path) -> None:
    sys.stdout.write(path.read_text(encoding="utf-8"))


def _note(text: str) -> None:
    # A run that is done does not fail because its last line has no reader.
    with contextlib.suppress(BrokenPipeError):
        typer.echo(text, err=True)
