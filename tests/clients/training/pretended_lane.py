"""Pretended lane: copies to a device that are there when they are taken, and no sooner."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["PretendedLane"]


class PretendedMark:
    """Point of a pretended lane."""

    def __init__(self, lane: "PretendedLane", number: int) -> None:
        self._lane = lane
        self._number = number

    def synchronize(self) -> None:
        self._lane.done.append(f"wait {self._number}")


class PretendedLane:
    """Lane whose copies hold no numbers before somebody has what is computed wait for them.

    Attributes:
        done: "send", "take" or "wait" with the number of a batch, for each thing that was done.
        device: device of the copies.

    Args:
        arrives: False if copies never come.
    """

    def __init__(self, *, arrives: bool = True) -> None:
        self.device = torch.device("cpu")
        self.done: list[str] = []
        self._arrives = arrives
        self._sent = 0
        self._taken = 0
        self._sources: dict[int, list[Tensor]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    def send(self, leaves: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        self._sent += 1
        self.done.append(f"send {self._sent}")
        self._sources[self._sent] = list(leaves)
        empty = [
            torch.full_like(leaf, torch.nan if leaf.is_floating_point() else 0, device=self.device) for leaf in leaves
        ]
        return empty, self._sent

    def take(self, copies: Sequence[Tensor], sent: Any) -> None:
        self._taken = sent
        self.done.append(f"take {sent}")
        for one, source in zip(copies, self._sources.pop(sent), strict=True):
            if self._arrives:
                one.copy_(source, non_blocking=True)

    def mark(self) -> PretendedMark:
        return PretendedMark(self, self._taken)
