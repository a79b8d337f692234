"""A process whose children can be asked about themselves, and end at its loader's death."""

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from fed.processes.child_processes import end_with_parent, spawned

__all__ = ["answer"]


def answer(pipe: Connection) -> None:
    """Tell of this process, then wait."""
    end_with_parent()
    told = os.environ.get("TOLD"), os.environ.get("OMP_NUM_THREADS"), os.environ.get("PYTHONSAFEPATH")
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    pipe.send((told, blocked, "torch" in sys.modules, os.getpid(), os.getppid()))
    pipe.recv()


def main() -> None:
    """Start children, kill what forked them, and start another."""
    os.environ["OMP_NUM_THREADS"] = "3"
    os.environ["TOLD"] = "early"
    first, pipe = spawned(answer)
    told, blocked, _, pid, loader = pipe.recv()
    assert told == ("early", "3", None)
    assert blocked
    assert pid == first.pid
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    os.environ["TOLD"] = "late"
    second, second_pipe = spawned(answer)
    told, _, has_torch, second_pid, its_loader = second_pipe.recv()
    assert told == ("late", "3", None)
    assert has_torch
    assert its_loader == loader

    os.kill(loader, signal.SIGKILL)
    limit_s = time.monotonic() + 20
    while any(Path(f"/proc/{child}").exists() and _state(child) != "Z" for child in (pid, second_pid)):
        assert time.monotonic() < limit_s, "children have outlived the process that forked them"
        time.sleep(0.02)
    assert not first.is_alive()
    assert not second.is_alive()

    third, third_pipe = spawned(answer)
    assert third_pipe.recv()[4] != loader
    third.kill()
    third.join()
    print("done")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


if __name__ == "__main__":
    main()
