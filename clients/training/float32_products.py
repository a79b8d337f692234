"""Products of float32 on a GPU: in float32 as IEEE 754 has it, or in TF32 where the experiment asks for that.

TF32 has the range of float32 and ten bits behind the point in place of 23. PyTorch takes it for cuDNN's convolutions
unless it is told otherwise.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fed.config.experiment import Local
from fed.vectors.tensors import torch

__all__ = ["float32_products", "note_without_tf32"]

_FIRST_WITH_TF32 = (8, 0)
"""Compute capability of the first GPUs of NVIDIA that have TF32, those of Ampere."""


@contextmanager
def float32_products(device: "torch.device", *, tf32: bool = False) -> Iterator[None]:
    """Block in which matrix products, convolutions and recurrent layers of float32 have one precision on a GPU.

    PyTorch's settings are the user's: they are as before when the block ends.

    Args:
        device: device that computes in the block; on the CPU nothing is set.
        tf32: True if products may be rounded to TF32.
    """
    if device.type == "cpu":
        yield
        return
    before = [holder.fp32_precision for holder in _holders()]
    _set(["tf32" if tf32 else "ieee"] * len(before))
    try:
        yield
    finally:
        _set(before)


def note_without_tf32(local: Local, device: "torch.device") -> str:
    """Clause that a run says where TF32 is asked for and there is none; else empty.

    Args:
        local: the experiment's section of that name.
        device: device that trains.

    Example:
        >>> note_without_tf32(Local(precision="tf32"), torch.device("cpu"))
        'in float32, since the device cpu has no TF32'
    """
    if local.precision != "tf32" or _has_tf32(device):
        return ""
    return f"in float32, since the device {device} has no TF32"


def _has_tf32(device: "torch.device") -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_WITH_TF32


def _holders() -> tuple[Any, ...]:
    """Parts of PyTorch that have a setting each: convolutions come first."""
    cudnn: Any = torch.backends.cudnn
    return cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul


def _set(precisions: list[str]) -> None:
    # PyTorch's older flag must agree with the newer ones, or else torch.backends.cudnn.flags() raises an error.
    torch.backends.cudnn.allow_tf32 = precisions[0] == "tf32"
    for holder, precision in zip(_holders(), precisions, strict=True):
        holder.fp32_precision = precision
