"""Random rotation: a Hadamard transform of random signs, in blocks of a power of two.

Ailon & Chazelle, "The fast Johnson–Lindenstrauss transform", 2009; for federated learning Suresh et al., "Distributed
mean estimation with limited communication", ICML 2017, 1611.00429. Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values
from fed.compression.pieces import empty, pieces, stacked
from fed.vectors.tensors import Tensor, torch

__all__ = ["Rotation", "block_pieces", "block_sizes", "flips", "hadamard", "padded", "rotate"]

_LARGEST = 1 << 16  # numbers of a block; larger ones are no more Gaussian, and leave a core's cache
_MOST_PADDING = 128  # a block is padded where fewer than a part in so many of all numbers are left


@dataclass(frozen=True, kw_only=True)
class Rotation(Codec):
    r"""A random rotation, common to a round: fewer bits or a lower clip suffice (Suresh et al. 2017, 1611.00429).

    .. math:: C(x) = \frac{1}{\sqrt d} H D x

    in blocks of a power of two, with Hadamard's matrix H and random signs D. Linear and of the same norm. The chance
    of a value beyond c ‖x‖/√d is 2 exp(−c²/2) at most.
    """

    gives: ClassVar = "values"
    is_linear: ClassVar[bool] = True
    is_common: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = True
    keeps_contractions: ClassVar[bool] = True
    bound: ClassVar[str] = "δ = 1, but for rounding"

    def size_bytes(self, values: Values) -> int:
        """Zero: the signs follow from the round."""
        return 0

    def inner(self, values: Values, content: Tensor | None = None) -> Values:
        """The rotated values, a few more than before."""
        return values._replace(numbers=sum(block_sizes(values.numbers)), layers=())

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Rotate."""
        sizes = block_sizes(values.numbers)
        total = sum(sizes)
        signs = self._signs(len(rows_KM), total, draw)
        rotated = empty((len(rows_KM), total), rows_KM.dtype)
        for rows, columns, blocks in block_pieces(len(rows_KM), sizes):
            flat = padded(rows_KM[rows, columns], columns).mul_(flips(signs, rows, columns))
            rotated[rows, columns] = rotate(flat.view(len(flat), blocks.stop - blocks.start, -1)).view(len(flat), -1)
        return Encoded(torch.empty(len(rows_KM), 0, dtype=torch.uint8), rotated)

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Rotate back."""
        inner_KJ = stacked(inner)
        sizes = block_sizes(values.numbers)
        signs = self._signs(len(inner_KJ), sum(sizes), draw)
        rows_KM = empty((len(inner_KJ), values.numbers), inner_KJ.dtype)
        for rows, columns, blocks in block_pieces(len(inner_KJ), sizes):
            flat = inner_KJ[rows, columns]
            found = rotate(flat.view(len(flat), blocks.stop - blocks.start, -1)).view(len(flat), -1)
            found.mul_(flips(signs, rows, columns))
            rows_KM[rows, columns] = found[:, : values.numbers - columns.start]
        return rows_KM

    def _signs(self, rows: int, numbers: int, draw: Draw) -> NDArray[np.uint8]:
        # Each round's signs are drawn once, however many clients' rows there are.
        by_round = {
            number: np.frombuffer(draw.common(row).bytes(-(-numbers // 8)), np.uint8)
            for row, number in enumerate(draw.rounds[:rows])
        }
        return np.stack([by_round[number] for number in draw.rounds[:rows]])


def rotate(block: Tensor) -> Tensor:
    """Orthonormal Hadamard transform of the last dimension, a power of two: its own inverse."""
    return hadamard(block).mul_(block.shape[-1] ** -0.5)


def hadamard(block: Tensor) -> Tensor:
    """Transform by a matrix of ones and minus ones, of the last dimension, a power of two.

    Additions alone, which give the same bits for one block and for many, where matrix products need not.
    """
    size = block.shape[-1]
    columns = 1 << (size.bit_length() - 1) // 2
    # Neighbours are added as columns are, where runs of numbers are long.
    by_column = _sums_and_differences(block.reshape(-1, size // columns, columns).transpose(1, 2).contiguous())
    return _sums_and_differences(by_column.transpose(1, 2).contiguous()).view(block.shape)


def _sums_and_differences(block: Tensor) -> Tensor:
    """The same transform of the second of three dimensions; the block is overwritten."""
    size = block.shape[1]
    half = 1
    other = torch.empty_like(block)
    while half < size:
        (first, second), (total, difference) = (
            of.view(len(of), size // (2 * half), 2, -1).unbind(2) for of in (block, other)
        )
        torch.add(first, second, out=total)
        torch.sub(first, second, out=difference)
        # Between two buffers: in place, a difference would need the sum's first operand again.
        block, other = other, block
        half *= 2
    return block


def block_sizes(numbers: int) -> list[int]:
    """Sizes of the blocks, each a power of two; together they hold the numbers with less than a hundredth to spare."""
    sizes = []
    left = numbers
    while left:
        down = min(_LARGEST, 1 << (left.bit_length() - 1))
        # Parts of the rest become blocks of their own, unless so few numbers are left that zeros cost less.
        size = down if left * _MOST_PADDING > numbers or down == left else 2 * down
        sizes.append(size)
        left -= min(size, left)
    return sizes


def block_pieces(rows: int, sizes: list[int]) -> Iterator[tuple[slice, slice, slice]]:
    """Rows, columns and blocks of pieces, those of one size together."""
    begin = 0
    block = 0
    for size in dict.fromkeys(sizes):
        count = sizes.count(size)
        for of, columns in pieces((rows, size * count), size):
            blocks = slice(block + columns.start // size, block + columns.stop // size)
            yield of, slice(begin + columns.start, begin + columns.stop), blocks
        begin += size * count
        block += count


def padded(piece_KM: Tensor, columns: slice) -> Tensor:
    """Copy of the values at these columns, and zeros where there are none."""
    padded = piece_KM.new_zeros(len(piece_KM), columns.stop - columns.start)
    padded[:, : piece_KM.shape[1]] = piece_KM
    return padded


def flips(signs: NDArray[np.uint8], rows: slice, columns: slice) -> Tensor:
    """Ones and minus ones for these columns.

    Args:
        signs: random bits, [K, ·].
        rows: rows of the piece.
        columns: columns of the piece.
    """
    first = columns.start // 8
    bits = np.unpackbits(signs[rows, first : -(-columns.stop // 8)], axis=1, count=columns.stop - 8 * first)
    bits += bits
    bits -= 1
    return torch.from_numpy(bits.view(np.int8)[:, columns.start - 8 * first :])
