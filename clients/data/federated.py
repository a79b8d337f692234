"""Training data by client, and a test set."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fed.errors import InvalidData

__all__ = ["ClientId", "FederatedData", "Pair"]

ClientId: TypeAlias = int | str
Pair: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class FederatedData:
    """Training data by client, and a test set.

    Args:
        train: client id → (inputs [n, ...], targets [n, ...]), n ≥ 1, of one type and shape over all clients. It may be
            any mapping, such as one that reads a client's file when asked; each client is read once to be checked.
        test: (inputs [m, ...], targets [m, ...]), m ≥ 1, or None: then nothing is evaluated.
        classes: how many classes there are; where it is None, one more than the largest integer label seen.

    Raises:
        InvalidData: if a client has no samples, its id is no integer or text, inputs and targets differ in number,
            types or shapes differ between clients, a value is not finite, or a label is no less than ``classes``; the
            message names the client.

    Example:
        >>> import torch
        >>> pair = (torch.zeros(4, 2), torch.tensor([0, 1, 1, 2]))
        >>> FederatedData(train={"a": pair, "b": pair}, test=pair).number_of_classes()
        3
        >>> FederatedData(train={"a": pair}).sizes
        {'a': 4}
    """

    train: Mapping[Any, Pair]  # keys are ClientId: a Mapping[int, …] would be no Mapping[int | str, …]
    test: Pair | None = None
    classes: int | None = None
    sizes: Mapping[ClientId, int] = field(init=False, repr=False, compare=False)
    """Client id → its number of samples n."""

    def __post_init__(self) -> None:
        if not isinstance(self.train, Mapping):
            raise InvalidData(
                "train must be a mapping from a client's id to its pair (inputs, targets), got "
                f"{type(self.train).__name__}: number the clients, as dict(enumerate(pairs)) does"
            )
        if not self.train:
            raise InvalidData("data must have at least one client, got none")
        sizes: dict[ClientId, int] = {}
        model: tuple[Pair, str] | None = None
        for client, pair in self.train.items():
            whose = f"client {client!r}"
            _check_id(client)
            _check_pair(pair, whose)
            model = model or (pair, whose)
            _check_alike(pair, whose, *model)
            _check_classes(pair[1], whose, self.classes)
            sizes[client] = len(pair[1])
        if self.test is not None and model is not None:
            _check_pair(self.test, "the test set")
            _check_alike(self.test, "the test set", *model)
            _check_classes(self.test[1], "the test set", self.classes)
        object.__setattr__(self, "sizes", sizes)

    def number_of_classes(self) -> int | None:
        """How many classes the labels have; None where targets are no labels, that is, not integers."""
        if self.classes is not None:
            return self.classes
        if _is_real(next(iter(self.train.values()))[1]):
            return None
        largest = max(int(targets.long().max()) for _, targets in self.train.values())  # not all integers have a max
        return 1 + (largest if self.test is None else max(largest, int(self.test[1].long().max())))

    def pooled(self) -> "FederatedData":
        """All training data in one place: one client, named ``all``, holds every sample."""
        inputs, targets = zip(*self.train.values(), strict=True)
        return FederatedData({"all": (torch.cat(inputs), torch.cat(targets))}, self.test, self.classes)


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _all_finite(tensor: Tensor) -> bool:
    # A sum is finite only if its terms are, which settles nearly all cases in one pass; finite terms may overflow.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _check_id(client: object) -> None:
    if not isinstance(client, int | str | np.integer):
        raise InvalidData(
            f"a client's id must be an integer or a text, for it names random streams, got {client!r}: "
            "number the clients, or name them"
        )


def _check_pair(pair: object, whose: str) -> None:
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
        if _is_real(tensor) and not _all_finite(tensor):
            place = tuple(int(index) for index in torch.nonzero(~torch.isfinite(tensor))[0])
            value = tensor[place].item()
            raise InvalidData(
                f"{name} of {whose} must be finite, got {value} at index {place}: clean or drop that sample"
            )


def _check_classes(targets: Tensor, whose: str, classes: int | None) -> None:
    if classes is None or _is_real(targets):
        return
    # Negative numbers may be a loss's own, such as those it ignores.
    largest = int(targets.long().max())
    if largest >= classes:
        raise InvalidData(
            f"targets of {whose} must be in 0 … {classes - 1}, as classes={classes} says, got {largest}: "
            "number the classes from 0, or raise classes"
        )


def _check_alike(pair: Pair, whose: str, model: Pair, others: str) -> None:
    for name, tensor, expected in zip(("inputs", "targets"), pair, model, strict=True):
        if tensor.dtype != expected.dtype or tensor.shape[1:] != expected.shape[1:]:
            raise InvalidData(
                f"{name} of {whose} must be like those of {others}, {expected.dtype} of shape "
                f"{tuple(expected.shape[1:])} a sample, got {tensor.dtype} of shape {tuple(tensor.shape[1:])}"
            )
