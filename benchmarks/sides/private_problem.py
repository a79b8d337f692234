"""Model, samples and size of a batch, as both sides of ``dp_sgd.py`` read them. Needs PyTorch alone."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

_LAYERS = [nn.Conv2d, nn.Flatten, nn.GroupNorm, nn.Linear, nn.MaxPool2d, nn.ReLU, nn.Sequential]


def read_problem(path: str | Path) -> dict[str, Any]:
    """Read what ``dp_sgd.py`` wrote; a module of other layers is refused, for a file may hold any code."""
    with torch.serialization.safe_globals(_LAYERS):
        problem: dict[str, Any] = torch.load(path, weights_only=True)
    return problem
