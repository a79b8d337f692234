"""Samples of one client: a pair (inputs, targets) of trees in memory, or samples that are read as they are needed.

Samples of any other kind, such as a map-style data set, derive from :class:`SamplesOnDemand`: training and evaluation
then read the samples of a batch when it is their turn. Shapes: see :mod:`fed.vectors.layout`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fed.errors import InvalidData
from fed.vectors import trees
from fed.vectors.tensors import Tensor, torch
from fed.vectors.trees import Ragged, Tree

__all__ = [
    "Held",
    "Pair",
    "SamplesOnDemand",
    "as_pair",
    "as_sample",
    "as_tree",
    "dense",
    "is_read",
    "is_real",
    "joined",
    "labels_of",
    "may_ignore",
    "samples_at",
    "size_of",
    "taken",
    "whole",
]

Pair: TypeAlias = tuple[Tree, Tree]
"""(inputs, targets) of samples or of a batch; targets are None where a model finds its loss from the inputs alone."""

Held: TypeAlias = Any
"""Pair | SamplesOnDemand; Any, since most code knows which of them it has."""


class SamplesOnDemand(ABC):
    """Samples of one client, or of a test set, that are read one by one when they are needed.

    They can be pickled, as for worker processes, where what they read from can. A sample is the same whenever it is
    read; what draws belongs into ``collate``, which has a seeded stream.
    """

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def read(self, place: int) -> Pair:
        """One sample: inputs and targets as trees of tensors, without a dimension of samples; targets may be None.

        Args:
            place: number of the sample, 0 … its number of samples − 1.
        """


@dataclass(frozen=True)
class _Chosen(SamplesOnDemand):
    """Some of other samples, in the order of their places."""

    samples: SamplesOnDemand
    places: Tensor

    def __len__(self) -> int:
        return len(self.places)

    def read(self, place: int) -> Pair:
        return self.samples.read(int(self.places[place]))


@dataclass(frozen=True)
class _Chained(SamplesOnDemand):
    """Samples of several holders, one after another."""

    parts: tuple[Held, ...]

    def __len__(self) -> int:
        return sum(map(size_of, self.parts))

    def read(self, place: int) -> Pair:
        for part in self.parts:
            if place < (size := size_of(part)):
                return samples_at(part, [place])[0]
            place -= size
        raise IndexError(place)


def as_pair(given: object) -> Held:
    """Samples as a user gives them: a pair (inputs, targets) as trees; inputs alone have the targets None.

    What is no pair and no mapping comes back as it is, for :func:`fed.clients.data.samples.check_pair` to refuse.
    """
    if isinstance(given, Mapping):
        return as_tree(given), None
    if isinstance(given, tuple | list) and len(given) == 2 and not trees.is_named_tuple(given):
        inputs, targets = given
        if isinstance(given, tuple) and isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            return given
        return as_tree(inputs), as_tree(targets)
    return given


def as_tree(given: object) -> Tree:
    """A tree as a user gives it: any mapping is a dictionary, and a list has a value for each sample.

    A list of numbers becomes a tensor, a list of tensors or lists :class:`fed.vectors.trees.Ragged`, whatever their
    lengths, since another client's may be of several.

    Example:
        >>> as_tree({"ids": [[1, 2], [3]], "label": [0, 1]})["label"]
        tensor([0, 1])
    """
    if isinstance(given, Mapping):
        return {key: as_tree(part) for key, part in given.items()}
    if isinstance(given, tuple):
        parts = [as_tree(part) for part in given]
        return type(given)(*parts) if trees.is_named_tuple(given) else tuple(parts)
    if not isinstance(given, list) or not given:
        return given
    try:
        values = [torch.as_tensor(value) for value in given]
        return torch.stack(values) if values[0].ndim == 0 else Ragged.of(values)
    except (RuntimeError, TypeError, ValueError):  # check_pair says what is wrong with it
        return given


def as_sample(given: object) -> Pair:
    """One sample, or a batch, as a user's function gives it: (inputs, targets), or inputs alone with targets None."""
    if isinstance(given, tuple | list) and len(given) == 2 and not trees.is_named_tuple(given):
        inputs, targets = given
    else:
        inputs = given
        targets = None
    if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
        return inputs, targets
    return _with_dictionaries(inputs), _with_dictionaries(targets)


def _with_dictionaries(tree: object) -> Tree:
    """The same tree, whose mappings of any class are dictionaries."""
    if isinstance(tree, Mapping):
        return {key: _with_dictionaries(part) for key, part in tree.items()}
    if isinstance(tree, tuple):
        parts = [_with_dictionaries(part) for part in tree]
        return type(tree)(*parts) if trees.is_named_tuple(tree) else tuple(parts)
    return tree


def is_read(held: Held) -> bool:
    """True for samples that are read when they are needed."""
    # A look at the type first: to ask an abstract class takes longer, and each task asks several times.
    return type(held) is not tuple and isinstance(held, SamplesOnDemand)


def size_of(held: Held) -> int:
    """Number of samples."""
    if is_read(held):
        return len(held)
    inputs, targets = held
    return trees.length(inputs if targets is None else targets)


def taken(held: Held, places: "Tensor | slice") -> Held:
    """Samples at these places, in that order: copies of those in memory, or with a slice of step 1 views."""
    if is_read(held):
        return _Chosen(held, torch.arange(len(held))[places] if isinstance(places, slice) else places)
    inputs, targets = held
    return trees.take(inputs, places), trees.take(targets, places)


def joined(parts: Sequence[Held]) -> Held:
    """Samples of several holders, one holder's after another's; on demand where one of them is."""
    if any(map(is_read, parts)):
        return _Chained(tuple(parts))
    inputs, targets = zip(*parts, strict=True)
    return trees.concatenated(inputs), trees.concatenated(targets)


def samples_at(held: Held, places: Sequence[int]) -> list[Pair]:
    """Single samples, trees of tensors without a dimension of samples."""
    if is_read(held):
        return [as_sample(held.read(place)) for place in places]
    inputs, targets = held
    return [(trees.sample(inputs, place), trees.sample(targets, place)) for place in places]


def whole(held: Held) -> Pair:
    """All samples in memory, those on demand read at once.

    Raises:
        InvalidData: if samples on demand have several shapes, so that only ``collate`` can make batches of them.
    """
    if not is_read(held):
        pair: Pair = held
        return pair
    try:
        inputs, targets = zip(*samples_at(held, range(len(held))), strict=True)
        return trees.stacked(inputs), trees.stacked(targets)
    except RuntimeError:
        raise InvalidData(
            "samples must have one shape to be held in memory together, got several: pad them where they are read, or "
            "leave out what reads all of them, such as another data.partition"
        ) from None


def dense(held: Held) -> Held:
    """Samples in contiguous memory, as processes share it: kernels may round otherwise for other strides."""
    if is_read(held):
        return held
    inputs_E, targets_E = held
    return trees.contiguous(inputs_E), trees.contiguous(targets_E)


def is_real(leaf: Any) -> bool:
    """True if values are real or complex numbers, and so no labels."""
    dtype: torch.dtype = leaf.dtype
    return dtype.is_floating_point or dtype.is_complex


def labels_of(targets: Tree) -> Tensor | None:
    """Values of targets that may be labels: of one tensor of integers, ragged or not; None for all others."""
    leaf = targets.values_T if isinstance(targets, Ragged) else targets
    return leaf if isinstance(leaf, Tensor) and not is_real(leaf) else None


def may_ignore(held: Held, *, is_collated: bool) -> bool:
    """True if targets may be labels below 0, such as −100 for one that does not count.

    Args:
        held: pair in memory, or samples on demand, which are not read for it.
        is_collated: True if a collate makes the targets, so that these say nothing.
    """
    if is_collated or is_read(held):
        return True
    labels = labels_of(held[1])
    if labels is None or labels.numel() == 0:
        return False
    return int((labels if labels.dtype is torch.int64 else labels.long()).amin()) < 0  # not all integers have a min
