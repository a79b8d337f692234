"""Quantisers: codecs that write every value with a few bits.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fed.compression.bits import packed_bytes
from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values
from fed.compression.pieces import empty, packed, pieces, stacked, unpacked
from fed.vectors.tensors import Tensor, torch

__all__ = [
    "FP4",
    "QSGD",
    "BFloat16",
    "Float16",
    "Int8",
    "Natural",
    "Sign",
    "TernGrad",
    "TwoLevel",
    "as_bytes",
    "from_bytes",
    "nearest",
]


def as_bytes(tensor_KM: Tensor) -> Tensor:
    """The bytes of numbers, [K, ·], on the CPU."""
    if tensor_KM.stride(1) != 1 or not tensor_KM.is_contiguous():  # a single number counts as contiguous at any stride
        tensor_KM = tensor_KM.clone(memory_format=torch.contiguous_format)
    return tensor_KM.cpu().view(torch.uint8)


def from_bytes(content_KO: Tensor, dtype: "torch.dtype") -> Tensor:
    """Reverse :func:`as_bytes`."""
    numbers_KM = torch.empty(len(content_KO), content_KO.shape[1] // dtype.itemsize, dtype=dtype)
    numbers_KM.view(torch.uint8).copy_(content_KO)  # which may begin at an odd byte
    return numbers_KM


def _blocks(rows_KM: Tensor, size: int) -> Iterator[Tensor]:
    """Rows in blocks, [K, ·, size], and the remaining columns as one block, [K, 1, ·]."""
    whole = rows_KM.shape[1] // size * size
    if whole:
        yield rows_KM[:, :whole].view(len(rows_KM), -1, size)
    if whole < rows_KM.shape[1]:
        yield rows_KM[:, whole:].unsqueeze(1)


def _by_block(piece_KM: Tensor, scales_KB: Tensor, size: int, columns: slice) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of a piece, [K, ·, ·], each with its scale, [K, ·, 1].

    Args:
        piece_KM: some columns of some rows.
        scales_KB: all scales of these rows.
        size: number of values in a block.
        columns: columns of the piece; a block begins at the first.
    """
    begin = columns.start // size
    for block in _blocks(piece_KM, size):
        yield block, scales_KB[:, begin : begin + block.shape[1], None]
        begin += block.shape[1]


def _of_blocks(rows_KM: Tensor, size: int, reduced: Callable[[Tensor], Tensor]) -> Tensor:
    """A number for each block, [K, ·].

    Args:
        rows_KM: values, [K, M].
        size: number of values in a block.
        reduced: function that reduces the last of three dimensions.
    """
    found_KB = torch.empty(len(rows_KM), -(-rows_KM.shape[1] // size), dtype=rows_KM.dtype)
    for rows, columns in pieces(rows_KM.shape, size):
        for block, found in _by_block(rows_KM[rows, columns], found_KB[rows], size, columns):
            found[:, :, 0] = reduced(block)
    return found_KB


def _peak(block: Tensor) -> Tensor:
    """The largest magnitude."""
    return block.abs().amax(2)


def _norm(block: Tensor) -> Tensor:
    """The Euclidean norm, at most the type's largest number."""
    # squares of large or small numbers leave float32's range
    norms: Tensor = torch.linalg.vector_norm(block, dim=2, dtype=torch.float64)
    return norms.clamp_max_(torch.finfo(block.dtype).max)


def _words(streams: list[np.random.Generator], rows: slice, columns: slice, kind: np.dtype[Any]) -> NDArray[Any]:
    """Random words, each row's from its stream, [K, M]; the columns of a row come in order.

    Args:
        streams: random streams, one for each of all rows.
        rows: rows of a piece.
        columns: columns of the piece.
        kind: type of a word: unsigned integers of 32 or 64 bits.
    """
    count = columns.stop - columns.start
    size = -(-count * kind.itemsize // 8)
    # these are the words that Generator.random and Generator.integers would shift, in half their time
    drawn = [stream.bit_generator.random_raw(size).view(kind)[:count] for stream in streams[rows]]
    return drawn[0][None] if len(drawn) == 1 else np.stack(drawn)


def _uniforms(streams: list[np.random.Generator], rows: slice, columns: slice) -> Tensor:
    """Multiples of 2⁻²⁴ uniform in [0, 1), [K, M]; arguments as those of :func:`_words`."""
    drawn_KM = _words(streams, rows, columns, np.dtype(np.uint32))
    drawn_KM >>= 8
    return torch.from_numpy(drawn_KM.view(np.int32)).to(torch.float32).mul_(2**-24)


def nearest(magnitudes: NDArray[np.floating], middles: list[float]) -> NDArray[np.uint8]:
    """Place of the interval between ascending middles that holds each magnitude, the lower one at a middle."""
    codes = np.zeros(magnitudes.shape, np.uint8)
    for middle in middles:
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
        scales_KB = (_of_blocks(rows_KM, self.block, _peak) / 127).clamp_min_(smallest)
        head_KO = as_bytes(scales_KB)
        content_KO = empty((len(rows_KM), head_KO.shape[1] + values.numbers), torch.uint8)
        content_KO[:, : head_KO.shape[1]] = head_KO
        codes_KM = content_KO[:, head_KO.shape[1] :].view(torch.int8)
        for rows, columns in pieces(rows_KM.shape, self.block):
            by_block = _by_block(rows_KM[rows, columns], scales_KB[rows], self.block, columns)
            for (block, scale), codes in zip(by_block, _blocks(codes_KM[rows, columns], self.block), strict=True):
                codes.copy_((block / scale).round_())
        return Encoded(content_KO)

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Multiply by the scales."""
        content_KO = stacked(content)
        codes_KM = content_KO[:, -values.numbers :].view(torch.int8)
        scales_KB = from_bytes(content_KO[:, : -values.numbers], values.dtype)
        rows_KM = empty((len(content_KO), values.numbers), values.dtype)
        for rows, columns in pieces(rows_KM.shape, self.block):
            by_block = _by_block(codes_KM[rows, columns], scales_KB[rows], self.block, columns)
            for (codes, scale), block in zip(by_block, _blocks(rows_KM[rows, columns], self.block), strict=True):
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
        peaks_KB = _of_blocks(rows_KM, self._BLOCK, _peak)
        fractions_KB, exponents_KB = torch.frexp(peaks_KB / 6)
        exponents_KB -= (fractions_KB == 0.5).to(torch.int32)  # such a power is enough
        exponents_KB.clamp_min_(math.frexp(torch.finfo(rows_KM.dtype).tiny)[1])
        scales_KB = torch.ldexp(torch.ones_like(peaks_KB), -exponents_KB)  # exact, and so are products with it
        middles = [(low + high) / 2 for low, high in pairwise(self._MAGNITUDES)]

        def code(rows: slice, columns: slice) -> NDArray[np.uint8]:
            piece = rows_KM[rows, columns]
            by_block = _by_block(piece, scales_KB[rows], self._BLOCK, columns)
            multiples = torch.cat([(block * scale).flatten(1) for block, scale in by_block], 1)
            codes = nearest(multiples.abs_().numpy(), middles)
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
        exponents_KB.clamp_max_(math.frexp(limit)[1] - 1)
        scales_KB = torch.ldexp(torch.ones(exponents_KB.shape, dtype=values.dtype), exponents_KB)

        def number(codes: NDArray[np.unsignedinteger], rows: slice, columns: slice, found: Tensor) -> None:
            np.take(numbers, codes, out=found.numpy(), mode="clip")
            for block, scale in _by_block(found, scales_KB[rows], self._BLOCK, columns):
                block *= scale
            found.clamp_(-limit, limit)

        return unpacked(content_KO[:, -taken:], bits=4, values=values, number=number, multiple=self._BLOCK)


def _exponents(dtype: "torch.dtype") -> "torch.dtype":
    """The type that holds the exponents of numbers of this type."""
    return torch.int8 if dtype.itemsize <= 4 else torch.int16


@dataclass(frozen=True, kw_only=True)
class QSGD(Codec):
    r"""Random rounding to one of few levels (Alistarh et al. 2017, 1610.02132, section 3).

    .. math:: C(x)_i = ‖x‖ \operatorname{sign}(x_i) ξ_i / s, \qquad
        ξ_i = ⌊s |x_i| / ‖x‖ + u_i⌋, \qquad u_i ∼ U[0, 1), \qquad s = 2^{b - 1} - 1

    in each bucket of d values. Unbiased; the variance is at most min(d/s², √d/s) ‖x‖², with the largest magnitude as
    the norm d/(4 s²) ‖x‖². One bit holds a sign alone: +‖x‖ with probability (1 + x_i/‖x‖)/2, else −‖x‖.

    Args:
        bits: b, bits of a value, 1 to 8.
        bucket: d ≥ 1, number of values that share a norm.
        norm: "l2", the paper's norm, or "max", which is never larger, so that the variance is smaller.
    """

    is_unbiased: ClassVar[bool] = True
    bound: ClassVar[str] = "ω ≤ min(d/s², √d/s), at 1 bit d − 1, with max d/(4 s²)"

    bits: Annotated[int, Field(ge=1, le=8)] = 4
    bucket: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    norm: Literal["l2", "max"] = "l2"

    def size_bytes(self, values: Values) -> int:
        """The bits of the values, and a norm a bucket."""
        norms = -(-values.numbers // self.bucket)
        return norms * values.dtype.itemsize + packed_bytes(values.numbers, self.bits)

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Round down or up at random."""
        norms_KB = _of_blocks(rows_KM, self.bucket, _peak if self.norm == "max" else _norm)
        # zeros have no norm, and stay zeros whatever stands in for it
        divisors_KB = norms_KB.where(norms_KB > 0, 1)
        streams = [draw.own(row) for row in range(len(rows_KM))]

        def code(rows: slice, columns: slice) -> NDArray[np.uint8]:
            # floor(y + u) rounds negative numbers without bias too, and a conversion of positive ones is the floor
            levels = _uniforms(streams, rows, columns).add_(self._middle)
            by_block = _by_block(rows_KM[rows, columns], divisors_KB[rows], self.bucket, columns)
            for (block, norm), level in zip(by_block, _blocks(levels, self.bucket), strict=True):
                level += (block / norm).mul_(self._middle)
            return levels.clamp_max_(self._largest).numpy().astype(np.uint8)

        return packed(as_bytes(norms_KB), rows_KM, bits=self.bits, code=code, multiple=self.bucket)

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Multiply levels by the norms."""
        content_KO = stacked(content)
        taken = packed_bytes(values.numbers, self.bits)
        norms_KB = from_bytes(content_KO[:, :-taken], values.dtype)

        def number(codes: NDArray[np.unsignedinteger], rows: slice, columns: slice, found: Tensor) -> None:
            found.copy_(torch.from_numpy(codes)).clamp_max_(self._largest).sub_(self._middle).div_(self._middle)
            for block, norm in _by_block(found, norms_KB[rows], self.bucket, columns):
                block *= norm

        return unpacked(content_KO[:, -taken:], bits=self.bits, values=values, number=number, multiple=self.bucket)

    @property
    def _largest(self) -> int:
        """2 s, the largest code, or 1 where a bit is the sign alone."""
        return max(1, (1 << self.bits) - 2)

    @property
    def _middle(self) -> float:
        return self._largest / 2


@dataclass(frozen=True, kw_only=True)
class TernGrad(Codec):
    r"""Values −s, 0 or s at random, five of them a byte (Wen et al. 2017, 1705.07878, equation 1).

    .. math:: C(x)_i = s \operatorname{sign}(x_i) b_i, \qquad P(b_i = 1) = |x_i| / s, \qquad s = \max_j |x_j|

    in each layer; those of fewer than 64 values share one s. Unbiased: 1.6 bits a parameter; entropy allows 1.585. The
    variance in a layer of d values is

    .. math:: s ‖x‖_1 - ‖x‖² ≤ \frac{\sqrt d - 1}{2} ‖x‖²
    """

    is_unbiased: ClassVar[bool] = True
    bound: ClassVar[str] = "ω = s‖x‖₁/‖x‖² − 1 ≤ (√d − 1)/2 in each layer"

    def size_bytes(self, values: Values) -> int:
        """A byte for five values, and a scale a layer."""
        return len(values.groups()) * values.dtype.itemsize + -(-values.numbers // 5)

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Keep each value's sign, or nothing."""
        groups = values.groups()
        streams = [draw.own(row) for row in range(len(rows_KM))]
        peaks_KG = torch.stack([self._peaks(rows_KM, places) for places in groups], 1)
        digits_KM = empty((len(rows_KM), -(-values.numbers // 5) * 5), torch.uint8)
        digits_KM[:, values.numbers :] = 1
        # a row's numbers are drawn in its order
        for place, peaks_K in sorted(_by_layer(groups, peaks_KG), key=lambda layer: layer[0].start):
            layer_KM = rows_KM[:, place]
            digits = digits_KM[:, place].numpy()
            for rows, columns in pieces(layer_KM.shape):
                piece = layer_KM[rows, columns].numpy()
                thresholds = (_uniforms(streams, rows, columns) * peaks_K[rows, None]).numpy()
                digits[rows, columns] = 1 + (piece > thresholds).view(np.uint8) - (piece < -thresholds).view(np.uint8)
        head_KO = as_bytes(peaks_KG)
        content_KO = empty((len(rows_KM), head_KO.shape[1] + digits_KM.shape[1] // 5), torch.uint8)
        content_KO[:, : head_KO.shape[1]] = head_KO
        codes = content_KO[:, head_KO.shape[1] :].numpy()
        fives = digits_KM.view(len(rows_KM), -1, 5).numpy()
        for rows, columns in pieces(codes.shape):
            code = fives[rows, columns, 4]
            for digit in range(3, -1, -1):
                code = code * np.uint8(3) + fives[rows, columns, digit]
            codes[rows, columns] = code
        return Encoded(content_KO)

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Multiply signs by the scales."""
        content_KO = stacked(content)
        taken = -(-values.numbers // 5)
        codes = content_KO[:, -taken:].numpy()
        rows_KM = empty((len(content_KO), values.numbers), values.dtype)
        signs = (np.arange(256)[:, None] // 3 ** np.arange(5) % 3 - 1).astype(np.int8)
        for rows, columns in pieces(codes.shape):
            found_KM = rows_KM[rows, 5 * columns.start : 5 * columns.stop]
            taken_KM = torch.from_numpy(signs[codes[rows, columns]]).flatten(1)
            found_KM.copy_(taken_KM[:, : found_KM.shape[1]])
        scales_KG = from_bytes(content_KO[:, :-taken], values.dtype)
        for place, scales_K in _by_layer(values.groups(), scales_KG):
            layer_KM = rows_KM[:, place]
            for rows, columns in pieces(layer_KM.shape):
                layer_KM[rows, columns] *= scales_K[rows, None]
        return rows_KM

    @staticmethod
    def _peaks(rows_KM: Tensor, places: list[slice]) -> Tensor:
        """The largest magnitude of each row at such places, [K]."""
        ends = [torch.stack(torch.aminmax(rows_KM[:, place], dim=1)) for place in places]
        return torch.cat(ends).abs().amax(0)


def _by_layer(groups: list[list[slice]], scales_KG: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Each layer's place with the scales of its group, [K]."""
    for places, scales_K in zip(groups, scales_KG.unbind(1), strict=True):
        for place in places:
            yield place, scales_K


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
        # a sum of large numbers leaves float32's range
        sums_K1 = torch.zeros(len(rows_KM), 1, dtype=torch.float64)
        for rows, columns in pieces(rows_KM.shape):
            # blocks as long as these are summed in one order, whether there is one row or more
            for block in _blocks(rows_KM[rows, columns], 4096):
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
class Natural(Codec):
    r"""Random rounding to a power of two: the sign and the exponent (Horváth et al. 2019, 1905.10988).

    .. math:: C(x) = \operatorname{sign}(x) 2^{⌊\log_2 |x|⌋ + b}, \qquad P(b = 1) = |x| 2^{-⌊\log_2 |x|⌋} - 1

    Unbiased with variance at most ‖x‖²/8: 9 bits a parameter in float32, 12 in float64. A power above the type's
    largest is rounded down.
    """

    is_unbiased: ClassVar[bool] = True
    bound: ClassVar[str] = "ω ≤ 1/8"

    def size_bytes(self, values: Values) -> int:
        """A sign and an exponent a value."""
        return packed_bytes(values.numbers, 1 + _parts(values.dtype)[1])

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Round up with the probability that the mantissa says."""
        mantissa, exponent = _parts(values.dtype)
        kind = np.dtype(f"u{values.dtype.itemsize}")
        words_KM = rows_KM.numpy().view(kind)
        streams = [draw.own(row) for row in range(len(rows_KM))]

        def code(rows: slice, columns: slice) -> NDArray[np.uint16]:
            words = words_KM[rows, columns]
            drawn = _words(streams, rows, columns, kind) >> (exponent + 1)
            # adding below the mantissa carries into the exponent as often as it should
            rounded = ((words & ((1 << (mantissa + exponent)) - 1)) + drawn) >> mantissa
            exponents = np.minimum(rounded, (1 << exponent) - 2)
            codes: NDArray[np.uint16] = (exponents | (words >> mantissa & (1 << exponent))).astype(np.uint16)
            return codes

        nothing = torch.empty(len(rows_KM), 0, dtype=torch.uint8)
        return packed(nothing, rows_KM, bits=1 + exponent, code=code)

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Put zeros for the mantissa."""
        mantissa, exponent = _parts(values.dtype)

        def number(codes: NDArray[np.unsignedinteger], rows: slice, columns: slice, found: Tensor) -> None:
            words = codes.astype(f"u{values.dtype.itemsize}")
            words = (words >> exponent << (mantissa + exponent)) | ((words & ((1 << exponent) - 1)) << mantissa)
            found.copy_(torch.from_numpy(words.view(found.numpy().dtype)))

        return unpacked(stacked(content), bits=1 + exponent, values=values, number=number)


def _parts(dtype: "torch.dtype") -> tuple[int, int]:
    """Bits of the mantissa and of the exponent of float32 or float64."""
    return (23, 8) if dtype == torch.float32 else (52, 11)


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
        parts.partition(half, axis=1)
        large_K1 = parts[:, half:].mean(1, np.float64, keepdims=True)
        small_K1 = parts[:, :half].mean(1, np.float64, keepdims=True) if half else large_K1
        means_K2 = torch.from_numpy(np.concatenate([small_K1, large_K1], 1)).to(rows_KM.dtype)
        middles_K1 = means_K2.mean(1, keepdim=True).numpy()

        def code(of: slice, columns: slice) -> NDArray[np.uint8]:
            piece = rows[of, columns]
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
