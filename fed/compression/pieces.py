"""Work on long rows in pieces that stay in a core's cache, and memory that is cheap to touch.

The system clears each page of fresh memory when it is touched first: a copy of 40 MB into memory of PyTorch's takes six
times as long as one into memory that is kept. Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fed.compression.bits import pack_into, packed_bytes, unpack
from fed.compression.codec import Encoded, Rows, Values
from fed.vectors.tensors import Tensor, torch

__all__ = ["empty", "packed", "pieces", "stacked", "unpacked"]

_NUMBERS = 1 << 16  # of a piece: in float32 a few of them fit in a core's second cache


def pieces(shape: Sequence[int], multiple: int = 1) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of pieces, in order: short rows by the dozen, long rows one after the other in parts.

    The parts of a row do not depend on how many rows there are, so that neither does the order of a sum.

    Args:
        shape: number K of rows, and M of numbers in each.
        multiple: divisor of the number of columns in each part of a row but the last; 8 is another.

    Example:
        >>> [(rows.stop, columns.stop) for rows, columns in pieces((3, 30_000))]
        [(2, 30000), (3, 30000)]
        >>> [columns.stop for _, columns in pieces((1, 150_000), 1000)]
        [65000, 130000, 150000]
    """
    rows, numbers = shape
    # Planes of bits are written by the byte: a piece of 8 numbers ends at one in every plane.
    unit = math.lcm(8, multiple)
    group = max(1, _NUMBERS // max(numbers, 1))
    step = max(1, _NUMBERS // unit) * unit
    for row in range(0, rows, group):
        for begin in range(0, numbers, step):
            yield slice(row, min(row + group, rows)), slice(begin, min(begin + step, numbers))


def empty(shape: Sequence[int], dtype: "torch.dtype") -> Tensor:
    """Memory for numbers that are to be written."""
    # NumPy asks Linux for pages of 2 MB where PyTorch takes what comes, pages of 4 KB.
    memory = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(*shape)


def stacked(rows: Rows) -> Tensor:
    """Rows of one length as one tensor, [K, ·]; a single one is not copied."""
    if isinstance(rows, Tensor):
        return rows
    return rows[0][None] if len(rows) == 1 else torch.stack([*rows])


def packed(
    head_KO: Tensor, rows_KM: Tensor, bits: int, code: Callable[[slice, slice], NDArray[np.generic]], multiple: int = 1
) -> Encoded:
    """Bytes, and a few bits for each value, made piece by piece.

    Args:
        head_KO: bytes that come first, [K, ·].
        rows_KM: values, [K, M].
        bits: bits of a value.
        code: function that returns numbers below 2^bits for the values at such rows and columns.
        multiple: divisor of the number of columns of a piece, as for :func:`pieces`.
    """
    count, numbers = rows_KM.shape
    taken = head_KO.shape[1]
    content_KO = empty((count, taken + packed_bytes(numbers, bits)), torch.uint8)
    content_KO[:, :taken] = head_KO
    packed_KO = content_KO.numpy()[:, taken:]
    for rows, columns in pieces(rows_KM.shape, multiple):
        pack_into(packed_KO[rows], code(rows, columns), bits=bits, begin=columns.start)
    return Encoded(content_KO)


def unpacked(
    content_KO: Tensor,
    bits: int,
    values: Values,
    number: Callable[[NDArray[np.unsignedinteger], slice, slice, Tensor], object],
    multiple: int = 1,
) -> Tensor:
    """Values that :func:`packed` wrote, [K, M].

    Args:
        content_KO: bytes that follow the first ones.
        bits: bits of a value.
        values: description of the vectors.
        number: function that writes the values of such codes, at such rows and columns, to a tensor.
        multiple: divisor of the number of columns of a piece, as for :func:`pieces`.
    """
    rows_KM = empty((len(content_KO), values.numbers), values.dtype)
    packed_KO = content_KO.numpy()
    for rows, columns in pieces(rows_KM.shape, multiple):
        codes = unpack(packed_KO[rows], bits, numbers=columns.stop - columns.start, begin=columns.start)
        number(codes, rows, columns, rows_KM[rows, columns])
    return rows_KM
