"""A program in which ``fed simulate`` dies, again and again, and is each time told to go on, until it has finished."""

import os
import random
import signal
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from fed.cli.main import main
from tests.fed.storage.checkpoint_deaths import forked

TOUCHES_FILES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def killed(file: Path, folder: Path, times: int, seed: int) -> None:
    """Killed at random points of time, so many times or until it has finished."""
    begun_s = time.perf_counter()
    assert ended(forked(partial(run, file, folder.with_name("timed")))) == 0
    whole_s = time.perf_counter() - begun_s
    random_delay, deaths = random.Random(seed), 0
    while deaths < times and not (folder / "summary.json").exists():
        child = forked(partial(run, file, folder))
        time.sleep(random_delay.uniform(0, whole_s / 2))
        os.kill(child, signal.SIGKILL)
        deaths += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert deaths > 1
    assert ended(forked(partial(run, file, folder))) == 0
    print(deaths)


def stepwise(file: Path, folder: Path) -> None:
    """Ended without a clean-up before the first, the second, the n-th time that it touches a file of its folder."""
    for step in count(1):
        its = folder / str(step)
        if ended(forked(partial(run, file, its, dies_at=step))) == 0:
            print(step)
            return
        assert ended(forked(partial(run, file, its))) == 0, step


def run(file: Path, folder: Path, dies_at: int | None = None) -> int:
    """Begin, or go on where that has begun."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if dies_at is not None:
        sys.addaudithook(Death(folder, dies_at))
    if (folder / "experiment.yaml").exists() and (folder / "environment.json").exists():
        return main(["simulate", "--resume", str(folder)])
    again = ["--overwrite"] if (folder / "environment.json").exists() else []
    return main(["simulate", str(file), "--output", str(folder), *again])


class Death:
    """Comes at a certain time that a folder's files are touched."""

    def __init__(self, folder: Path, at: int) -> None:
        self._folder, self._left = str(folder), at

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in TOUCHES_FILES and str(arguments[0]).startswith(self._folder):
            self._left -= 1
            if not self._left:
                os._exit(77)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "killed":
        killed(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        stepwise(Path(sys.argv[2]), Path(sys.argv[3]))
