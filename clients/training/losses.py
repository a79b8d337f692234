"""Losses of a batch, and of each of its samples alone.

Shapes: see :mod:`fed.layout`.
"""

from collections.abc import Callable
from typing import TypeAlias

from fed.tensors import Tensor, nn, torch

__all__ = ["Loss", "cross_entropy", "of_each_sample"]

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(output, target) → a scalar, the mean over the batch."""


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy of scores [B, C, ...] against integer labels [B, ...]."""
    return nn.functional.cross_entropy(output, target.long())


cross_entropy.mean_over_samples = True  # type: ignore[attr-defined]  # mypy knows no attributes of functions


def of_each_sample(loss: Loss, output: Tensor, target: Tensor) -> Tensor:
    """Losses [B] of samples, each as if it were a batch of its own.

    Args:
        loss: (output, target) → a scalar.
        output: [B, ...].
        target: [B, ...].
    """
    if loss is not cross_entropy:
        losses_B: Tensor = torch.func.vmap(lambda one, its: loss(one.unsqueeze(0), its.unsqueeze(0)))(output, target)
        return losses_B
    # Classes first, because PyTorch's softmax over the last of few numbers takes eight times as long.
    log_p_CE = output.movedim(1, 0).flatten(1).contiguous().log_softmax(0)
    losses_E = log_p_CE.gather(0, target.long().flatten().unsqueeze(0)).neg()
    return losses_E.view(target.shape).flatten(1).mean(1) if target.ndim > 1 else losses_E.squeeze(0)
