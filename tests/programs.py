"""Commands of ``fed`` as processes of their own, in sessions of their own, with all that they say in a file.

To load PyTorch takes seconds, so that the short tests fork them from a process that has loaded it. They are processes
as any other, whose children are forked from a child of theirs, as those of a real command are. The long tests start
each anew.
"""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from multiprocessing import connection, forkserver, process
from pathlib import Path
from typing import Any, TypeAlias

from fed.processes import child_processes

__all__ = ["FORKS", "Process", "prepare", "run_command", "started"]

FORKS = multiprocessing.get_context("forkserver")
"""Processes that are forked from one that has loaded what tests need, and has no thread."""

_LOADED = (
    "fed.cli.main",
    "fed.clients.node.edge_node",
    "fed.clients.node.sessions",
    "fed.clients.node.training_process",
    "fed.reports.charts",
    "fed.server.grpc.deploy",
    "fed.server.peer.deploy",
    "fed.simulations.simulate",
    "matplotlib.backends.backend_svg",
)


class Forked:
    """A forked command, with what tests use of :class:`subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], settings: Mapping[str, Any], log: Path) -> None:
        log.touch()  # its output may be read before it has begun
        self._process = FORKS.Process(target=_become_command, args=(arguments, settings, log))
        self._process.start()
        internals: Any = process
        internals._children.discard(self._process)  # it is no worker of this process
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("fed", timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


Process: TypeAlias = "subprocess.Popen[bytes] | Forked"


_forks_commands = True


def prepare(*, forks_commands: bool) -> None:
    """Load what the processes of tests need, in a process beside this one, before any of them starts.

    Args:
        forks_commands: True if commands are forks of it too; False if each starts anew.
    """
    global _forks_commands  # a setting of the whole run
    _forks_commands = forks_commands
    product: Any = child_processes
    product._LOADED_FOR_CHILDREN = (*product._LOADED_FOR_CHILDREN, *_LOADED)
    child_processes.load_for_children(__name__)


def started(
    arguments: Sequence[str], log: Path, settings: Mapping[str, Any] | None = None, prefix: Sequence[str] = ()
) -> Process:
    """Start a command.

    Args:
        arguments: arguments that follow ``fed``.
        log: file of all that it says.
        settings: seconds of its patience by their names; under ``dies_at``, the phase of a session that kills it;
            ``is_in_background``, to begin it with SIGINT ignored, as a shell's script does with a job.
        prefix: command that starts it.
    """
    if _forks_commands and not prefix:
        return Forked(arguments, settings or {}, log)
    command = [*prefix, sys.executable, "-c", _ANEW, json.dumps(arguments), json.dumps(settings or {})]
    with log.open("wb") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


_ANEW = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
from tests.programs import run_command
run_command(*map(json.loads, sys.argv[1:]))
"""


def run_command(arguments: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Run a command in this process, as its only one, and end."""
    from fed.cli.main import main
    from fed.server.grpc.service import Patience
    from fed.wire.dialling import DialPatience

    for kind in (Patience, DialPatience):
        initialise: Any = kind.__init__
        initialise.__defaults__ = tuple(settings.get(part.name, part.default) for part in fields(kind))
    if "dies_at" in settings:
        from tests.server.dying import die_at

        die_at(settings["dies_at"])
    if settings.get("is_in_background"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv = ["fed", *arguments]
    sys.exit(main())


def _become_command(arguments: Sequence[str], settings: Mapping[str, Any], log: Path) -> None:
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    internals: Any = process
    internals._parent_process = None  # it is nobody's worker
    _fork_loader()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_command(arguments, settings)


def _fork_loader() -> None:
    """Give this command the process that forks its children, as if it had started and loaded all modules."""
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    alive, held = os.pipe()
    loader = os.fork()
    if loader == 0:
        os.close(held)
        try:
            forkserver.main(listener.detach(), alive, [])
        finally:
            os._exit(0)
    os.close(alive)
    listener.close()
    own: Any = forkserver._forkserver
    own._forkserver_address, own._forkserver_alive_fd, own._forkserver_pid = address, held, loader
