"""Process that computes for its parent: its settings, and the report of its crash."""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fed.processes.child_processes import end_with_parent
from fed.vectors.shared_memory import SharedMemory
from fed.vectors.tensors import torch
from fed.vectors.torch_settings import take_over

__all__ = ["FAULT_BYTES", "allow_children", "fault_in", "prepare_process"]

FAULT_BYTES = 1 << 16
"""Size of the end of a process's memory, where the report of a crash is written."""


def prepare_process(connection: Connection, memory: SharedMemory, settings: Sequence[Any]) -> None:
    """Compute as the parent does, with one thread, and end when it ends.

    Args:
        connection: end of the pipe that belongs to this process.
        memory: memory shared with the parent, whose last ``FAULT_BYTES`` are for the report of a crash.
        settings: settings of PyTorch from the parent's :func:`fed.vectors.torch_settings.current_settings`.
    """
    os.set_inheritable(connection.fileno(), False)  # a process of its own would keep its end alive
    # The user's program, which a child imports, may have set a handler that does not end it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    allow_children()
    os.lseek(memory.fd, len(memory.mapped) - FAULT_BYTES, os.SEEK_SET)
    faulthandler.enable(memory.fd)  # shared memory outlives a crash, and the parent reads it
    end_with_parent()
    with contextlib.suppress(OSError):  # where memory runs out, a child is the smaller loss
        Path("/proc/self/oom_score_adj").write_text("500")
    torch.set_num_threads(1)  # the last bits of a sum depend on how many threads share it
    with contextlib.suppress(RuntimeError):  # the program's main module has set it, or computed with it
        torch.set_num_interop_threads(1)
    take_over(settings)


def allow_children() -> None:
    """Let this process start others, which Python forbids a daemon: a user's data may be read by some."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def fault_in(memory: SharedMemory) -> str:
    """Text that faulthandler wrote at a crash.

    Args:
        memory: memory that :func:`prepare_process` was given.
    """
    return memory.mapped[-FAULT_BYTES:].rstrip(b"\0").decode(errors="replace")
