"""Samples: those of a source before they are dealt out, and one client's pair (inputs, targets) with its checks.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fed.errors import InvalidData
from fed.vectors.tensors import Tensor, torch

__all__ = ["ClientId", "Names", "Pair", "Samples", "check_alike", "check_classes", "check_pair", "dense", "is_real"]

ClientId: TypeAlias = int | str
Pair: TypeAlias = tuple[Tensor, Tensor]


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
        inputs: [E, ...], of any floating type, or integers such as characters.
        targets: [E, ...], integers, or of any floating type where they are no labels.
        test: a test set of the source's own; without one a share of the samples is held out.
        columns: further values of each sample, [E] each, by name. ``client`` names its holder, for the partition
            ``natural``; ``file`` the file it came from, for ``file``; any other serves ``hash`` and ``rank``.
        classes: number of classes, where the labels at hand may not show it.
        names: names of features and classes.
        is_test: [E], bool, true for samples that nobody trains on. They are the test set, unless ``test`` is given, and
            where the partition names clients also their holders' own test sets. None: every sample may be trained on.

    Raises:
        InvalidData: if inputs, targets and columns differ in their number of samples.

    Example:
        >>> import torch
        >>> samples = Samples(torch.zeros(3, 2), torch.tensor([0, 1, 1]), columns={"client": np.array(["a", "b", "b"])})
        >>> samples.take(np.array([1, 2])).columns["client"].tolist()
        ['b', 'b']
    """

    inputs: Tensor
    targets: Tensor
    test: Pair | None = None
    columns: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    classes: int | None = None
    names: Names = field(default_factory=Names)
    is_test: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        shapes = {"targets": tuple(self.targets.shape[:1])}
        shapes |= {f"column {name}": tuple(np.shape(column)) for name, column in self.columns.items()}
        shapes |= {} if self.is_test is None else {"is_test": tuple(np.shape(self.is_test))}
        for name, shape in shapes.items():
            if self.inputs.ndim == 0 or shape != (len(self.inputs),):
                raise InvalidData(
                    f"inputs, targets and columns must have one value a sample, got inputs of shape "
                    f"{tuple(self.inputs.shape)} and {name} of shape {shape}: give as many of each"
                )

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, indices_E: NDArray[np.int64]) -> "Samples":
        """Samples at these indices, in that order; the test set stays."""
        at = torch.from_numpy(indices_E)
        columns = {name: column[indices_E] for name, column in self.columns.items()}
        is_test = None if self.is_test is None else self.is_test[indices_E]
        return replace(self, inputs=self.inputs[at], targets=self.targets[at], columns=columns, is_test=is_test)


def is_real(tensor: Tensor) -> bool:
    """True if values are real or complex numbers, and so no labels."""
    return tensor.is_floating_point() or tensor.is_complex()


def dense(pair: Pair) -> Pair:
    """Pair in contiguous memory, as processes share it: kernels may round otherwise for other strides."""
    inputs_E, targets_E = pair
    return inputs_E.contiguous(), targets_E.contiguous()


def check_pair(pair: object, owner: str) -> None:
    """Check that a pair has as many inputs as targets, at least one, all of them finite.

    Args:
        pair: samples of a client, or of a test set.
        owner: name of the holder in errors, such as "client 3".

    Raises:
        InvalidData: if it is something else.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        got = f"{len(pair)} parts" if isinstance(pair, tuple | list) else type(pair).__name__
        raise InvalidData(f"{owner} must hold a pair of tensors (inputs, targets), got {got}: give one of each")
    if not all(isinstance(part, Tensor) for part in pair):
        remedy = "torch.from_numpy" if any(isinstance(part, np.ndarray) for part in pair) else "torch.tensor"
        got = " and ".join(type(part).__name__ for part in pair)
        raise InvalidData(
            f"{owner} must hold a pair of tensors (inputs, targets), got {got}: make tensors of them with {remedy}"
        )
    inputs, targets = pair
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
        raise InvalidData(
            f"{owner} must have as many targets as inputs, got shapes {tuple(inputs.shape)} and {tuple(targets.shape)}"
        )
    if len(inputs) == 0:
        raise InvalidData(f"{owner} must hold at least one sample, got none: remove it, or give it data")
    for name, tensor in (("inputs", inputs), ("targets", targets)):
        if is_real(tensor) and not _all_finite(tensor):
            # Looked for only now: to find it takes several passes.
            place = tuple(int(index) for index in torch.nonzero(~torch.isfinite(tensor))[0])
            value = tensor[place].item()
            raise InvalidData(
                f"{name} of {owner} must be finite, got {value} at index {place}: clean or drop that sample"
            )


def check_alike(pair: Pair, owner: str, model: Pair, others: str) -> None:
    """Check a pair against the types and shapes of another's samples.

    Args:
        pair: samples of a client, or of a test set.
        owner: name of the holder in errors, such as "client 3".
        model: the other pair, of any number of samples.
        others: name of the other pair's holder in errors.

    Raises:
        InvalidData: if they differ.
    """
    for name, tensor, expected in zip(("inputs", "targets"), pair, model, strict=True):
        if tensor.dtype != expected.dtype or tensor.shape[1:] != expected.shape[1:]:
            raise InvalidData(
                f"{name} of {owner} must be like those of {others}, {expected.dtype} of shape "
                f"{tuple(expected.shape[1:])} a sample, got {tensor.dtype} of shape {tuple(tensor.shape[1:])}"
            )


def check_classes(targets: Tensor, owner: str, classes: int | None, why: str = "", *, are_labels: bool = False) -> None:
    """Check integer targets against the number of classes, where it is known.

    Args:
        targets: [E, ...].
        owner: name of the holder in errors, such as "client 3".
        classes: number of classes; None: not known, and nothing is checked.
        why: reason for that number in errors; empty: the data's own ``classes``.
        are_labels: True if negative numbers are wrong too. Otherwise a loss may give them a meaning, such as "ignore".

    Raises:
        InvalidData: if a label is not in 0 … classes − 1.
    """
    if classes is None or is_real(targets):
        return
    labels = targets.long()  # not all integers have a max
    lowest = int(labels.min())
    largest = int(labels.max())
    if largest >= classes or (are_labels and lowest < 0):
        raise InvalidData(
            f"targets of {owner} must be in 0 … {classes - 1}, {why or f'as classes={classes} says'}, got "
            f"{largest if largest >= classes else lowest}: number the classes from 0, or raise their number"
        )


def _all_finite(tensor: Tensor) -> bool:
    # A finite sum proves every term finite, which settles nearly all cases in one pass; an infinite one proves nothing.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
