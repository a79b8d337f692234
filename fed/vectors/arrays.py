"""Tensors as bytes of NumPy, which libraries pass between processes and machines without a copy."""

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fed.vectors.shared_memory import packed
from fed.vectors.tensors import Tensor, torch

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ArrayTensor", "Bytes", "bytes_of", "tensor_of"]

_SMALL_BYTES = 1 << 20


class Bytes(NamedTuple):
    """A tensor's numbers as bytes, whatever its type, with what is needed to read them.

    Attributes:
        array: the bytes, of type uint8.
        dtype: type of the tensor.
        shape: shape of the tensor.
    """

    array: "np.ndarray[Any, np.dtype[np.uint8]]"
    dtype: "torch.dtype"
    shape: tuple[int, ...]


def bytes_of(tensor: Tensor) -> Bytes:
    """The bytes of a tensor, which share its memory where they lie in one row.

    Raises:
        InvalidInput: if it is not an array of numbers in rows and columns.

    Example:
        >>> bytes_of(torch.ones(2, dtype=torch.bfloat16)).array.tolist()
        [128, 63, 128, 63]
    """
    packed([tensor])  # refuses what has no bytes in a row
    in_a_row = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return Bytes(in_a_row.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))


def tensor_of(part: Bytes) -> Tensor:
    """The tensor of such bytes. A large one shares their memory and must not be written to; a small one is a copy."""
    if not math.prod(part.shape):
        return torch.empty(part.shape, dtype=part.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writ")  # nobody writes to it
        flat = torch.from_numpy(part.array)
    # Copies begin where PyTorch lets tensors begin.
    aligned = flat.clone() if flat.nbytes < _SMALL_BYTES else flat
    return aligned.view(part.dtype).view(part.shape)


class ArrayTensor:
    """Copy of tensors, joined along the first dimension, which a library may carry as one array of NumPy.

    Args:
        tensors: tensors to copy, of one type, alike in all dimensions but the first; at least one.

    Attributes:
        tensor: copy of the joined tensors, not to be written to.

    Example:
        >>> ArrayTensor(torch.arange(3), torch.ones(1, dtype=torch.int64)).tensor
        tensor([0, 1, 2, 1])
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.__setstate__(bytes_of(torch.cat([tensor.detach() for tensor in tensors])))

    def __getstate__(self) -> Bytes:
        return self._bytes

    def __setstate__(self, state: Sequence[Any]) -> None:
        self._bytes = Bytes(*state)
        self.tensor = tensor_of(self._bytes)
