"""A process whose children can be asked about themselves, and end at its loader's death."""

import os
import signal
import sys
import time
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from fed.clients.node.training_process import TrainingProcess, TrainingProcessDied
from fed.config.node_data import NodeData
from fed.processes import child_processes
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
    _await_end(pid)
    _await_end(second_pid)
    assert not first.is_alive()
    assert not second.is_alive()

    third, third_pipe = spawned(answer)
    third_loader = third_pipe.recv()[4]
    assert third_loader != loader
    third.kill()
    third.join()
    _hold_to_own_folder()
    _hold_to_sentence(third_loader)
    print("done")


def _hold_to_own_folder() -> None:
    """Who can reach the loader's socket can have any code run: an abstract name would be everyone's."""
    address: Any = forkserver._forkserver
    folder = Path(address._forkserver_address).parent
    assert folder.is_absolute()
    assert folder.stat().st_mode & 0o077 == 0


def _hold_to_sentence(loader: int) -> None:
    """End each loader while it loads: a node's question gets a sentence."""
    product: Any = child_processes
    product._LOADED_FOR_CHILDREN = ("tests.fed.processes.deadly",)
    os.kill(loader, signal.SIGKILL)
    _await_end(loader)
    data = NodeData.model_validate({"data": {"kind": "digits", "clients": 2}, "client": 0})
    with pytest.raises(TrainingProcessDied, match=r"training process cannot be started .*loads PyTorch for others was"):
        TrainingProcess(0, data, Path("state")).describe()


def _await_end(pid: int) -> None:
    limit_s = time.monotonic() + 20
    while _state(pid) != "Z":
        assert time.monotonic() < limit_s, f"{pid} has outlived the process that forked it, or its own end"
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"
