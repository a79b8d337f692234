"""PowerSGD: each layer as the product of two thin matrices.

Vogels, Karimireddy & Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", NeurIPS
2019, 1905.13727, algorithm 1. Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import PositiveInt

from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values
from fed.compression.pieces import empty
from fed.vectors.tensors import Tensor, torch

__all__ = ["PowerSGD"]


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Codec):
    r"""Each layer's matrix as the product of two thin ones (Vogels et al. 2019, 1905.13727).

    M, [rows, everything else], is approximated by one step of a power iteration.

    .. math:: P = \operatorname{orth}(M Q_{before}), \qquad Q = M^⊤ P, \qquad C(M) = P Q^⊤

    P has orthonormal columns, so that the squared error is ‖M‖² − ‖PᵀM‖²: 0 where M has rank r, and below ‖M‖² unless
    M Q_before is 0. Where a codec behind it encodes P and Q, no such bound holds. A client begins with the Q of its
    last message that counted; lost messages change nothing. Vectors, layers of fewer than 64 values, and those that two
    factors would not make smaller go as they are.

    Args:
        rank: r ≥ 1, columns of each of the two factors.
    """

    gives: ClassVar = "values"
    comes_first: ClassVar[str] = "looks at the matrices of layers"
    is_contraction: ClassVar[bool] = True
    bound: ClassVar[str] = "δ = ‖PᵀM‖²/‖M‖², and 1 where the rank is at most r"

    rank: PositiveInt = 2

    def init(self, values: Values) -> CodecState:
        """A random Q for each layer, the same for all clients."""
        sizes = [columns * self.rank for _, _, columns in self._matrices(values)]
        drawn = np.random.default_rng(0).standard_normal(sum(sizes))  # a fixed seed: nobody has to send the first Q
        return {"factors": torch.from_numpy(drawn).to(values.dtype)} if sizes else {}

    def size_bytes(self, values: Values) -> int:
        """Zero: a message consists of values alone."""
        return 0

    def inner(self, values: Values, content: Tensor | None = None) -> Values:
        """P and Q of each layer, then the other layers."""
        matrices = self._matrices(values)
        saved = sum(rows * columns - self.rank * (rows + columns) for _, rows, columns in matrices)
        return values._replace(numbers=values.numbers - saved, layers=())

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Multiply by the factors of the last message that counted."""
        # One client after the other: products of batches differ in the last bit.
        befores = state.get("factors", rows_KM.new_empty(len(rows_KM), 0))
        made = [self._factors(row_M, before, values) for row_M, before in zip(rows_KM, befores, strict=True)]
        nothing = torch.empty(len(rows_KM), 0, dtype=torch.uint8)
        sent = [values_J for values_J, _ in made]
        if "factors" not in state:
            return Encoded(nothing, sent)
        counted = {"factors": torch.stack([factors for _, factors in made])}
        return Encoded(nothing, sent, counted, lost={"factors": befores})

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Multiply the factors."""
        rows_KM = empty((len(inner), values.numbers), values.dtype)
        for row_M, sent in zip(rows_KM, inner, strict=True):
            begin = 0
            matrices = self._matrices(values)
            for place, rows, columns in matrices:
                middle = begin + rows * self.rank
                end = middle + columns * self.rank
                left = sent[begin:middle].view(rows, -1)
                right = sent[middle:end].view(columns, -1)
                torch.mm(left, right.T, out=row_M[place].view(rows, columns))
                begin = end
            for place in _others(matrices, values):
                end = begin + place.stop - place.start
                row_M[place] = sent[begin:end]
                begin = end
        return rows_KM

    def _factors(self, row_M: Tensor, before: Tensor, values: Values) -> tuple[Tensor, Tensor]:
        """The values that one client sends, and its new factors."""
        sent = []
        kept = []
        begin = 0
        matrices = self._matrices(values)
        for place, rows, columns in matrices:
            matrix = row_M[place].view(rows, columns)
            end = begin + columns * self.rank
            # QR in place of the paper's Gram–Schmidt: the same columns, up to signs, which P Qᵀ does not show.
            left = torch.linalg.qr(matrix @ before[begin:end].view(columns, -1)).Q
            right = matrix.T @ left
            sent += [left.flatten(), right.flatten()]
            # A factor of zeros would stay one.
            kept.append(right.flatten() if right.any() else before[begin:end])
            begin = end
        sent += [row_M[place] for place in _others(matrices, values)]
        return torch.cat(sent), torch.cat([*kept, before[:0]])

    def _matrices(self, values: Values) -> list[tuple[slice, int, int]]:
        """Places, rows and columns of the layers that two factors make smaller."""
        found = []
        end = 0
        for shape in values.layers:
            place = slice(end, end + shape.numel())
            end = place.stop
            # A convolution's matrix has a row for each output channel, as the paper reshapes it.
            rows = shape[0] if len(shape) > 1 else 1
            columns = shape.numel() // max(rows, 1)
            # Smaller layers, such as biases, are hardly shorter as two factors, and not worth an error.
            if shape.numel() >= 64 and self.rank * (rows + columns) < rows * columns:
                found.append((place, rows, columns))
        return found


def _others(matrices: list[tuple[slice, int, int]], values: Values) -> list[slice]:
    """Places between and behind the matrices."""
    ends = [0, *(place.stop for place, _, _ in matrices)]
    begins = [*(place.start for place, _, _ in matrices), values.numbers]
    return [slice(end, begin) for end, begin in zip(ends, begins, strict=True)]
