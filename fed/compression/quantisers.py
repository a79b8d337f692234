"""Quantisers: codecs that write every value with a few bits.

Shapes: see :mod:`fed.layout`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fed.compression.bits import pack, packed_bytes, unpack
from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values

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
    "packed",
    "unpacked",
]


def as_bytes(tensor_KM: Tensor) -> Tensor:
    """The bytes of numbers, [K, ·], on the CPU."""
    if tensor_KM.stride(1) != 1 or not tensor_KM.is_contiguous():  # a single number counts as contiguous at any stride
        tensor_KM = tensor_KM.clone(memory_format=torch.contiguous_format)
    return tensor_KM.cpu().view(torch.uint8)


def from_bytes(content_KO: Tensor, dtype: torch.dtype) -> Tensor:
    """Reverse :func:`as_bytes`."""
    numbers_KM = torch.empty(len(content_KO), content_KO.shape[1] // dtype.itemsize, dtype=dtype)
    numbers_KM.view(torch.uint8).copy_(content_KO)  # which may begin at an odd byte
    return numbers_KM


def packed(codes_KM: Tensor, bits: int) -> Tensor:
    """Numbers below 2^bits, [K, M], as bytes, [K, ·]."""
    return torch.from_numpy(pack(codes_KM.cpu().numpy(), bits))


def unpacked(content_KO: Tensor, bits: int, numbers: int) -> Tensor:
    """Numbers that :func:`packed` wrote, [K, M].

    Args:
        content_KO: the bytes.
        bits: of a number.
        numbers: M.
    """
    return torch.from_numpy(unpack(content_KO.numpy(), bits, numbers))


def _blocks(rows_KM: Tensor, size: int) -> Iterator[Tensor]:
    """Rows in blocks, [K, ·, size], and what is left as one, [K, 1, ·]."""
    whole = rows_KM.shape[1] // size * size
    if whole:
        yield rows_KM[:, :whole].view(len(rows_KM), -1, size)
    if whole < rows_KM.shape[1]:
        yield rows_KM[:, whole:].unsqueeze(1)


def _by_block(rows_KM: Tensor, scales_KB: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of rows, [K, ·, ·], each with its scale, [K, ·, 1]."""
    begin = 0
    for block in _blocks(rows_KM, size):
        yield block, scales_KB[:, begin : begin + block.shape[1], None]
        begin += block.shape[1]


def _peaks(rows_KM: Tensor, size: int) -> Tensor:
    """The largest magnitude of each block, [K, ·]."""
    return torch.cat([block.abs().amax(2) for block in _blocks(rows_KM, size)], 1)


def _uniforms(rows_KM: Tensor, draw: Draw) -> Tensor:
    """Numbers uniform in [0, 1), each row's from its client's own stream, [K, M]."""
    drawn = [draw.own(row).random(rows_KM.shape[1], np.float32) for row in range(len(rows_KM))]
    return torch.from_numpy(np.stack(drawn)).to(rows_KM.device)


@dataclass(frozen=True, kw_only=True)
class _Cast(Codec):
    """Values in a shorter type of floating-point numbers; larger ones become its largest."""

    is_contraction: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype]

    def size_bytes(self, values: Values) -> int:
        """Two a value."""
        return values.numbers * self.dtype.itemsize

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Round to the nearest."""
        largest = torch.finfo(self.dtype).max
        if rows_KM.numel() and max(map(abs, map(float, torch.aminmax(rows_KM)))) > largest:
            rows_KM = rows_KM.clamp(-largest, largest)
        return Encoded(as_bytes(rows_KM.to(self.dtype)))

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Convert back."""
        return from_bytes(torch.stack([*content]), self.dtype).to(values.dtype)


@dataclass(frozen=True, kw_only=True)
class Float16(_Cast):
    """Half precision: 16 bits a value, 11 of them significant, up to 65,504 (IEEE 754-2008).

    The error of a value is at most 2⁻¹¹ of it, below 2⁻¹⁴ at most 2⁻²⁵.
    """

    bound: ClassVar[str] = "δ ≥ 1 − 2⁻²² from 2⁻¹⁴ to 65,504"
    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True, kw_only=True)
class BFloat16(_Cast):
    """The upper half of float32: 16 bits a value, 8 of them significant (Kalamkar et al. 2019, 1905.12322).

    The error of a value is at most 2⁻⁸ of it.
    """

    bound: ClassVar[str] = "δ ≥ 1 − 2⁻¹⁶"
    dtype: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    r"""Eight bits a value, scaled by the largest magnitude of its block (Dettmers et al. 2022, 2110.02861).

    .. math:: C(x)_i = \frac{m}{127} \operatorname{round}(127 x_i / m), \qquad m = \max_{j ∈ block} |x_j|

    The error of a value is at most m/254, that of the largest is 0, so that 1 − δ = (B − 1)/254² in blocks of B values:
    0.063 of 4096. Rounding is to the nearest; the paper's values are not spaced evenly.

    Args:
        block: values that share a scale, at least 1. 4096 make 8.008 bits a parameter in float32.
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
        scales_KB = (_peaks(rows_KM, self.block) / 127).clamp_min_(smallest)
        codes = [
            (block / scale).round_().to(torch.int8).flatten(1)
            for block, scale in _by_block(rows_KM, scales_KB, self.block)
        ]
        return Encoded(torch.cat([as_bytes(part) for part in (scales_KB, *codes)], 1))

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Multiply by the scales."""
        content_KO = torch.stack([*content])
        codes_KM = from_bytes(content_KO[:, -values.numbers :], torch.int8)
        scales_KB = from_bytes(content_KO[:, : -values.numbers], values.dtype)
        rows_KM = codes_KM.to(values.dtype)
        for block, scale in _by_block(rows_KM, scales_KB, self.block):
            block *= scale
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
    _MAGNITUDES: ClassVar[Tensor] = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)

    def size_bytes(self, values: Values) -> int:
        """A byte and 16 for each 32 values in float32."""
        return -(-values.numbers // self._BLOCK) * _exponents(values.dtype).itemsize + packed_bytes(values.numbers, 4)

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Round to the nearest."""
        kind = _exponents(rows_KM.dtype)
        fractions_KB, exponents_KB = torch.frexp(_peaks(rows_KM, self._BLOCK) / 6)
        exponents_KB -= (fractions_KB == 0.5).to(torch.int32)  # such a power is enough
        exponents_KB.clamp_min_(math.frexp(torch.finfo(rows_KM.dtype).tiny)[1])
        middles = ((self._MAGNITUDES[1:] + self._MAGNITUDES[:-1]) / 2).to(rows_KM)
        codes = [
            torch.bucketize(torch.ldexp(block.abs(), -exponents), middles, out_int32=True).flatten(1)
            for block, exponents in _by_block(rows_KM, exponents_KB, self._BLOCK)
        ]
        codes_KM = torch.cat(codes, 1).to(torch.uint8) | torch.signbit(rows_KM).to(torch.uint8) << 3
        return Encoded(torch.cat([as_bytes(exponents_KB.to(kind)), packed(codes_KM, 4)], 1))

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Look the magnitudes up."""
        content_KO, taken = torch.stack([*content]), packed_bytes(values.numbers, 4)
        codes_KM = unpacked(content_KO[:, -taken:], 4, values.numbers)
        numbers = torch.cat([self._MAGNITUDES, -self._MAGNITUDES]).to(values.dtype)
        rows_KM = numbers[codes_KM.int()]
        exponents_KB = from_bytes(content_KO[:, :-taken], _exponents(values.dtype)).int()
        for block, exponents in _by_block(rows_KM, exponents_KB, self._BLOCK):
            block.copy_(torch.ldexp(block, exponents))
        return rows_KM.clamp_(torch.finfo(values.dtype).min, torch.finfo(values.dtype).max)  # beyond it may be a power


def _exponents(dtype: torch.dtype) -> torch.dtype:
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
        bits: b, of a value, 1 to 8.
        bucket: d, values that share a norm, at least 1.
        norm: "l2", the paper's, or "max", which is never larger: less variance.
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
        norms_KB, codes_KM = self._norms(rows_KM), torch.empty_like(rows_KM, dtype=torch.uint8)
        # zeros have no norm, and stay zeros whatever stands in for it
        by_bucket = _by_block(rows_KM, norms_KB.where(norms_KB > 0, 1), self.bucket)
        for (block, norm), drawn, codes in zip(
            by_bucket, _blocks(_uniforms(rows_KM, draw), self.bucket), _blocks(codes_KM, self.bucket), strict=True
        ):
            # floor(y + u) rounds negative numbers without bias too, and a conversion of positive ones is the floor
            codes.copy_(drawn.add_(self._middle).addcmul_(block, self._middle / norm)).clamp_max_(self._largest)
        return Encoded(torch.cat([as_bytes(norms_KB), packed(codes_KM, self.bits)], 1))

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Multiply levels by the norms."""
        content_KO, taken = torch.stack([*content]), packed_bytes(values.numbers, self.bits)
        codes_KM = unpacked(content_KO[:, -taken:], self.bits, values.numbers)
        rows_KM = codes_KM.to(values.dtype).clamp_max_(self._largest).sub_(self._middle).div_(self._middle)
        for block, norm in _by_block(rows_KM, from_bytes(content_KO[:, :-taken], values.dtype), self.bucket):
            block *= norm
        return rows_KM

    @property
    def _largest(self) -> int:
        """2 s, the largest code, or 1 where a bit is the sign alone."""
        return max(1, (1 << self.bits) - 2)

    @property
    def _middle(self) -> float:
        return self._largest / 2

    def _norms(self, rows_KM: Tensor) -> Tensor:
        if self.norm == "max":
            return _peaks(rows_KM, self.bucket)
        # squares of large or small numbers leave float32's range; a norm that does becomes its largest
        wide = (torch.linalg.vector_norm(block, dim=2, dtype=torch.float64) for block in _blocks(rows_KM, self.bucket))
        return torch.cat([*wide], 1).clamp_max_(torch.finfo(rows_KM.dtype).max).to(rows_KM.dtype)


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
        drawn_KM, scales, groups = _uniforms(rows_KM, draw), [], values.groups()
        digits_KM = rows_KM.new_empty((len(rows_KM), -(-values.numbers // 5) * 5), dtype=torch.uint8).fill_(1)
        for places in groups:
            peaks_K = torch.stack([rows_KM[:, place].abs().amax(1) for place in places]).amax(0)
            scales.append(peaks_K)
            for place in places:
                chosen = rows_KM[:, place].abs() > drawn_KM[:, place] * peaks_K[:, None]
                digits_KM[:, place] = (rows_KM[:, place].sign() * chosen).add_(1).to(torch.uint8)
        codes = (digits_KM.view(len(rows_KM), -1, 5) * _POWERS_OF_3).sum(2, dtype=torch.uint8)
        return Encoded(torch.cat([as_bytes(torch.stack(scales, 1)), codes.cpu()], 1))

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Multiply signs by the scales."""
        content_KO, taken = torch.stack([*content]), -(-values.numbers // 5)
        digits = content_KO[:, -taken:, None] // _POWERS_OF_3 % 3
        rows_KM = digits.flatten(1)[:, : values.numbers].to(values.dtype).sub_(1)
        scales_KG = from_bytes(content_KO[:, :-taken], values.dtype)
        for scale_K, places in zip(scales_KG.unbind(1), values.groups(), strict=True):
            for place in places:
                rows_KM[:, place] *= scale_K[:, None]
        return rows_KM


_POWERS_OF_3 = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)


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
        means_K1 = torch.linalg.vector_norm(rows_KM, 1, 1, keepdim=True, dtype=torch.float64) / values.numbers
        return Encoded(torch.cat([as_bytes(means_K1.to(rows_KM.dtype)), packed(rows_KM >= 0, 1)], 1))

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Multiply the signs by the magnitude."""
        content_KO = torch.stack([*content])
        bits_KM = unpacked(content_KO[:, values.dtype.itemsize :], 1, values.numbers)
        means_K1 = from_bytes(content_KO[:, : values.dtype.itemsize], values.dtype)
        return bits_KM.to(values.dtype).mul_(2).sub_(1).mul_(means_K1)


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
        drawn = [draw.own(row).integers(0, 1 << mantissa, values.numbers, kind) for row in range(len(rows_KM))]
        # adding below the mantissa carries into the exponent as often as it should
        words = rows_KM.abs().cpu().numpy().view(kind) + np.stack(drawn)
        exponents = np.minimum(words >> mantissa, (1 << exponent) - 2).astype(np.uint16)
        signs = torch.signbit(rows_KM).cpu().numpy().astype(np.uint16) << exponent
        return Encoded(torch.from_numpy(pack(exponents | signs, 1 + exponent)))

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Put zeros for the mantissa."""
        mantissa, exponent = _parts(values.dtype)
        codes_KM = unpack(torch.stack([*content]).numpy(), 1 + exponent, values.numbers)
        words = codes_KM.astype(f"u{values.dtype.itemsize}")
        words = (words >> exponent << (mantissa + exponent)) | ((words & ((1 << exponent) - 1)) << mantissa)
        return torch.from_numpy(words).view(values.dtype)


def _parts(dtype: torch.dtype) -> tuple[int, int]:
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
        half, magnitudes_KM = values.numbers // 2, rows_KM.abs()
        parts = np.partition(magnitudes_KM.cpu().numpy(), half, axis=1)
        large_K1 = parts[:, half:].mean(1, np.float64, keepdims=True)
        small_K1 = parts[:, :half].mean(1, np.float64, keepdims=True) if half else large_K1
        means_K2 = torch.from_numpy(np.concatenate([small_K1, large_K1], 1)).to(rows_KM)
        is_large = magnitudes_KM > means_K2.mean(1, keepdim=True)
        codes_KM = is_large.to(torch.uint8) | (rows_KM < 0).to(torch.uint8) << 1
        return Encoded(torch.cat([as_bytes(means_K2), packed(codes_KM, 2)], 1))

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Look the magnitudes up."""
        content_KO, taken = torch.stack([*content]), packed_bytes(values.numbers, 2)
        means_K2 = from_bytes(content_KO[:, :-taken], values.dtype)
        codes_KM = unpacked(content_KO[:, -taken:], 2, values.numbers)
        return torch.cat([means_K2, -means_K2], 1).gather(1, codes_KM.long())
