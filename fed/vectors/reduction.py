"""Exact weighted mean of many vectors: the same bits in whatever order and grouping they are added.

Floating-point addition is not associative, so sums are kept exactly: each number is cut along one fixed grid of powers
of two, and the pieces of each cell, *lanes*, are added as integers. Digits below the grid's last line are rounded
away. (After Demmel & Nguyen 2015, "Parallel reproducible summation", doi 10.1109/TC.2014.2345391, with one absolute
grid in place of one that moves, so that merging is plain addition.)

Adding a lane's *magnet*, 1.5 · 2⁵² units, rounds a number to whole units, for float64 holds no others there. The bits
of the result, read as an integer, are that number of units and a constant, the bits of the magnet.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import cache

from fed.errors import FedError
from fed.vectors.tensors import Tensor, torch

__all__ = ["MOST_LANES", "PACKED_BYTES", "WeightedMean"]

_LANE_BITS = 52  # lane l counts units of 2^(52·l - 96)
_LOWEST_EXPONENT = -96  # of the lowest lane's unit: it rounds to nearest, by 2^-97 at most
_USUAL = (1, 0)  # the lanes of all vectors; those of numbers above 2^7 have more
_MOST_USUAL = 2.0**7  # 2^51 units of lane 1
# Pieces have at most 2⁵¹ units each: so many of them add up to an integer of 64 bits.
_MOST_PIECES = 1 << 11
_LARGEST = 2.0**800  # 2²⁰ products below it, and the magnets of their lanes, stay finite
_MOST_ATOMS = 1 << 20
_WORD_BITS = 32
_USUAL_WORDS = 4  # of a packed sum, up to 2³¹; larger ones have more
_PIECE = 1 << 16  # numbers of a piece, so that its lanes stay in a core's cache
_TOGETHER = 1 << 16  # numbers of small vectors that are cut together, half a megabyte
_LONGEST_PRODUCT = 1 << 21  # a longer one is cut at once, since a copy of it in float64 takes much memory

MOST_LANES = 30
"""Largest number of lanes of a packed sum: they hold up to 2⁸²⁰, the sum of 2²⁰ of the largest products."""

PACKED_BYTES = 4 * _USUAL_WORDS
"""Bytes of each number of a packed sum, unless one of them is 2³¹ or more."""


class WeightedMean:
    """A commutative monoid over (vector, weight): ``add``, ``merge``, ``finish``; a new one is its zero.

    .. math:: (Σ_i w_i v_i) / Σ_i w_i

    The product w·v is rounded once, in float64, and to a multiple of 2⁻⁹⁶; the sum of the products is exact, and is
    rounded at the end, to 2⁻⁵² of itself. Memory is O(P) however many vectors are added (two or three lanes for usual
    magnitudes); at most 2²⁰ are. A vector that is refused changes nothing.

    Args:
        size: P, the length of the vectors.
        device: device of the vectors; None: the CPU.

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
        self._lanes: dict[int, Tensor] = {}  # [P], int64
        self._pieces = 0  # in each lane, at most
        self._magnets = 0  # in each of the usual lanes, beside its units
        self._products: list[Tensor] = []  # not cut yet: a single one needs no lanes, small ones are cut together

    def add(self, vector_P: Tensor, weight: float, factor: float = 1.0, *, less_P: Tensor | None = None) -> None:
        """Count a vector with a weight.

        Args:
            vector_P: vector of finite numbers, [P].
            weight: weight of the vector, finite and > 0.
            factor: number that multiplies the vector, and not the weight.
            less_P: vector [P] to subtract first, in float64, piece by piece where it is long; None for none.

        Raises:
            FedError: if the shape is another, a product is not finite and below 2⁸⁰⁰, or 2²⁰ vectors are counted.
        """
        if not (weight > 0 and math.isfinite(weight)):
            raise FedError(f"a weight must be positive and finite, got {weight}")
        if vector_P.shape != (self.size,):
            raise FedError(f"a vector must have the shape ({self.size},), got {tuple(vector_P.shape)}")
        # A single message needs no lanes, and a round with one client is common: its product waits uncut.
        is_first = self.atoms == 0 and self.size <= _LONGEST_PRODUCT
        if is_first or (len(self._products) + 1) * self.size <= _TOGETHER:
            difference_P = vector_P.double() if less_P is None else vector_P.double() - less_P.double()
            product_P = difference_P * (weight * factor)
            if not torch.dot(product_P, product_P).item() < _LARGEST:  # most are far smaller, and one number says so
                _largest(product_P)
            self._count(1, _exact(weight))
            self._products.append(product_P)
            return
        self._count(1, _exact(weight))
        self._cut_products()
        try:
            self._cut(vector_P, weight * factor, less_P)
        except FedError:
            # A refused vector must leave no trace: a round goes on with the others.
            self._count(-1, -_exact(weight))
            raise

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
        # Before the lanes are added: together they could exceed 64 bits.
        self._make_room(other._pieces)
        for index, lane_P in other._lanes.items():
            self._lane(index).add_(lane_P)
        self._magnets += other._magnets

    def packed(self) -> Tensor:
        r"""Pack the exact sum for its way to another process: lanes of P numbers in int32, one after the other.

        .. math:: \sum_i w_i v_i = \sum_l 2^{32 (l - 3)} \, \mathrm{lane}_l

        There are four lanes at least. Equal sums give the same lanes; count and weight are not in them.
        """
        self._cut_products()
        # Lanes of 52 bits are cut into words of 32, since int32 is what the messages carry.
        most_words = _LANE_BITS * self._length // _WORD_BITS + 2  # one of them for the carry
        words = torch.zeros(max(most_words, _USUAL_WORDS), self.size, dtype=torch.int32)
        for start in range(0, self.size, _PIECE):
            for place, word_J in enumerate(_words(self._digits(start))):
                words[place, start : start + _PIECE] = word_J
        used = words.any(1).nonzero()
        return words[: max(int(used[-1]) + 1 if len(used) else 0, _USUAL_WORDS)].flatten()

    @classmethod
    def unpacked(cls, packed: Tensor, size: int, atoms: int, weight: int | Fraction) -> "WeightedMean":
        """Sum that :meth:`packed` has packed.

        Args:
            packed: lanes of the sum; they may come from anyone.
            size: P, the length of the vectors.
            atoms: number of vectors that the sum counts.
            weight: sum of their weights, > 0.

        Raises:
            FedError: if its length is no whole number of lanes, or there are too many.
        """
        lanes = packed.numel() // max(size, 1)
        # The sum may come from a stranger, so that its length is checked before memory is taken for it.
        if packed.numel() != lanes * size or lanes > MOST_LANES:
            raise FedError(f"a packed sum must have up to {MOST_LANES} lanes of {size}, got {packed.numel()} numbers")
        total = cls(size)
        total._count(atoms, weight)
        total._pieces = 8  # no lane has more than the pieces of three words
        for place, word_P in enumerate(packed.view(lanes, size).long()):
            index, shift = divmod(_WORD_BITS * place, _LANE_BITS)
            total._lane(index).add_((word_P & _low_bits(_LANE_BITS - shift)) << shift)
            total._lane(index + 1).add_(word_P >> (_LANE_BITS - shift))
        return total

    def finish(self, *, is_last: bool = False) -> Tensor:
        """The mean [P], in float64.

        Args:
            is_last: True if the sum is not used again, so that the mean may take its memory.

        Raises:
            FedError: if nothing was added.
        """
        if not self.weight:
            raise FedError("the mean of no vectors is undefined: at least one must be added")
        if self.atoms == 1 and self._products:  # on the grid's last line, as lanes would leave it; + 0 makes −0 to 0
            units_P = (self._products[0] * _constant(2.0**-_LOWEST_EXPONENT)).round_()
            return units_P.mul_(_constant(2.0**_LOWEST_EXPONENT)).add_(_constant(0.0)).div_(float(self.weight))
        self._cut_products()
        # Each of its pieces is read before the sum overwrites it.
        lowest_P = self._lanes[0].view(torch.float64) if is_last and self._lanes else None
        sum_P = torch.zeros(self.size, dtype=torch.float64, device=self.device) if lowest_P is None else lowest_P
        for start in range(0, self.size, _PIECE):
            sum_J = torch.zeros(min(_PIECE, self.size - start), dtype=torch.float64, device=self.device)
            for index, digits_J in enumerate(self._digits(start)):
                sum_J.add_(digits_J.double(), alpha=_unit(index))
            sum_P[start : start + _PIECE] = sum_J
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

    def _cut_products(self) -> None:
        """Cut the products that are not yet cut into lanes."""
        products = self._products
        self._products = []
        if len(products) == 1:
            self._cut(products[0])
        elif products and self.size:
            # For small vectors a call costs more than its numbers: they are cut together.
            for begin in range(0, len(products), _MOST_PIECES // 2):
                rest_KP = torch.stack(products[begin : begin + _MOST_PIECES // 2])
                self._make_room(len(rest_KP))
                self._cut_piece(rest_KP, torch.empty_like(rest_KP), 0)
                self._magnets += len(rest_KP)

    def _cut(self, vector_P: Tensor, factor: float = 1.0, less_P: Tensor | None = None) -> None:
        """Cut a vector's products into lanes; a vector that is refused leaves nothing there."""
        self._make_room(1)
        # One pair of buffers for all pieces: fresh pages would cost more than the arithmetic.
        product_J, cut_J = torch.empty(2, min(self.size, _PIECE), dtype=torch.float64, device=self.device)

        def cut(start: int, sign: int) -> None:
            piece_J = vector_P[start : start + _PIECE]
            rest_J = product_J[: len(piece_J)]
            rest_J.copy_(piece_J)
            if less_P is not None:
                rest_J.sub_(less_P[start : start + _PIECE])
            rest_J.mul_(factor)
            self._cut_piece(rest_J, cut_J[: len(piece_J)], start, sign)

        for start in range(0, self.size, _PIECE):
            try:
                cut(start, 1)
            except FedError:
                # Integer lanes take back exactly what they were given: subtraction leaves the bits of before.
                for earlier in range(0, start, _PIECE):
                    cut(earlier, -1)
                raise
        self._magnets += 1

    def _cut_piece(self, rest_J: Tensor, cut_J: Tensor, start: int, sign: int = 1) -> None:
        """Cut a piece, or several [K, J], into lanes, from the highest to the lowest.

        Args:
            rest_J: numbers of the piece; overwritten.
            cut_J: memory of the same shape; overwritten.
            start: place of the piece's first number in the vector.
            sign: 1 to add the piece, -1 to take it off again.

        Raises:
            FedError: if a number is not below 2⁸⁰⁰; then nothing is added.
        """
        flat = rest_J.view(-1)
        if not torch.dot(flat, flat).item() < _MOST_USUAL**2:  # five times as fast as looking for the largest
            exponent = math.frexp(_largest(rest_J))[1]  # all are below 2^exponent
            highest = -((_LOWEST_EXPONENT + _LANE_BITS - 1 - exponent) // _LANE_BITS)
            for index in range(highest, _USUAL[0], -1):
                torch.add(rest_J, _magnet(index), out=cut_J)
                self._add_units(index, cut_J.view(torch.int64) - _magnet_bits(index), start, sign)
                rest_J.sub_(cut_J.sub_(_magnet(index)))
        torch.add(rest_J, _magnet(1), out=cut_J)
        # The two usual lanes keep their magnets' bits, counted in _magnets: a subtraction less for every piece.
        self._add_units(1, cut_J.view(torch.int64), start, sign)
        rest_J.sub_(cut_J.sub_(_magnet(1)))
        self._add_units(0, rest_J.add_(_magnet(0)).view(torch.int64), start, sign)

    def _add_units(self, index: int, units_J: Tensor, start: int, sign: int) -> None:
        if units_J.ndim == 2:  # of whole vectors
            units_J = units_J.sum(0)
            if index not in self._lanes:
                self._lanes[index] = units_J
                return
        self._lane(index)[start : start + len(units_J)].add_(units_J, alpha=sign)

    def _digits(self, start: int) -> Iterator[Tensor]:
        """Piece of each lane in turn, in [−½, ½) of the next lane's unit: the same for equal sums.

        Lanes may cancel each other, and a sum of them in float64 would by then have lost the lower digits. So each lane
        first hands its whole units of the next lane to that lane.
        """
        carry_J = torch.zeros(min(_PIECE, self.size - start), dtype=torch.int64, device=self.device)
        index = 0
        while index < self._length or carry_J.any():
            units_J = carry_J
            if index in self._lanes:
                units_J = self._lanes[index][start : start + _PIECE] + carry_J
                if index in _USUAL:
                    units_J -= _as_int64(self._magnets * _magnet_bits(index))
            digits_J, carry_J = _split(units_J, _LANE_BITS)
            yield digits_J
            index += 1

    def _make_room(self, pieces: int) -> None:
        """Have room for more pieces in all lanes: if need be each lane first hands its carries to the next."""
        if self._pieces + pieces > _MOST_PIECES:
            for start in range(0, self.size, _PIECE):
                for index, digits_J in enumerate(list(self._digits(start))):
                    self._lane(index)[start : start + _PIECE] = digits_J
            self._pieces = 1
            self._magnets = 0
        self._pieces += pieces

    @property
    def _length(self) -> int:
        """The number of lanes, those among them that nothing was added to."""
        return max(self._lanes, default=-1) + 1

    def _lane(self, index: int) -> Tensor:
        if index not in self._lanes:
            self._lanes[index] = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        return self._lanes[index]


def _exact(weight: float) -> int | Fraction:
    return int(weight) if float(weight).is_integer() else Fraction(weight)


def _largest(numbers_J: Tensor) -> float:
    """The largest absolute value.

    Raises:
        FedError: if it is not below 2⁸⁰⁰.
    """
    lowest, highest = torch.aminmax(numbers_J)  # both are NaN where one number is; vector_norm takes 20 times as long
    largest = max(-lowest.item(), highest.item())
    if not largest < _LARGEST:  # true for NaN too
        raise FedError(f"a vector's numbers must be finite and below {_LARGEST:.0e}, got {largest}")
    return largest


def _unit(index: int) -> float:
    return math.ldexp(1.0, _LANE_BITS * index + _LOWEST_EXPONENT)


@cache
def _constant(value: float) -> Tensor:
    """A number as a tensor, with which small tensors are computed in less time than with a number."""
    return torch.tensor(value, dtype=torch.float64, device="cpu")


@cache
def _magnet(index: int) -> Tensor:
    return _constant(math.ldexp(1.5, 52 + _LANE_BITS * index + _LOWEST_EXPONENT))


@cache
def _magnet_bits(index: int) -> int:
    return int(_magnet(index).view(torch.int64))


def _as_int64(number: int) -> int:
    """Lowest 64 bits of an integer, read with a sign, as sums of 64 bits hold it."""
    return ((number + (1 << 63)) & _low_bits(64)) - (1 << 63)


def _low_bits(count: int) -> int:
    return (1 << count) - 1


def _split(units_J: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Integers as digits in [−2ᵇ⁻¹, 2ᵇ⁻¹), and as their carries to the next digit."""
    # Half a unit is added first: balanced digits make a small negative sum short, not all ones up to the top.
    carry_J = (units_J + (1 << (bits - 1))) >> bits
    return units_J - (carry_J << bits), carry_J


def _words(digits: Iterator[Tensor]) -> Iterator[Tensor]:
    """Digits of lanes as digits of 32 bits, in [−2³¹, 2³¹)."""
    carry_J = torch.zeros((), dtype=torch.int64)
    place = 0
    for index, digits_J in enumerate(digits):
        if _LANE_BITS * index >= _WORD_BITS * (place + 1):  # no lane begins in this word
            word_J, carry_J = _split(carry_J, _WORD_BITS)
            yield word_J
            place += 1
        shift = _LANE_BITS * index - _WORD_BITS * place
        low_J = (digits_J & _low_bits(_WORD_BITS - shift)) << shift
        high_J = digits_J >> (_WORD_BITS - shift)
        word_J, carry_J = _split(low_J + carry_J, _WORD_BITS)
        yield word_J
        carry_J = carry_J + high_J
        place += 1
    while carry_J.any():
        word_J, carry_J = _split(carry_J, _WORD_BITS)
        yield word_J
