"""Child processes: how they are started and ended."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["end_with_parent", "one_thread_each", "spawned", "stop"]

_PARENT_CHECK_S = 1.0


def spawned(target: Callable[..., None], *arguments: Any, **named: Any) -> tuple[BaseProcess, Connection]:
    """Start a process that ignores Ctrl-C and is given its end of a pipe; the process, and this process's end.

    Args:
        target: function that is called in the process, with its end of the pipe and then the arguments.
        arguments: positional arguments of ``target`` behind the pipe's end.
        named: further arguments of :class:`multiprocessing.Process`.
    """
    # A fork copies locks that other threads hold, gRPC's among them, and CUDA cannot be used in it.
    spawning = multiprocessing.get_context("spawn")
    ours, its = spawning.Pipe()
    with its:  # closed here, or the end of the process would never be seen
        process = spawning.Process(target=target, args=(its, *arguments), **named)
        resource_tracker.ensure_running()  # or the first process would start it, which ends a mask
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child inherits the mask
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # this process still receives Ctrl-C
    return process, ours


def end_with_parent() -> None:
    """End this process as soon as its parent has ended, however that happens."""
    threading.Thread(target=_await_parents_end, name="watch", daemon=True).start()


def _await_parents_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    # A copy of the parent (a fork) may hold its sentinel: a process without parent has another one.
    while not wait([parent.sentinel], _PARENT_CHECK_S) and os.getppid() == parent.pid:
        pass
    os._exit(1)  # sys.exit would end this thread alone


def stop(process: BaseProcess, within_s: float) -> None:
    """Wait for a process that is about to end, and end it if it does not."""
    process.join(within_s)
    if process.is_alive():
        process.kill()
        process.join()


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """Limit the libraries that a process loads from here on to one thread each."""
    # By the environment, since the libraries read it once, when they are loaded.
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
