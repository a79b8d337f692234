"""Runs of a comparison spread over the nodes of a Ray cluster, one process each, with the same bits as here."""

import contextlib
import copy
import dataclasses
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fed.clients.training.devices import device_of
from fed.config.comparison import Comparison
from fed.config.components import Component
from fed.config.experiment import Experiment
from fed.errors import InvalidInput, RunFailed
from fed.processes.machine import keep_freed_memory
from fed.simulations.executors.on_ray import Ray, amounts_of, words_of_death
from fed.simulations.executors.ray_cluster import RayCluster, take_surroundings
from fed.simulations.processes import ComparisonObserver, Ended, PlannedRun, portable_error, record_of
from fed.storage.atomic_files import LOCK, held
from fed.storage.run_reader import is_run

__all__ = ["RayRun", "on_ray", "section_of"]

_log = logging.getLogger(__name__)

_DEATHS = 3
"""Number of processes that a run may end before it counts as failed."""

_STOP_WITHIN_S = 10.0
"""Seconds that interrupted runs have to leave their folders in order."""

_UNLOCKED_WITHIN_S = 60.0
"""Seconds that a process on a node that has died has to end, and to unlock its run's folder."""


def section_of(comparison: Comparison) -> Component | None:
    """The section of the executor ray, if all variants have the same; else None."""
    sections = [variant.simulation.executor for variant in comparison.variants().values()]
    first = sections[0]
    if first is None or first.target is not Ray or any(section != first for section in sections):
        return None
    return first


class _Shared(NamedTuple):
    """File that each node must see as this process does."""

    path: Path
    content: bytes


class RayRun:
    """Actor that does run after run, each in a thread beside the one that is asked for news.

    Args:
        surroundings: paths and folder of the process that compares.
        shared: file of the comparison's folder; None: nothing is written.
        given: parts given in Python, by the names of :func:`fed.simulate`'s parameters.
    """

    def __init__(self, surroundings: tuple[list[str], str], shared: _Shared | None, given: Mapping[str, Any]) -> None:
        take_surroundings(*surroundings)
        keep_freed_memory()
        self._given = given
        self._is_stopped = False
        self._news: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        first: tuple[str, Any] = ("ready", None)
        if shared is not None and not _sees(shared):
            first = ("error", InvalidInput(_NOT_SHARED.format(folder=shared.path.parent)))
        self._news.put(first)

    def news(self) -> tuple[str, Any]:
        """Wait for the next message: ready, round, end, error or stopped."""
        return self._news.get()

    def begin(self, run: PlannedRun) -> None:
        """Begin a run."""
        threading.Thread(target=self._run, args=(run,), daemon=True).start()

    def stop(self) -> None:
        """End the run after its round, with its folder in order."""
        self._is_stopped = True

    def _run(self, run: PlannedRun) -> None:
        try:
            if run.resumes and run.directory is not None:
                _await_unlocked(run.directory)
                run = dataclasses.replace(run, resumes=is_run(run.directory))
            self._news.put(("end", record_of(run, self._tell, **self._given)))
        except KeyboardInterrupt:
            self._news.put(("stopped", None))
        except Exception as error:
            self._news.put(("error", portable_error(error)))

    def _tell(self, line: Mapping[str, Any]) -> None:
        self._news.put(("round", line))
        if self._is_stopped:
            raise KeyboardInterrupt


def _sees(shared: _Shared) -> bool:
    try:
        return shared.path.read_bytes() == shared.content
    except OSError:
        return False


def _await_unlocked(folder: Path) -> None:
    """Wait until a process that died with its node has let go of a folder."""
    end_s = time.monotonic() + _UNLOCKED_WITHIN_S
    while (folder / LOCK).exists() and time.monotonic() < end_s:
        with contextlib.suppress(InvalidInput), held(folder, ""):
            return
        time.sleep(0.1)


@dataclass(eq=False)
class _Worker:
    """The comparing process's side of an actor."""

    actor: Any
    run: PlannedRun | None = None


@dataclass
class _Progress:
    """Progress of a run that may begin again on another node."""

    rounds: int = 0
    deaths: int = 0


@dataclass(eq=False)
class _Spread:
    """Runs on the nodes of a cluster."""

    cluster: RayCluster
    make: Any
    observer: ComparisonObserver | None
    waiting: deque[PlannedRun]
    progress: dict[tuple[str, Any], _Progress] = field(default_factory=dict)
    calls: dict[Any, _Worker] = field(default_factory=dict)
    false_starts: int = 0

    def start(self) -> None:
        self.listen(_Worker(self.make()))

    def listen(self, worker: _Worker) -> None:
        self.calls[worker.actor.news.remote()] = worker

    def end(self, worker: _Worker) -> None:
        self.cluster.ray.kill(worker.actor)

    def give(self, worker: _Worker) -> None:
        """Give a worker the next run, or end it where there is none."""
        worker.run = None
        if not self.waiting:
            self.end(worker)
            return
        run = worker.run = self.waiting.popleft()
        worker.actor.begin.remote(run)
        self.listen(worker)
        if self.of(run).deaths == 0 and self.observer is not None:
            self.observer.start(run.name, run.repetition)

    def of(self, run: PlannedRun) -> _Progress:
        return self.progress.setdefault((run.name, run.repetition), _Progress())

    def records(self) -> Ended:
        while self.calls:
            ready, _ = self.cluster.ray.wait(list(self.calls), num_returns=1)
            worker = self.calls.pop(ready[0])
            run = worker.run
            try:
                kind, content = self.cluster.ray.get(ready[0])
            except self.cluster.ray.exceptions.RayError as error:
                kind = "died"
                content = error
            if kind == "error":
                raise content
            if kind == "round" and run is not None:
                self.tell(run, content)
                self.listen(worker)
            elif kind == "died":
                reason = self.reason_to_give_up(worker, content)
                if reason and run is not None:
                    yield run, {"metrics": [], "summary": {"status": "failed", "reason": reason}}
                if self.waiting:
                    self.start()
            else:
                self.give(worker)
                if kind == "end" and run is not None:
                    yield run, content

    def tell(self, run: PlannedRun, line: Mapping[str, Any]) -> None:
        """Tell of a round, once, though a run that began again has it twice."""
        progress = self.of(run)
        if line["round"] > progress.rounds:
            progress.rounds = line["round"]
            if self.observer is not None:
                self.observer.round(run.name, run.repetition, line)

    def reason_to_give_up(self, worker: _Worker, error: Exception) -> str:
        """Have the run of a worker that died done again, or say why not.

        Raises:
            RunFailed: if no worker is left, and several have died before they had a run.
        """
        self.end(worker)
        run = worker.run
        words = words_of_death(error)
        if run is None:
            self.false_starts += 1
            if self.false_starts >= _DEATHS and not self.calls:
                raise RunFailed(f"no run can begin on the Ray cluster: {words}")
            return ""
        self.false_starts = 0
        progress = self.of(run)
        progress.deaths += 1
        _log.warning("%s with seed %s begins again on Ray: %s", run.name, run.repetition, words)
        if progress.deaths == _DEATHS:
            return f"it ended {_DEATHS} processes on Ray; last words: {words}"
        self.waiting.appendleft(dataclasses.replace(run, overwrites=True, resumes=run.directory is not None))
        return ""

    def stop(self) -> None:
        """Have all runs leave their folders in order, and end all workers."""
        busy = {call: worker for call, worker in self.calls.items() if worker.run is not None}
        workers = list(self.calls.values())
        for worker in busy.values():
            worker.actor.stop.remote()
        end_s = time.monotonic() + _STOP_WITHIN_S
        while busy and (left_s := end_s - time.monotonic()) > 0:
            ready, _ = self.cluster.ray.wait(list(busy), num_returns=1, timeout=left_s)
            for call in ready:
                worker = busy.pop(call)
                with contextlib.suppress(self.cluster.ray.exceptions.RayError):
                    if self.cluster.ray.get(call)[0] == "round":
                        busy[worker.actor.news.remote()] = worker
        for worker in workers:
            self.end(worker)


def on_ray(
    planned: Sequence[PlannedRun],
    section: Component,
    jobs: int | None,
    observer: ComparisonObserver | None,
    shared: Path | None,
    **given: Any,
) -> Ended:
    """Record of each run as it ends; runs are spread over a cluster and leave nothing there when this is closed.

    A run whose process or node dies goes on elsewhere from its newest checkpoint, or begins again.

    Args:
        planned: plans of the runs, which begin in this order.
        section: section of the executor ray.
        jobs: largest number of runs at a time; None: as many as there is room for.
        observer: observer of the comparison; None for none.
        shared: file of the comparison's folder, which all nodes must see; None: nothing is written.
        given: Python objects for :func:`fed.simulate`, by the names of its parameters; each process has a copy.

    Raises:
        FedError: what a run raised, other than :class:`fed.errors.RunFailed`.
        RuntimeError: if a run raised anything else; it holds that traceback.
    """
    keys = section.model_dump(exclude={"kind"})
    experiments = [Experiment(**run.experiment) for run in planned]
    device = device_of(experiments[0].simulation.device).type
    processes = max(experiment.local.devices for experiment in experiments)
    needs = amounts_of(device, processes, keys["workers_per_gpu"], keys["memory_gb"])
    cluster = RayCluster(keys["address"])
    try:
        room = cluster.room(needs)
        if not room:
            raise InvalidInput("the Ray cluster has no node with room for a run: lower what each takes, or add nodes")
        ray = cluster.ray
        content = None if shared is None else _Shared(shared.resolve(), shared.read_bytes())
        parts = ray.put(given)
        actor = ray.remote(RayRun).options(
            num_cpus=needs["CPU"], num_gpus=needs["GPU"], memory=needs["memory"] or None, max_concurrency=2
        )
        surroundings = (list(sys.path), str(Path.cwd()))
        waiting = deque(_in_one_process(run, device) for run in planned)
        spread = _Spread(cluster, lambda: actor.remote(surroundings, content, parts), observer, waiting)
        try:
            for _ in range(min(len(planned), room, jobs or room)):
                spread.start()
            yield from spread.records()
        finally:
            spread.stop()
    finally:
        cluster.leave()


def _in_one_process(run: PlannedRun, device: str) -> PlannedRun:
    """A run that trains in its own process, on the device that Ray gives it."""
    keys = copy.deepcopy(run.experiment)
    keys["simulation"] = {**(keys.get("simulation") or {}), "executor": "in_process", "workers": 0, "device": device}
    directory = None if run.directory is None else run.directory.resolve()
    return dataclasses.replace(run, experiment=keys, directory=directory)


_NOT_SHARED = (
    "a node of the Ray cluster does not see {folder} as this machine does: choose an output in a folder that all nodes "
    "share"
)
