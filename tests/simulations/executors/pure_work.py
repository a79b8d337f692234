"""What workers do in tests: a content is called with the tensors. Here, for a spawned process imports it by name."""

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from fed.errors import Diverged, FedError
from fed.vectors.shared_memory import SharedTensor
from fed.vectors.torch_settings import current_settings

Tensors = Sequence[Tensor]
BOUND_S = 60.0


def call(content: Callable[..., Any], tensors: Tensors) -> tuple[Any, Tensors]:
    result: tuple[Any, Tensors] = content(*tensors)
    return result


def caller(device: torch.device) -> Callable[..., tuple[Any, Tensors]]:
    return call


def devices(count: int) -> list[torch.device]:
    """Devices that can be told apart, each of them the processor."""
    return [torch.device("cpu", number) for number in range(count)]


def await_that(condition: Callable[[], bool], what: str, bound_s: float = BOUND_S) -> None:
    end_s = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"waited in vain for {what}")
        time.sleep(0.001)


def note(file: Path, text: str) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(f"{text}\n")


def notes(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def same(*tensors: Tensor) -> tuple[None, Tensors]:
    return None, tensors


def turned(*tensors: Tensor) -> tuple[None, Tensors]:
    return None, tensors[::-1]


def who(*tensors: Tensor) -> tuple[tuple[int, int, str | None], Tensors]:
    return (os.getpid(), torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")), ()


def settings(*tensors: Tensor) -> tuple[list[Any], Tensors]:
    return current_settings(), ()


def process_of_its_own(*tensors: Tensor) -> tuple[int | None, Tensors]:
    process = multiprocessing.get_context("spawn").Process(target=os.getpid)
    process.start()
    process.join()
    return process.exitcode, ()


@dataclass(frozen=True)
class Train:
    """Some milliseconds of steps whose order of rounding matters; the content is the seed and who did it."""

    seed: int
    steps: int = 50

    def __call__(self, start: Tensor, data: Tensor) -> tuple[tuple[int, int], Tensors]:
        generator = torch.Generator().manual_seed(self.seed)
        point = start.clone()
        for _ in range(self.steps):
            batch = data[torch.randperm(len(data), generator=generator)[:8]]
            point -= 0.1 * torch.tanh(batch - point).mean(0)
        return (self.seed, os.getpid()), (point, point.sum(), data[:0])


@dataclass(frozen=True)
class Note:
    """Says that it ran; once ``until`` is there."""

    file: Path
    name: str
    until: Path | None = None

    def __call__(self, *tensors: Tensor) -> tuple[str, Tensors]:
        note(self.file, self.name)
        if self.until is not None:
            await_that(self.until.exists, self.until.name, 10 * BOUND_S)  # longer than any test waits for its end
        return self.name, tensors


@dataclass(frozen=True)
class Fail:
    """Fails in some way for so many times, of which a file is the memory."""

    how: Callable[[], NoReturn]
    file: Path
    times: int = 10**6

    def __call__(self, *tensors: Tensor) -> tuple[int, Tensors]:
        note(self.file, str(os.getpid()))
        if len(notes(self.file)) <= self.times:
            self.how()
        return os.getpid(), tensors


def raises() -> NoReturn:
    raise ValueError("bad batch\nand more of it")


def raises_in_torch() -> NoReturn:
    torch.zeros(3) @ torch.zeros(4)
    raise AssertionError


def diverges() -> NoReturn:
    raise Diverged.of(5, "c", "the training loss became nan")


def diverging(*tensors: Tensor) -> NoReturn:
    diverges()


def leaves() -> NoReturn:
    raise SystemExit(7)


def leaves_at_once() -> NoReturn:
    os._exit(7)


def kills_itself() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def kills_what_forked_it() -> NoReturn:
    os.kill(os.getppid(), signal.SIGKILL)
    while True:
        signal.pause()


def crashes() -> NoReturn:
    ctypes.string_at(0)
    raise AssertionError


@dataclass(frozen=True)
class Raise:
    """Raises an error that can be pickled."""

    error: BaseException

    def __call__(self, *tensors: Tensor) -> NoReturn:
        raise self.error


class TwoArguments(FedError):
    """Cannot be made again from its message."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def raises_two_arguments(*tensors: Tensor) -> NoReturn:
    raise TwoArguments("one", "two")


def answers_what_cannot_be_pickled(*tensors: Tensor) -> tuple[Any, Tensors]:
    return (lambda: None), ()


def placed(device: torch.device) -> Callable[..., tuple[Any, Tensors]]:
    """What says on which device its worker is, and in which process."""
    return partial(_place, device)


def _place(device: torch.device, content: Any, tensors: Tensors) -> tuple[tuple[str, int], Tensors]:
    return (str(device), os.getpid()), ()


def make_that_raises(device: torch.device) -> NoReturn:
    raise ValueError(f"no work on {device}")


def make_that_diverges(device: torch.device) -> NoReturn:
    diverges()


@dataclass(frozen=True)
class KilledInTheMaking:
    """Makes what calls, after the last of so many workers was killed so many times at it."""

    file: Path
    times: int
    count: int = 1
    kills: Callable[[], NoReturn] = kills_itself

    def __call__(self, device: torch.device) -> Callable[..., tuple[Any, Tensors]]:
        if device.index == self.count - 1:
            Fail(self.kills, self.file, self.times)()
        return call


@dataclass(frozen=True)
class Adder:
    """Adds what workers share to what they get."""

    shared: SharedTensor
    ballast: bytes = b""

    def __call__(self, device: torch.device) -> Callable[..., tuple[Any, Tensors]]:
        return self.add

    def add(self, content: Any, tensors: Tensors) -> tuple[Any, Tensors]:
        past_the_page = self.shared.tensor.data_ptr() % os.sysconf("SC_PAGE_SIZE")
        return (past_the_page, torch.get_default_dtype()), [self.shared.tensor + tensors[0]]


@dataclass(frozen=True)
class Overwriter:
    """Adds one to what workers share, and says what it finds there then."""

    shared: SharedTensor

    def __call__(self, device: torch.device) -> Callable[..., tuple[Any, Tensors]]:
        return self.overwrite

    def overwrite(self, content: Any, tensors: Tensors) -> tuple[Any, Tensors]:
        self.shared.tensor += 1
        return os.getpid(), [self.shared.tensor]


def pids() -> list[int]:
    """Of the processes that this one has spawned and that live."""
    return [process.pid for process in multiprocessing.active_children() if process.pid is not None]


def is_alive(pid: int) -> bool:
    """Whether it runs: who is dead and not yet buried does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def is_deaf(pid: int) -> bool:
    """Whether Ctrl-C does not reach it."""
    [mask] = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigBlk" in line]
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)
