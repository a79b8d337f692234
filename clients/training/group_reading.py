"""Group reading: batches of a group of clients, side by side, from memory or as a collate makes them.

Shapes: see :mod:`fed.vectors.layout`.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

from fed.clients.data import Held, Pair
from fed.clients.data.collate import Collating, batch_of
from fed.clients.data.held import dense, is_read, size_of
from fed.clients.training.reading import seed_of_batch
from fed.vectors import trees
from fed.vectors.tensors import Tensor, torch

__all__ = ["GroupInMemory", "GroupReading", "ReadGroup", "UnequalBatches", "group_reading"]


class UnequalBatches(Exception):
    """Batches of a group's clients that have several shapes, and so cannot stand side by side."""


class GroupInMemory:
    """Batches of pairs in memory, which are moved to the device once.

    Attributes:
        is_padded: False: no client's batch has another shape than it has alone, but for the number of samples.

    Args:
        samples: each client's (inputs, targets).
        device: device of the batches.
    """

    is_padded = False

    def __init__(self, samples: Sequence[Pair], device: "torch.device") -> None:
        inputs, targets = zip(*samples, strict=True)
        self._device = device
        self._inputs_E = trees.mapped(self._to_device, trees.concatenated(inputs))
        self._targets_E = trees.mapped(self._to_device, trees.concatenated(targets))

    def _to_device(self, leaf: Tensor) -> Tensor:
        # Contiguous, for kernels may round otherwise for other strides, which concatenation may keep.
        return leaf.to(self._device, non_blocking=True).contiguous()

    def batch(self, index_E: Tensor, weights_KB: Tensor, number: int) -> Pair:
        """Batch of the first clients, trees of [K, B, ...].

        Args:
            index_E: [K · B], place of each sample among those of all clients.
            weights_KB: weight of each sample's loss, 0 where a place is filled up.
            number: number of the batch among those of a task.
        """

        def of_batch(leaf_E: Tensor) -> Tensor:
            return leaf_E.index_select(0, index_E).view(*weights_KB.shape, *leaf_E.shape[1:])

        return trees.mapped(of_batch, self._inputs_E), trees.mapped(of_batch, self._targets_E)


class ReadGroup:
    """Batches that a collate makes client by client, each as if its client trained alone, in common shapes.

    Attributes:
        is_padded: True if the last batch was padded to these shapes.

    Args:
        samples: each client's samples.
        rows: the client of each row.
        collate: the run's collate; None: samples are stacked.
        device: device of the batches.
        seeds: each client's seed of what the collate draws.
    """

    def __init__(
        self,
        samples: Sequence[Held],
        rows: Sequence[int],
        collate: Collating | None,
        device: "torch.device",
        seeds: Sequence[Callable[[], int]],
    ) -> None:
        begins = [0, *itertools.accumulate(map(size_of, samples))]
        self._clients = [(samples[row], begins[row], seeds[row]()) for row in rows]
        self._collate = collate
        self._device = device
        self.is_padded = False

    def batch(self, index_E: Tensor, weights_KB: Tensor, number: int) -> Pair:
        """Batch of the first clients, trees of [K, B, ...].

        Args:
            index_E: [K · B], place of each sample among those of all clients.
            weights_KB: weight of each sample's loss, 0 where a place is filled up.
            number: number of the batch among those of a task.

        Raises:
            UnequalBatches: if clients' batches have several shapes.
        """
        index_KB = index_E.view(weights_KB.shape).cpu()
        sizes = (weights_KB > 0).sum(1).tolist()
        batches = []
        for (held, begin, seed), index_B, size in zip(self._clients, index_KB, sizes, strict=False):
            # A client that has finished holds its place with a sample whose weight is 0.
            places = index_B[:size] - begin if size else torch.zeros(1, dtype=torch.int64)
            batch = batch_of(held, places, self._collate, seed_of_batch(seed, number))
            if {len(leaf) for part in batch for leaf in trees.leaves(part)} != {len(places)}:
                raise UnequalBatches
            batches.append(batch)
        alike = [*batches] if self._collate is None else self._collate.together(batches)
        if alike is None:
            raise UnequalBatches
        self.is_padded = any(map(_is_padded, batches, alike))
        filled = [self._filled(batch, weights_KB.shape[1]) for batch in alike]
        inputs, targets = zip(*filled, strict=True)
        return trees.mapped(self._to_device, trees.stacked(inputs)), trees.mapped(
            self._to_device, trees.stacked(targets)
        )

    def _to_device(self, leaf: Tensor) -> Tensor:
        return leaf.to(self._device, non_blocking=True)

    @staticmethod
    def _filled(batch: Pair, places: int) -> Pair:
        """Batch whose last sample fills the places that are left."""
        inputs, targets = batch
        rows = torch.arange(places).clamp(max=trees.length(inputs) - 1)
        return trees.take(inputs, rows), trees.take(targets, rows)


def _is_padded(batch: Pair, widened: Pair) -> bool:
    return [trees.shapes(part) for part in batch] != [trees.shapes(part) for part in widened]


GroupReading: TypeAlias = GroupInMemory | ReadGroup
"""Batches of a group's clients side by side."""


def group_reading(
    samples: Sequence[Held],
    rows: Sequence[int],
    collate: Collating | None,
    device: "torch.device",
    seeds: Sequence[Callable[[], int]],
) -> GroupReading:
    """Reading of a group's samples.

    Args:
        samples: each client's samples.
        rows: the client of each row.
        collate: the run's collate, or None.
        device: device of the batches.
        seeds: each client's seed of what the collate draws.
    """
    if collate is None and not any(map(is_read, samples)):
        return GroupInMemory(samples, device)
    return ReadGroup([dense(held) for held in samples], rows, collate, device=device, seeds=seeds)
