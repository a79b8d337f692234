"""EDEN: a random rotation, and a few bits for each coordinate of what looks Gaussian after it.

Vargaftik et al., "EDEN: communication-efficient and robust distributed mean estimation for federated learning", ICML
2022, 2108.08842. Shapes: see :mod:`fed.layout`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fed.compression.bits import packed_bytes, unpack
from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values
from fed.compression.pieces import empty, packed, pieces, stacked
from fed.compression.quantisers import as_bytes, from_bytes, nearest

__all__ = ["Eden", "rotate"]

_LARGEST = 1 << 16  # numbers of a block; larger ones are no more Gaussian, and leave a core's cache
_MOST_PADDING = 128  # a block is padded where fewer than a part in so many of all numbers are left

_LEVELS = {  # positive centroids of the best quantiser of a standard Gaussian (Lloyd 1982; Max 1960, table I)
    1: (0.79788456,),
    2: (0.45278003, 1.51041761),
    3: (0.24509418, 0.75600528, 1.34390928, 2.15194570),
    4: (0.12839503, 0.38804830, 0.65675912, 0.94234046, 1.25623120, 1.61804639, 2.06901723, 2.73258957),
}


@dataclass(frozen=True, kw_only=True)
class Eden(Codec):
    r"""A random rotation, and the nearest of 2^b levels for each coordinate (Vargaftik et al. 2022, 2108.08842).

    .. math:: z = \frac{\sqrt d}{‖x‖} R x, \qquad C(x) = S R^⊤ q(z), \qquad S = \frac{‖x‖²}{⟨R x, q(z)⟩}

    in blocks of a power of two, at most 65,536, with R a Hadamard transform of random signs. Unbiased if R were
    uniformly random. Coordinates of large blocks are nearly Gaussian; the squared error is then D/(1 − D) ‖x‖², with
    the distortion D of the quantiser: 1 − 2/π at one bit, 0.1175, 0.0345 and 0.0095 at two, three and four; D ‖x‖² at
    the scale that makes it smallest, which error feedback finds.

    Args:
        bits: b, of a coordinate, 1 to 4.
    """

    is_unbiased: ClassVar[bool] = True
    bound: ClassVar[str] = "ω → π/2 − 1 at 1 bit; 0.133, 0.0358, 0.00959 at 2, 3, 4"

    bits: Annotated[int, Field(ge=1, le=4)] = 1

    def size_bytes(self, values: Values) -> int:
        """A scale a block, and so many bits a coordinate."""
        sizes = _sizes(values.numbers)
        return len(sizes) * values.dtype.itemsize + packed_bytes(sum(sizes), self.bits)

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Rotate and round."""
        total, sizes = sum(_sizes(values.numbers)), _sizes(values.numbers)
        levels = torch.tensor(_LEVELS[self.bits]).to(rows_KM.dtype)
        middles, signs = [float(low + high) / 2 for low, high in pairwise(levels)], _signs(len(rows_KM), total, draw)
        codes_KM = np.empty((len(rows_KM), total), np.uint8)
        scales_KB = torch.empty(len(rows_KM), len(sizes), dtype=rows_KM.dtype)
        for rows, columns, blocks in _pieces(len(rows_KM), sizes):
            flat = _padded(rows_KM[rows, columns], columns)
            flat *= _flips(signs, rows, columns)
            block = flat.view(len(flat), blocks.stop - blocks.start, -1)
            norms = torch.linalg.vector_norm(block, dim=2, keepdim=True, dtype=torch.float64)
            block /= norms.clamp_min(torch.finfo(block.dtype).tiny).to(block.dtype)
            unit = _hadamard(block)  # of norm √d
            magnitudes, root = unit.abs(), block.shape[2] ** 0.5
            code = nearest(magnitudes.numpy(), middles)
            product = magnitudes.mul_(torch.from_numpy(levels.numpy().take(code))).double().sum(2)
            scales_KB[rows, blocks] = (norms[:, :, 0] * root / product.where(product > 0, 1)).to(rows_KM.dtype)
            code += np.signbit(unit.numpy()) * np.uint8(1 << (self.bits - 1))
            codes_KM[rows, columns] = code.reshape(len(flat), -1)
        return packed(as_bytes(scales_KB), torch.from_numpy(codes_KM), self.bits, lambda *place: codes_KM[place])

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Rotate back."""
        content_KO, sizes = stacked(content), _sizes(values.numbers)
        total, levels = sum(sizes), torch.tensor(_LEVELS[self.bits], dtype=values.dtype)
        signs, numbers = _signs(len(content_KO), total, draw), torch.cat([levels, -levels]).numpy()
        packed_KO = content_KO[:, -packed_bytes(total, self.bits) :].numpy()
        scales_KB = from_bytes(content_KO[:, : -packed_KO.shape[1]], values.dtype)
        rows_KM = empty((len(content_KO), values.numbers), values.dtype)
        for rows, columns, blocks in _pieces(len(content_KO), sizes):
            first = columns.start // 8 * 8
            codes = unpack(packed_KO[rows], self.bits, columns.stop - first, first)[:, columns.start - first :]
            flat = torch.from_numpy(numbers.take(codes))
            block = flat.view(len(flat), blocks.stop - blocks.start, -1)
            block *= scales_KB[rows, blocks, None] * block.shape[2] ** -0.5
            found = _hadamard(block).view(len(flat), -1).mul_(_flips(signs, rows, columns))
            rows_KM[rows, columns] = found[:, : values.numbers - columns.start]
        return rows_KM


def rotate(block: Tensor) -> Tensor:
    """Orthonormal Hadamard transform of the last dimension, a power of two: its own inverse."""
    return _hadamard(block).mul_(block.shape[-1] ** -0.5)


def _hadamard(block: Tensor) -> Tensor:
    """Transform by a matrix of ones and minus ones, of the last dimension.

    Additions alone, which give the same bits for one block and for many, where matrix products need not.
    """
    size = block.shape[-1]
    columns = 1 << (size.bit_length() - 1) // 2
    # neighbours are added as columns are, where runs of numbers are long
    by_column = _sums_and_differences(block.reshape(-1, size // columns, columns).transpose(1, 2).contiguous())
    return _sums_and_differences(by_column.transpose(1, 2).contiguous()).view(block.shape)


def _sums_and_differences(block: Tensor) -> Tensor:
    """The same of the second of three dimensions; the block is overwritten."""
    size, half, other = block.shape[1], 1, torch.empty_like(block)
    while half < size:
        (first, second), (total, difference) = (
            of.view(len(of), size // (2 * half), 2, -1).unbind(2) for of in (block, other)
        )
        torch.add(first, second, out=total)
        torch.sub(first, second, out=difference)
        block, other, half = other, block, 2 * half
    return block


def _sizes(numbers: int) -> list[int]:
    """Sizes of the blocks, each a power of two; all together less than a hundredth larger than what they hold."""
    sizes, left = [], numbers
    while left:
        down = min(_LARGEST, 1 << (left.bit_length() - 1))
        size = down if left * _MOST_PADDING > numbers or down == left else 2 * down
        sizes.append(size)
        left -= min(size, left)
    return sizes


def _pieces(rows: int, sizes: list[int]) -> Iterator[tuple[slice, slice, slice]]:
    """Rows, columns and blocks of pieces, those of one size together."""
    begin, block = 0, 0
    for size in dict.fromkeys(sizes):
        count = sizes.count(size)
        for of, columns in pieces((rows, size * count), size):
            blocks = slice(block + columns.start // size, block + columns.stop // size)
            yield of, slice(begin + columns.start, begin + columns.stop), blocks
        begin, block = begin + size * count, block + count


def _padded(piece_KM: Tensor, columns: slice) -> Tensor:
    """Copy of the values at these columns, and zeros where there are none."""
    padded = piece_KM.new_zeros(len(piece_KM), columns.stop - columns.start)
    padded[:, : piece_KM.shape[1]] = piece_KM
    return padded


def _signs(rows: int, numbers: int, draw: Draw) -> NDArray[np.uint8]:
    """Each client's random bits, [K, ·]."""
    drawn = [draw.own(row).bytes(-(-numbers // 8)) for row in range(rows)]
    return np.frombuffer(b"".join(drawn), np.uint8).reshape(rows, -1)


def _flips(signs: NDArray[np.uint8], rows: slice, columns: slice) -> Tensor:
    """Ones and minus ones for these columns."""
    first = columns.start // 8
    bits = np.unpackbits(signs[rows, first : -(-columns.stop // 8)], axis=1, count=columns.stop - 8 * first)
    bits += bits
    bits -= 1
    return torch.from_numpy(bits.view(np.int8)[:, columns.start - 8 * first :])
