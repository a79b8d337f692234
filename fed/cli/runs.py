"""``fed simulate`` and ``fed compare``: where a run is kept, how it is watched, and what is said of it in the end."""

import contextlib
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import typer

import fed
from fed.cli.progress import ComparisonProgress, Display, SimulationProgress, display, say_all
from fed.errors import InvalidInput
from fed.machine import keep_freed_memory
from fed.quantities import bytes_text, duration_text

if TYPE_CHECKING:
    from fed.config.comparison import Comparison
    from fed.config.experiment import Experiment
    from fed.simulations.estimate import Expectation

__all__ = ["batching", "compare", "folder", "resume", "simulate", "summary_in", "tell"]

_RUNS = Path("runs")
_Progress: TypeAlias = SimulationProgress | ComparisonProgress


def simulate(experiment: "Experiment", *, output: Path | None, overwrite: bool, verbose: bool, as_json: bool) -> int:
    """Run an experiment, and say what came of it and where it is kept; the exit code."""
    with folder(experiment.name, output, overwrite) as directory:
        return _simulate(experiment, directory, verbose, as_json, overwrite=overwrite)


def resume(directory: Path, *, verbose: bool, as_json: bool) -> int:
    """Go on with a run from its last checkpoint; of one that has finished, say what came of it; the exit code."""
    from fed.storage.run_folder import RunFolder
    from fed.storage.run_reader import RunState, state_of

    run = RunFolder.existing(directory)
    if state_of(directory) is RunState.FINISHED:
        tell(directory, summary_in(directory), as_json)
        return 0
    return _simulate(run.experiment(), directory, verbose, as_json, resume=True)


def _simulate(
    experiment: "Experiment",
    directory: Path,
    verbose: bool,
    as_json: bool,
    *,
    overwrite: bool = False,
    resume: bool = False,
) -> int:
    keep_freed_memory()
    shown = display()
    if verbose:
        say_all(shown)
    watch = SimulationProgress(shown, directory)
    with _watched(watch, shown, directory, as_json):
        run = fed.simulate(experiment, output=directory, overwrite=overwrite, resume=resume, observer=watch)
    tell(directory, run.summary, as_json)
    return 0


def tell(directory: Path, summary: Mapping[str, Any], as_json: bool) -> None:
    """Say what came of a run, and where it is kept."""
    if as_json:
        _print_file(directory / "summary.json")
        _note(f"kept in {directory}")
    else:
        typer.echo(f"{_outcome(summary)}\n{directory}")


def summary_in(directory: Path) -> Mapping[str, Any]:
    """The summary of a run that has come to its end."""
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    return summary


def compare(comparison: "Comparison", *, output: Path | None, overwrite: bool, jobs: int, as_json: bool) -> int:
    """Run a comparison, print its table and where the report is; the exit code, 1 if a run failed."""
    from fed.reports.conclusions import failures, unlike

    shown = display()
    with _all_to_standard_error(as_json):
        expected = {name: _expect(name, experiment) for name, experiment in comparison.variants().items()}
    watch = ComparisonProgress(shown, expected, len(comparison.seeds), jobs)
    with folder(comparison.name, output, overwrite) as directory, _watched(watch, shown, directory, as_json):
        result = fed.compare(comparison, output=directory, overwrite=overwrite, jobs=jobs, observer=watch)
    if as_json:
        _print_file(directory / "comparison.json")
        _note(f"report in {directory / 'report.html'}")
    else:
        _print_table(result)
        typer.echo(directory / "report.html")
    if difference := unlike(result):
        _note(f"note: {difference}")
    for line in (failed := failures(result)):
        _note(f"error: {line}")
    return 1 if failed else 0


def batching(document: "Experiment | Comparison") -> Iterator[str]:
    """How clients will train, in groups or one by one, and why: a sentence for each variant."""
    from fed.config.experiment import Experiment
    from fed.simulations.simulation import Simulation

    variants = {"": document} if isinstance(document, Experiment) else document.variants()
    for name, experiment in variants.items():
        try:
            chosen = Simulation(experiment).batching
        except Exception as error:  # whatever a user's model or data raise: the values are shown all the same
            reason = str(error) if isinstance(error, InvalidInput) else f"{type(error).__name__}: {error}"
            yield f"{name or 'simulation'}: how clients will train is not known: {reason}".splitlines()[0]
            continue
        how = "batched" if chosen.is_batched else "one client at a time"
        yield f"{name or 'simulation'}: {how}: {chosen.reason}"


@contextlib.contextmanager
def folder(name: str, output: Path | None, overwrite: bool) -> Iterator[Path]:
    """Where a run is kept: ``output``, or else a new folder, ``runs/NAME`` or ``runs/NAME-2`` and so on.

    A new folder is there from the beginning, so that no other run takes it, and gone again if nothing is in it.
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
    for suffix in itertools.chain([""], (f"-{number}" for number in itertools.count(2))):
        directory = _RUNS / f"{name}{suffix}"
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            if _RUNS.is_dir():
                continue
            raise InvalidInput(f"{_RUNS} is a file, where runs are kept: give another folder by --output") from None
        except OSError as error:
            problem = f"{directory} cannot be made ({error.strerror}): give another folder by --output"
            raise InvalidInput(problem) from None
        return directory
    raise AssertionError("there is always a next number")


def _as_file_name(name: str) -> str:
    """A name without what separates folders, hides them or climbs out of them."""
    return re.sub(r"[^\w.+=,-]+", "-", name).strip("-.") or "run"


@contextlib.contextmanager
def _watched(watch: _Progress, shown: Display, directory: Path, as_json: bool) -> Iterator[None]:
    """Show how far it is; of what is broken off, say what is kept."""
    try:
        with _all_to_standard_error(as_json), shown:
            yield
    except (KeyboardInterrupt, Exception) as error:
        if watch.has_begun or isinstance(error, KeyboardInterrupt):
            _say_what_is_kept(directory, watch, as_json)
        raise


@contextlib.contextmanager
def _all_to_standard_error(as_json: bool) -> Iterator[None]:
    """With ``--json``, also what a user's own code prints."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def _expect(name: str, experiment: "Experiment") -> "Expectation":
    """What one run of a variant takes, before any begins; what cannot be run at all is found here too."""
    import torch

    from fed.simulations.estimate import expect
    from fed.simulations.simulation import Simulation

    torch.set_num_threads(1)  # as each run will have
    try:
        return expect(Simulation(experiment))
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from None


def _outcome(summary: Mapping[str, Any]) -> str:
    accuracy, loss = summary["final_test_accuracy"], summary["final_test_loss"]
    parts = [f"{summary['rounds']} round{'' if summary['rounds'] == 1 else 's'} in {duration_text(summary['wall_s'])}"]
    parts += [f"test accuracy {accuracy:.4f}"] if accuracy is not None else []
    parts += [f"test loss {loss:.4f}"] if loss is not None else []
    parts += [f"{bytes_text(summary['bytes_up'])} up", f"{bytes_text(summary['bytes_down'])} down"]
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
    for name in ("summary.json", "comparison.json"):
        if as_json and (directory / name).is_file():
            _print_file(directory / name)


def _print_file(path: Path) -> None:
    sys.stdout.write(path.read_text(encoding="utf-8"))


def _print_table(result: Any) -> None:
    from fed.cli.tables import console
    from fed.reports.tables import table

    shown = console()
    shown.print(table(result, shown.width))


def _note(text: str) -> None:
    # What was done is done, whether or not anybody reads where it is.
    with contextlib.suppress(BrokenPipeError):
        typer.echo(text, err=True)
