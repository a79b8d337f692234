"""Collate: makes batches of samples, where they are not merely stacked: pads them to one length, augments them.

A collate is a function of a list of samples, each a pair (inputs, targets) of trees without a dimension of samples, or
the inputs alone where targets are None. It returns a batch likewise. Two more arguments are given by name, if it has
parameters of these names: ``generator``, the NumPy stream from which it may draw, and ``training``, which is False
where a model is scored. PyTorch's own generator is seeded likewise, so that what it draws is the same wherever a
client trains. Its further parameters are keys of the section ``collate``. Shapes: see :mod:`fed.vectors.layout`.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from pydantic import PositiveInt

from fed.clients.data.held import Held, Pair, SamplesOnDemand, as_sample, samples_at, taken
from fed.clients.scoring.measures import IGNORED
from fed.config.hyperparameters import Hyperparameters
from fed.errors import InvalidData, InvalidExperiment
from fed.vectors import trees
from fed.vectors.randomness import seeded_torch
from fed.vectors.tensors import Tensor, torch
from fed.vectors.trees import Tree

__all__ = ["Collate", "Collating", "Pad", "batch_of"]

Collate: TypeAlias = Callable[..., Any]
"""A list of samples → a batch."""


@dataclass(frozen=True, kw_only=True)
class Pad(Hyperparameters):
    """Pads samples of several lengths at their ends: to the longest of the batch, or to one length.

    Integers of the targets, and of inputs called ``labels``, are padded with −100, which losses leave out; all other
    values with 0. Clients that train in a group are padded to the longest of the group, so a model must not look at
    padding: give it a mask.

    Args:
        length: length of every batch; null for that of its longest sample. A longer sample is refused.
        multiple: number of which lengths become a multiple, ≥ 1.
        values: path of a tensor, such as ``input_ids``, → the value that pads it.
        mask: name of a further input, 1 where a sample has values and 0 where it is padded; null for none. It is of
            the first of the inputs that has several lengths. A mask of this name that the samples bring, as those of
            a tokenizer do, stays and is padded with 0.
    """

    length: PositiveInt | None = None
    multiple: PositiveInt = 1
    values: Mapping[str, float] = field(default_factory=dict)
    mask: str | None = None

    def __call__(self, samples: Sequence[Any]) -> Pair:
        """Make a batch."""
        inputs, targets = zip(*map(as_sample, samples), strict=True)
        if self.mask is not None:
            inputs = tuple(self._with_mask(one) for one in inputs)
        return self._padded(inputs, "inputs"), self._padded(targets, "targets")

    def together(self, batches: Sequence[Pair]) -> list[Pair]:
        """Batches of several clients, padded to common shapes."""
        columns = [list(column) for column in zip(*map(_leaves, batches), strict=True)]
        widened = [
            self._to_one_shape(column, self._filler(*_named(batches[0])[at])) for at, column in enumerate(columns)
        ]
        return [_with_leaves(batch, leaves) for batch, leaves in zip(batches, zip(*widened, strict=True), strict=True)]

    def _with_mask(self, inputs: Tree) -> Tree:
        if not isinstance(inputs, dict):
            raise InvalidData(f"collate pad adds a mask to inputs that are a dictionary, got {trees.outline(inputs)}")
        if self.mask in inputs:
            return inputs
        ((_, first), *_) = [leaf for leaf in trees.named_leaves(inputs, "inputs") if leaf[1].ndim] or [("", None)]
        if first is None:
            raise InvalidData("collate pad adds a mask to inputs with a length, got single numbers: leave out mask")
        return {**inputs, self.mask: torch.ones(len(first), dtype=torch.int64)}

    def _padded(self, samples: Sequence[Tree], name: str) -> Tree:
        leaves = [
            self._batch(*column) for column in zip(*(trees.named_leaves(one, name) for one in samples), strict=True)
        ]
        return trees.with_leaves(samples[0], leaves) if leaves else samples[0]

    def _batch(self, *column: tuple[str, Tensor]) -> Tensor:
        """One leaf of all samples, [B, ...]."""
        name, first = column[0]
        parts = [part for _, part in column]
        if first.ndim == 0:
            return torch.stack(parts)
        longest = max(map(len, parts))
        length = self.length or longest
        if longest > length:
            raise InvalidData(
                f"{name} must be at most collate.length={length} long, got {longest}: cut it, or raise it"
            )
        length = -(-length // self.multiple) * self.multiple
        batch = first.new_full((len(parts), length, *first.shape[1:]), self._filler(name, first))
        for row, part in enumerate(parts):
            batch[row, : len(part)] = part
        return batch

    def _filler(self, name: str, leaf: Tensor) -> float:
        path = ".".join(re.findall(r"[\w-]+", name)[1:]) or name
        if path in self.values:
            return self.values[path]
        are_labels = name.startswith("targets") or path == "labels"
        return IGNORED if are_labels and not (leaf.is_floating_point() or leaf.is_complex()) else 0

    @staticmethod
    def _to_one_shape(batches: Sequence[Tensor], filler: float) -> list[Tensor]:
        if batches[0].ndim < 2:
            return [*batches]
        length = max(batch.shape[1] for batch in batches)
        return [_lengthened(batch, length, filler) for batch in batches]


def _lengthened(batch: Tensor, length: int, filler: float) -> Tensor:
    if batch.shape[1] == length:
        return batch
    more = batch.new_full((batch.shape[0], length - batch.shape[1], *batch.shape[2:]), filler)
    return torch.cat([batch, more], 1)


@dataclass(frozen=True)
class Collating:
    """A collate in a run, with what it is given by name.

    Args:
        function: the collate.
    """

    function: Collate

    @cached_property
    def _asked_for(self) -> frozenset[str]:
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # some callables of C do not tell
            return frozenset()
        return frozenset(parameters) & {"generator", "training"}

    def __call__(self, samples: Sequence[Pair], seed: int, *, training: bool) -> Pair:
        """A batch of samples; what the function draws follows from the seed.

        Raises:
            InvalidData: if it gives something else than a batch.
        """
        given: dict[str, Any] = {"training": training} if "training" in self._asked_for else {}
        if "generator" in self._asked_for:
            given["generator"] = np.random.Generator(np.random.Philox(key=seed))
        plain = [inputs if targets is None else (inputs, targets) for inputs, targets in samples]
        with seeded_torch(seed, torch.device("cpu")):
            batch = as_sample(self.function(plain, **given))
        _check_batch(batch)
        return batch

    def together(self, batches: Sequence[Pair]) -> list[Pair] | None:
        """Batches of several clients in common shapes; None where they have several and cannot be widened."""
        shapes = {tuple(leaf.shape[1:] for leaf in _leaves(batch)) for batch in batches}
        if len(shapes) == 1:
            return [*batches]
        widen = getattr(self.function, "together", None) or getattr(_inner(self.function), "together", None)
        return None if widen is None else widen(batches)


def _inner(function: Any) -> Any:
    return getattr(function, "func", None)


def batch_of(held: Held, places: Tensor, collate: Collating | None, seed: int = 0, *, training: bool = True) -> Pair:
    """A batch of samples at these places, on the CPU.

    Args:
        held: pair in memory, or samples on demand.
        places: places of the samples, [B].
        collate: the run's collate; None: samples are stacked.
        seed: seed of what the collate draws.
        training: False where a model is scored.
    """
    if collate is None and not isinstance(held, SamplesOnDemand):
        pair: Pair = taken(held, places)
        return pair
    samples = samples_at(held, places.tolist())
    if collate is not None:
        return collate(samples, seed, training=training)
    try:
        inputs, targets = zip(*samples, strict=True)
        return trees.stacked(inputs), trees.stacked(targets)
    except RuntimeError as error:
        raise InvalidExperiment(
            f"samples of a batch must have one shape, got others ({error}): bring them to one where they are read, as "
            "images are resized, or write collate: pad, or name a function of your own there"
        ) from None


def _named(pair: Pair) -> list[tuple[str, Any]]:
    return [*trees.named_leaves(pair[0], "inputs"), *trees.named_leaves(pair[1], "targets")]


def _leaves(pair: Pair) -> list[Any]:
    return [*trees.leaves(pair[0]), *trees.leaves(pair[1])]


def _with_leaves(pair: Pair, parts: Sequence[Any]) -> Pair:
    count = len(trees.leaves(pair[0]))
    return trees.with_leaves(pair[0], parts[:count]), trees.with_leaves(pair[1], parts[count:])


def _check_batch(batch: Pair) -> None:
    leaves = _named(batch)
    for name, leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            got = "a single number" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise InvalidData(f"collate must give tensors with a row for each sample, got {got} for {name}")
    if not leaves or len({len(leaf) for _, leaf in leaves}) > 1:
        raise InvalidData(
            "collate must give a pair (inputs, targets), or inputs alone, with as many rows in each tensor, got "
            f"{ {name: tuple(leaf.shape) for name, leaf in leaves} }"
        )
