"""The weighted mean of many vectors, the same to the bit in whatever order and grouping they are added.

Floating-point addition is not associative, so sums are kept exactly: each number is cut along one fixed grid of powers
of two, and the pieces of each cell, *lanes*, are added as integers that float64 holds without rounding. What lies below
the grid's last line is dropped. (After Demmel & Nguyen 2015, "Parallel reproducible summation", doi
10.1109/TC.2014.2345391, with one absolute grid in place of one that moves, so that merging is plain addition.)

Shapes: P, the length of the vectors.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from fed.errors import FedError

__all__ = ["WeightedMean"]

_LANE_BITS = 32  # of the 53 bits of a lane, 21 are left for carries
_LOWEST = -3  # the lowest lane's unit is 2^(32·-3): what is below 2^-97 is dropped
_LARGEST = 2.0**800
_MOST_ATOMS = 2 ** (52 - _LANE_BITS)
_PIECE = 1 << 14  # numbers of a piece, so that its lanes stay in a core's cache


class WeightedMean:
    """A commutative monoid over (vector, weight): ``add``, ``merge``, ``finish``; a new one is its zero.

    .. math:: (Σ_i w_i v_i) / Σ_i w_i

    The product w·v is rounded once, in float64; the sum of the products is exact down to 2⁻⁹⁷ and rounded once at the
    end. Memory is O(P) however many vectors are added (four or five lanes for usual magnitudes); at most 2²⁰ are.

    Args:
        size: P.
        device: where the vectors are.

    Example:
        >>> mean = WeightedMean(1)
        >>> for value in (1e16, 1.0, -1e16):
        ...     mean.add(torch.tensor([value]), 1)
        >>> mean.finish() * 3
        tensor([1.], dtype=torch.float64)
    """

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        self.size = size
        self.device = device
        self.atoms = 0
        self.weight = Fraction(0)
        self._lanes: dict[int, Tensor] = {}

    def add(self, vector_P: Tensor, weight: float) -> None:
        """Count a vector with a weight.

        Args:
            vector_P: [P], finite.
            weight: positive and finite.

        Raises:
            FedError: if a number is not finite or above 2⁸⁰⁰, or more than 2²⁰ vectors are added.
        """
        if not (weight > 0 and math.isfinite(weight)):
            raise FedError(f"a weight must be positive and finite, got {weight}")
        self._count(1, Fraction(weight))
        scratch_2p = torch.empty(2, min(self.size, _PIECE), dtype=torch.float64, device=self.device)
        for start in range(0, self.size, _PIECE):
            piece_p = vector_P[start : start + _PIECE]
            rest_p, cut_p = scratch_2p[:, : len(piece_p)]
            self._add_piece(rest_p.copy_(piece_p).mul_(weight), cut_p, start)

    def merge(self, other: "WeightedMean") -> None:
        """Count all that another sum has counted."""
        self._count(other.atoms, other.weight)
        for index, lane_P in other._lanes.items():
            self._lane(index).add_(lane_P)

    def finish(self) -> Tensor:
        """The mean [P], in float64.

        Raises:
            FedError: if nothing was added.
        """
        if not self.weight:
            raise FedError("the mean of no vectors is undefined: at least one must be added")
        sum_P = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        for index in sorted(self._lanes):
            sum_P += self._lanes[index]
        return sum_P / float(self.weight)

    def _count(self, atoms: int, weight: Fraction) -> None:
        self.atoms += atoms
        self.weight += weight
        if self.atoms > _MOST_ATOMS:
            raise FedError(
                f"a mean counts at most {_MOST_ATOMS} vectors, got {self.atoms}: reduce them in groups first"
            )

    def _add_piece(self, rest_p: Tensor, cut_p: Tensor, start: int) -> None:
        """Cut a piece into lanes, from the highest that it reaches to the lowest, or until nothing is left."""
        for index in range(_highest_lane(rest_p), _LOWEST - 1, -1):
            magnet = math.ldexp(1.5, 52 + _LANE_BITS * index)  # adding it rounds to a multiple of 2^(32·index)
            torch.add(rest_p, magnet, out=cut_p).sub_(magnet)
            self._lane(index)[start : start + len(rest_p)] += cut_p
            if index == _LOWEST or not rest_p.sub_(cut_p).any():
                return

    def _lane(self, index: int) -> Tensor:
        if index not in self._lanes:
            self._lanes[index] = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        return self._lanes[index]


def _highest_lane(numbers_p: Tensor) -> int:
    """The highest lane in which these numbers leave anything: half a unit rounds to nothing."""
    largest = float(torch.linalg.vector_norm(numbers_p, math.inf))
    if not largest < _LARGEST:
        raise FedError(f"a vector's numbers must be finite and below {_LARGEST:.0e}, got {largest}")
    return math.frexp(largest)[1] // _LANE_BITS  # largest < 2^exponent
