"""Stages on trial: each one class, which a test names by one line of the registry."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fed.compression.codec import Draw
from fed.compression.stage import Stage

__all__ = ["Drifts", "Halves", "Shakes"]


@dataclass(frozen=True, kw_only=True)
class Halves(Stage):
    """Half of each update."""

    def change_updates(self, update_KM: Tensor, draw: Draw) -> Tensor:
        return update_KM / 2


@dataclass(frozen=True, kw_only=True)
class Shakes(Stage):
    """Noise of each client's own."""

    def change_updates(self, update_KM: Tensor, draw: Draw) -> Tensor:
        drawn = [torch.from_numpy(draw.own(row).normal(size=update_KM.shape[1])) for row in range(len(update_KM))]
        return update_KM + 0.01 * torch.stack(drawn)


@dataclass(frozen=True, kw_only=True)
class Drifts(Stage):
    """Noise of the mean, in rounds of nobody too."""

    acts_alone: ClassVar[bool] = True

    def change_mean(self, mean_M: Tensor, clients: int, draw: Draw) -> Tensor:
        return mean_M + torch.from_numpy(draw.own(0).normal(size=len(mean_M))) / max(clients, 1)
