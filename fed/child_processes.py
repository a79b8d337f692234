"""Child processes: how they are started and ended."""

import contextlib
import os
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

__all__ = ["one_thread_each", "start_deaf", "stop"]


def start_deaf(process: BaseProcess) -> None:
    """Start a process that ignores the terminal's Ctrl-C, which this process still receives."""
    if not hasattr(signal, "pthread_sigmask"):
        process.start()
        return
    resource_tracker.ensure_running()  # or the first process would start it, which ends a mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child inherits the mask
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop(process: BaseProcess, within_s: float) -> None:
    """Wait for a process that is about to end, and end it if it does not."""
    process.join(within_s)
    if process.is_alive():
        process.kill()
        process.join()


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """Limit the libraries that a process loads from here on to one thread each."""
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
