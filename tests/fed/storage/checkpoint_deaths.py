"""A program in which writers of checkpoints die, again and again; after each death it looks at what is left."""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch

from fed.storage.checkpoint_files import file_name, flaw_of, numbers_in
from fed.storage.checkpoints import Checkpoints
from fed.storage.serialization import Tree

TOUCHES_FILES = {"open", "os.rename", "os.remove", "os.mkdir", "os.listdir", "os.scandir"}


def state(number: int) -> Tree:
    return {"of": number, "model": torch.full((50_000,), number, dtype=torch.float64)}


def is_whole(found: tuple[int, Tree] | None) -> bool:
    return found is None or (found[1]["of"] == found[0] and torch.equal(found[1]["model"], state(found[0])["model"]))


def killed(folder: Path, times: int) -> None:
    """Writers that are killed, each a little later than the one before, so that every step is met."""
    kept, reached, unfinished = Checkpoints(folder, keep=2), 0, 0
    for attempt in range(times):
        writer = forked(partial(write_on, kept, reached))
        time.sleep(0.005 + 0.0007 * (attempt % 100))
        os.kill(writer, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(writer, 0)[1])
        unfinished += any(folder.glob(".*"))
        numbers = numbers_in(folder)
        assert [flaw_of(folder / file_name(number), number) for number in numbers] == [None] * len(numbers)
        newest = kept.newest()
        assert is_whole(newest)
        assert (newest or (0, None))[0] >= reached, "no checkpoint is lost"
        reached = newest[0] if newest else 0
    assert unfinished, "none died while it wrote"
    kept.write(reached + 1, None)
    assert not any(folder.glob(".*")), "what was not finished is gone"


def write_on(kept: Checkpoints, begin: int) -> NoReturn:
    for number in count(begin + 1):
        kept.write(number, state(number))
    raise AssertionError


def stepwise(folder: Path) -> None:
    """Writers that end without a clean-up before the first, the second, the n-th time that they touch a file."""
    for step in count(1):
        kept = Checkpoints(folder / str(step), keep=2)
        kept.write(1, state(1))
        kept.write(2, state(2))
        writer = forked(partial(write_and_die, kept, step))
        has_written = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == 1
        assert all(flaw_of(kept.folder / file_name(number), number) is None for number in numbers_in(kept.folder))
        newest = kept.newest()
        assert newest is not None
        assert newest[0] in (2, 3)
        assert is_whole(newest)
        kept.write(3, state(3))
        assert sorted(path.name for path in kept.folder.iterdir()) == [file_name(2), file_name(3)]
        if has_written:
            assert step > 5
            return


def write_and_die(kept: Checkpoints, step: int) -> int:
    calls = 0

    def end(event: str, _: Any) -> None:
        nonlocal calls
        calls += event in TOUCHES_FILES
        if calls == step:
            os._exit(0)

    sys.addaudithook(end)
    kept.write(3, state(3))
    return 1


def forked(work: Callable[[], int]) -> int:
    """A child that does the work, and ends with the code that this gives, or with 2."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = work()
        finally:
            os._exit(code)
    return child


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "killed":
        killed(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        stepwise(Path(sys.argv[2]))
