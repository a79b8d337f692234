"""Time of an item's way to a worker and back, measured in this process."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from fed.vectors.shared_memory import Parcel, SharedMemory, Slot, packed
from fed.vectors.tensors import Tensor

__all__ = ["sending_s"]

_TIMES = 3
_WAKING_S = 1e-4
"""Seconds in which two processes wake, one at the item and one at its result, beside what they do then."""


def sending_s(item: tuple[Any, Sequence[Tensor]], result: tuple[Any, Sequence[Tensor]]) -> float:
    """Seconds of an item's way to a worker, and of its result's way back.

    Each is pickled, its tensors are copied into shared memory, and both are read there, as workers and the main process
    do it; the result's tensors are copied once more. The median of three ways is taken.

    Args:
        item: content and tensors of the item.
        result: content and tensors of its result.

    Raises:
        InvalidInput: if they cannot go to another process.
        RunFailed: if there is no room for them.

    Example:
        >>> import torch
        >>> model = [torch.zeros(1000)]
        >>> 1e-4 < sending_s((("clients", 3, 7), model), (None, model)) < 1
        True
    """
    capacity_bytes = max(packed(tensors)[1] for _, tensors in (item, result))
    slot = Slot(SharedMemory(Slot.size_bytes(capacity_bytes)), 0, capacity_bytes)
    times_s = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        _passed(slot, *item, capacity_bytes)
        for tensor in _passed(slot, *result, capacity_bytes):
            tensor.clone()
        times_s.append(time.perf_counter() - began)
    return statistics.median(times_s) + _WAKING_S


def _passed(slot: Slot, content: Any, tensors: Sequence[Tensor], capacity_bytes: int) -> Sequence[Tensor]:
    """Tensors as the other process reads them."""
    parcel = Parcel.of(content, tensors, capacity_bytes, "a trial item")
    size = slot.write(parcel, tensors)
    _, read = slot.read(size)
    return read
