"""Quantisers: codecs that write every value with a few bits.

Those here round to the nearest; :mod:`fed.compression.random_quantisers` has those that round at random.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fed.compression.bits import packed_bytes
from fed.compression.blocks import as_bytes, blocks_of, by_block, from_bytes, peak, reduced_by_block
from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values
from fed.compression.pieces import empty, packed, pieces, stacked, unpacked
from fed.compression.random_quantisers import QSGD, Natural, TernGrad
from fed.vectors.tensors import Tensor, torch

__all__ = ["FP4", "QSGD", "BFloat16", "Float16", "Int8", "Natural", "Sign", "TernGrad", "TwoLevel", "nearest"]


def nearest(magnitudes: NDArray[np.floating], middles: list[float]) -> NDArray[np.uint8]:
    """Place of the interval between ascending middles that holds each magnitude, the lower one at a middle."""
    codes = np.zeros(magnitudes.shape, np.uint8)
    for middle in middles:
        # A pass for each middle beats np.searchsorted: there are at most seven, and each pass is vectorised.
        codes += magnitudes > middle
    return codes


@dataclass(frozen=True, kw_only=True)
class _Cast(Codec):
    """Values in a shorter type of floating-point numbers; larger ones become its largest."""

    is_contraction: ClassVar[bool] = True
    dtype_name: ClassVar[str]

    @property
    def dtype(self) -> "torch.dtype":
        """Type of a value on its way."""
        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype

    def size_bytes(self, values: Values) -> int:
        """Two bytes a value."""
        return values.numbers * self.dtype.itemsize

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Round to the nearest."""
        largest = torch.finfo(self.dtype).max
        # A clamp copies all numbers, and hardly any update needs one.
        if rows_KM.numel() and max(map(abs, map(float, torch.aminmax(rows_KM)))) > largest:
            rows_KM = rows_KM.clamp(-largest, largest)
        return Encoded(as_bytes(rows_KM.to(self.dtype)))

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Convert back."""
        content_KO = stacked(content)
        size = self.dtype.itemsize
        rows_KM = empty((len(content_KO), values.numbers), values.dtype)
        for rows, columns in pieces(rows_KM.shape):
            part_KO = content_KO[rows, columns.start * size : columns.stop * size]
            rows_KM[rows, columns] = from_bytes(part_KO, self.dtype)
        return rows_KM


@dataclass(frozen=True, kw_only=True)
class Float16(_Cast):
    """Half precision: 16 bits a value, 11 of them significant, up to 65,504 (IEEE 754-2008).

    The error of a value is at most 2⁻¹¹ of it, below 2⁻¹⁴ at most 2⁻²⁵.
    """

    bound: ClassVar[str] = "δ ≥ 1 − 2⁻²² from 2⁻¹⁴ to 65,504"
    dtype_name: ClassVar[str] = "float16"


@dataclass(frozen=True, kw_only=True)
class BFloat16(_Cast):
    """The upper half of float32: 16 bits a value, 8 of them significant (Kalamkar et al. 2019, 1905.12322).

    The error of a value is at most 2⁻⁸ of it.
    """

    bound: ClassVar[str] = "δ ≥ 1 − 2⁻¹⁶"
    dtype_name: ClassVar[str] = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    r"""Eight bits a value, scaled by the largest magnitude of its block (Dettmers et al. 2022, 2110.02861).

    .. math:: C(x)_i = \frac{m}{127} \operatorname{round}(127 x_i / m), \qquad m = \max_{j ∈ block} |x_j|

    The error of a value is at most m/254, that of the largest is 0, so that 1 − δ = (B − 1)/254² in blocks of B values:
    0.063 of 4096. Rounding is to the nearest; the paper's values are not spaced evenly.

    Args:
        block: number of values that share a scale, ≥ 1. 4096 make 8.008 bits a parameter in float32.
    """

    is_contraction: ClassVar[bool] = True
    bound: ClassVar[str] = "δ ≥ 1 − (B − 1)/254² in blocks of B"

    block: Annotated[int, Field(ge=1, le=1 << 15)] = 4096

    def size_bytes(self, values: Values) -> int:
        """A byte a value, and a scale a block."""
        return -(-values.numbers // self.block) * values.dtype.itemsize + values.numbers

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Round to the nearest of 255 values."""
        smallest = torch.finfo(rows_KM.dtype).tiny  # below it a quotient is not exact to half a step
        scales_KB = (reduced_by_block(rows_KM, self.block, peak) / 127).clamp_min_(smallest)
        head_KO = as_bytes(scales_KB)
        content_KO = empty((len(rows_KM), head_KO.shape[1] + values.numbers), torch.uint8)
        content_KO[:, : head_KO.shape[1]] = head_KO
        codes_KM = content_KO[:, head_KO.shape[1] :].view(torch.int8)
        for rows, columns in pieces(rows_KM.shape, self.block):
            scaled = by_block(rows_KM[rows, columns], scales_KB[rows], self.block, columns)
            for (block, scale), codes in zip(scaled, blocks_of(codes_KM[rows, columns], self.block), strict=True):
                codes.copy_((block / scale).round_())
        return Encoded(content_KO)

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Multiply by the scales."""
        content_KO = stacked(content)
        codes_KM = content_KO[:, -values.numbers :].view(torch.int8)
        scales_KB = from_bytes(content_KO[:, : -values.numbers], values.dtype)
        rows_KM = empty((len(content_KO), values.numbers), values.dtype)
        for rows, columns in pieces(rows_KM.shape, self.block):
            scaled = by_block(codes_KM[rows, columns], scales_KB[rows], self.block, columns)
            for (codes, scale), block in zip(scaled, blocks_of(rows_KM[rows, columns], self.block), strict=True):
                torch.mul(codes, scale, out=block)
        return rows_KM


@dataclass(frozen=True, kw_only=True)
class FP4(Codec):
    r"""Four-bit floating-point values, times a power of two for each 32 of them (Rouhani et al. 2023, 2310.10537).

    A value is a sign and one of 0, ½, 1, 1½, 2, 3, 4, 6, as in MXFP4: 4.25 bits a parameter. The
    power is the smallest with which no value exceeds 6, where the standard's lets the largest of some blocks saturate.
    The squared error of a block is at most 31/175 of its squared norm: its largest value is above 3 times the power,
    and 31 others may be a quarter of the power, which becomes 0.
    """

    is_contraction: ClassVar[bool] = True
    bound: ClassVar[str] = "δ ≥ 1 − 31/175"

    _BLOCK: ClassVar[int] = 32
    _MAGNITUDES: ClassVar[tuple[float, ...]] = (0, 0.5, 1, 1.5, 2, 3, 4, 6)

    def size_bytes(self, values: Values) -> int:
        """A byte and 16 for each 32 values in float32."""
        return -(-values.numbers // self._BLOCK) * _exponents(values.dtype).itemsize + packed_bytes(values.numbers, 4)

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Round to the nearest."""
        peaks_KB = reduced_by_block(rows_KM, self._BLOCK, peak)
        fractions_KB, exponents_KB = torch.frexp(peaks_KB / 6)
        exponents_KB -= (fractions_KB == 0.5).to(torch.int32)  # such a power is enough
        # The reciprocal of a smaller power would be infinite.
        exponents_KB.clamp_min_(math.frexp(torch.finfo(rows_KM.dtype).tiny)[1])
        scales_KB = torch.ldexp(torch.ones_like(peaks_KB), -exponents_KB)  # exact, and so are products with it
        middles = [(low + high) / 2 for low, high in pairwise(self._MAGNITUDES)]

        def code(rows: slice, columns: slice) -> NDArray[np.uint8]:
            piece = rows_KM[rows, columns]
            scaled = by_block(piece, scales_KB[rows], self._BLOCK, columns)
            multiples = torch.cat([(block * scale).flatten(1) for block, scale in scaled], 1)
            codes = nearest(multiples.abs_().numpy(), middles)
            # By the sign's bit, not by a comparison: −0 keeps its sign.
            codes += np.signbit(piece.numpy()) * np.uint8(8)
            return codes

        head_KO = as_bytes(exponents_KB.to(_exponents(rows_KM.dtype)))
        return packed(head_KO, rows_KM, bits=4, code=code, multiple=self._BLOCK)

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Look up the magnitude of each code."""
        content_KO = stacked(content)
        taken = packed_bytes(values.numbers, 4)
        magnitudes = torch.tensor(self._MAGNITUDES, dtype=values.dtype)
        numbers = torch.cat([magnitudes, -magnitudes]).numpy()
        limit = torch.finfo(values.dtype).max  # a number times a power may be beyond it
        exponents_KB = from_bytes(content_KO[:, :-taken], _exponents(values.dtype)).int()
        # Bytes may come from anyone: a larger power is infinite, and infinite times 0 is NaN.
        exponents_KB.clamp_max_(math.frexp(limit)[1] - 1)
        scales_KB = torch.ldexp(torch.ones(exponents_KB.shape, dtype=values.dtype), exponents_KB)

        def number(codes: NDArray[np.unsignedinteger], rows: slice, columns: slice, found: Tensor) -> None:
            np.take(numbers, codes, out=found.numpy(), mode="clip")
            for block, scale in by_block(found, scales_KB[rows], self._BLOCK, columns):
                block *= scale
            found.clamp_(-limit, limit)

        return unpacked(content_KO[:, -taken:], bits=4, values=values, number=number, multiple=self._BLOCK)


def _exponents(dtype: "torch.dtype") -> "torch.dtype":
    """The type that holds the exponents of numbers of this type."""
    return torch.int8 if dtype.itemsize <= 4 else torch.int16


@dataclass(frozen=True, kw_only=True)
class Sign(Codec):
    r"""One bit a value, and the mean magnitude (Karimireddy et al. 2019, 1901.09847).

    .. math:: C(x) = \frac{‖x‖_1}{d} \operatorname{sign}(x), \qquad ‖C(x) - x‖² = (1 - \frac{‖x‖_1²}{d ‖x‖²}) ‖x‖²

    Zeros count as positive.
    """

    is_contraction: ClassVar[bool] = True
    bound: ClassVar[str] = "δ = ‖x‖₁²/(d‖x‖²) ≥ 1/d"

    def size_bytes(self, values: Values) -> int:
        """A bit a value, and the magnitude."""
        return values.dtype.itemsize + packed_bytes(values.numbers, 1)

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Keep the signs."""
        # A sum of large numbers leaves float32's range.
        sums_K1 = torch.zeros(len(rows_KM), 1, dtype=torch.float64)
        for rows, columns in pieces(rows_KM.shape):
            # Blocks as long as these are summed in one order, whether there is one row or more.
            for block in blocks_of(rows_KM[rows, columns], 4096):
                sums_K1[rows] += block.double().abs().sum(2).sum(1, keepdim=True)
        means_K1 = (sums_K1 / values.numbers).to(rows_KM.dtype)
        return packed(
            as_bytes(means_K1),
            rows_KM,
            bits=1,
            code=lambda rows, columns: rows_KM[rows, columns].numpy() >= 0,
        )

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Multiply the signs by the magnitude."""
        content_KO = stacked(content)
        taken = values.dtype.itemsize
        means_K1 = from_bytes(content_KO[:, :taken], values.dtype)

        def number(codes: NDArray[np.unsignedinteger], rows: slice, columns: slice, found: Tensor) -> None:
            found.copy_(torch.from_numpy(codes)).mul_(2).sub_(1).mul_(means_K1[rows])

        return unpacked(content_KO[:, taken:], bits=1, values=values, number=number)


@dataclass(frozen=True, kw_only=True)
class TwoLevel(Codec):
    r"""Two bits a value: its sign, and the nearer of two magnitudes (after SparseLoCo, 2508.15706).

    The magnitudes are the means of the smaller and of the larger half of all magnitudes.

    .. math:: ‖C(x) - x‖² ≤ ‖x‖² - \sum_h n_h m_h² ≤ (1 - 1/⌈d/2⌉) ‖x‖²

    with the mean m_h of the n_h values of each half.
    """

    is_contraction: ClassVar[bool] = True
    bound: ClassVar[str] = "δ ≥ 1/⌈d/2⌉"

    def size_bytes(self, values: Values) -> int:
        """Two bits a value, and two magnitudes."""
        return 2 * values.dtype.itemsize + packed_bytes(values.numbers, 2)

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Round to the nearest of four values."""
        half = values.numbers // 2
        rows = rows_KM.numpy()
        parts = np.abs(rows)
        # A partial sort finds the two halves in linear time.
        parts.partition(half, axis=1)
        # In float64: a sum of large numbers leaves float32's range.
        large_K1 = parts[:, half:].mean(1, np.float64, keepdims=True)
        small_K1 = parts[:, :half].mean(1, np.float64, keepdims=True) if half else large_K1
        means_K2 = torch.from_numpy(np.concatenate([small_K1, large_K1], 1)).to(rows_KM.dtype)
        middles_K1 = means_K2.mean(1, keepdim=True).numpy()

        def code(of: slice, columns: slice) -> NDArray[np.uint8]:
            piece = rows[of, columns]
            # In place on bytes: each of these lines is one pass over a small piece.
            codes = (piece < 0).view(np.uint8)
            codes += codes
            codes += np.abs(piece) > middles_K1[of]
            return codes

        return packed(as_bytes(means_K2), rows_KM, bits=2, code=code)

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Look up the magnitude of each code."""
        content_KO = stacked(content)
        taken = packed_bytes(values.numbers, 2)
        small_K1, large_K1 = from_bytes(content_KO[:, :-taken], values.dtype).numpy().T[:, :, None]

        def number(codes: NDArray[np.unsignedinteger], rows: slice, columns: slice, found: Tensor) -> None:
            np.copyto(found.numpy(), np.where(codes & 1, large_K1[rows], small_K1[rows]))
            found *= torch.from_numpy(1 - (codes & 2).view(np.int8))

        return unpacked(content_KO[:, -taken:], bits=2, values=values, number=number)
