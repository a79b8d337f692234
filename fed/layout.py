"""A model's floating-point state as one flat tensor.

Shapes: P trainable parameters; B further floating-point state (float buffers and frozen parameters); V = P + B; I
integers; K states.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from fed.errors import InvalidModel

__all__ = ["Layout", "Part"]


@dataclass(frozen=True)
class Part:
    """One tensor of a model and its place in the vector: ``vector[offset : offset + size]``."""

    name: str
    shape: torch.Size
    offset: int
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return self.shape.numel()

    def view(self, vector: Tensor) -> Tensor:
        """This tensor's numbers in a vector, in its shape."""
        return vector[self.offset : self.offset + self.size].view(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a model's state stands in its vector.

    Trainable parameters come first: rules act on ``vector[:parameters]``. Float buffers (a BatchNorm's running
    statistics) and frozen parameters follow: they take the plain weighted mean. Integer buffers (a count of batches)
    are a vector of their own, of which the largest of the clients' values counts. Tied weights stand once. Buffers that
    the module does not save are no state.

    Args:
        parameters: P, the number of trainable parameters.
        size: V = P + B, the length of the vector.
        dtype: the vector's type: the widest of all floating types of the state.
        trained: the trainable parameters' places.
        averaged: the places of all other floating-point state.
        integers: the places of integer and boolean buffers, in an int64 vector of their own.

    Example:
        >>> layout = Layout.of(nn.BatchNorm1d(3))
        >>> layout.parameters, layout.size, [part.name for part in layout.averaged]
        (6, 12, ['running_mean', 'running_var'])
    """

    parameters: int
    size: int
    dtype: torch.dtype
    trained: tuple[Part, ...]
    averaged: tuple[Part, ...]
    integers: tuple[Part, ...]

    @property
    def integer_count(self) -> int:
        """I, how many integers there are."""
        return sum(part.size for part in self.integers)

    @classmethod
    def of(cls, module: nn.Module) -> "Layout":
        """The layout of a module.

        Raises:
            InvalidModel: if it has no trainable parameters, they are of several types, or the state is complex.
        """
        saved = set(module.state_dict().keys())
        buffers = {name: tensor for name, tensor in module.named_buffers() if name in saved}
        trained = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
        frozen = {name: tensor for name, tensor in module.named_parameters() if not tensor.requires_grad}
        dtypes = {tensor.dtype for tensor in trained.values()}
        if len(dtypes) != 1:
            raise InvalidModel(
                f"a model must have trainable parameters of one type, got {sorted(map(str, dtypes)) or 'none'}: "
                "convert it, for instance with model.float()"
            )
        state = {**trained, **frozen, **buffers}
        if any(tensor.is_complex() for tensor in state.values()):
            raise InvalidModel("a model's state must be real, got complex numbers: keep real and imaginary parts apart")
        trained_parts, parameters = _places(trained.items(), 0)
        others = {name: tensor for name, tensor in {**frozen, **buffers}.items() if tensor.is_floating_point()}
        averaged_parts, size = _places(others.items(), parameters)
        whole = {name: tensor for name, tensor in {**frozen, **buffers}.items() if not tensor.is_floating_point()}
        floating = [*dtypes, *(tensor.dtype for tensor in others.values())]
        return cls(
            parameters,
            size,
            reduce(torch.promote_types, floating),
            trained_parts,
            averaged_parts,
            _places(whole.items(), 0)[0],
        )

    def pack(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """A module's state as (vector [V], integers [I]), on the device of its parameters."""
        state = _state(module)
        device = state[self.trained[0].name].device
        vector_V = torch.empty(self.size, dtype=self.dtype, device=device)
        for part in (*self.trained, *self.averaged):
            part.view(vector_V).copy_(state[part.name])
        integers_I = torch.empty(self.integer_count, dtype=torch.int64, device=device)
        for part in self.integers:
            part.view(integers_I).copy_(state[part.name])
        return vector_V, integers_I

    def unpack(self, vector_V: Tensor, integers_I: Tensor, module: nn.Module) -> None:
        """Write a state into a module, in place."""
        state = _state(module)
        for part in (*self.trained, *self.averaged):
            state[part.name].copy_(part.view(vector_V))
        for part in self.integers:
            state[part.name].copy_(part.view(integers_I))

    @property
    def parts(self) -> tuple[Part, ...]:
        """All tensors: those to be trained, those to be averaged, integers."""
        return (*self.trained, *self.averaged, *self.integers)

    def tensors(self, vectors_KV: Tensor, integers_KI: Tensor) -> list[Tensor]:
        """The tensors of some states, each stacked over them, in the order of ``parts`` and in the model's types."""
        floats = [(part, vectors_KV) for part in (*self.trained, *self.averaged)]
        return [
            rows[:, part.offset : part.offset + part.size].reshape(len(rows), *part.shape).to(part.dtype)
            for part, rows in (*floats, *((part, integers_KI) for part in self.integers))
        ]

    def size_bytes(self) -> int:
        """Bytes of one state as it travels, uncompressed."""
        return self.size * self.dtype.itemsize + self.integer_count * torch.int64.itemsize


def _places(tensors: Iterable[tuple[str, Tensor]], offset: int) -> tuple[tuple[Part, ...], int]:
    parts = []
    for name, tensor in tensors:
        parts.append(Part(name, tensor.shape, offset, tensor.dtype))
        offset += math.prod(tensor.shape)
    return tuple(parts), offset


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
