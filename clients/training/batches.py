"""Batches: a client's samples cut into optimizer steps, and a step into the batches that it accumulates."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fed.config.experiment import Local

__all__ = ["Batches", "normalises_batches"]


class Batches:
    """Epochs in a fresh order each, cut into steps of one size, the last of an epoch shorter, until all are taken.

    Args:
        local: the experiment's section of that name.
        samples: the client's, at least 1.
        never_single: no step has a single sample, as BatchNorm needs it: a last one joins the step before it.
        steps: of a task, if it is not as the section says.

    Attributes:
        samples: the client's.
        steps: optimizer steps of a task.
        sizes: the samples of each step of one epoch.
        seen: the samples of all steps of a task, each as often as it is seen.
        keeps_order: every batch has all samples; their order means nothing, so they keep it and nothing is drawn.

    Example:
        >>> batches = Batches(Local(batch_size=4, epochs=2), 10)
        >>> batches.steps, batches.sizes, batches.seen
        (6, [4, 4, 2], 20)
        >>> [sorted(order) == [*range(10)] for order in batches.orders(np.random.default_rng(0))]
        [True, True]
    """

    def __init__(self, local: Local, samples: int, never_single: bool = False, steps: int | None = None) -> None:
        self.samples, self._size, self._never_single = samples, local.batch_size, never_single
        self.sizes = _cut(samples, local.batch_size * local.accumulate, never_single)
        steps = local.steps if steps is None else steps
        self.steps = (local.epochs or 1) * len(self.sizes) if steps is None else steps
        epochs, rest = divmod(self.steps, len(self.sizes))
        self.seen = epochs * samples + sum(self.sizes[:rest])
        self.keeps_order = len(self.sizes) == 1 and (local.accumulate == 1 or samples <= local.batch_size)

    def orders(self, generator: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Order [E] in which each epoch takes the samples; in the last epoch, for as many steps as are left.

        Args:
            generator: the stream that shuffles them; one permutation an epoch, drawn when its order is asked for.
        """
        for _ in range(-(-self.steps // len(self.sizes))):
            yield np.arange(self.samples) if self.keeps_order else generator.permutation(self.samples)

    def within(self, step: int) -> list[int]:
        """Number of samples in each batch of a step."""
        return _cut(step, self._size, self._never_single)


def normalises_batches(module: nn.Module) -> bool:
    """True if a model has batch normalisation, for which a single sample has no variance.

    Example:
        >>> normalises_batches(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
        True
    """
    # the base of all kinds, SyncBatchNorm among them
    return any(isinstance(part, _BatchNorm) for part in module.modules())


def _cut(samples: int, size: int, never_single: bool) -> list[int]:
    """Sizes of parts: all equal but the last; a last single sample joins the part before it."""
    whole, rest = divmod(samples, size)
    sizes = [size] * whole + [rest] * bool(rest)
    if never_single and len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [sizes[-2] + 1]
    return sizes
