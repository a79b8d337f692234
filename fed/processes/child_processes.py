"""Child processes: how they are started and ended."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = ["UNKNOWN_EXIT_CODE", "end_with_parent", "load_for_children", "spawned", "stop"]

UNKNOWN_EXIT_CODE = 255
"""Exit code of a child that has ended with the process that forked it."""

# In Python 3.11.0, every user of the machine may ask such a process for forks that run code of his (CVE-2022-42919).
_FORKS = sys.platform == "linux" and sys.version_info >= (3, 11, 1)

_CHILDREN = multiprocessing.get_context("forkserver") if _FORKS else multiprocessing.get_context("spawn")
"""Way in which children start: on Linux as forks of a process that has loaded PyTorch once, and does nothing else.

A fork of this process would hold copies of locks that other threads hold, gRPC's among them, and could not use CUDA.
On macOS the system's own libraries do not work in a fork.
"""

_LOADED_FOR_CHILDREN = ("torch", "torch.func", "numpy")
"""Modules that all children need, which take seconds to load."""

_WHILE_LIBRARIES_LOAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONSAFEPATH": "1",
}
"""Environment in which the libraries of children are loaded, which read it then, and once: one thread each.

No module of theirs is taken from the working folder, where the user's own may have the same names.
"""

_ENVIRONMENT_LOCK = threading.Lock()


def load_for_children(module_name: str) -> None:
    """Begin to load what children need, in a process beside this one, so that each starts at once.

    The first child does so too. Called before this process loads its own modules, it saves the time that they take.
    Where the system refuses, the first child says so.

    Args:
        module_name: module of the function that children are to run.
    """
    with contextlib.suppress(OSError):
        _load(module_name)


def _load(module_name: str) -> None:
    if _FORKS:
        from multiprocessing import forkserver  # not on every system

        with _interrupts_blocked(), _environment(_WHILE_LIBRARIES_LOAD):
            forkserver.set_forkserver_preload([*_LOADED_FOR_CHILDREN, module_name])
            forkserver.ensure_running()


def spawned(target: Callable[..., None], *arguments: Any, **named: Any) -> tuple[BaseProcess, Connection]:
    """Start a process that ignores Ctrl-C and is given its end of a pipe; the process, and this process's end.

    Its libraries compute with one thread, until it asks for more. Its environment variables are those of this process.

    Args:
        target: function that is called in the process, with its end of the pipe and then the arguments.
        arguments: positional arguments of ``target`` behind the pipe's end.
        named: further arguments of :class:`multiprocessing.Process`.

    Raises:
        OSError: if the system refuses, or ends the process that is to fork.
    """
    _load(target.__module__)
    ours, its = _CHILDREN.Pipe()
    with its:  # closed here, or the end of the process would never be seen
        process = _CHILDREN.Process(target=_begin, args=(dict(os.environ), target, its, *arguments), **named)
        with _interrupts_blocked(), _environment(_WHILE_LIBRARIES_LOAD), _importable_program():
            try:
                process.start()
            except EOFError:
                raise ChildProcessError("the process that loads PyTorch for others was ended") from None
    return process, ours


def _begin(environment: Mapping[str, str], target: Callable[..., None], *arguments: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)


def end_with_parent() -> None:
    """End this process as soon as its parent has ended, however that happens."""
    threading.Thread(target=_await_parents_end, name="watch", daemon=True).start()


def _await_parents_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    signs_of_end = [parent.sentinel]
    if _FORKS:
        # A copy of the parent (a fork) may hold its sentinel. And where the process that forked this one has ended,
        # the parent takes this one for dead, and may start another.
        for pid in (parent.pid, os.getppid()):
            try:
                signs_of_end.append(os.pidfd_open(pid))
            except ProcessLookupError:
                os._exit(1)
    wait(signs_of_end)
    os._exit(1)  # sys.exit would end this thread alone


def stop(process: BaseProcess, within_s: float) -> None:
    """Wait for a process that is about to end, and end it if it does not."""
    process.join(within_s)
    if process.is_alive():
        process.kill()
        process.join()


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C: a process that is started meanwhile never receives it, and this one receives it at the end."""
    resource_tracker.ensure_running()  # or the first process would start it, which ends a mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child inherits the mask
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _importable_program() -> Iterator[None]:
    """Hide the file of a program that has none: Python calls that from standard input <stdin>, and children open it."""
    program = sys.modules["__main__"]
    name = getattr(program, "__file__", None)
    if name is None or program.__spec__ is not None or Path(name).exists():
        yield
        return
    del program.__file__
    try:
        yield
    finally:
        program.__file__ = name


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started meanwhile; one thread at a time."""
    with _ENVIRONMENT_LOCK:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
