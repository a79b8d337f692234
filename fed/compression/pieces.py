"""Work on long rows in pieces that stay in a core's cache, and memory that is cheap to touch.

The system clears each page of fresh memory when it is touched first: a copy of 40 MB into memory of PyTorch's takes six
times as long as one into memory that is kept. Shapes: see :mod:`fed.layout`.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fed.compression.codec import Rows

__all__ = ["empty", "pieces", "stacked"]

_NUMBERS = 1 << 16  # of a piece: in float32 a few of them fit in a core's second cache


def pieces(shape: Sequence[int], multiple: int = 1) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of pieces, in order: short rows by the dozen, long rows one after the other in parts.

    The parts of a row do not depend on how many rows there are, so that neither does the order of a sum.

    Args:
        shape: K rows of M numbers.
        multiple: of columns in each part of a row but the last; they are a multiple of 8 as well.

    Example:
        >>> [(rows.stop, columns.stop) for rows, columns in pieces((3, 30_000))]
        [(2, 30000), (3, 30000)]
        >>> [columns.stop for _, columns in pieces((1, 150_000), 1000)]
        [65000, 130000, 150000]
    """
    (rows, numbers), unit = shape, math.lcm(8, multiple)
    group, step = max(1, _NUMBERS // max(numbers, 1)), max(1, _NUMBERS // unit) * unit
    for row in range(0, rows, group):
        for begin in range(0, numbers, step):
            yield slice(row, min(row + group, rows)), slice(begin, min(begin + step, numbers))


def empty(rows: int, numbers: int, dtype: torch.dtype) -> Tensor:
    """Memory for rows, [K, M], that is to be written.

    Args:
        rows: K.
        numbers: M.
        dtype: of a number.
    """
    # NumPy asks Linux for pages of 2 MB where PyTorch takes what comes, pages of 4 KB
    memory = np.empty(rows * numbers * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(rows, numbers)


def stacked(rows: Rows) -> Tensor:
    """Rows of one length as one tensor, [K, ·]; a single one is not copied."""
    if isinstance(rows, Tensor):
        return rows
    return rows[0][None] if len(rows) == 1 else torch.stack([*rows])
