"""``fed simulate`` and ``fed report``; and what it shares with other commands: the folder, the end, the outcome."""

import contextlib
import itertools
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeAlias

import typer

import fed
from fed.cli.documents import changes, read_experiment
from fed.cli.options import FileUnlessResumed, Json, Output, Overwrite, Report, Resume, RunOptions, Settings
from fed.cli.progress import ComparisonProgress, SimulationProgress, display, say_all, saying_long_steps
from fed.errors import InvalidInput, is_interrupt, os_errors_as
from fed.privacy.experiment_digest import BUDGET_KEY, budget_only_ends
from fed.quantities import bytes_text, counted, duration_text, epsilon_text, score_text
from fed.storage.scores import LOSS, metrics_of

__all__ = [
    "all_to_standard_error",
    "folder",
    "note",
    "print_file",
    "report",
    "simulate",
    "stopped_in_order",
    "tell",
    "to_run",
    "watched",
]

_RUNS = Path("runs")
_A_MOMENT_S = 0.01
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
    """Run an experiment on simulated clients, on this machine; or resume a run that was interrupted."""
    options = RunOptions(
        file=file, settings=settings, output=output, overwrite=overwrite, resume=resume, report=report, json=json
    )
    experiment = to_run("simulate", options)
    if experiment is None:
        return 0
    shown = display()
    if verbose:
        say_all(shown)
    with stopped_in_order(), folder(experiment.name, resume or output, overwrite) as directory:
        watch = SimulationProgress(shown, directory)
        with watched(watch, shown.running(), directory, json), saying_long_steps(shown):
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
    settings = changes(options.settings or ())
    may_be_set = {BUDGET_KEY} if command == "simulate" else set()
    if options.file is not None or options.output is not None or options.overwrite or not settings.keys() <= may_be_set:
        but = f", but for --set {BUDGET_KEY}=…" if may_be_set else ""
        raise InvalidInput(
            f"--resume takes the experiment from the run's folder: give that folder and no other options{but}"
        )
    from fed.storage.run_folder import RunFolder, state_of
    from fed.storage.run_reader import RunState, summary_of

    kept = RunFolder.existing(resume)
    begun = kept.experiment()
    experiment = begun.override(settings) if settings else begun
    if state_of(resume) is not RunState.FINISHED or experiment.dump() != begun.dump():
        return experiment
    summary = summary_of(resume) or {}
    if reason := summary.get("reason"):
        may_go_on = may_be_set and budget_only_ends(begun.dump()["privacy"])
        way_out = f"; a larger budget lets it: --set {BUDGET_KEY}=…" if may_go_on else ""
        note(f"this run has ended, and does not go on: {reason}{way_out}")
    tell(resume, summary, replace(options, report=False))
    return None


def tell(directory: Path, summary: Mapping[str, Any], options: RunOptions) -> None:
    """Print the outcome of a run and its folder, and draw its report where the options say so.

    Args:
        directory: folder of the run.
        summary: summary of the run.
        options: options of the command that ran it.

    Raises:
        typer.Exit: if no client has answered in any round, with the code 1, so that a script takes it for no success.
    """
    if options.report:
        from fed.reports.html import write_run_report

        write_run_report(directory)
    if options.json:
        print_file(directory / "summary.json")
        note(f"kept in {directory}")
    else:
        typer.echo(f"{_outcome(summary)}\n{directory}")
    idle = summary.get("empty_rounds", 0) + summary.get("unanswered_rounds", 0)
    if summary.get("rounds") and idle == summary["rounds"]:
        raise typer.Exit(1)


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
def watched(
    watch: _Progress, running: contextlib.AbstractContextManager[object], directory: Path, as_json: bool
) -> Iterator[None]:
    """Block within which progress is shown; when a run is broken off, what is kept of it is printed.

    Args:
        watch: progress of the run.
        running: block within which its display is there.
        directory: folder of the run.
        as_json: True if standard output is for JSON alone.
    """
    try:
        with all_to_standard_error(as_json), running:
            yield
    except (KeyboardInterrupt, Exception) as error:
        # An error before the first round says all: nothing is kept of such a run.
        if watch.has_begun or is_interrupt(error):
            _say_what_is_kept(directory, watch, as_json)
        raise


@contextlib.contextmanager
def stopped_in_order() -> Iterator[None]:
    """Block that a service manager's stop ends as Ctrl-C does, also where a shell has a command ignore Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():  # which alone may say what a signal does
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; within ``copyreg``, whose bare ``except`` would swallow it, a moment later."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "copyreg":
            threading.Timer(_A_MOMENT_S, os.kill, [os.getpid(), number]).start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def all_to_standard_error(as_json: bool) -> contextlib.AbstractContextManager[object]:
    """Redirect a user's own prints to standard error with ``--json``."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def _outcome(summary: Mapping[str, Any]) -> str:
    parts = [f"{counted(summary['rounds'], 'round')} in {duration_text(summary['wall_s'])}"]
    for metric in dict.fromkeys((*metrics_of(summary), LOSS)):
        score = summary.get(metric.final)
        parts += [f"test {metric.words} {score_text(score)}"] if score is not None else []
    parts += [f"{bytes_text(summary['bytes_up'])} up", f"{bytes_text(summary['bytes_down'])} down"]
    if summary.get("epsilon") is not None:
        parts += [f"ε = {epsilon_text(summary['epsilon'])} at δ = {summary['delta']:g}"]
    parts += [f"{summary['rounds_alone']} mixed with nobody"] if summary.get("rounds_alone") else []
    return ", ".join(parts)


def _say_what_is_kept(directory: Path, watch: _Progress, as_json: bool) -> None:
    is_simulation = isinstance(watch, SimulationProgress)
    can_go_on = (
        any((directory / "checkpoints").glob("*")) if is_simulation else (directory / "comparison.yaml").is_file()
    )
    if watch.has_begun:
        note(f"stopped after {watch.done()}; what was done is kept in {directory}")
    else:
        as_it_was = f"stopped before another round; {directory} is as it was"
        note(as_it_was if can_go_on else "stopped before the first round")
        return
    if can_go_on:
        command = "simulate" if is_simulation else "compare"
        note(f"go on with: fed {command} --resume {shlex.quote(str(directory))}")
    # With --json a program reads standard output, and gets what there is.
    for name in ("summary.json", "comparison.json"):
        if as_json and (directory / name).is_file():
            print_file(directory / name)


def print_file(path: Path) -> None:
    """Print a file as it is."""
    sys.stdout.write(path.read_text(encoding="utf-8"))


def note(text: str) -> None:
    """Print a line on standard error: standard output is for the results."""
    # A run that is done does not fail because its last line has no reader.
    with contextlib.suppress(BrokenPipeError):
        typer.echo(text, err=True)
