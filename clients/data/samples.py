"""Samples: those of a source before they are dealt out, and the checks of what one client holds.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fed.clients.data.arrays import brings_tensors, tree_of
from fed.clients.data.frames import categories_of, is_frame, names_of
from fed.clients.data.held import Held, Pair, SamplesOnDemand, is_real, labels_of, samples_at, size_of, taken
from fed.clients.scoring.measures import IGNORED
from fed.errors import InvalidData
from fed.vectors import trees
from fed.vectors.tensors import Tensor, torch
from fed.vectors.trees import Ragged, Tree

__all__ = ["ClientId", "Names", "Samples", "check_alike", "check_classes", "check_pair", "names_of_pair", "pattern_of"]

ClientId: TypeAlias = int | str


class Names(NamedTuple):
    """Names that a source gives to features and classes, by which data of several places can be compared.

    Args:
        columns: names of the features in their order, then of the targets in theirs; empty where inputs are no table.
        labels: names of the classes in their order; empty where classes are mere numbers.
    """

    columns: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Samples:
    """Samples of a source, E of them, not yet dealt to clients; a user's own source may return this.

    Args:
        inputs: [E, ...], of any floating type, or integers such as characters; or a tree of such tensors. NumPy arrays,
            frames and lists of numbers become tensors, here and in ``targets``. Or samples on demand: they are dealt by
            ``targets``, and read when they are needed.
        targets: [E, ...], integers, or of any floating type where they are no labels; or a tree of such tensors, or
            None where the model finds its loss from the inputs alone.
        test: a test set of the source's own; without one a share of the samples is held out.
        columns: further values of each sample, [E] each, by name. ``client`` names its holder, for the partition
            ``natural``; ``file`` the file it came from, for ``file``; any other serves ``hash`` and ``rank``.
        classes: number of classes, where the labels at hand may not show it.
        names: names of features and classes.
        is_test: [E], bool, true for samples that nobody trains on. They are the test set, unless ``test`` is given, and
            where the partition names clients also their holders' own test sets. None: every sample may be trained on.
        collate: function that makes a batch of a list of samples; None: that of the experiment, or none.

    Raises:
        InvalidData: if inputs, targets and columns differ in their number of samples.

    Example:
        >>> import torch
        >>> samples = Samples(torch.zeros(3, 2), torch.tensor([0, 1, 1]), columns={"client": np.array(["a", "b", "b"])})
        >>> samples.take(np.array([1, 2])).columns["client"].tolist()
        ['b', 'b']
    """

    inputs: Tree  # or SamplesOnDemand
    targets: Tree
    test: Held | None = None
    columns: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    classes: int | None = None
    names: Names = field(default_factory=Names)
    is_test: NDArray[np.bool_] | None = None
    collate: Callable[..., Any] | None = None
    is_from_arrays: bool | None = field(default=None, repr=False, kw_only=True)
    """True where inputs came as arrays, frames or lists, whose float64 nobody has chosen; None: found from them."""

    def __post_init__(self) -> None:
        if self.is_from_arrays is None:
            given = self.inputs.read(0) if isinstance(self.inputs, SamplesOnDemand) and len(self) else self.inputs
            object.__setattr__(self, "is_from_arrays", not brings_tensors(given))
        found = names_of_pair(self.inputs, self.targets)
        object.__setattr__(self, "names", self.names if any(self.names) else found)
        object.__setattr__(self, "classes", len(found.labels) or None if self.classes is None else self.classes)
        object.__setattr__(self, "targets", tree_of(self.targets, "targets", are_targets=True))
        held: list[tuple[str, Any]] = [("inputs", self.inputs)]
        if isinstance(self.inputs, SamplesOnDemand):
            self._count_classes()
        else:
            object.__setattr__(self, "inputs", tree_of(self.inputs, "inputs"))
            held = trees.named_leaves(self.inputs, "inputs")
        first, *others = [*held, *trees.named_leaves(self.targets, "targets")]
        shapes = {name: _samples_shape(leaf) for name, leaf in others}
        shapes |= {f"column {name}": tuple(np.shape(column)) for name, column in self.columns.items()}
        shapes |= {} if self.is_test is None else {"is_test": tuple(np.shape(self.is_test))}
        for name, shape in shapes.items():
            if not _samples_shape(first[1]) or shape != _samples_shape(first[1]):
                raise InvalidData(
                    f"inputs, targets and columns must have one value a sample, got {first[0]} of shape "
                    f"{_shape(first[1])} and {name} of shape {shape}: give as many of each"
                )

    def __len__(self) -> int:
        return len(self.inputs) if isinstance(self.inputs, SamplesOnDemand) else trees.length(self.inputs)

    def _count_classes(self) -> None:
        """Classes of samples on demand, of which clients hold no labels in memory."""
        labels = labels_of(self.targets)
        if self.classes is None and labels is not None and labels.numel():
            object.__setattr__(self, "classes", 1 + int(labels.long().max()))

    def held_at(self, indices_E: NDArray[np.int64]) -> Held:
        """Samples at these indices, in that order, as a client holds them."""
        # Copies, not views: a view drags all samples along when it is sent to another process.
        at = torch.from_numpy(indices_E)
        if isinstance(self.inputs, SamplesOnDemand):
            return taken(self.inputs, at)
        return trees.take(self.inputs, at), trees.take(self.targets, at)

    def take(self, indices_E: NDArray[np.int64]) -> "Samples":
        """Samples at these indices, in that order; the test set stays."""
        at = torch.from_numpy(indices_E)
        columns = {name: column[indices_E] for name, column in self.columns.items()}
        is_test = None if self.is_test is None else self.is_test[indices_E]
        inputs = taken(self.inputs, at) if isinstance(self.inputs, SamplesOnDemand) else trees.take(self.inputs, at)
        targets = trees.take(self.targets, at)
        return replace(self, inputs=inputs, targets=targets, columns=columns, is_test=is_test)


def names_of_pair(inputs: Any, targets: Any) -> Names:
    """Names of columns and classes that a frame of inputs and its targets bring; empty for all else."""
    if not is_frame(inputs):
        return Names()
    return Names((*names_of(inputs), *names_of(targets)), categories_of(targets))


def check_pair(held: object, owner: str) -> None:
    """Check that a pair has as many targets as inputs, at least one, all of them finite; on demand one sample is read.

    Args:
        held: samples of a client, or of a test set.
        owner: name of the holder in errors, such as "client 3".

    Raises:
        InvalidData: if it is something else.
    """
    if isinstance(held, SamplesOnDemand):
        if len(held):
            _check_tensors(samples_at(held, [0])[0], owner, "its first sample must have")
    elif not isinstance(held, tuple | list) or len(held) != 2:
        got = f"{len(held)} parts" if isinstance(held, tuple | list) else type(held).__name__
        raise InvalidData(f"{owner} must hold a pair of tensors (inputs, targets), got {got}: give one of each")
    else:
        _check_tensors(held, owner, "must hold")
        _check_lengths(held, owner)
    if size_of(held) == 0:
        raise InvalidData(f"{owner} must hold at least one sample, got none: remove it, or give it data")
    for name, leaf in [] if isinstance(held, SamplesOnDemand) else _named(held):
        _check_finite(leaf, name, owner)


def _named(pair: Any) -> list[tuple[str, Any]]:
    """The leaves of a pair, each with its path."""
    inputs, targets = pair
    if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
        return [("inputs", inputs), ("targets", targets)]
    return [*trees.named_leaves(inputs, "inputs"), *trees.named_leaves(targets, "targets")]


def _check_tensors(pair: Any, owner: str, must: str) -> None:
    inputs, targets = pair
    if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
        return
    if not all(isinstance(part, dict | tuple | Tensor | Ragged | None) for part in pair):
        raise _no_tensors([inputs, targets], f"{owner} {must} a pair of tensors (inputs, targets)")
    for name, leaf in _named(pair):
        if not isinstance(leaf, Tensor | Ragged):
            raise _no_tensors([leaf], f"{name} of {owner} must be a tensor")
    for part in (inputs, targets):
        _check_keys(part, owner)
    if not trees.leaves(inputs):
        raise InvalidData(f"{owner} must hold inputs, got none: give at least one tensor")


def _no_tensors(parts: list[Any], begin: str) -> InvalidData:
    remedy = "torch.from_numpy" if any(isinstance(part, np.ndarray) for part in parts) else "torch.tensor"
    got = " and ".join(type(part).__name__ for part in parts)
    return InvalidData(f"{begin}, got {got}: make tensors of them with {remedy}")


def _check_keys(tree: Tree, owner: str) -> None:
    if isinstance(tree, dict):
        for key, part in tree.items():
            if not isinstance(key, str):
                raise InvalidData(f"keys of {owner}'s samples must be texts, got {key!r}: name each value")
            _check_keys(part, owner)
    for part in tree if isinstance(tree, tuple) else ():
        _check_keys(part, owner)


def _check_lengths(pair: Any, owner: str) -> None:
    (first, model), *others = _named(pair)
    for name, leaf in others or [(first, model)]:
        if not _samples_shape(leaf) or not _samples_shape(model) or len(leaf) != len(model):
            if (first, name) == ("inputs", "targets"):
                raise InvalidData(
                    f"{owner} must have as many targets as inputs, got shapes {_shape(model)} and {_shape(leaf)}"
                )
            raise InvalidData(
                f"{owner} must have as many values in {name} as in {first}, one a sample, got shapes {_shape(leaf)} "
                f"and {_shape(model)}"
            )


def _check_finite(leaf: Any, name: str, owner: str) -> None:
    tensor: Tensor = leaf.values_T if isinstance(leaf, Ragged) else leaf
    if not is_real(tensor) or _all_finite(tensor):
        return
    # Looked for only now: to find it takes several passes.
    place = tuple(int(index) for index in torch.nonzero(~torch.isfinite(tensor))[0])
    value = tensor[place].item()
    if isinstance(leaf, Ragged):
        sample = int(torch.searchsorted(leaf.begins_E, place[0], right=True)) - 1
        place = (sample, place[0] - int(leaf.begins_E[sample]), *place[1:])
    raise InvalidData(f"{name} of {owner} must be finite, got {value} at index {place}: clean or drop that sample")


def _samples_shape(leaf: Any) -> tuple[int, ...]:
    """(number of samples,); empty for a tensor of a single number."""
    return (len(leaf),) if isinstance(leaf, Ragged | SamplesOnDemand) else tuple(leaf.shape[:1])


def _shape(leaf: Any) -> object:
    return f"[{len(leaf)} lengths]" if isinstance(leaf, Ragged | SamplesOnDemand) else tuple(leaf.shape)


def check_alike(held: Held, owner: str, model: Pair, others: str) -> None:
    """Check samples against the types and shapes of another's; of those on demand the first one.

    Args:
        held: samples of a client, or of a test set.
        owner: name of the holder in errors, such as "client 3".
        model: the other pair, of any number of samples.
        others: name of the other pair's holder in errors.

    Raises:
        InvalidData: if they differ.
    """
    pair = pattern_of(held)
    for name, part, expected in zip(("inputs", "targets"), pair, model, strict=True):
        if not isinstance(part, Tensor) and trees.outline(part) != trees.outline(expected):
            raise InvalidData(
                f"{name} of {owner} must be like those of {others}, {trees.outline(expected)}, got "
                f"{trees.outline(part)}"
            )
    # One sample on demand says nothing of the lengths of others.
    is_alike = _is_alike_but_for_lengths if isinstance(held, SamplesOnDemand) else _is_alike
    for (name, leaf), (_, expected) in zip(_named(pair), _named(model), strict=True):
        if not is_alike(leaf, expected):
            raise InvalidData(
                f"{name} of {owner} must be like those of {others}, {expected.dtype} of shape "
                f"{_of_a_sample(expected)} a sample, got {leaf.dtype} of shape {_of_a_sample(leaf)}"
            )


def _is_alike(leaf: Any, expected: Any) -> bool:
    return bool(leaf.dtype == expected.dtype and _of_a_sample(leaf) == _of_a_sample(expected))


def _is_alike_but_for_lengths(leaf: Any, expected: Any) -> bool:
    return bool(leaf.dtype == expected.dtype and len(_of_a_sample(leaf)) == len(_of_a_sample(expected)))


def _of_a_sample(leaf: Any) -> tuple[Any, ...]:
    """Shape of one sample; of a ragged leaf without the number of rows."""
    return (..., *leaf.values_T.shape[1:]) if isinstance(leaf, Ragged) else tuple(leaf.shape[1:])


def pattern_of(held: Held) -> Pair:
    """Pair with the form, types and shapes of a holder's samples, without samples: copies, which keep nothing else."""
    if isinstance(held, SamplesOnDemand):
        inputs, targets = samples_at(held, [0])[0]
        return trees.mapped(_emptied_sample, inputs), trees.mapped(_emptied_sample, targets)
    inputs, targets = held
    return trees.mapped(_emptied, inputs), trees.mapped(_emptied, targets)


def _emptied_sample(leaf: Tensor) -> Tensor:
    return leaf.new_empty(0, *leaf.shape)


def _emptied(leaf: Any) -> Any:
    if isinstance(leaf, Ragged):
        return Ragged(leaf.values_T[:0].clone(), leaf.begins_E[:1].clone())
    return leaf[:0].clone()


def check_classes(targets: Tree, owner: str, classes: int | None, why: str = "", *, are_labels: bool = False) -> None:
    """Check integer targets against the number of classes, where it is known.

    Args:
        targets: [E, ...].
        owner: name of the holder in errors, such as "client 3".
        classes: number of classes; None: not known, and nothing is checked.
        why: reason for that number in errors; empty: the data's own ``classes``.
        are_labels: True if negative numbers are wrong too, but for −100, which marks targets that do not count.
            Otherwise a loss may give them a meaning, such as "ignore".

    Raises:
        InvalidData: if a label is not in 0 … classes − 1.
    """
    values = labels_of(targets)
    if classes is None or values is None or not values.numel():
        return
    labels = values.long()  # not all integers have a max
    lowest = int(labels.min())
    largest = int(labels.max())
    if lowest == IGNORED:
        lowest = int(labels.where(labels != IGNORED, 0).min())
    if largest >= classes or (are_labels and lowest < 0):
        raise InvalidData(
            f"targets of {owner} must be in 0 … {classes - 1}, {why or f'as classes={classes} says'}, got "
            f"{largest if largest >= classes else lowest}: number the classes from 0, or raise their number"
        )


def _all_finite(tensor: Tensor) -> bool:
    # A finite sum proves every term finite, which settles nearly all cases in one pass; an infinite one proves nothing.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
