"""Optimizer steps of a task: the batches of each step, the form of the loss for them, and the mean of their losses.

Shapes: see :mod:`fed.vectors.layout`.
"""

import operator
from collections.abc import Iterator
from itertools import islice

import numpy as np

from fed.clients.data import Held
from fed.clients.data.collate import Collating
from fed.clients.data.held import may_ignore as holds_ignored
from fed.clients.data.held import size_of
from fed.clients.scoring.losses import counted_cross_entropy, cross_entropy
from fed.clients.scoring.measures import Loss
from fed.clients.training.batches import Batches
from fed.clients.training.reading import Batch, Reading
from fed.vectors.tensors import Tensor, torch

__all__ = ["MeanLoss", "loss_for", "parts_of_measurement", "steps_of"]

_LOSSES_AT_ONCE = 1024  # bounds the memory of losses that wait
_SAMPLES_AT_ONCE = 128  # in one forward pass of a measurement


def steps_of(its: Reading, batches: Batches, order: np.random.Generator, accumulate: int) -> Iterator[list[Batch]]:
    """The batches of each optimizer step of a task.

    Args:
        its: reading of the client's samples.
        batches: cuts of the client's samples into batches.
        order: the stream that shuffles them.
        accumulate: largest number of batches of a step.
    """
    if batches.keeps_order:
        for step in range(batches.steps):
            yield [its.all(accumulate * step)]
        return
    within = batches.within
    for epoch, order_E in enumerate(batches.orders(order)):
        first = epoch * len(within)
        numbers = (accumulate * step + place for step, parts in enumerate(within, first) for place in range(len(parts)))
        made = its.batches(order_E, batches.of_epoch, numbers)
        taken = within[: batches.steps - first]
        if accumulate == 1:
            for batch in islice(made, len(taken)):
                yield [batch]
        else:
            for parts in taken:
                yield list(islice(made, len(parts)))


def parts_of_measurement(samples: Held, its: Reading) -> list[Batch]:
    """All samples in parts of bounded size, over which a loss is measured.

    Args:
        samples: the client's (inputs, targets).
        its: reading of them.
    """
    size = size_of(samples)
    chunks = max(size // _SAMPLES_AT_ONCE, 1)  # none of a single sample, as BatchNorm needs it
    parts = its.places(np.arange(size)).tensor_split(chunks)
    return [its.batch(places_B, number) for number, places_B in enumerate(parts)]


def loss_for(loss: Loss, samples: Held, *, collate: Collating | None, may_ignore: bool) -> Loss:
    """The loss; cross-entropy in the form that is 0 where no label of a batch counts, if there may be such a batch.

    Args:
        loss: (output, target) → scalar.
        samples: the client's (inputs, targets).
        collate: function that makes batches of samples; None: they are stacked.
        may_ignore: True if targets may be labels that do not count, so that they are looked at.
    """
    looks = loss is cross_entropy and may_ignore
    if looks and holds_ignored(samples, is_collated=collate is not None):
        return counted_cross_entropy
    return loss


class MeanLoss:
    """Mean of batches' losses over their samples, in float64; no step waits for it."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._sizes: list[float] = []
        self._sum = 0.0
        self._samples = 0.0

    def add(self, loss: Tensor, samples: float) -> None:
        """Add a batch's loss, a scalar without a graph, and its number of samples."""
        self._losses.append(loss)
        self._sizes.append(samples)
        if len(self._losses) == _LOSSES_AT_ONCE:
            self._take()

    def mean(self) -> float:
        """Mean over all samples."""
        self._take()
        return self._sum / self._samples

    def sum(self) -> float:
        """Sum over all samples."""
        self._take()
        return self._sum

    def _take(self) -> None:
        losses = torch.stack(self._losses).tolist() if self._losses else []  # one wait for a GPU instead of one a step
        self._sum += sum(map(operator.mul, losses, self._sizes))
        self._samples += sum(self._sizes)
        self._losses = []
        self._sizes = []
