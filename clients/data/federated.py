"""Training data by client, and a test set."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

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
        train: client id → (inputs [n, ...], targets [n, ...]), n ≥ 1, of one type and shape over all clients.
        test: (inputs [m, ...], targets [m, ...]), m ≥ 1, or None: then nothing is evaluated.
        classes: how many classes there are; where it is None, one more than the largest integer label seen.

    Raises:
        InvalidData: if a client has no samples, inputs and targets differ in number, types or shapes differ between
            clients, or a value is not finite; the message names the client.

    Example:
        >>> import torch
        >>> pair = (torch.zeros(4, 2), torch.tensor([0, 1, 1, 2]))
        >>> FederatedData(train={"a": pair, "b": pair}, test=pair).number_of_classes()
        3
    """

    train: Mapping[ClientId, Pair]
    test: Pair | None = None
    classes: int | None = None

    def __post_init__(self) -> None:
        if not self.train:
            raise InvalidData("data must have at least one client, got none")
        first = next(iter(self.train))
        _check_pair(self.train[first], f"client {first!r}")
        for client, pair in self.train.items():
            _check_pair(pair, f"client {client!r}")
            _check_alike(pair, f"client {client!r}", self.train[first], f"client {first!r}")
        if self.test is not None:
            _check_pair(self.test, "the test set")
            _check_alike(self.test, "the test set", self.train[first], f"client {first!r}")

    def number_of_classes(self) -> int | None:
        """How many classes the labels have; None where targets are no labels, that is, not integers."""
        if self.classes is not None:
            return self.classes
        pairs = [*self.train.values(), *([self.test] if self.test is not None else [])]
        if any(_is_real(targets) for _, targets in pairs):
            return None
        return 1 + max(int(targets.max()) for _, targets in pairs)

    def pooled(self) -> "FederatedData":
        """All training data in one place: one client, named ``all``, holds every sample."""
        inputs, targets = zip(*self.train.values(), strict=True)
        return FederatedData({"all": (torch.cat(inputs), torch.cat(targets))}, self.test, self.classes)


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _check_pair(pair: object, whose: str) -> None:
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
        raise InvalidData(f"{whose} must hold a pair of tensors (inputs, targets), got {type(pair).__name__}")
    inputs, targets = pair
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
        raise InvalidData(
            f"{whose} must have as many targets as inputs, got shapes {tuple(inputs.shape)} and {tuple(targets.shape)}"
        )
    if len(inputs) == 0:
        raise InvalidData(f"{whose} must hold at least one sample, got none: remove it, or give it data")
    for name, tensor in (("inputs", inputs), ("targets", targets)):
        if _is_real(tensor) and not bool(torch.isfinite(tensor).all()):
            place = tuple(int(index) for index in torch.nonzero(~torch.isfinite(tensor))[0])
            value = tensor[place].item()
            raise InvalidData(
                f"{name} of {whose} must be finite, got {value} at index {place}: clean or drop that sample"
            )


def _check_alike(pair: Pair, whose: str, model: Pair, others: str) -> None:
    for name, tensor, expected in zip(("inputs", "targets"), pair, model, strict=True):
        if tensor.dtype != expected.dtype or tensor.shape[1:] != expected.shape[1:]:
            raise InvalidData(
                f"{name} of {whose} must be like those of {others}, {expected.dtype} of shape "
                f"{tuple(expected.shape[1:])} a sample, got {tensor.dtype} of shape {tuple(tensor.shape[1:])}"
            )
