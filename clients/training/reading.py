"""Reading: batches of a client's samples on the device that computes, from memory or as they are needed.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fed.clients.data.collate import Collating, batch_of
from fed.clients.data.held import Held, is_read, size_of
from fed.clients.training.devices import uploaded
from fed.vectors import trees
from fed.vectors.tensors import Tensor, nn, torch
from fed.vectors.trees import Tree

__all__ = ["AsNeeded", "Batch", "InMemory", "Reading", "called", "moved", "reading", "seed_of_batch", "with_parameters"]


class Batch(NamedTuple):
    """Inputs and targets of a batch, which nobody else holds, and the number of its samples."""

    inputs: Tree
    targets: Tree
    samples: int


class InMemory:
    """Batches of a pair in memory, which is moved to the device once.

    Args:
        pair: (inputs, targets), without ragged leaves.
        device: device of the batches.
    """

    def __init__(self, pair: Held, device: "torch.device") -> None:
        self._device = device
        self._samples = size_of(pair)
        inputs_E, targets_E = pair
        self._inputs_E = moved(inputs_E, device)
        self._targets_E = moved(targets_E, device)

    def places(self, order_E: NDArray[np.int64]) -> Tensor:
        """Places of samples, as :meth:`batch` takes parts of them."""
        return uploaded(torch.from_numpy(order_E), self._device)

    def all(self, number: int) -> Batch:
        """All samples in their order, as the batch of a number."""
        inputs = trees.mapped(torch.clone, self._inputs_E)
        targets = trees.mapped(torch.clone, self._targets_E)
        return Batch(inputs, targets, self._samples)

    def batch(self, places_B: Tensor, number: int) -> Batch:
        """Batch of samples at these places.

        Args:
            places_B: part of :meth:`places`.
            number: number of the batch among those of a task.
        """
        return Batch(trees.take(self._inputs_E, places_B), trees.take(self._targets_E, places_B), len(places_B))

    def batches(self, order_E: NDArray[np.int64], sizes: Sequence[int], numbers: Iterable[int]) -> Iterator[Batch]:
        """Batches of samples in an order, one after another, each made when it is asked for.

        Args:
            order_E: the samples' order.
            sizes: number of samples of each batch.
            numbers: number of each batch among those of a task.
        """
        places_E = self.places(order_E)
        # Batch by batch: a slice of all samples would begin anywhere, and MKL's results depend on the alignment.
        parts = places_E.split_with_sizes(sizes)
        labels_E = self._targets_E
        if not isinstance(labels_E, Tensor) or labels_E.dtype is not torch.int64:
            for places_B, number in zip(parts, numbers, strict=True):
                yield self.batch(places_B, number)
            return
        # No product is taken with integers: of them a slice does.
        for places_B, labels_B in zip(parts, labels_E.index_select(0, places_E).split_with_sizes(sizes), strict=True):
            yield Batch(trees.take(self._inputs_E, places_B), labels_B, len(labels_B))


class AsNeeded:
    """Batches that a collate makes, or of samples that are read when it is their turn.

    Args:
        held: pair in memory, or samples on demand.
        collate: the run's collate; None: samples are stacked.
        device: device of the batches.
        seed: seed of what the collate draws; each batch has its own, by its number, whatever was drawn before.
        training: False where a model is scored.
    """

    def __init__(
        self, held: Held, collate: Collating | None, device: "torch.device", seed: int, *, training: bool = True
    ) -> None:
        self._held = held
        self._collate = collate
        self._device = device
        self._seed = seed
        self._training = training

    def places(self, order_E: NDArray[np.int64]) -> Tensor:
        """Places of samples, as :meth:`batch` takes parts of them."""
        return torch.from_numpy(order_E)

    def all(self, number: int) -> Batch:
        """All samples in their order, as the batch of a number."""
        return self.batch(torch.arange(size_of(self._held)), number)

    def batch(self, places_B: Tensor, number: int) -> Batch:
        """Batch of samples at these places.

        Args:
            places_B: part of :meth:`places`.
            number: number of the batch among those of a task.
        """
        seed = seed_of_batch(self._seed, number)
        inputs, targets = batch_of(self._held, places_B, self._collate, seed, training=self._training)
        return Batch(moved(inputs, self._device), moved(targets, self._device), len(places_B))

    def batches(self, order_E: NDArray[np.int64], sizes: Sequence[int], numbers: Iterable[int]) -> Iterator[Batch]:
        """Batches of samples in an order, one after another, each made when it is asked for.

        Args:
            order_E: the samples' order.
            sizes: number of samples of each batch.
            numbers: number of each batch among those of a task.
        """
        for places_B, number in zip(self.places(order_E).split_with_sizes(sizes), numbers, strict=True):
            yield self.batch(places_B, number)


def seed_of_batch(seed: int, number: int) -> int:
    """Seed of what a collate draws for a batch: apart from the model's own draws, which have ``seed`` itself."""
    return (seed + 1 + number) % 2**63


Reading: TypeAlias = InMemory | AsNeeded
"""Batches of samples, from memory or as they are needed."""


def reading(
    held: Held, collate: Collating | None, device: "torch.device", seed: int = 0, *, training: bool = True
) -> Reading:
    """Reading of a client's samples, or of a test set.

    Args:
        held: pair in memory, or samples on demand.
        collate: the run's collate, or None.
        device: device of the batches.
        seed: seed of what the collate draws.
        training: False where a model is scored.
    """
    if collate is None and not is_read(held):
        return InMemory(held, device)
    return AsNeeded(held, collate, device, seed, training=training)


def moved(tree: Tree, device: "torch.device", *, copy: bool = False) -> Any:
    """The same tree on a device.

    Args:
        tree: tree of tensors.
        device: device of the result.
        copy: True for tensors that share no memory with the tree's.
    """
    if isinstance(tree, Tensor):
        return uploaded(tree, device, copy=copy)
    return trees.mapped(lambda leaf: uploaded(leaf, device, copy=copy), tree)


def called(module: "nn.Module", inputs: Tree) -> Any:
    """Output of a model: of a tensor, of a dictionary by the names of its parameters, of a tuple in their order."""
    if isinstance(inputs, Tensor):
        return module(inputs)
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs)


def with_parameters(module: "nn.Module", state: dict[str, Tensor], inputs: Tree) -> Any:
    """Output of a model that has other parameters and buffers.

    Args:
        module: the model.
        state: name → tensor; whatever the model sets is written into it.
        inputs: inputs as :func:`called` takes them.
    """
    if isinstance(inputs, Tensor):
        return torch.func.functional_call(module, state, (inputs,))
    if isinstance(inputs, dict):
        return torch.func.functional_call(module, state, (), inputs)
    return torch.func.functional_call(module, state, tuple(inputs))
