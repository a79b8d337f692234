"""One client's samples, a pair (inputs, targets), and what makes them fit to be learned from. Shapes: n samples."""

from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from fed.errors import InvalidData

__all__ = ["ClientId", "Pair", "check_alike", "check_classes", "check_id", "check_pair", "dense", "is_real"]

ClientId: TypeAlias = int | str
Pair: TypeAlias = tuple[Tensor, Tensor]


def is_real(tensor: Tensor) -> bool:
    """Whether values are real or complex numbers, and so no labels."""
    return tensor.is_floating_point() or tensor.is_complex()


def dense(pair: Pair) -> Pair:
    """As it lies in memory that processes share: kernels may round otherwise where strides are others."""
    inputs_n, targets_n = pair
    return inputs_n.contiguous(), targets_n.contiguous()


def check_id(client: object) -> None:
    """Hold a client's id to what can name a random stream.

    Raises:
        InvalidData: if it is neither an integer nor a text.
    """
    if not isinstance(client, int | str | np.integer):
        raise InvalidData(
            f"a client's id must be an integer or a text, for it names random streams, got {client!r}: "
            "number the clients, or name them"
        )


def check_pair(pair: object, whose: str) -> None:
    """Hold what should be a pair to as many inputs as targets, at least one, all of them finite.

    Args:
        pair: what a client holds.
        whose: it is, for the message.

    Raises:
        InvalidData: if it is something else.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        got = f"{len(pair)} parts" if isinstance(pair, tuple | list) else type(pair).__name__
        raise InvalidData(f"{whose} must hold a pair of tensors (inputs, targets), got {got}: give one of each")
    if not all(isinstance(part, Tensor) for part in pair):
        remedy = "torch.from_numpy" if any(isinstance(part, np.ndarray) for part in pair) else "torch.tensor"
        got = " and ".join(type(part).__name__ for part in pair)
        raise InvalidData(
            f"{whose} must hold a pair of tensors (inputs, targets), got {got}: make tensors of them with {remedy}"
        )
    inputs, targets = pair
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
        raise InvalidData(
            f"{whose} must have as many targets as inputs, got shapes {tuple(inputs.shape)} and {tuple(targets.shape)}"
        )
    if len(inputs) == 0:
        raise InvalidData(f"{whose} must hold at least one sample, got none: remove it, or give it data")
    for name, tensor in (("inputs", inputs), ("targets", targets)):
        if is_real(tensor) and not _all_finite(tensor):
            place = tuple(int(index) for index in torch.nonzero(~torch.isfinite(tensor))[0])
            value = tensor[place].item()
            raise InvalidData(
                f"{name} of {whose} must be finite, got {value} at index {place}: clean or drop that sample"
            )


def check_alike(pair: Pair, whose: str, model: Pair, others: str) -> None:
    """Hold a pair to the types and shapes of another's samples.

    Args:
        pair: what a client holds.
        whose: it is, for the message.
        model: the other, of any number of samples.
        others: whose that is.

    Raises:
        InvalidData: if they differ.
    """
    for name, tensor, expected in zip(("inputs", "targets"), pair, model, strict=True):
        if tensor.dtype != expected.dtype or tensor.shape[1:] != expected.shape[1:]:
            raise InvalidData(
                f"{name} of {whose} must be like those of {others}, {expected.dtype} of shape "
                f"{tuple(expected.shape[1:])} a sample, got {tensor.dtype} of shape {tuple(tensor.shape[1:])}"
            )


def check_classes(targets: Tensor, whose: str, classes: int | None, *, are_labels: bool = False) -> None:
    """Hold integer targets to the number of classes, where it is known.

    Args:
        targets: [n, ...].
        whose: they are, for the message.
        classes: how many classes there are.
        are_labels: whether a negative number is wrong too; it may be a loss's own, such as one that it ignores.

    Raises:
        InvalidData: if a label is none of a class.
    """
    if classes is None or is_real(targets):
        return
    labels = targets.long()  # not all integers have a max
    lowest, largest = int(labels.min()), int(labels.max())
    if largest >= classes or (are_labels and lowest < 0):
        raise InvalidData(
            f"targets of {whose} must be in 0 … {classes - 1}, as classes={classes} says, got "
            f"{largest if largest >= classes else lowest}: number the classes from 0, or raise classes"
        )


def _all_finite(tensor: Tensor) -> bool:
    # A sum is finite only if its terms are, which settles nearly all cases in one pass; finite terms may overflow.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
