"""Device that vectors of a whole round are computed with, where they lie in the CPU's memory.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fed.vectors.tensors import Tensor, torch

__all__ = ["computing_device", "computing_on", "parts_on"]

_NUMBERS_AT_ONCE = 2**22
"""Numbers of a part of a round's messages on a GPU: 32 MiB, which a copy needs to be fast, and which have room beside
models."""

_device: ContextVar["torch.device | None"] = ContextVar("computing_device", default=None)


@contextmanager
def computing_on(device: "torch.device") -> Iterator[None]:
    """Block in which a round's vectors are computed with on a device; Apple's, which lack float64, are passed over.

    Args:
        device: device that computes.
    """
    token = _device.set(None if device.type in ("cpu", "mps") else device)
    try:
        yield
    finally:
        _device.reset(token)


def computing_device() -> "torch.device | None":
    """Device of the block; None for the CPU."""
    return _device.get()


def parts_on(device: "torch.device", messages_SM: Tensor) -> Iterator[Tensor]:
    """Messages on a device, some columns [S, J] at a time.

    Args:
        device: device of the parts.
        messages_SM: messages on the CPU.
    """
    for part_SJ in torch.split(messages_SM, max(1, _NUMBERS_AT_ONCE // max(1, len(messages_SM))), dim=1):
        yield part_SJ.to(device, non_blocking=True)
