"""Deterministic algorithms on GPUs: a run has the same bits whenever it is repeated on GPUs of one kind.

Some kernels add in the order in which threads come, and cuDNN may take another algorithm whenever it is asked. On a CPU
all that a run uses is deterministic.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import utils

from fed.errors import InvalidModel, users_line
from fed.vectors.tensors import torch

__all__ = ["deterministic", "fix_workspaces"]

_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"
_FIXED = ":4096:8"
"""Value of that variable with which cuBLAS is deterministic: eight buffers of 4 MiB."""


@contextmanager
def deterministic(device: "torch.device", *, on: bool = True) -> Iterator[None]:
    """Block in which a GPU computes by deterministic algorithms alone.

    PyTorch's settings are the user's: they are as before when the block ends.

    Args:
        device: device that computes in the block; on the CPU nothing is set.
        on: True if algorithms must be deterministic; False: PyTorch's settings decide.

    Raises:
        InvalidModel: if an operation of the block has no deterministic algorithm.
    """
    if device.type == "cpu" or not on:
        yield
        return
    fix_workspaces(device)
    before = _current()
    # PyTorch would fill all new memory, so that reading it shows. That is for debugging, and a kernel for each tensor.
    _set(("error", True, False, False))
    try:
        yield
    except Exception as error:
        if words := _in_plain_words(error, device):
            raise InvalidModel(words) from error
        raise
    finally:
        _set(before)


def fix_workspaces(device: "torch.device") -> None:
    """Have cuBLAS take its memory in one way, which it decides on when a process first multiplies on a GPU.

    Args:
        device: device that computes; nothing is done for others than GPUs of NVIDIA.
    """
    if device.type == "cuda":
        os.environ.setdefault(_WORKSPACES, _FIXED)


def _current() -> tuple[Any, bool, bool, bool]:
    cudnn = torch.backends.cudnn
    memory: Any = utils.deterministic
    return (
        torch.get_deterministic_debug_mode(),
        cudnn.deterministic,
        cudnn.benchmark,
        memory.fill_uninitialized_memory,
    )


def _set(settings: tuple[Any, bool, bool, bool]) -> None:
    mode, is_deterministic, benchmarks, fills = settings
    # Unlike use_deterministic_algorithms() it does not import PyTorch's compiler.
    torch.set_deterministic_debug_mode(mode)
    torch.backends.cudnn.deterministic = is_deterministic
    torch.backends.cudnn.benchmark = benchmarks
    memory: Any = utils.deterministic
    memory.fill_uninitialized_memory = fills


def _in_plain_words(error: BaseException, device: "torch.device") -> str:
    """Sentence on an operation without a deterministic algorithm; empty if that is not the error's cause."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if without := re.search(r"(\w+) does not have a deterministic implementation", text):
            line = users_line(cause)
            place = f", at {line}" if line else ""
            return f"{without[1]} has no deterministic algorithm on the device {device}{place}: {_REMEDY}"
        if "not deterministic because it uses CuBLAS" in text:
            return (
                f"{_WORKSPACES} must be {_FIXED} or :16:8 before a process first computes on a GPU, got "
                f"{os.environ.get(_WORKSPACES)!r}, or it was set later: set it before Python starts, or set "
                "simulation.deterministic to false"
            )
        cause = cause.__cause__ or cause.__context__
    return ""


_REMEDY = (
    "compute it otherwise, or set simulation.deterministic to false (at a node, deterministic in its data file), after "
    "which repeated runs may differ by rounding"
)
