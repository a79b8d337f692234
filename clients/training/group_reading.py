"""Group reading: batches of a group of clients, side by side, from memory or as a collate makes them.

Shapes: see :mod:`fed.vectors.layout`.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from fed.clients.data import Held, Pair
from fed.clients.data.collate import Collating, batch_of
from fed.clients.data.held import dense, is_read, size_of
from fed.clients.training.batches import GroupBatch, Places
from fed.clients.training.copies_ahead import Lane, copied_ahead
from fed.clients.training.devices import uploaded
from fed.clients.training.reading import seed_of_batch
from fed.vectors import trees
from fed.vectors.tensors import Tensor, torch

__all__ = ["GroupInMemory", "GroupReading", "ReadGroup", "UnequalBatches", "group_reading"]

_CPU = torch.device("cpu")


class UnequalBatches(Exception):
    """Batches of a group's clients that have several shapes, and so cannot stand side by side."""


class GroupInMemory:
    """Batches of pairs in memory, which are moved to the device once, or a batch at a time on a lane.

    Attributes:
        is_padded: False: no client's batch has another shape than it has alone, but for the number of samples.
        index_device: device of the samples, and of the indices that name them.

    Args:
        samples: each client's (inputs, targets).
        device: device of the batches.
        lane: way on which batches are copied; None: all samples are moved at once.
    """

    is_padded = False

    def __init__(self, samples: Sequence[Pair], device: "torch.device", lane: Lane | None = None) -> None:
        inputs, targets = zip(*samples, strict=True)
        self.index_device = device if lane is None else _CPU
        self._lane = lane
        self._inputs_E = trees.mapped(self._to_device, trees.concatenated(inputs))
        self._targets_E = trees.mapped(self._to_device, trees.concatenated(targets))

    def _to_device(self, leaf: Tensor) -> Tensor:
        # Contiguous, for kernels may round otherwise for other strides, which concatenation may keep.
        return uploaded(leaf, self.index_device).contiguous()

    def batches(self, places: Iterable[Places], numbers: Iterable[int]) -> Iterator[GroupBatch]:
        """Batches of consecutive steps, each made when it is asked for, or a little before.

        Args:
            places: places of the samples of each batch.
            numbers: number of each batch among those of a task.
        """
        made = map(self._batch, places)
        return made if self._lane is None else copied_ahead(made, self._lane)

    def _batch(self, places: Places) -> GroupBatch:
        index_E, weights_KB, samples_K = places

        def of_batch(leaf_E: Tensor) -> Tensor:
            return self._taken(leaf_E, index_E).view(*weights_KB.shape, *leaf_E.shape[1:])

        inputs = trees.mapped(of_batch, self._inputs_E)
        targets = trees.mapped(of_batch, self._targets_E)
        return GroupBatch(inputs, targets, weights_KB, samples_K)

    def _taken(self, leaf_E: Tensor, index_E: Tensor) -> Tensor:
        if self._lane is None:
            return leaf_E.index_select(0, index_E)
        out = self._lane.empty((len(index_E), *leaf_E.shape[1:]), leaf_E.dtype)
        return torch.index_select(leaf_E, 0, index_E, out=out)


class ReadGroup:
    """Batches that a collate makes client by client, each as if its client trained alone, in common shapes.

    Attributes:
        is_padded: True if the last batch was padded to these shapes.
        index_device: the CPU.

    Args:
        samples: each client's samples.
        rows: the client of each row.
        collate: the run's collate; None: samples are stacked.
        device: device of the batches.
        seeds: each client's seed of what the collate draws.
        lane: way on which batches are copied; None: the device's own.
    """

    index_device = _CPU

    def __init__(
        self,
        samples: Sequence[Held],
        rows: Sequence[int],
        collate: Collating | None,
        *,
        device: "torch.device",
        seeds: Sequence[Callable[[], int]],
        lane: Lane | None = None,
    ) -> None:
        begins = [0, *itertools.accumulate(map(size_of, samples))]
        self._clients = [(samples[row], begins[row], seeds[row]()) for row in rows]
        self._collate = collate
        self._device = device if lane is None else _CPU
        self._lane = lane
        self.is_padded = False

    def batches(self, places: Iterable[Places], numbers: Iterable[int]) -> Iterator[GroupBatch]:
        """Batches of consecutive steps, each made when it is asked for, or a little before.

        Args:
            places: places of the samples of each batch.
            numbers: number of each batch among those of a task.

        Raises:
            UnequalBatches: if clients' batches have several shapes.
        """
        made = map(self._batch, places, numbers)
        return made if self._lane is None else copied_ahead(made, self._lane)

    def _batch(self, places: Places, number: int) -> GroupBatch:
        index_KB = places.index_E.view(places.weights_KB.shape)
        batches = []
        for (held, begin, seed), index_B, size in zip(self._clients, index_KB, places.samples_K, strict=False):
            # A client that has finished holds its place with a sample whose weight is 0.
            its_places = index_B[:size] - begin if size else torch.zeros(1, dtype=torch.int64)
            batch = batch_of(held, its_places, self._collate, seed_of_batch(seed, number))
            if {len(leaf) for part in batch for leaf in trees.leaves(part)} != {len(its_places)}:
                raise UnequalBatches
            batches.append(batch)
        alike = [*batches] if self._collate is None else self._collate.together(batches)
        if alike is None:
            raise UnequalBatches
        self.is_padded = any(map(_is_padded, batches, alike))
        filled = [self._filled(batch, places.weights_KB.shape[1]) for batch in alike]
        inputs, targets = (trees.mapped(self._to_device, trees.stacked(parts)) for parts in zip(*filled, strict=True))
        return GroupBatch(inputs, targets, places.weights_KB, places.samples_K)

    def _to_device(self, leaf: Tensor) -> Tensor:
        return uploaded(leaf, self._device)

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
    *,
    device: "torch.device",
    seeds: Sequence[Callable[[], int]],
    lane: Lane | None = None,
    room_bytes: float = math.inf,
) -> GroupReading:
    """Reading of a group's samples: all are moved to the device at once where they have room.

    Args:
        samples: each client's samples.
        rows: the client of each row.
        collate: the run's collate, or None.
        device: device of the batches.
        seeds: each client's seed of what the collate draws.
        lane: way to the device beside its computation; None: there is none.
        room_bytes: size of the samples that may lie on the device, if there is a lane.
    """
    if collate is not None or any(map(is_read, samples)):
        held = [dense(one) for one in samples]
        return ReadGroup(held, rows, collate, device=device, seeds=seeds, lane=lane)
    has_room = lane is None or _size_bytes(samples) <= room_bytes
    return GroupInMemory(samples, device, None if has_room else lane)


def _size_bytes(samples: Sequence[Pair]) -> int:
    return sum(leaf.nbytes for pair in samples for part in pair for leaf in trees.leaves(part))
