"""Sparsifiers: codecs that send a few of the values, and where they are.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveFloat

from fed.compression.bits import pack, packed_bytes, positions_bytes, read_positions, unpack, write_positions
from fed.compression.blocks import as_bytes, from_bytes
from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values
from fed.compression.pieces import empty, pieces
from fed.config.hyperparameters import DecayRate
from fed.errors import InvalidPayload
from fed.vectors.tensors import Tensor, torch

__all__ = ["DGC", "STC", "Fraction", "RandomK", "Threshold", "TopK", "count_of", "largest", "scattered"]

_SAMPLE = 1 << 13  # values from which a threshold is estimated
_COUNT = np.dtype("<u4")

Fraction = Annotated[float, Field(gt=0, le=1)]
"""Share of the values, in (0, 1]."""


def count_of(fraction: float, numbers: int) -> int:
    """Number of values that are kept: at least one."""
    return min(numbers, max(1, round(fraction * numbers)))


def largest(rows_KM: Tensor, count: int) -> Tensor:
    """Ascending positions of the largest magnitudes of each row, the first of equal ones, [K, count] on the CPU."""
    numbers_KM = rows_KM.numpy()
    if numbers_KM.shape[1] < 8 * _SAMPLE:
        return torch.from_numpy(_largest(np.abs(numbers_KM), count))
    return torch.from_numpy(np.stack([_largest_of_many(row_M, count) for row_M in numbers_KM]))


def _largest(magnitudes_KM: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    rows, numbers = magnitudes_KM.shape
    least_K1 = np.partition(magnitudes_KM, numbers - count, axis=1)[:, numbers - count, None]
    are_kept = magnitudes_KM > least_K1
    # Of equal magnitudes the first ones, so that the choice is the same on every machine.
    missing_K1 = count - are_kept.sum(1, keepdims=True)
    equal = magnitudes_KM == least_K1
    are_kept |= equal & (np.cumsum(equal, axis=1) <= missing_K1)
    return np.nonzero(are_kept)[1].reshape(rows, count)


def _largest_of_many(row_M: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """The same of one long row: a threshold from a sample leaves few values to choose from."""
    sample = np.sort(np.abs(row_M[:: len(row_M) // _SAMPLE]))
    expected = len(sample) * count / len(row_M)
    # Four standard deviations below the expected place: the threshold is hardly ever too high.
    place = len(sample) - 1 - int(expected + 4 * expected**0.5 + 4)
    if place > 0 and len(candidates := _at_least(row_M, sample[place])) >= count:
        return candidates.take(_largest(np.abs(row_M[None, candidates]), count).ravel())
    return _largest(np.abs(row_M[None]), count).ravel()


def _at_least(row_M: NDArray[np.floating], magnitude: float) -> NDArray[np.int64]:
    """Ascending positions of magnitudes that reach this one."""
    parts = [columns for _, columns in pieces((1, len(row_M)))]
    found = [np.flatnonzero(np.abs(row_M[part]) >= magnitude) + part.start for part in parts]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def scattered(positions_KJ: Rows, inner: Rows, values: Values) -> Tensor:
    """Vectors of zeros, [K, M], with values at positions.

    Args:
        positions_KJ: positions in each vector.
        inner: values at these positions.
        values: description of the vectors.
    """
    rows_KM = empty((len(positions_KJ), values.numbers), values.dtype).zero_()
    for row_M, positions_J, values_J in zip(rows_KM, positions_KJ, inner, strict=True):
        row_M[positions_J] = values_J
    return rows_KM


@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    r"""The values of largest magnitude, with their positions in a Golomb–Rice code (Aji & Heafield 2017, 1704.05021).

    .. math:: ‖C(x) - x‖² ≤ (1 - k/d) ‖x‖²

    A contraction behind it, with δ' of its own, makes a chain with δ = δ' k/d.

    Args:
        fraction: k/d in (0, 1], the share of the values that are sent; at least one is.
    """

    gives: ClassVar = "values"
    is_contraction: ClassVar[bool] = True
    keeps_contractions: ClassVar[bool] = True  # values that are left out and values that are sent share no place
    bound: ClassVar[str] = "δ ≥ k/d"
    selects: ClassVar[bool] = True
    has_fixed_size: ClassVar[bool] = False

    fraction: Fraction = 0.01

    def size_bytes(self, values: Values) -> int:
        """Bytes of the positions."""
        return positions_bytes(count_of(self.fraction, values.numbers), values.numbers)

    def inner(self, values: Values, content: Tensor | None = None) -> Values:
        """The values that are sent."""
        return values._replace(numbers=count_of(self.fraction, values.numbers), layers=())

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Choose the largest values."""
        positions_KJ = largest(rows_KM, count_of(self.fraction, values.numbers))
        code = [torch.from_numpy(write_positions(row.numpy(), values.numbers)) for row in positions_KJ]
        return Encoded(code, rows_KM.gather(1, positions_KJ.to(rows_KM.device)))

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Put the values back at their positions."""
        count = count_of(self.fraction, values.numbers)
        return scattered([_positions(code, count, values) for code in content], inner, values)


@dataclass(frozen=True, kw_only=True)
class RandomK(Codec):
    r"""Values at random positions, common to a round, which are not sent (Stich et al. 2018, 1809.07599).

    .. math:: C(x)_i = x_i d/k \text{ where i is chosen}, \qquad E ‖C(x) - x‖² = (d/k - 1) ‖x‖²

    Unbiased and linear.

    Args:
        fraction: k/d in (0, 1], the share of the values that are sent; at least one is.
    """

    gives: ClassVar = "values"
    is_linear: ClassVar[bool] = True
    is_common: ClassVar[bool] = True
    is_unbiased: ClassVar[bool] = True
    bound: ClassVar[str] = "ω = d/k − 1"

    fraction: Fraction = 0.01

    def size_bytes(self, values: Values) -> int:
        """Zero: the positions follow from the round."""
        return 0

    def shrinkage(self, values: Values) -> float:
        """k/d: the chosen values as they are."""
        return count_of(self.fraction, values.numbers) / values.numbers

    def inner(self, values: Values, content: Tensor | None = None) -> Values:
        """The values that are sent."""
        return values._replace(numbers=count_of(self.fraction, values.numbers), layers=())

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Take the values of the round's positions."""
        positions_KJ = torch.stack(self._positions(len(rows_KM), values, draw))
        kept_KJ = rows_KM.gather(1, positions_KJ.to(rows_KM.device))
        nothing = torch.empty(len(rows_KM), 0, dtype=torch.uint8)
        return Encoded(nothing, kept_KJ * (values.numbers / positions_KJ.shape[1]))

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Put the values back at their positions."""
        return scattered(self._positions(len(inner), values, draw), inner, values)

    def _positions(self, rows: int, values: Values, draw: Draw) -> list[Tensor]:
        count = count_of(self.fraction, values.numbers)
        # Drawn once a round, and shared by all clients of it.
        by_round: dict[int, Tensor] = {}
        for row, number in enumerate(draw.rounds[:rows]):
            if number not in by_round:
                chosen = draw.common(row).choice(values.numbers, count, replace=False, shuffle=False)
                by_round[number] = torch.from_numpy(np.sort(chosen))
        return [by_round[number] for number in draw.rounds[:rows]]


@dataclass(frozen=True, kw_only=True)
class Threshold(Codec):
    """The values of at least some magnitude, as many as there are, with their positions (Strom 2015).

    Positions take a Golomb–Rice code. The error of each value is below the threshold.

    Args:
        magnitude: smallest magnitude that is sent, > 0.
    """

    gives: ClassVar = "values"
    selects: ClassVar[bool] = True
    has_fixed_size: ClassVar[bool] = False
    bound: ClassVar[str] = "|C(x)ᵢ − xᵢ| < magnitude"

    magnitude: PositiveFloat = 0.01

    def size_bytes(self, values: Values) -> int:
        """The number of values, and their positions."""
        # A Golomb–Rice code takes at most 1.08 bits for each place where one may be, and a byte a plane.
        return _COUNT.itemsize + packed_bytes(values.numbers + values.numbers // 8, 1) + 33

    def inner(self, values: Values, content: Tensor | None = None) -> Values:
        """The values that are sent."""
        count = values.numbers if content is None else _count(content, values)
        return values._replace(numbers=count, layers=())

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Choose the values that are large enough."""
        chosen = [torch.from_numpy(_at_least(row_M, self.magnitude)) for row_M in rows_KM.numpy()]
        kept = [row_M[positions] for row_M, positions in zip(rows_KM, chosen, strict=True)]
        return Encoded([_with_count(positions, values) for positions in chosen], kept)

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Put the values back at their positions."""
        return scattered([_counted_positions(code, values) for code in content], inner, values)


@dataclass(frozen=True, kw_only=True)
class STC(Codec):
    r"""Sparse ternary compression: signs of the largest values, and a magnitude (Sattler et al. 2019, 1903.02891).

    .. math:: C(x)_i = μ \operatorname{sign}(x_i) \text{ where } |x_i| \text{ is among the k largest}, \qquad
        ‖C(x) - x‖² = ‖x‖² - k μ² ≤ (1 - \min(1/k, k/d)) ‖x‖²

    with their mean magnitude μ. Positions take a Golomb–Rice code, signs a bit.

    Args:
        fraction: k/d in (0, 1], the share of the values that are sent; at least one is.
    """

    is_contraction: ClassVar[bool] = True
    bound: ClassVar[str] = "δ = kμ²/‖x‖² ≥ min(1/k, k/d)"
    selects: ClassVar[bool] = True
    has_fixed_size: ClassVar[bool] = False

    fraction: Fraction = 0.01

    def size_bytes(self, values: Values) -> int:
        """The magnitude, the signs and the positions."""
        count = count_of(self.fraction, values.numbers)
        return values.dtype.itemsize + packed_bytes(count, 1) + positions_bytes(count, values.numbers)

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Choose the largest, and keep their signs."""
        positions_KJ = largest(rows_KM, count_of(self.fraction, values.numbers))
        kept_KJ = rows_KM.gather(1, positions_KJ.to(rows_KM.device))
        means_K1 = kept_KJ.abs().double().mean(1, keepdim=True).to(values.dtype)
        head = torch.cat([as_bytes(means_K1), torch.from_numpy(pack(kept_KJ.numpy() >= 0, 1))], 1)
        codes = [torch.from_numpy(write_positions(row.numpy(), values.numbers)) for row in positions_KJ]
        return Encoded([torch.cat(parts) for parts in zip(head, codes, strict=True)])

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Put the magnitude, with its signs, back at the positions."""
        count = count_of(self.fraction, values.numbers)
        begin = values.dtype.itemsize
        end = begin + packed_bytes(count, 1)
        if any(len(one) < end for one in content):
            raise InvalidPayload(f"the magnitude and {count} signs take {end} bytes")
        head_KO = torch.stack([one[:end] for one in content])
        signs_KJ = torch.from_numpy(unpack(head_KO[:, begin:].numpy(), 1, count)).to(values.dtype).mul_(2).sub_(1)
        positions = [_positions(one[end:], count, values) for one in content]
        return scattered(positions, signs_KJ * from_bytes(head_KO[:, :begin], values.dtype), values)


@dataclass(frozen=True, kw_only=True)
class DGC(Codec):
    r"""Deep gradient compression: the largest values of a residual with momentum (Lin et al. 2018, 1712.01887).

    .. math:: u ← m u + g, \qquad v ← v + u, \qquad C = \text{the values of v of largest magnitude}

    Values that are sent are set to zero in v and u (momentum factor masking); the others wait in v for later rounds, so
    that error feedback around this codec is refused. g is the client's update.

    Args:
        fraction: share of the values that are sent after the warm-up, in (0, 1].
        momentum: m in [0, 1), the share of u that stays each round.
        warm_up_rounds: rounds in which the fraction falls from a quarter of the values to its own, by the same factor
            each round.
        clip: largest norm of g, > 0; unless given there is no bound. The paper's is the norm of all clients' gradients
            together times N^−½ for N clients.
    """

    gives: ClassVar = "values"
    keeps_residual: ClassVar[bool] = True
    bound: ClassVar[str] = "what was sent and v are the sum of all updates, where m = 0"
    selects: ClassVar[bool] = True
    comes_first: ClassVar[str] = "keeps a residual of the whole update"
    has_fixed_size: ClassVar[bool] = False

    fraction: Fraction = 0.001
    momentum: DecayRate = 0.9
    warm_up_rounds: NonNegativeInt = 4
    clip: PositiveFloat | None = None

    def init(self, values: Values) -> CodecState:
        """A momentum and a residual of zeros."""
        return {name: torch.zeros(values.numbers, dtype=values.dtype) for name in ("momentum", "residual")}

    def size_bytes(self, values: Values) -> int:
        """The number of values, and their positions."""
        return _COUNT.itemsize + positions_bytes(self._most(values.numbers), values.numbers)

    def inner(self, values: Values, content: Tensor | None = None) -> Values:
        """The values that are sent."""
        count = self._most(values.numbers) if content is None else _count(content, values)
        return values._replace(numbers=count, layers=())

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Add the updates to the waiting values, and send the largest ones."""
        momentum_KM = self.momentum * state["momentum"] + self._clipped(rows_KM)
        residual_KM = state["residual"] + momentum_KM
        # Row by row: under asynchronous rounds the rows of one call may be of several.
        counts = [count_of(self._fraction(number), values.numbers) for number in draw.rounds]
        positions = [largest(row_M[None], count)[0] for row_M, count in zip(residual_KM, counts, strict=True)]
        kept = [row_M[places] for row_M, places in zip(residual_KM, positions, strict=True)]
        lost = {"momentum": momentum_KM, "residual": residual_KM}
        # Copies, for a message that is lost must leave all values waiting.
        counted = {name: part_KM.clone() for name, part_KM in lost.items()}
        for part_KM in counted.values():
            for row_M, places in zip(part_KM, positions, strict=True):
                row_M[places] = 0
        content = [_with_count(places, values) for places in positions]
        return Encoded(content, values=kept, counted=counted, lost=lost)

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Put the values back at their positions."""
        return scattered([_counted_positions(code, values) for code in content], inner, values)

    def _fraction(self, number: int) -> float:
        """The fraction of a round: a quarter in the first, and from round to round by the same factor less."""
        if number > self.warm_up_rounds or self.fraction >= 0.25:
            return self.fraction
        return float(0.25 * (self.fraction / 0.25) ** ((number - 1) / self.warm_up_rounds))

    def _most(self, numbers: int) -> int:
        return count_of(self._fraction(1), numbers)

    def _clipped(self, rows_KM: Tensor) -> Tensor:
        if self.clip is None:
            return rows_KM
        norms_K1 = torch.linalg.vector_norm(rows_KM, dim=1, keepdim=True, dtype=torch.float64)
        # By the larger of norm and clip: the factor is 1 at most, and nothing is divided by 0.
        return torch.mul(rows_KM, (self.clip / norms_K1.clamp_min(self.clip)).to(rows_KM.dtype))


def _positions(code: Tensor, count: int, values: Values) -> Tensor:
    return torch.from_numpy(read_positions(code.numpy(), count, values.numbers))


def _with_count(positions_J: Tensor, values: Values) -> Tensor:
    """The number of positions, and their code."""
    code = write_positions(positions_J.cpu().numpy(), values.numbers)
    return torch.from_numpy(np.concatenate([np.array([len(positions_J)], _COUNT).view(np.uint8), code]))


def _count(content: Tensor, values: Values) -> int:
    """The number of positions that a content begins with."""
    if len(content) < _COUNT.itemsize:
        raise InvalidPayload(f"the number of positions takes {_COUNT.itemsize} bytes, got {len(content)}")
    count = int(content[: _COUNT.itemsize].numpy().view(_COUNT)[0])
    # The count may come from anyone, and decides how much memory the values take.
    if count > values.numbers:
        raise InvalidPayload(f"there can be {values.numbers} positions at most, got {count}")
    return count


def _counted_positions(content: Tensor, values: Values) -> Tensor:
    return _positions(content[_COUNT.itemsize :], _count(content, values), values)
