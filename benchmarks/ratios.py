"""Ratios of measurements that were taken in turn, each with its interval."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy import stats

_LEVEL = 0.95


class Ratio(NamedTuple):
    """Ratio, with the interval that holds the true one 95 times of 100.

    Args:
        middle: the geometric mean of the pairs' ratios.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float]) -> "Ratio":
        """Ratio of measurements in pairs: each pair was taken one after the other, under the same load.

        The logarithms of the pairs' ratios are taken as normal (Student's t); of a single pair nothing is known.

        Args:
            numerators: measurements above 0, one or more.
            denominators: measurements above 0, as many.

        Example:
            >>> Ratio.of([4.0, 8.0], [1.0, 2.0])
            Ratio(middle=4.0, low=4.0, high=4.0)
        """
        logs = [math.log(one / other) for one, other in zip(numerators, denominators, strict=True)]
        middle = statistics.fmean(logs)
        if len(logs) == 1:
            return cls(math.exp(middle), 0.0, math.inf)
        spread = statistics.stdev(logs) / math.sqrt(len(logs))
        half = float(stats.t.ppf((1 + _LEVEL) / 2, len(logs) - 1)) * spread
        return cls(math.exp(middle), math.exp(middle - half), math.exp(middle + half))

    def __str__(self) -> str:
        """The ratio, and its interval."""
        return f"{self.middle:.2f} ({self.low:.2f} – {self.high:.2f})"
