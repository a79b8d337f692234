"""Count sketch: sums of values that hash to the same bucket; sketches are added, and the sum is read.

Charikar, Chen & Farach-Colton, "Finding frequent items in data streams", 2002; for federated learning Rothchild et al.,
"FetchSGD", ICML 2020, 2007.07682. Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values
from fed.compression.pieces import empty, pieces, stacked
from fed.compression.sparsifiers import Fraction, count_of, largest, scattered
from fed.errors import InvalidPayload
from fed.vectors.tensors import Tensor, torch

__all__ = ["Sketch"]


@dataclass(frozen=True, kw_only=True)
class Sketch(Codec):
    r"""Sums of values that fall into the same bucket; the largest are read (Rothchild et al. 2020, 2007.07682).

    There are several rows of buckets, and a value is the median of the sums in its buckets.

    .. math:: S_{r, h_r(i)} = \sum_i σ_r(i) x_i, \qquad \hat x_i = \operatorname{median}_r σ_r(i) S_{r, h_r(i)}

    with hashes h and signs σ that are the same for all clients and rounds of a run. Linear: the coordinator adds
    sketches, and reads the sum once. In a row of w buckets the estimate of x_i is unbiased, with the variance
    (‖x‖² − x_i²)/w over the hashes.

    Args:
        fraction: number of buckets of all rows together, as a share of the values, in (0, 1].
        rows: number of rows of buckets, ≥ 1.
        read: share of the values that are read, those of largest magnitude, in (0, 1].
    """

    gives: ClassVar = "values"
    comes_first: ClassVar[str] = "adds values of the whole update"
    is_linear: ClassVar[bool] = True
    is_common: ClassVar[bool] = True
    reads_sums: ClassVar[bool] = True
    bound: ClassVar[str] = "mean square of x̂ᵢ − xᵢ in one row ≤ ‖x‖²/w, w its buckets"

    fraction: Fraction = 0.1
    rows: PositiveInt = 5
    read: Fraction = 0.01

    def size_bytes(self, values: Values) -> int:
        """Zero: a message consists of values alone."""
        return 0

    def inner(self, values: Values, content: Tensor | None = None) -> Values:
        """The buckets of all rows."""
        return values._replace(numbers=self.rows * self._columns(values), layers=())

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Add each value to its bucket of every row."""
        tables = torch.zeros(len(rows_KM), self.rows, self._columns(values), dtype=values.dtype)
        for first in range(0, self.rows, 2):  # few tables at a time stay in a core's cache
            for _, columns in pieces((1, values.numbers)):
                for row, (buckets, signs) in enumerate(self._hashes(first, columns, values, draw), first):
                    for table, signed in zip(tables[:, row], rows_KM[:, columns] * signs, strict=True):
                        table.scatter_add_(0, buckets, signed)
        return Encoded(torch.empty(len(rows_KM), 0, dtype=torch.uint8), tables.flatten(1))

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Read the largest values, of a sketch or of a sum of sketches."""
        tables = stacked(inner).reshape(len(inner), self.rows, -1)
        # One infinite bucket would be read as the largest of all values.
        if not tables.isfinite().all():
            raise InvalidPayload("the buckets of a sketch must hold finite numbers, got others")
        rows_KM = empty((len(inner), values.numbers), values.dtype)
        for _, columns in pieces((1, values.numbers)):
            found = [
                tables[:, row].index_select(1, buckets) * signs
                for first in range(0, self.rows, 2)
                for row, (buckets, signs) in enumerate(self._hashes(first, columns, values, draw), first)
            ]
            rows_KM[:, columns] = _median(found)
        positions_KJ = largest(rows_KM, count_of(self.read, values.numbers))
        return scattered([*positions_KJ], [*rows_KM.gather(1, positions_KJ)], values)

    def _columns(self, values: Values) -> int:
        return max(1, round(self.fraction * values.numbers / self.rows))

    def _hashes(self, first: int, columns: slice, values: Values, draw: Draw) -> Iterator[tuple[Tensor, Tensor]]:
        """Buckets and signs of the values at some columns, for two rows of buckets, or for the last one.

        Args:
            first: number of the first of the two rows, even.
            columns: places of the values.
            values: description of the vectors.
            draw: the random streams, of which that of the whole run is used.
        """
        # The run's seed, not the round's: sums of several rounds must hash alike.
        seed = draw.streams.torch_seed("codec")
        count = np.uint64(self._columns(values))
        places = np.arange(columns.start, columns.stop, dtype=np.uint64)
        words = _mixed(places + np.uint64((seed + first * _STEP) % 2**64))
        # Two rows of one hash: 32 bits are enough for a bucket and a sign.
        for half in (words & np.uint64(0xFFFFFFFF), words >> np.uint64(32))[: self.rows - first]:
            signs = (half & np.uint64(1)).astype(np.int8)
            signs += signs
            signs -= 1
            # The highest bits tell the bucket, the lowest one the sign
            # A product and a shift instead of a remainder, which takes several times as long.
            half *= count
            half >>= np.uint64(32)
            yield torch.from_numpy(half.view(np.int64)), torch.from_numpy(signs)


def _median(rows: list[Tensor]) -> Tensor:
    """The median of each place, by an odd-even transposition sort."""
    # Minima and maxima of whole rows, in place of a sort of each place's few values.
    for turn in range(len(rows)):
        for lower in range(turn % 2, len(rows) - 1, 2):
            pair = rows[lower : lower + 2]
            rows[lower : lower + 2] = torch.minimum(*pair), torch.maximum(*pair)
    middle = len(rows) // 2
    return rows[middle] if len(rows) % 2 else (rows[middle - 1] + rows[middle]) / 2


_STEP = 0x9E3779B97F4A7C15


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's mixing of 64 bits (Steele, Lea & Flood 2014); the words are overwritten."""
    words *= np.uint64(_STEP)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    return words
