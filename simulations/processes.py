"""Processes of a comparison: its runs one after the other or side by side, with the same bits either way."""

import contextlib
import logging
import multiprocessing
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from fed.clients.training.devices import deal_from, most_side_by_side
from fed.config.comparison import Repetition
from fed.config.experiment import Experiment
from fed.errors import FedError, InvalidCheckpoint, InvalidInput, RunFailed, first_line, in_one_sentence
from fed.processes.child_processes import end_with_parent, spawned, stop
from fed.processes.machine import usable_cores
from fed.reports.summary import Record
from fed.server.observer import Essential, Event, Kinds, RoundEnded
from fed.server.tracking import RunLabel, tracked
from fed.simulations.simulate import simulate
from fed.storage.run import Run
from fed.storage.run_reader import metrics_lines

__all__ = [
    "ComparisonObserver",
    "Ended",
    "PlannedRun",
    "jobs_of",
    "one_by_one",
    "portable_error",
    "record_of",
    "side_by_side",
]

_log = logging.getLogger(__name__)

_STOP_WITHIN_S = 10.0
"""Seconds that an interrupted run has to leave its folder in order."""

Ended: TypeAlias = Generator[tuple["PlannedRun", Record]]
"""Each run and its record, as the run ends. The generator must be closed, which ends the processes."""


class ComparisonObserver(Protocol):
    """Observer of a comparison. Runs are named by variant and seed, or (seed, fold), and may overlap."""

    def begin(self, runs: Sequence[tuple[str, Repetition]]) -> None:
        """Take note of all the runs that there will be; an error of it ends the comparison before any run.

        Args:
            runs: names of the runs to do, without those that the folder holds whole.
        """

    def start(self, name: str, repetition: Repetition) -> None:
        """Take note that a run begins.

        Args:
            name: name of the variant.
            repetition: seed of the run, with folds (seed, fold).
        """

    def round(self, name: str, repetition: Repetition, line: Mapping[str, Any]) -> None:
        """Take note that a run has finished a round.

        Args:
            name: name of the variant.
            repetition: seed of the run, with folds (seed, fold).
            line: metrics of the round, by name.
        """

    def end(self, name: str, repetition: Repetition, summary: Mapping[str, Any]) -> None:
        """Take note that a run has finished, or failed.

        Args:
            name: name of the variant.
            repetition: seed of the run, with folds (seed, fold).
            summary: summary of the run.
        """


@dataclass(frozen=True)
class PlannedRun:
    """Planned run: a variant with one of the seeds, or (seed, fold), and its folder.

    Args:
        name: name of the variant.
        repetition: seed, or (seed, fold).
        experiment: keys of its experiment.
        directory: folder of the run; None: nothing is written.
        overwrites: True if it replaces what its folder holds of an earlier run.
        resumes: True if it goes on from its newest checkpoint, where there is one.
        part: place of the run in the comparison, for trackers.
    """

    name: str
    repetition: Repetition
    experiment: dict[str, Any]
    directory: Path | None = None
    overwrites: bool = False
    resumes: bool = False
    part: RunLabel = field(default_factory=RunLabel)


@dataclass(frozen=True)
class _Reporter:
    """Observer of a run that also keeps its metrics, which are lost otherwise if the run fails."""

    tell: Callable[[dict[str, Any]], None]
    lines: list[dict[str, Any]] = field(default_factory=list)
    kinds: Kinds = (RoundEnded,)

    def observe(self, event: Event) -> None:
        assert isinstance(event, RoundEnded)
        self.lines.append(dict(event.line))
        self.tell(self.lines[-1])


def record_of(run: PlannedRun, tell: Callable[[dict[str, Any]], None], **given: Any) -> Record:
    """Record of a run that is made in this process.

    Args:
        run: plan of the run.
        tell: function that is called with the metrics of each round.
        given: Python objects for :func:`fed.simulate`, by the names of its parameters.
    """
    reporter = _Reporter(tell)
    try:
        done = _simulated(run, reporter, **given)
    except RunFailed as error:
        lines = reporter.lines
        if run.resumes and run.directory is not None:
            lines = [line for line, _ in metrics_lines(run.directory)]  # with those from before it was resumed
        return {"metrics": lines, "summary": {"status": "failed", "reason": str(error)}}
    return {"metrics": done.metrics, "summary": done.summary}


def _simulated(run: PlannedRun, reporter: _Reporter, **given: Any) -> Run:
    """The run, resumed where its folder has what that takes, or else from its beginning."""
    experiment = Experiment(**run.experiment)
    observers = tracked([Essential(reporter)], experiment, run.directory, run.part)
    told = {"output": run.directory, "observers": observers, **given}
    if run.resumes:
        try:
            return simulate(experiment, resume=True, **told)
        except InvalidCheckpoint as error:
            _log.warning("%s begins again: %s", run.directory, error)
    return simulate(experiment, overwrite=run.overwrites, **told)


def _tell(observer: ComparisonObserver | None, run: PlannedRun, line: Mapping[str, Any]) -> None:
    if observer is not None:
        observer.round(run.name, run.repetition, line)


def jobs_of(jobs: int | Literal["auto"], given: Mapping[str, Any], devices: Iterable[str] = ()) -> int:
    """Number of processes for runs side by side; 1: this process alone.

    Args:
        jobs: number that is asked for, or "auto": one for each core, and at most four for each GPU of those that train.
        given: parts given in Python, by the names of :func:`fed.simulate`'s parameters.
        devices: names of the runs' devices.

    Raises:
        InvalidInput: if it is less than 1, or a part cannot go to another process.
    """
    if jobs != "auto" and not isinstance(jobs, int):
        raise InvalidInput(f"jobs must be a number or 'auto', got {jobs!r}")
    count = min(usable_cores(), most_side_by_side(devices) or usable_cores()) if jobs == "auto" else jobs
    if count < 1:
        raise InvalidInput(f"jobs must be at least 1, got {count}")
    if count == 1:
        return 1
    for name, part in given.items():
        try:
            pickle.dumps(part)  # tried here, where the part can be named
        except Exception as error:
            if jobs == "auto":
                _log.info("one run after the other: the %s cannot be pickled (%s)", name, first_line(error))
                return 1
            raise InvalidInput(
                f"the {name} given in Python cannot be pickled ({first_line(error)}), so jobs must be 1, got {jobs}: "
                "leave jobs out, or define it at the top of a module"
            ) from None
    return count


def one_by_one(planned: Sequence[PlannedRun], observer: ComparisonObserver | None = None, **given: Any) -> Ended:
    """Record of each run, made in this process.

    Args:
        planned: plans of the runs, which are made in this order.
        observer: observer of the comparison; None for none.
        given: Python objects for :func:`fed.simulate`, by the names of its parameters.
    """
    for run in planned:
        if observer is not None:
            observer.start(run.name, run.repetition)
        yield run, record_of(run, partial(_tell, observer, run), **given)


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    place: int
    is_ready: bool = False
    run: PlannedRun | None = None

    def give(self, run: PlannedRun) -> None:
        self.run = run
        with contextlib.suppress(ConnectionError):  # it has just died, which the next receive() says
            self.connection.send(run)

    def receive(self) -> tuple[str, Any]:
        try:
            kind, content = self.connection.recv()
        except (EOFError, ConnectionError):
            # Joined first: only then is there an exit code.
            self.process.join()
            if not self.is_ready:
                raise in_one_sentence(RunFailed(_NO_START.format(code=self.process.exitcode))) from None
            reason = _DIED.format(code=self.process.exitcode)
            return "died", {"metrics": [], "summary": {"status": "failed", "reason": reason}}
        self.is_ready = True
        return kind, content

    def stop(self) -> None:
        self.connection.close()
        stop(self.process, _STOP_WITHIN_S)


_DIED = "its process died with exit code {code}: it may have run out of memory, lower jobs"
_NO_START = (
    "a process for runs side by side could not start (exit code {code}): a program that calls compare with jobs > 1 "
    "must do so under if __name__ == '__main__':, or use jobs=1"
)


def side_by_side(
    planned: Sequence[PlannedRun], jobs: int, observer: ComparisonObserver | None = None, **given: Any
) -> Ended:
    """Record of each run as it ends, up to ``jobs`` at a time, in processes that are gone when the iterator is closed.

    A process that dies fails its own run alone; another process takes its place.

    Args:
        planned: plans of the runs, which begin in this order.
        jobs: number of processes, at least 1.
        observer: observer of the comparison; None for none.
        given: Python objects for :func:`fed.simulate`, by the names of its parameters; each process has a copy.

    Raises:
        FedError: what a run raised, other than :class:`fed.errors.RunFailed`.
        RuntimeError: if a run raised anything else; it holds that traceback.
    """
    waiting = deque(planned)
    parts = pickle.dumps(given)
    workers = [_begun(parts, place) for place in range(min(jobs, len(planned)))]
    try:
        while workers:
            worker_of = {worker.connection: worker for worker in workers}
            for worker in [worker_of[ready] for ready in wait(list(worker_of))]:  # type: ignore[index]  # nothing else
                kind, content = worker.receive()
                if kind == "error":
                    raise content
                run = worker.run
                if run is not None and kind == "round":
                    _tell(observer, run, content)
                    continue
                # A process serves many runs: to start one, and to load PyTorch, takes seconds.
                if waiting and kind != "died":
                    begun = waiting.popleft()
                    worker.give(begun)
                    if observer is not None:
                        observer.start(begun.name, begun.repetition)
                else:
                    workers.remove(worker)
                    worker.stop()
                    if waiting:
                        workers.append(_begun(parts, worker.place))
                if run is not None:
                    yield run, content
    finally:
        for worker in workers:
            worker.process.terminate()  # all first, so that they end side by side
        for worker in workers:
            worker.stop()


def _begun(parts: bytes, place: int) -> _Worker:
    process, connection = spawned(_work, parts, place, name="worker of a comparison")
    return _Worker(process, connection, place)


def _work(connection: Connection, parts: bytes, place: int) -> None:
    """Do run after run until the other end is closed, or stop when terminated, each folder left in order."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A comparison that is killed and resumed must not find its runs' folders still in use.
    end_with_parent()
    deal_from(place)
    given = pickle.loads(parts)  # noqa: S301  # made by the parent
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        connection.send(("ready", None))
        while True:
            run = connection.recv()
            message: tuple[str, Any]
            try:
                record = record_of(run, lambda line: connection.send(("round", line)), **given)
                message = ("end", record)
            except Exception as error:
                message = ("error", portable_error(error))
            connection.send(message)


def portable_error(error: Exception) -> Exception:
    """Error that can be sent between processes: an error of ours, or else one that holds the traceback as text."""
    return error if isinstance(error, FedError) else RuntimeError("".join(traceback.format_exception(error)))
