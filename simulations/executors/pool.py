"""Pool of worker processes, which survives their deaths.

Workers get items, and give their results back, in shared memory; messages through a pipe only say where to look. A
worker has two slots, so that an item waits beside the one at work. The items of a worker that dies go to others.
"""

import contextlib
import logging
import selectors
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, NamedTuple

from fed.clients.training.executor import Item, Make, Result, Work
from fed.clients.training.working_process import FAULT_BYTES, fault_in
from fed.errors import FedError, InvalidInput, RunFailed, in_one_sentence, os_errors_as
from fed.processes.child_processes import UNKNOWN_EXIT_CODE, spawned, stop
from fed.processes.crash_report import words_of_exit
from fed.simulations.executors.queued import QueuedExecutor, QueuedTask
from fed.simulations.executors.worker import (
    ANSWER,
    ORDER,
    SLOTS,
    Maker,
    WorkerReply,
    serve,
)
from fed.vectors.shared_memory import Parcel, SharedMemory, Slot
from fed.vectors.torch_settings import current_settings

if TYPE_CHECKING:
    from fed.vectors.tensors import torch

__all__ = ["Workers"]

_log = logging.getLogger(__name__)

_DEATHS = 3
"""Number of deaths of workers during one item, after which it is given to no other."""

_STOP_WITHIN_S = 5.0


@dataclass(eq=False)
class _Task(QueuedTask):
    parcel: Parcel


class _Given(NamedTuple):
    task: _Task
    slot: int


@dataclass(eq=False)
class _Worker:
    """The parent's side of a worker."""

    number: int
    device: "torch.device"
    memory: SharedMemory
    slots: list[Slot]
    process: BaseProcess
    connection: Connection
    is_ready: bool = False
    false_starts: int = 0
    given: deque[_Given] = field(default_factory=deque)
    free: list[int] = field(default_factory=lambda: list(range(SLOTS)))

    def give(self, task: _Task) -> None:
        slot = self.free.pop()
        self.given.append(_Given(task, slot))
        size = self.slots[slot].write(task.parcel, task.item.tensors)
        self.slots[slot].is_recalled = False  # before the order, on which the worker looks at it
        self.tell(ORDER.pack(slot, size))

    def tell(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it has just died, which its end of the pipe says next
            self.connection.send_bytes(message)

    def fault(self) -> str:
        """Text that faulthandler wrote at a crash."""
        return fault_in(self.memory)


class Workers(QueuedExecutor[_Task]):
    """Worker processes of this machine, one thread each.

    A worker that dies, is killed or runs out of memory is replaced, and so is one whose work raised anything but a
    :class:`fed.errors.FedError`; its items come first in the queue. Results are the same bits, for work is pure. A
    stopped worker (SIGSTOP) cannot be told from a slow one and is waited for. Workers do not see Ctrl-C, and end when
    this process does, however that happens.

    Args:
        make: function from a device to the work, called in each worker; picklable, with a
            :class:`fed.vectors.shared_memory.SharedTensor` in place of each large tensor, which is then
            not copied. It is pickled whenever a worker begins, so it must not change meanwhile.
        devices: device of each worker; at least one.
        capacity_bytes: largest size of an item's tensors together, and of its result's, each tensor rounded up to 64
            bytes. A worker has twice this memory for them, beside its own.
        small_bytes: size of an item's tensors below which it is done in this process, if its result alone is waited
            for: sending it takes longer than doing it. Such items are begun when their results are asked for.
        awaits: True if the constructor waits until a worker has begun.

    Raises:
        InvalidInput: if there cannot be such workers.
        RunFailed: if there is no room for them.

    Note:
        An item is begun at once where a worker is idle: of many items submit the costliest first. Results are copies.
    """

    is_parallel = True
    pickles_work = True
    shares_memory = True

    def __init__(
        self,
        make: Make,
        devices: "Sequence[torch.device]",
        capacity_bytes: int,
        small_bytes: int = 0,
        awaits: bool = False,
    ) -> None:
        super().__init__()
        if not devices:
            raise InvalidInput("there must be at least 1 worker, got 0")
        self._make = make
        self._capacity_bytes = capacity_bytes
        self._small_bytes = small_bytes
        self._first_device = devices[0]
        self._small: dict[int, Item] = {}
        self._work_here: Work | None = None
        self._settings = current_settings()
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker]
        try:
            for number, device in enumerate(devices):
                size = SLOTS * Slot.size_bytes(capacity_bytes) + FAULT_BYTES
                self._workers.append(self._started(number, device, SharedMemory(size)))
            while awaits and not any(worker.is_ready for worker in self._workers):
                self._listen(None)
        except BaseException:
            self.close()
            raise

    def submit(self, item: Item) -> int:  # noqa: D102
        self._check_open()
        self._submitted += 1
        size_bytes = sum(part.numel() * part.element_size() for part in item.tensors)
        if item.priority == 0 and size_bytes < self._small_bytes:
            self._small[self._submitted] = item
        else:
            self._send(self._submitted, item)
        return self._submitted

    def _send(self, ticket: int, item: Item) -> None:
        content = (item.label, item.content)
        parcel = Parcel.of(content, item.tensors, capacity_bytes=self._capacity_bytes, what=item.label)
        task = _Task(ticket, item, parcel)
        self._pending[ticket] = task
        self._enqueue(task)
        self._listen(0)
        self._hand_out(1)

    def _done_here(self, ticket: int) -> Result | None:
        """Result of a small item, done in this process; None if that failed, and the item is for workers instead."""
        item = self._small.pop(ticket)
        try:
            self._work_here = self._work_here or self._make(self._first_device)
            content, tensors = self._work_here(item.content, item.tensors)
        except FedError:
            raise
        except Exception:
            _log.warning("%s failed in this process, and is given to workers", item.label, exc_info=True)
            self._work_here = None  # its state may be half changed
            self._small[ticket] = item
            return None
        return Result(ticket, content, [tensor.detach() for tensor in tensors])

    def results(self, tickets: Iterable[int]) -> Iterator[Result]:  # noqa: D102
        wanted = set(tickets)
        if len(wanted) == 1 and wanted == self._small.keys():
            self._check_open()
            (ticket,) = wanted
            if (result := self._done_here(ticket)) is not None:
                yield result
                return
        for ticket in sorted(self._small) if wanted & self._small.keys() else ():
            self._send(ticket, self._small.pop(ticket))
        try:
            while wanted:
                self._check_open()
                self._hand_out(SLOTS)
                self._recall()
                done = self._done_of(wanted)
                if not done:
                    self._listen(None)
                for ticket in done:  # workers get new items between results, for the caller may take long
                    self._listen(0)
                    self._hand_out(SLOTS)
                    wanted.discard(ticket)
                    yield self._taken(ticket)
        except KeyboardInterrupt:
            self.close()
            raise

    def close(self) -> None:  # noqa: D102
        workers = self._workers
        self._workers = []  # closed from here on, even if what follows is interrupted
        try:
            for worker in workers:
                if worker.is_ready and not worker.given:
                    worker.tell(b"")
                else:
                    worker.process.kill()
                worker.connection.close()
            for worker in workers:
                stop(worker.process, _STOP_WITHIN_S)
        finally:
            for worker in workers:
                worker.process.kill()
            self._selector.close()
            self._small.clear()
            self._queue.clear()
            self._pending.clear()
            self._finished.clear()

    def _hand_out(self, slots: int) -> None:
        """Give every worker up to this many items."""
        # Round by round, so that no worker gets a second item while another has none.
        for given in range(slots):
            for worker in self._workers:
                if worker.is_ready and len(worker.given) == given and (task := self._next()):
                    worker.give(task)

    def _next(self) -> _Task | None:
        while self._queue:
            task = self._first()
            if task.ticket in self._pending:  # else a recalled item, whose first result has come
                return task
        return None

    def _recall(self) -> None:
        """Give idle workers the items that wait behind another's work; if both do one, the first result counts."""
        idle = [worker for worker in self._workers if worker.is_ready and not worker.given]
        for worker in self._workers if idle else ():
            for task, slot in list(worker.given)[1:]:
                if idle and not worker.slots[slot].is_recalled:
                    worker.slots[slot].is_recalled = True
                    idle.pop().give(task)

    def _started(self, number: int, device: "torch.device", memory: SharedMemory) -> _Worker:
        memory.mapped[-FAULT_BYTES:] = bytes(FAULT_BYTES)
        with os_errors_as(RunFailed, "a worker process cannot be started", "use fewer workers"):
            process, ours = spawned(
                serve,
                memory,
                self._capacity_bytes,
                self._settings,
                Maker(self._make),
                device,
                name=f"worker {number}",
                daemon=True,  # an interpreter that ends without close() would wait for any other process
            )
        slots = [Slot(memory, index, self._capacity_bytes) for index in range(SLOTS)]
        worker = _Worker(number=number, device=device, memory=memory, slots=slots, process=process, connection=ours)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _listen(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            worker: _Worker = key.data
            heard = b""
            with contextlib.suppress(EOFError, OSError):
                heard = worker.connection.recv_bytes()
            if heard:
                answer, slot, size = ANSWER.unpack(heard)
                self._take_reply(worker, answer, slot, size)
            else:
                self._remove_dead(worker, None)

    def _take_reply(self, worker: _Worker, answer: int, slot: int, size: int) -> None:
        if answer == WorkerReply.READY:
            worker.is_ready = True
            return
        try:
            content, tensors = worker.slots[slot].read(size)
        except Exception as error:
            # Such as a class of the user's that exists in the worker only: the item fails, and not the pool.
            answer = WorkerReply.REFUSED
            content = RunFailed(f"the answer of a worker cannot be read here: {error!r}")
        if answer == WorkerReply.NOT_MADE:
            self.close()
            if isinstance(content, FedError):
                raise content
            if "<module '__main__'" in content:
                raise in_one_sentence(RunFailed(_NOT_THERE.format(words=content)))
            raise RunFailed(_NOT_MADE.format(words=content))
        # The worker ends by itself: its work's state may be half changed.
        if answer == WorkerReply.RAISED:
            self._remove_dead(worker, content)
            return
        task = worker.given.popleft().task
        worker.free.append(slot)
        if answer == WorkerReply.DONE:
            # The slot is written to again.
            self._finish(task, Result(task.ticket, content, [tensor.clone() for tensor in tensors]))
        elif answer == WorkerReply.REFUSED:
            self._finish(task, content)

    def _finish(self, task: _Task, result: Result | FedError) -> None:
        if self._pending.pop(task.ticket, None) is not None:
            self._finished[task.ticket] = result

    def _remove_dead(self, worker: _Worker, report: tuple[str, str] | None) -> None:
        """Remove a dead worker, and start another."""
        self._selector.unregister(worker.connection)
        worker.connection.close()
        stop(worker.process, _STOP_WITHIN_S)
        code = worker.process.exitcode
        words, details = report or (words_of_exit(code, worker.fault()), worker.fault())
        at_work = worker.given[0].task if worker.given else None
        doing = f"at {at_work.item.label}" if at_work else "idle"
        # A process that ends by itself at its start would do so again; one that a signal has ended might not.
        if not worker.is_ready and (code is None or (code >= 0 and code != UNKNOWN_EXIT_CODE)):
            self.close()
            raise in_one_sentence(RunFailed(_NO_START.format(words=words)))
        lines = [f"worker {worker.number} died, {doing}: {words}"]
        is_new = at_work is None or not at_work.deaths
        if is_new and details:
            lines.append(details)
        _log.warning("%s", "\n".join(lines))
        if at_work:
            at_work.deaths += 1
        for task, slot in worker.given:
            # After so many deaths the item itself must be the cause: more workers would die of it.
            if task.deaths == _DEATHS:
                self._finish(task, RunFailed(_GIVEN_UP.format(label=task.item.label, words=words)))
            elif not worker.slots[slot].is_recalled:  # otherwise another worker has it
                self._enqueue(task, is_lost=True)
        self._replace(worker, words)

    def _replace(self, worker: _Worker, words: str) -> None:
        """Start another worker in a dead one's place; after three that were killed at their start, none."""
        index = self._workers.index(worker)
        # A worker that was ready has shown that workers can start on this machine.
        false_starts = 0 if worker.is_ready else worker.false_starts + 1
        if false_starts < _DEATHS:
            self._workers[index] = self._started(worker.number, worker.device, worker.memory)
            self._workers[index].false_starts = false_starts
            return
        del self._workers[index]
        _log.warning("%d worker processes are left", len(self._workers))
        if not self._workers:
            self.close()
            raise RunFailed(_NOT_MADE.format(words=words))


_GIVEN_UP = f"{{label}} ended {_DEATHS} worker processes; last words: {{words}}"
_NOT_MADE = "worker processes cannot begin: {words}; use workers: 0 to train in this process and see where it fails"
_NOT_THERE = (
    "worker processes do not find a part of the program itself ({words}): define it in a file of its own and import "
    "it, or use workers: 0"
)
_NO_START = (
    "a worker process could not start ({words}): a program that uses workers must do so under "
    "if __name__ == '__main__':, or use workers: 0"
)
