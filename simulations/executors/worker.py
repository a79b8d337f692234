"""Worker process: its main loop, and the protocol between it and its parent.

Through a pipe the parent sends the slot of an item, or nothing to end it; the worker replies with a
:class:`WorkerReply`. Contents and tensors lie in shared memory: two slots, and behind them room for what
:mod:`faulthandler` writes.
"""

import contextlib
import enum
import faulthandler
import logging
import multiprocessing
import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from multiprocessing import context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fed import errors
from fed.clients.training.executor import Make, Work
from fed.errors import FedError
from fed.processes.child_processes import end_with_parent
from fed.simulations.executors.crash_report import words_of_error
from fed.simulations.executors.shared_memory import CONTENT_BYTES, Parcel, SharedMemory, Slot
from fed.vectors.tensors import torch

__all__ = ["ANSWER", "FAULT_BYTES", "ORDER", "SLOTS", "Maker", "WorkerReply", "current_settings", "serve"]

_log = logging.getLogger(__name__)

SLOTS = 2
"""Number of slots of a worker: one for the item at work, one for the item that waits."""

FAULT_BYTES = 1 << 16
"""Size of the end of a worker's memory, where the report of a crash is written."""

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


def _flag(holder: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(holder, name), lambda value: setattr(holder, name, value)


def _settings() -> tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...]:
    """Settings of PyTorch that change the bits of results: how each is read, and how it is set."""
    return (
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        _flag(torch.backends.mkldnn, "enabled"),
        *(_flag(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
        *(_flag(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction") for kind in ("fp16", "bf16")),
    )


def current_settings() -> list[Any]:
    """Settings of this process that change the bits of results, for a worker to take over."""
    return [current() for current, _ in _settings()]


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
        settings: settings of PyTorch from the parent's :func:`current_settings`.
        maker: factory of the work.
        device: device that the work computes on.
    """
    _prepare_process(connection, memory, settings)
    slots = [Slot(memory, index, capacity_bytes) for index in range(SLOTS)]
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            work = maker.make(device)
        except BaseException as error:
            content: FedError | str
            if isinstance(error, FedError):
                content = _portable(error)
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


def _prepare_process(connection: Connection, memory: SharedMemory, settings: Sequence[Any]) -> None:
    """Compute as the parent does, with one thread, and end when it ends."""
    os.set_inheritable(connection.fileno(), False)  # a process of its own would keep its end alive
    # The user's program, which a worker imports, may have set a handler that does not end it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A user's data may be read by processes of the worker's own, which a daemon must not have.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.lseek(memory.fd, len(memory.mapped) - FAULT_BYTES, os.SEEK_SET)
    faulthandler.enable(memory.fd)  # shared memory outlives a crash, and the parent reads it
    end_with_parent()
    with contextlib.suppress(OSError):  # where memory runs out, a worker is the smaller loss
        Path("/proc/self/oom_score_adj").write_text("500")
    torch.set_num_threads(1)  # the last bits of a sum depend on how many threads share it
    with contextlib.suppress(RuntimeError):  # the program's main module has set it, or computed with it
        torch.set_num_interop_threads(1)
    for (_, set_to), value in zip(_settings(), settings, strict=True):
        set_to(value)


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
        return WorkerReply.REFUSED, slot.write(Parcel.of(_portable(error)), ())
    except BaseException as error:
        return WorkerReply.RAISED, slot.write(Parcel.of(words_of_error(error)), ())


def _portable(error: FedError) -> FedError:
    """Error that can be sent to the parent: this one, or else one of its nearest class in :mod:`fed.errors`."""
    try:
        pickled = pickle.dumps(error)
        # Some errors can be pickled, and then not be loaded, or only as another type.
        if type(pickle.loads(pickled)) is type(error) and len(pickled) < CONTENT_BYTES // 2:  # noqa: S301  # its own
            return error
    except Exception:
        _log.debug("cannot be pickled: %r", error, exc_info=True)
    nearest: type[FedError] = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    # A message without bounds would not fit into the slot.
    return nearest(str(error)[:10_000])


def _exit_at_once() -> None:
    """End without the threads and exit handlers of work that is half done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
