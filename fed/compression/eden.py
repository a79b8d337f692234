"""EDEN: a random rotation, and a few bits for each coordinate of what looks Gaussian after it.

Vargaftik et al., "EDEN: communication-efficient and robust distributed mean estimation for federated learning", ICML
2022, 2108.08842. Shapes: see :mod:`fed.layout`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fed.compression.bits import packed_bytes
from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values
from fed.compression.quantisers import as_bytes, from_bytes, packed, unpacked

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
        sizes = _sizes(values.numbers)
        padded = torch.nn.functional.pad(rows_KM, (0, sum(sizes) - values.numbers)).mul_(
            _signs(rows_KM, sum(sizes), draw)
        )
        levels = torch.tensor(_LEVELS[self.bits]).to(rows_KM)
        middles, scales, codes = (levels[1:] + levels[:-1]) / 2, [], []
        for block in _blocks(padded, sizes):
            norms = torch.linalg.vector_norm(block, dim=2, keepdim=True, dtype=torch.float64)
            unit = rotate(block / norms.clamp_min(torch.finfo(block.dtype).tiny).to(block.dtype)).mul_(
                block.shape[2] ** 0.5
            )
            code = torch.bucketize(unit.abs(), middles, out_int32=True)
            product = (unit.double().abs() * levels[code]).sum(2)
            scales.append((norms[:, :, 0] * block.shape[2] ** 0.5 / product.where(product > 0, 1)).to(rows_KM.dtype))
            codes.append((code | torch.signbit(unit).int() << (self.bits - 1)).flatten(1))
        codes_KM = torch.cat(codes, 1).to(torch.uint8)
        return Encoded(torch.cat([as_bytes(torch.cat(scales, 1)), packed(codes_KM, self.bits)], 1))

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Rotate back."""
        content_KO, sizes = torch.stack([*content]), _sizes(values.numbers)
        taken = packed_bytes(sum(sizes), self.bits)
        levels = torch.tensor(_LEVELS[self.bits], dtype=values.dtype)
        codes_KM = unpacked(content_KO[:, -taken:], self.bits, sum(sizes)).int()
        padded = torch.cat([levels, -levels])[codes_KM]
        scales_KB, begin = from_bytes(content_KO[:, :-taken], values.dtype), 0
        for block in _blocks(padded, sizes):
            scale = scales_KB[:, begin : begin + block.shape[1], None]
            begin += block.shape[1]
            block.copy_(rotate(block * scale))
        return padded.mul_(_signs(padded, sum(sizes), draw))[:, : values.numbers]


def rotate(block: Tensor) -> Tensor:
    """Orthonormal Hadamard transform of the last dimension, a power of two: its own inverse."""
    size, half = block.shape[-1], 1
    while half < size:
        first, second = block.view(*block.shape[:-1], -1, 2, half).unbind(-2)
        block = torch.stack([first + second, first - second], -2).flatten(-3)
        half *= 2
    return block.mul(size**-0.5)


def _sizes(numbers: int) -> list[int]:
    """Sizes of the blocks, each a power of two; all together less than a hundredth larger than what they hold."""
    sizes, left = [], numbers
    while left:
        down = min(_LARGEST, 1 << (left.bit_length() - 1))
        size = down if left * _MOST_PADDING > numbers or down == left else 2 * down
        sizes.append(size)
        left -= min(size, left)
    return sizes


def _blocks(padded: Tensor, sizes: list[int]) -> Iterator[Tensor]:
    """Views of the blocks, those of one size together, [K, ·, size]."""
    begin = 0
    for size in dict.fromkeys(sizes):
        end = begin + size * sizes.count(size)
        yield padded[:, begin:end].view(len(padded), -1, size)
        begin = end


def _signs(rows_KM: Tensor, numbers: int, draw: Draw) -> Tensor:
    """Each client's random signs, [K, numbers]."""
    drawn = [np.frombuffer(draw.own(row).bytes(-(-numbers // 8)), np.uint8) for row in range(len(rows_KM))]
    bits = np.unpackbits(np.stack(drawn), axis=1, count=numbers)
    return torch.from_numpy(bits).to(rows_KM).mul_(2).sub_(1)
