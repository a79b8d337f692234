"""Executor on a Ray cluster: actors on its nodes do the items, and the items of one that dies go to others."""

import logging
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from fed.clients.training.executor import Demand, Item, Make, Result
from fed.errors import FedError, InvalidExperiment, InvalidInput, RunFailed, first_line
from fed.simulations.executors.queued import QueuedExecutor, QueuedTask
from fed.simulations.executors.ray_cluster import RayCluster
from fed.simulations.executors.ray_worker import Answer, RayReply, RayWorker
from fed.vectors.arrays import Bytes, bytes_of, tensor_of
from fed.vectors.tensors import Tensor
from fed.vectors.torch_settings import current_settings

__all__ = ["Ray", "amounts_of", "words_of_death"]

_log = logging.getLogger(__name__)

_DEATHS = 3
"""Number of deaths of workers during one item, after which it is given to no other."""

_STORED_BYTES = 100_000
"""Size from which a tensor of several items goes into the object store once, rather than with each of them."""

_WAITING_S = 60.0
"""Seconds without a worker after which the log says what is waited for."""


_Key: TypeAlias = tuple[Any, ...]


@dataclass
class _Stored:
    """Tensor in the object store, and the number of items that wait for it."""

    reference: Any
    items: int = 0


@dataclass(eq=False)
class _Task(QueuedTask):
    places: list[tuple[Any, tuple[int, ...]]] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)  # bytes, or the reference of those in the object store
    stored: list[_Key] = field(default_factory=list)


@dataclass(eq=False)
class _Worker:
    """The caller's side of an actor."""

    number: int
    actor: Any
    false_starts: int = 0
    is_ready: bool = False
    given: list[_Task] = field(default_factory=list)


class Ray(QueuedExecutor[_Task]):
    """Workers on the nodes of a Ray cluster, one thread each, on a core each or on a GPU.

    Each makes its work once; data reach a node once, through its object store. A worker that dies, with its node or
    alone, is replaced where there is room, and its items come first in the queue; an item that has ended three is given
    up. The cluster has its resources back at the end, also on Ctrl-C and where this process is killed.

    Args:
        make: factory of the work; it can be pickled.
        demand: workers that the simulation has use for.
        address: address of a running cluster, such as 10.0.0.1:6379, or auto for that of ``RAY_ADDRESS`` or of this
            machine; null: one is started on this machine, with the cores and GPUs that are usable here.
        workers_per_gpu: number of workers that share a GPU, where the device is one.
        memory_gb: memory that Ray sets apart for each worker, in gigabytes; null: none.

    Raises:
        InvalidInput: if Ray is not installed.
        InvalidExperiment: if the cluster has no room for so many workers, or none for their device.
        RunFailed: if the cluster cannot be reached or started.
    """

    is_parallel = True
    pickles_work = True
    copies_arrays = True

    def __init__(
        self,
        make: Make,
        demand: Demand,
        address: str | None = None,
        workers_per_gpu: Annotated[int, Field(ge=1)] = 1,
        memory_gb: Annotated[float, Field(gt=0)] | None = None,
    ) -> None:
        super().__init__()
        if demand.device not in ("cpu", "cuda"):
            raise InvalidExperiment(
                f"workers on Ray compute on the CPU or on GPUs of NVIDIA, got device {demand.device}: set "
                "simulation.device to cpu"
            )
        self._device = demand.device
        self._calls: dict[Any, tuple[_Worker, _Task | None]] = {}
        self._stored: dict[_Key, _Stored] = {}
        self._workers: list[_Worker]
        self._cluster = RayCluster(address)
        self._ray = self._cluster.ray
        try:
            needs = amounts_of(self._device, demand.processes, workers_per_gpu, memory_gb)
            count = self._count(demand, needs)
            self._actor = self._ray.remote(RayWorker).options(
                num_cpus=needs["CPU"],
                num_gpus=needs["GPU"],
                memory=needs["memory"] or None,
                scheduling_strategy="SPREAD",
                max_restarts=0,
            )
            self._made = self._ray.put(make)
            self._surroundings = (list(sys.path), str(Path.cwd()))
            self._settings = current_settings()
            self._workers = [self._started(number) for number in range(count)]
        except BaseException:
            self.close()
            raise

    def _count(self, demand: Demand, needs: dict[str, float]) -> int:
        room = self._cluster.room(needs)
        asked = min(room, demand.groups) if demand.workers is None else demand.workers
        if not room or asked > room:
            each = " and ".join(f"{amount:g} {_UNITS[name]}" for name, amount in needs.items() if amount)
            raise InvalidExperiment(
                f"the Ray cluster has room for {room} workers with {each} each, got {asked or 1}: lower "
                "simulation.workers or what each takes, or add nodes"
            )
        return asked

    def submit(self, item: Item) -> int:  # noqa: D102
        self._check_open()
        self._submitted += 1
        task = _Task(self._submitted, item)
        for tensor in item.tensors:
            self._pack(task, tensor)
        self._pending[task.ticket] = task
        self._enqueue(task)
        self._listen(0)
        self._hand_out(1)
        return task.ticket

    def _pack(self, task: _Task, tensor: Tensor) -> None:
        """Add the bytes of a tensor to a task, or their reference: a model that all groups get is stored once."""
        part = bytes_of(tensor)
        task.places.append((part.dtype, part.shape))
        if part.array.nbytes < _STORED_BYTES:
            task.arrays.append(part.array)
            return
        # An item that waits keeps this memory, and its numbers, as they are.
        key = (tensor.data_ptr(), part.dtype, part.shape, tensor.stride())
        if key not in self._stored:
            self._stored[key] = _Stored(self._ray.put(part.array))
        self._stored[key].items += 1
        task.stored.append(key)
        task.arrays.append(self._stored[key].reference)

    def results(self, tickets: Iterable[int]) -> Iterator[Result]:  # noqa: D102
        wanted = set(tickets)
        try:
            while wanted:
                self._check_open()
                self._hand_out(2)
                done = self._done_of(wanted)
                if not done:
                    self._await()
                for ticket in done:  # workers get new items between results, for the caller may take long
                    self._listen(0)
                    self._hand_out(2)
                    wanted.discard(ticket)
                    yield self._taken(ticket)
        except KeyboardInterrupt:
            self.close()
            raise

    def close(self) -> None:  # noqa: D102
        workers = self._workers
        self._workers = []  # closed from here on, even if what follows is interrupted
        self._calls.clear()
        self._stored.clear()
        self._queue.clear()
        self._pending.clear()
        try:
            for worker in workers:
                self._ray.kill(worker.actor)
        finally:
            self._cluster.leave()

    def _hand_out(self, most: int) -> None:
        """Give every worker up to this many items; of the last ones no worker gets a second."""
        for given in range(most):
            for worker in self._workers:
                has_enough = len(self._queue) > given * len(self._workers)
                if has_enough and worker.is_ready and len(worker.given) == given:
                    self._give(worker, self._first())

    def _give(self, worker: _Worker, task: _Task) -> None:
        try:
            call = worker.actor.do.remote(task.item.content, task.places, *task.arrays)
        except TypeError as error:  # Ray's, where something cannot be pickled
            words = first_line(error)
            failure = InvalidInput(f"{task.item.label}: content must be picklable to go between processes: {words}")
            self._finish(task, failure)
            return
        worker.given.append(task)
        self._calls[call] = worker, task

    def _started(self, number: int, false_starts: int = 0) -> _Worker:
        worker = _Worker(number, self._actor.remote(self._surroundings, self._settings), false_starts)
        self._calls[worker.actor.begin.remote(self._made, self._device)] = worker, None
        return worker

    def _await(self) -> None:
        """Wait until something has happened."""
        if any(worker.is_ready for worker in self._workers):
            self._listen(None)
        elif not self._listen(_WAITING_S):
            _log.warning("waiting for a node of the Ray cluster that has room for a worker")
            self._listen(None)

    def _listen(self, timeout_s: float | None) -> bool:
        """Take the replies that are there, or the first that comes; True if there was one."""
        ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        for call in ready:
            if call in self._calls:  # else of a worker that has turned out to be dead
                worker, task = self._calls.pop(call)
                self._take_reply(worker, task, call)
        return bool(ready)

    def _take_reply(self, worker: _Worker, task: _Task | None, call: Any) -> None:
        exceptions = self._ray.exceptions
        try:
            answer: Answer = self._ray.get(call)
        except exceptions.RayTaskError as error:  # raised outside the work, such as by what cannot be pickled
            answer = (RayReply.RAISED, (first_line(error.cause or error), str(error)), ())
        except exceptions.RayError as error:
            self._remove_dead(worker, task, words_of_death(error), "")
            return
        reply, content, parts = answer
        if task is None:
            self._take_beginning(worker, reply, content)
        elif reply == RayReply.RAISED:
            self._remove_dead(worker, task, *content)
        else:
            worker.given.remove(task)
            is_done = reply == RayReply.DONE
            tensors = [tensor_of(Bytes(*part)).clone() for part in parts]
            self._finish(task, Result(task.ticket, content, tensors) if is_done else content)

    def _take_beginning(self, worker: _Worker, reply: RayReply, content: Any) -> None:
        """Take the reply of a worker that was to make its work; where that fails, it would fail anywhere."""
        if reply == RayReply.READY:
            worker.is_ready = True
            return
        self.close()
        raise content if reply == RayReply.REFUSED else RunFailed(_NOT_MADE.format(words=content[0]))

    def _finish(self, task: _Task, result: Result | FedError) -> None:
        del self._pending[task.ticket]
        self._finished[task.ticket] = result
        for key in task.stored:
            self._stored[key].items -= 1
            if not self._stored[key].items:
                del self._stored[key]

    def _remove_dead(self, worker: _Worker, task: _Task | None, words: str, details: str) -> None:
        """Remove a worker that died or whose work has failed, and start another."""
        at_work = worker.given[0] if worker.given else task
        doing = f"at {at_work.item.label}" if at_work else "idle"
        lines = [f"worker {worker.number} on Ray died, {doing}: {words}"]
        if details and (at_work is None or not at_work.deaths):
            lines.append(details)
        _log.warning("%s", "\n".join(lines))
        self._calls = {call: waits for call, waits in self._calls.items() if waits[0] is not worker}
        if at_work:
            at_work.deaths += 1
        for lost in worker.given:
            # After so many deaths the item itself must be the cause: more workers would die of it.
            if lost.deaths == _DEATHS:
                self._finish(lost, RunFailed(_GIVEN_UP.format(label=lost.item.label, words=words)))
            else:
                self._enqueue(lost, is_lost=True)
        self._replace(worker, words)

    def _replace(self, worker: _Worker, words: str) -> None:
        """Start another worker in a dead one's place; after three that died at their start, none."""
        self._ray.kill(worker.actor)  # one whose work has failed still lives, and its state may be half changed
        index = self._workers.index(worker)
        false_starts = 0 if worker.is_ready else worker.false_starts + 1
        if false_starts < _DEATHS:
            self._workers[index] = self._started(worker.number, false_starts)
            return
        del self._workers[index]
        _log.warning("%d workers on Ray are left", len(self._workers))
        if not self._workers:
            self.close()
            raise RunFailed(_NOT_MADE.format(words=words))


def amounts_of(device: str, processes: int, workers_per_gpu: int, memory_gb: float | None) -> dict[str, float]:
    """Resources that a worker takes, by their names in Ray.

    Args:
        device: type of its device.
        processes: number of its processes.
        workers_per_gpu: number of workers that share a GPU.
        memory_gb: memory that is set apart for it, in gigabytes; None: none.
    """
    gpus = processes / workers_per_gpu if device == "cuda" else 0.0
    return {
        "CPU": processes,
        "GPU": gpus if gpus <= 1 else math.ceil(gpus),  # Ray gives out parts of one GPU alone
        "memory": round((memory_gb or 0.0) * 1e9),
    }


def words_of_death(error: Exception) -> str:
    """Description of the end of a worker, out of Ray's many lines."""
    text = str(error)
    if "node" in text and "worker process has died" not in text:
        return "its node died"
    if type(error).__name__ == "ActorUnavailableError":
        return "its process cannot be reached: it or its node may have died"
    if "memory" in type(error).__name__.lower():
        return "killed by Ray, because its node's memory ran out"
    _, _, detail = text.partition("Worker exit detail: ")
    reason = detail.partition(". ")[0] or first_line(error)
    return f"its process died ({reason}): its node may have run out of memory"


_UNITS = {"CPU": "cores", "GPU": "GPUs", "memory": "bytes of memory"}
_GIVEN_UP = f"{{label}} ended {_DEATHS} workers on Ray; last words: {{words}}"
_NOT_MADE = (
    "workers on Ray cannot begin: {words}; use executor in_process to train in this process and see where it fails"
)
