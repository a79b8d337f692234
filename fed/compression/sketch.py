"""Count sketch: sums of values that hash to the same bucket; sketches are added, and the sum is read.

Charikar, Chen & Farach-Colton, "Finding frequent items in data streams", 2002; for federated learning Rothchild et al.,
"FetchSGD", ICML 2020, 2007.07682. Shapes: see :mod:`fed.layout`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt
from torch import Tensor

from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values
from fed.compression.sparsifiers import Fraction, count_of, largest, scattered
from fed.config.compatibility import Feature, Term

__all__ = ["Sketch"]


@dataclass(frozen=True, kw_only=True)
class Sketch(Codec):
    r"""Sums of values that fall into the same bucket; the largest are read (Rothchild et al. 2020, 2007.07682).

    There are several rows of buckets, and a value is the median of what its buckets hold.

    .. math:: S_{r, h_r(i)} = \sum_i σ_r(i) x_i, \qquad \hat x_i = \operatorname{median}_r σ_r(i) S_{r, h_r(i)}

    with hashes h and signs σ that are the same for all clients and rounds of a run. Linear: the coordinator adds
    sketches, and reads the sum once. In a row of w buckets the estimate of x_i is unbiased, with the variance
    (‖x‖² − x_i²)/w over the hashes.

    Args:
        fraction: buckets of all rows together, as a share of the values, in (0, 1].
        rows: of buckets, at least 1.
        read: the share of the values that are read, those of largest magnitude, in (0, 1].
    """

    gives: ClassVar = "values"
    comes_first: ClassVar[str] = "adds values of the whole update"
    is_linear: ClassVar[bool] = True
    reads_sums: ClassVar[bool] = True
    bound: ClassVar[str] = "mean square of x̂ᵢ − xᵢ in one row ≤ ‖x‖²/w, w its buckets"

    fraction: Fraction = 0.1
    rows: PositiveInt = 5
    read: Fraction = 0.01

    def lacks(self) -> Sequence[Term]:
        """Each client's own message."""
        return (Term(Feature.SINGLE_ANSWERS, "choose another codec", "whose sum alone is read"),)

    def size_bytes(self, values: Values) -> int:
        """Zero: all of it is values."""
        return 0

    def inner(self, values: Values, content: Tensor | None = None) -> Values:
        """The buckets of all rows."""
        return values._replace(numbers=self.rows * self._columns(values), layers=())

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Add each value to its bucket of every row."""
        columns, rows = self._columns(values), rows_KM.double().cpu().numpy()
        tables = [
            [np.bincount(buckets, signs * row_M, columns) for row_M in rows]
            for buckets, signs in self._hashes(values, draw)
        ]
        sums = torch.from_numpy(np.stack(tables, 1).reshape(len(rows), -1)).to(values.dtype)
        return Encoded(torch.empty(len(rows), 0, dtype=torch.uint8), sums)

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Read the largest values, of a sketch or of a sum of sketches."""
        tables = torch.stack([*inner]).view(len(inner), self.rows, -1).numpy()
        hashes = zip(self._hashes(values, draw), tables.swapaxes(0, 1), strict=True)
        found = [signs * table[:, buckets] for (buckets, signs), table in hashes]
        rows_KM = torch.from_numpy(np.median(np.stack(found), 0)).to(values.dtype)
        positions_KJ = largest(rows_KM, count_of(self.read, values.numbers))
        return scattered([*positions_KJ], [*rows_KM.gather(1, positions_KJ)], values)

    def _columns(self, values: Values) -> int:
        return max(1, round(self.fraction * values.numbers / self.rows))

    def _hashes(self, values: Values, draw: Draw) -> Iterator[tuple[NDArray[np.intp], NDArray[np.int8]]]:
        """Bucket and sign of every value, for each row."""
        seed, columns = draw.streams.torch_seed("codec"), np.uint64(self._columns(values))
        places = np.arange(values.numbers, dtype=np.uint64)
        for row in range(self.rows):
            words = _mixed(places + np.uint64((seed + row * _STEP) % 2**64))
            yield (
                ((words >> np.uint64(32)) * columns >> np.uint64(32)).astype(np.intp),
                ((words & np.uint64(1)) * 2).astype(np.int8) - 1,
            )


_STEP = 0x9E3779B97F4A7C15


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's mixing of 64 bits (Steele, Lea & Flood 2014)."""
    words = words * np.uint64(_STEP)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
