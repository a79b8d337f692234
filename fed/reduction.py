"""Exact weighted mean of many vectors: the same bits in whatever order and grouping they are added.

Floating-point addition is not associative, so sums are kept exactly: each number is cut along one fixed grid of powers
of two, and the pieces of each cell, *lanes*, are added as integers that float64 holds without rounding. What lies below
the grid's last line is rounded away. (After Demmel & Nguyen 2015, "Parallel reproducible summation", doi
10.1109/TC.2014.2345391, with one absolute grid in place of one that moves, so that merging is plain addition.)

Shapes: see :mod:`fed.layout`.
"""

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction

from fed.errors import FedError
from fed.tensors import Tensor, torch

__all__ = ["MOST_LANES", "PACKED_BYTES", "WeightedMean"]

_LANE_BITS = 32  # of the 53 bits of a lane, 21 are left for carries
_LOWEST = -3  # the lowest lane's unit is 2^(32·-3): it rounds to nearest, by 2^-97 at most
_LOWEST_EXPONENT = _LANE_BITS * _LOWEST
_LARGEST = 2.0**800  # 2²⁰ products below it, and the magnets of their lanes, stay finite
# Pieces have at most 2³² units each: 2²⁰ of them add up to 2⁵² at most, which float64 holds without rounding.
_MOST_ATOMS = 2 ** (52 - _LANE_BITS)
_USUAL_LANES = 4  # of a packed sum, up to 2³¹; larger ones have more
_PIECE = 1 << 14  # numbers of a piece, so that its lanes stay in a core's cache
_LONGEST_PRODUCT = 1 << 21  # a longer one is cut at once, since a copy of it in float64 takes much memory

MOST_LANES = 30
"""Lanes that a packed sum can have: up to 2⁸²⁰, of 2²⁰ of the largest products."""

PACKED_BYTES = 4 * _USUAL_LANES
"""Bytes of each number of a packed sum, unless one of them is 2³¹ or more."""


class WeightedMean:
    """A commutative monoid over (vector, weight): ``add``, ``merge``, ``finish``; a new one is its zero.

    .. math:: (Σ_i w_i v_i) / Σ_i w_i

    The product w·v is rounded once, in float64, and to a multiple of 2⁻⁹⁶; the sum of the products is exact, and is
    rounded at the end, to 2⁻⁵² of itself. Memory is O(P) however many vectors are added (four or five lanes for usual
    magnitudes); at most 2²⁰ are. What is refused changes nothing.

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

    def __init__(self, size: int, device: "torch.device | None" = None) -> None:
        self.size = size
        self.device = device
        self.atoms = 0
        self.weight: int | Fraction = 0  # exact; fractions take ten times as long as whole numbers
        self._lanes: dict[int, Tensor] = {}
        self._products: list[Tensor] = []  # not cut yet: a single one needs no lanes, small ones are cut together

    def add(self, vector_P: Tensor, weight: float, factor: float = 1.0, *, less_P: Tensor | None = None) -> None:
        """Count a vector with a weight.

        Args:
            vector_P: [P], finite.
            weight: positive and finite.
            factor: multiplies the vector, and not the weight.
            less_P: what counts is the vector less this one, [P], in float64, piece by piece where it is long.

        Raises:
            FedError: if the shape is another, a product is not finite and below 2⁸⁰⁰, or 2²⁰ vectors are counted.
        """
        if not (weight > 0 and math.isfinite(weight)):
            raise FedError(f"a weight must be positive and finite, got {weight}")
        if vector_P.shape != (self.size,):
            raise FedError(f"a vector must have the shape ({self.size},), got {tuple(vector_P.shape)}")
        is_first = self.atoms == 0 and self.size <= _LONGEST_PRODUCT
        if is_first or (len(self._products) + 1) * self.size <= _PIECE:
            product_P = _difference(vector_P, less_P) * (weight * factor)
            if not torch.dot(product_P, product_P).item() < _LARGEST:  # most are far smaller, and one number says so
                _highest_lane(product_P, 1)
            self._count(1, _exact(weight))
            self._products.append(product_P)
            return
        # first, since it may refuse the vector: nothing is counted until all of it is known to be good
        highest = [_highest_lane(piece_J, weight * factor) for _, piece_J in self._pieces(vector_P, less_P)]
        self._count(1, _exact(weight))
        self._cut_products()
        self._cut(self._pieces(vector_P, less_P), highest, weight * factor)

    def merge(self, other: "WeightedMean") -> None:
        """Count all that another sum has counted.

        Raises:
            FedError: if its vectors are of another length, or there are more than 2²⁰ vectors together.
        """
        if other.size != self.size:
            raise FedError(f"means of one length can be merged, got {self.size} and {other.size}")
        self._count(other.atoms, other.weight)
        self._cut_products()
        self._products = [*other._products]  # a list of its own: the other sum may continue
        for index, lane_P in other._lanes.items():
            self._lane(index).add_(lane_P)

    def packed(self) -> Tensor:
        r"""Pack the exact sum for its way to another process: lanes of P numbers in int32, one after the other.

        .. math:: \sum_i w_i v_i = \sum_l 2^{32 (l - 3)} \, \mathrm{lane}_l

        There are four lanes at least. Equal sums give the same lanes; count and weight are not in them.
        """
        self._cut_products()
        highest = max(self._lanes, default=_LOWEST) + 2  # one for the carry
        lanes = torch.zeros(max(highest - _LOWEST, _USUAL_LANES), self.size, dtype=torch.int32)
        for start in range(0, self.size, _PIECE):
            for index, digits_J in self._digits(start, highest):
                lanes[index - _LOWEST, start : start + _PIECE] = digits_J * math.ldexp(1, -_LANE_BITS * index)
        used = lanes.any(1).nonzero()
        return lanes[: max(int(used[-1]) + 1 if len(used) else 0, _USUAL_LANES)].flatten()

    @classmethod
    def unpacked(cls, packed: Tensor, size: int, atoms: int, weight: int | Fraction) -> "WeightedMean":
        """Sum that :meth:`packed` has packed.

        Args:
            packed: its lanes, from anyone.
            size: P.
            atoms: the number of vectors that it counts.
            weight: of all of them, above 0.

        Raises:
            FedError: if its length is no whole number of lanes, or there are too many.
        """
        lanes = packed.numel() // max(size, 1)
        if packed.numel() != lanes * size or lanes > MOST_LANES:
            raise FedError(f"a packed sum must have up to {MOST_LANES} lanes of {size}, got {packed.numel()} numbers")
        total = cls(size)
        total._count(atoms, weight)
        total._lanes = {
            place + _LOWEST: lane_P * math.ldexp(1, _LANE_BITS * (place + _LOWEST))
            for place, lane_P in enumerate(packed.view(lanes, size).double())
        }
        return total

    def finish(self, *, is_last: bool = False) -> Tensor:
        """The mean [P], in float64.

        Args:
            is_last: nothing else is asked of this sum, whose memory the mean takes.

        Raises:
            FedError: if nothing was added.
        """
        if not self.weight:
            raise FedError("the mean of no vectors is undefined: at least one must be added")
        if self.atoms == 1 and self._products:  # on the grid's last line, as lanes would leave it; 0 + makes −0 to 0
            units_P = (self._products[0] * 2.0**-_LOWEST_EXPONENT).round_()
            zero = units_P.new_zeros(())
            return torch.add(zero, units_P, alpha=2.0**_LOWEST_EXPONENT).div_(float(self.weight))
        self._cut_products()
        # each of its pieces is read before the sum overwrites it
        lowest_P = self._lanes[min(self._lanes)] if is_last and self._lanes else None
        sum_P = torch.zeros(self.size, dtype=torch.float64, device=self.device) if lowest_P is None else lowest_P
        for start in range(0, self.size, _PIECE):
            sum_P[start : start + _PIECE] = self._summed_piece(start)
        if is_last:
            self._lanes = {}
        return sum_P.div_(float(self.weight))

    def _count(self, atoms: int, weight: int | Fraction) -> None:
        if self.atoms + atoms > _MOST_ATOMS:
            raise FedError(
                f"a mean counts at most {_MOST_ATOMS} vectors, got {self.atoms + atoms}: reduce them in groups first"
            )
        self.atoms += atoms
        self.weight += weight

    def _pieces(self, vector_P: Tensor, less_P: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, self.size, _PIECE):
            piece_J = vector_P[start : start + _PIECE]
            yield start, piece_J if less_P is None else _difference(piece_J, less_P[start : start + _PIECE])

    def _cut_products(self) -> None:
        """Cut the products that are not yet cut into lanes."""
        products, self._products = self._products, []
        if len(products) == 1:
            highest = [_highest_lane(piece_J, 1) for _, piece_J in self._pieces(products[0])]
            self._cut(self._pieces(products[0]), highest, 1)
        elif products and self.size:
            # for small vectors a call costs more than its numbers: they are cut together
            rest_KP = torch.stack(products)
            self._add_piece(rest_KP, torch.empty_like(rest_KP), 0, _highest_lane(rest_KP, 1))

    def _cut(self, pieces: Iterable[tuple[int, Tensor]], highest: list[int], weight: float) -> None:
        longest = min(self.size, _PIECE)
        rest_J, cut_J = (torch.empty(longest, dtype=torch.float64, device=self.device) for _ in range(2))
        for (start, piece_J), lane in zip(pieces, highest, strict=True):
            if piece_J.shape != rest_J.shape:  # the last one
                rest_J, cut_J = rest_J[: len(piece_J)], cut_J[: len(piece_J)]
            self._add_piece(rest_J.copy_(piece_J).mul_(weight), cut_J, start, lane)

    def _add_piece(self, rest_J: Tensor, cut_J: Tensor, start: int, highest: int) -> None:
        """Cut a piece, or several [K, J], into lanes, from the highest to the lowest, or until nothing is left."""
        flat = rest_J.view(-1)
        for index in range(highest, _LOWEST - 1, -1):
            _round_to_lane(rest_J, index, out=cut_J)
            # a sum of multiples of one unit is exact
            lane_P, summed_J = self._lane(index), cut_J if cut_J.ndim == 1 else cut_J.sum(0)
            (lane_P if summed_J.shape == lane_P.shape else lane_P[start : start + len(summed_J)]).add_(summed_J)
            rest_J.sub_(cut_J)
            # Ten times as fast as counting; a number whose square underflows lies far below the grid.
            if index == _LOWEST or not torch.dot(flat, flat):
                return

    def _summed_piece(self, start: int) -> Tensor:
        """Sum of a piece's lanes, rounded to 2⁻⁵² of itself, the same for equal sums."""
        sum_J = torch.zeros(min(_PIECE, self.size - start), dtype=torch.float64, device=self.device)
        for _, digits_J in self._digits(start, max(self._lanes, default=_LOWEST) + 2):
            sum_J += digits_J
        return sum_J

    def _digits(self, start: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Piece of each lane in turn, up to before ``end``, in [−½, ½) of the next lane's unit.

        Lanes may cancel each other, and a plain sum would by then have lost what stands below. So each first hands to
        the next what is worth whole units there.
        """
        carry_J = torch.zeros(min(_PIECE, self.size - start), dtype=torch.float64, device=self.device)
        for index in range(min(self._lanes, default=_LOWEST), end):
            lane_J = self._lanes[index][start : start + _PIECE] + carry_J if index in self._lanes else carry_J
            unit = math.ldexp(1, _LANE_BITS * (index + 1))
            # exact, since a lane has 52 bits at most; not rounded to even: what is even depends on how lanes were added
            carry_J = (lane_J * (1 / unit)).add_(0.5).floor_().mul_(unit)
            yield index, lane_J.sub_(carry_J)
            if index >= max(self._lanes, default=index) and not carry_J.any():
                return

    def _lane(self, index: int) -> Tensor:
        if index not in self._lanes:
            self._lanes[index] = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        return self._lanes[index]


def _difference(vector_P: Tensor, less_P: Tensor | None) -> Tensor:
    return vector_P.double() if less_P is None else vector_P.double() - less_P.double()


def _exact(weight: float) -> int | Fraction:
    return int(weight) if float(weight).is_integer() else Fraction(weight)


def _highest_lane(numbers_J: Tensor, weight: float) -> int:
    """The highest lane in which these numbers' products leave anything: half a unit rounds to nothing."""
    lowest, highest = torch.aminmax(numbers_J)  # both are NaN where one number is; vector_norm takes 20 times as long
    largest = max(-lowest.item(), highest.item()) * weight
    if not largest < _LARGEST:  # true for NaN too
        raise FedError(f"a vector's numbers must be finite and below {_LARGEST:.0e}, got {largest}")
    return math.frexp(largest)[1] // _LANE_BITS  # largest < 2^exponent


def _round_to_lane(numbers_J: Tensor, index: int, out: Tensor | None = None) -> Tensor:
    """Numbers below 2^51 units of a lane, rounded to whole units."""
    magnet = math.ldexp(1.5, 52 + _LANE_BITS * index)  # beside it float64 holds no more than multiples of 2^(32·index)
    return torch.add(numbers_J, magnet, out=out).sub_(magnet)
