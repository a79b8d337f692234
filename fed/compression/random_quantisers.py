"""Random quantisers: codecs that round every value down or up at random, and are right on average.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fed.compression.bits import packed_bytes
from fed.compression.blocks import as_bytes, blocks_of, by_block, euclidean_norm, from_bytes, peak, reduced_by_block
from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values
from fed.compression.pieces import empty, packed, pieces, stacked, unpacked
from fed.vectors.tensors import Tensor, torch

__all__ = ["QSGD", "Natural", "TernGrad"]


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
    # These are the words that Generator.random and Generator.integers would shift, in half their time.
    drawn = [stream.bit_generator.random_raw(size).view(kind)[:count] for stream in streams[rows]]
    return drawn[0][None] if len(drawn) == 1 else np.stack(drawn)


def _uniforms(streams: list[np.random.Generator], rows: slice, columns: slice) -> Tensor:
    """Multiples of 2⁻²⁴ uniform in [0, 1), [K, M]; arguments as those of :func:`_words`."""
    drawn_KM = _words(streams, rows, columns, np.dtype(np.uint32))
    # 24 bits are what float32 holds without rounding: 1 is never drawn.
    drawn_KM >>= 8
    return torch.from_numpy(drawn_KM.view(np.int32)).to(torch.float32).mul_(2**-24)


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
        norms_KB = reduced_by_block(rows_KM, self.bucket, peak if self.norm == "max" else euclidean_norm)
        # Zeros have no norm, and stay zeros whatever stands in for it.
        divisors_KB = norms_KB.where(norms_KB > 0, 1)
        streams = [draw.own(row) for row in range(len(rows_KM))]

        def code(rows: slice, columns: slice) -> NDArray[np.uint8]:
            # The floor of y + u has no bias below 0 either, and for positive numbers a conversion is the floor.
            levels = _uniforms(streams, rows, columns).add_(self._middle)
            scaled = by_block(rows_KM[rows, columns], divisors_KB[rows], self.bucket, columns)
            for (block, norm), level in zip(scaled, blocks_of(levels, self.bucket), strict=True):
                level += (block / norm).mul_(self._middle)
            return levels.clamp_max_(self._largest).numpy().astype(np.uint8)

        return packed(as_bytes(norms_KB), rows_KM, bits=self.bits, code=code, multiple=self.bucket)

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Multiply levels by the norms."""
        content_KO = stacked(content)
        taken = packed_bytes(values.numbers, self.bits)
        norms_KB = from_bytes(content_KO[:, :-taken], values.dtype)

        def number(codes: NDArray[np.unsignedinteger], rows: slice, columns: slice, found: Tensor) -> None:
            # An honest code never exceeds the largest, one of a stranger may.
            found.copy_(torch.from_numpy(codes)).clamp_max_(self._largest).sub_(self._middle).div_(self._middle)
            for block, norm in by_block(found, norms_KB[rows], self.bucket, columns):
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
        # 1 is the digit of zero: a message has the same bytes whatever memory held before.
        digits_KM[:, values.numbers :] = 1
        # A row's numbers are drawn in its order.
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
            # Adding below the mantissa carries into the exponent as often as it should.
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
