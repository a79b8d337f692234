"""How good a model is on samples that it was not trained on.

Shapes: N samples; B, those of a batch; C classes.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fed.clients.data import Pair
from fed.clients.training import Loss

__all__ = ["Metric", "Score", "accuracy", "evaluate"]

Metric: TypeAlias = Callable[[Tensor, Tensor], Tensor | float]
"""(output, target) → a number, the mean over the batch."""

_BATCH = 1024


class Score(NamedTuple):
    """A model's mean loss and mean metric: accuracy, unless the user gave another; None where there is none."""

    loss: float
    accuracy: float | None


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of labels that score highest, over samples and positions.

    Args:
        output: [B, C, ...], scores of C classes.
        target: [B, ...], labels.
    """
    return (output.argmax(1) == target).to(torch.float64).mean()


def evaluate(module: nn.Module, loss: Loss, metric: Metric | None, samples: Pair, device: torch.device) -> Score:
    """Score a module, in evaluation mode, over all samples, in batches of 1,024.

    Args:
        module: on ``device``.
        loss: (output, target) → a scalar, the mean over the batch.
        metric: (output, target) → a number, the mean over the batch; or None.
        samples: (inputs, targets), anywhere.
        device: where to compute.
    """
    module.eval()
    inputs_N, targets_N = samples
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with torch.no_grad():  # not inference_mode: what a module caches here it may train with later
        for begin in range(0, len(inputs_N), _BATCH):
            target = targets_N[begin : begin + _BATCH].to(device, non_blocking=True, copy=True)
            # Copies, for a model may change its inputs in place.
            output = module(inputs_N[begin : begin + _BATCH].to(device, non_blocking=True, copy=True))
            measured = metric(output, target) if metric else 0.0
            scores = (loss(output, target), measured)
            means = [torch.as_tensor(score, dtype=torch.float64, device=device) for score in scores]
            sums += torch.stack(means) * len(target)
    mean_loss, mean_metric = (sums / len(inputs_N)).tolist()
    return Score(mean_loss, mean_metric if metric else None)
