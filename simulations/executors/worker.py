"""Worker process: its main loop, and the protocol between it and its parent.

Through a pipe the parent sends the slot of an item, or nothing to end it; the worker replies with a
:class:`WorkerReply`. Contents and tensors lie in shared memory: two slots, and behind them room for what
:mod:`faulthandler` writes.
"""

import contextlib
import enum
import os
import pickle
import struct
import sys
from collections.abc import Sequence
from multiprocessing import context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from fed.clients.training.devices import settle_on
from fed.clients.training.executor import Make, Work
from fed.clients.training.working_process import prepare_process
from fed.errors import FedError
from fed.processes.crash_report import portable, words_of_error
from fed.vectors.shared_memory import CONTENT_BYTES, Parcel, SharedMemory, Slot

if TYPE_CHECKING:
    from fed.vectors.tensors import torch

__all__ = ["ANSWER", "ORDER", "SLOTS", "Maker", "WorkerReply", "serve"]

SLOTS = 2
"""Number of slots of a worker: one for the item at work, one for the item that waits."""

ORDER = struct.Struct("<BI")
"""Format of the parent's messages: number of a slot, and size of the pickled content there in bytes."""

ANSWER = struct.Struct("<BBI")
"""Format of the worker's messages: a :class:`WorkerReply`, number of a slot, and size of the pickled content there."""


class WorkerReply(enum.IntEnum):
    """Reply of a worker. Each says what has happened, and what the slot then holds.

    Attributes:
        READY: worker waits for items. The slot holds nothing.
        NOT_MADE: work could not be made, and the worker ends. The slot holds a :class:`fed.errors.FedError` or a text.
        DONE: item is done. The slot holds its result.
        SKIPPED: item was recalled before it was begun. The slot holds nothing.
        REFUSED: work raised a :class:`fed.errors.FedError`, which the slot holds.
        RAISED: work raised another error, and the worker ends. The slot holds a description and the traceback.
    """

    READY = 0
    NOT_MADE = 1
    DONE = 2
    SKIPPED = 3
    REFUSED = 4
    RAISED = 5


class Maker:
    """Factory of a worker's work, sent through shared memory: a full pipe without a reader would block its writer.

    Args:
        make: function from a device to the work; picklable. It is pickled when a process starts.
    """

    def __init__(self, make: Make) -> None:
        self._make = make

    def __getstate__(self) -> tuple[SharedMemory, int]:
        context.assert_spawning(self)
        pickled = pickle.dumps(self._make, pickle.HIGHEST_PROTOCOL)
        self._memory = SharedMemory(len(pickled))  # kept until the process has it
        self._memory.mapped[: len(pickled)] = pickled
        return self._memory, len(pickled)

    def __setstate__(self, state: tuple[SharedMemory, int]) -> None:
        self._memory, self._size = state

    def make(self, device: "torch.device") -> Work:
        """Make the work of a worker on its device; to be called in its process, and once."""
        make: Make = pickle.loads(self._memory.mapped[: self._size])  # noqa: S301  # from the parent
        del self._memory  # it may be large
        return make(device)


def serve(
    connection: Connection,
    memory: SharedMemory,
    capacity_bytes: int,
    settings: Sequence[Any],
    maker: Maker,
    device: "torch.device",
) -> None:
    """The main function of a worker: do items until there is nothing more to come.

    Args:
        connection: end of the pipe that belongs to the worker.
        memory: memory shared with the parent: the slots, then ``FAULT_BYTES`` for the report of a crash.
        capacity_bytes: largest size of all tensors in a slot together.
        settings: settings of PyTorch from the parent's :func:`fed.vectors.torch_settings.current_settings`.
        maker: factory of the work.
        device: device that the work computes on.
    """
    prepare_process(connection, memory, settings)
    slots = [Slot(memory, index, capacity_bytes) for index in range(SLOTS)]
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            settle_on(device)
            work = maker.make(device)
        except BaseException as error:
            content: FedError | str
            if isinstance(error, FedError):
                content = portable(error, CONTENT_BYTES // 2)
            else:
                content, _ = words_of_error(error)
            size = slots[0].write(Parcel.of(content), ())
            connection.send_bytes(ANSWER.pack(WorkerReply.NOT_MADE, 0, size))
            _exit_at_once()
        connection.send_bytes(ANSWER.pack(WorkerReply.READY, 0, 0))
        while order := connection.recv_bytes():
            index, size = ORDER.unpack(order)
            answer, size = _answer(slots[index], size, work, capacity_bytes)
            connection.send_bytes(ANSWER.pack(answer, index, size))
            if answer == WorkerReply.RAISED:
                _exit_at_once()


def _answer(slot: Slot, size: int, work: Work, capacity_bytes: int) -> tuple[WorkerReply, int]:
    """Do a slot's item and put the result there; returns the reply, and the size of what is pickled."""
    if slot.is_recalled:  # another worker has the item
        return WorkerReply.SKIPPED, slot.write(Parcel.of(None), ())
    try:
        (label, content), tensors = slot.read(size)
        content, results = work(content, tensors)
        results = slot.apart(results)
        parcel = Parcel.of(content, results, capacity_bytes=capacity_bytes, what=f"the result of {label}")
        return WorkerReply.DONE, slot.write(parcel, results)
    except FedError as error:
        return WorkerReply.REFUSED, slot.write(Parcel.of(portable(error, CONTENT_BYTES // 2)), ())
    except BaseException as error:
        return WorkerReply.RAISED, slot.write(Parcel.of(words_of_error(error)), ())


def _exit_at_once() -> None:
    """End without the threads and exit handlers of work that is half done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
