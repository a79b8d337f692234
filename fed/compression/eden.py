"""EDEN: a random rotation, after which coordinates look Gaussian, and a few bits for each coordinate.

Vargaftik et al., "EDEN: communication-efficient and robust distributed mean estimation for federated learning", ICML
2022, 2108.08842. Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fed.compression.bits import packed_bytes, unpack
from fed.compression.blocks import as_bytes, from_bytes
from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values
from fed.compression.pieces import empty, packed, stacked
from fed.compression.quantisers import nearest
from fed.compression.rotation import block_pieces, block_sizes, flips, hadamard, padded
from fed.vectors.tensors import Tensor, torch

__all__ = ["Eden"]

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

    in blocks of a power of two, at most 65,536, with R a Hadamard transform of random signs. Biased, where the paper's
    R, a uniformly random rotation, is not: of x = (2, 1, 0, …) every draw at one bit gives (2.5, 0, …), which is off by
    ‖x‖/2. Of dense vectors in large blocks the coordinates are nearly Gaussian, and the bias is small: of 900 Gaussian
    values its square is below 0.002 ‖x‖². The squared error is then D/(1 − D) ‖x‖², with the distortion D of the
    quantiser: 1 − 2/π at one bit, 0.1175, 0.0345 and 0.0095 at two, three and four; D ‖x‖² at the scale that makes it
    smallest, which error feedback finds. Use that where updates may be sparse.

    Args:
        bits: b, bits of a coordinate, 1 to 4.
    """

    bound: ClassVar[str] = "dense: π/2 − 1 at 1 bit; 0.133, 0.0358, 0.00959 at 2, 3, 4"

    bits: Annotated[int, Field(ge=1, le=4)] = 1

    def size_bytes(self, values: Values) -> int:
        """A scale a block, and so many bits a coordinate."""
        sizes = block_sizes(values.numbers)
        return len(sizes) * values.dtype.itemsize + packed_bytes(sum(sizes), self.bits)

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Rotate and round."""
        sizes = block_sizes(values.numbers)
        total = sum(sizes)
        levels = torch.tensor(_LEVELS[self.bits]).to(rows_KM.dtype)
        middles = [float(low + high) / 2 for low, high in pairwise(levels)]
        signs = _signs(len(rows_KM), total, draw)
        codes_KM = np.empty((len(rows_KM), total), np.uint8)
        scales_KB = torch.empty(len(rows_KM), len(sizes), dtype=rows_KM.dtype)
        for rows, columns, blocks in block_pieces(len(rows_KM), sizes):
            flat = padded(rows_KM[rows, columns], columns)
            flat *= flips(signs, rows, columns)
            block = flat.view(len(flat), blocks.stop - blocks.start, -1)
            norms = torch.linalg.vector_norm(block, dim=2, keepdim=True, dtype=torch.float64)
            # Levels are those of a standard Gaussian, which a rotated block of norm √d resembles.
            block /= norms.clamp_min(torch.finfo(block.dtype).tiny).to(block.dtype)
            unit = hadamard(block)  # of norm √d
            # Levels are symmetric around 0: half of the comparisons are enough.
            magnitudes = unit.abs()
            root = block.shape[2] ** 0.5
            code = nearest(magnitudes.numpy(), middles)
            product = magnitudes.mul_(torch.from_numpy(levels.numpy().take(code))).double().sum(2)
            scales_KB[rows, blocks] = (norms[:, :, 0] * root / product.where(product > 0, 1)).to(rows_KM.dtype)
            code += np.signbit(unit.numpy()) * np.uint8(1 << (self.bits - 1))
            codes_KM[rows, columns] = code.reshape(len(flat), -1)
        return packed(
            as_bytes(scales_KB),
            torch.from_numpy(codes_KM),
            bits=self.bits,
            code=lambda *place: codes_KM[place],
        )

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Rotate back."""
        content_KO = stacked(content)
        sizes = block_sizes(values.numbers)
        total = sum(sizes)
        levels = torch.tensor(_LEVELS[self.bits], dtype=values.dtype)
        numbers = torch.cat([levels, -levels]).numpy()
        signs = _signs(len(content_KO), total, draw)
        packed_KO = content_KO[:, -packed_bytes(total, self.bits) :].numpy()
        scales_KB = from_bytes(content_KO[:, : -packed_KO.shape[1]], values.dtype)
        rows_KM = empty((len(content_KO), values.numbers), values.dtype)
        for rows, columns, blocks in block_pieces(len(content_KO), sizes):
            # Planes of bits are unpacked from whole bytes.
            first = columns.start // 8 * 8
            codes = unpack(packed_KO[rows], self.bits, numbers=columns.stop - first, begin=first)
            codes = codes[:, columns.start - first :]
            flat = torch.from_numpy(numbers.take(codes))
            block = flat.view(len(flat), blocks.stop - blocks.start, -1)
            block *= scales_KB[rows, blocks, None] * block.shape[2] ** -0.5
            found = hadamard(block).view(len(flat), -1).mul_(flips(signs, rows, columns))
            rows_KM[rows, columns] = found[:, : values.numbers - columns.start]
        return rows_KM


def _signs(rows: int, numbers: int, draw: Draw) -> NDArray[np.uint8]:
    """Each client's random bits, [K, ·]."""
    drawn = [draw.own(row).bytes(-(-numbers // 8)) for row in range(rows)]
    return np.frombuffer(b"".join(drawn), np.uint8).reshape(rows, -1)
