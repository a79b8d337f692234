"""Bytes, durations, counts and measured means as people read them."""

import math

__all__ = [
    "bytes_text",
    "count_text",
    "counted",
    "decimals_of",
    "duration_text",
    "epsilon_text",
    "mean_text",
    "score_text",
]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_PARTS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))


def bytes_text(size_bytes: float) -> str:
    """Three digits and a unit of powers of 1,000.

    Example:
        >>> bytes_text(999), bytes_text(12_345), bytes_text(3_000_000_000)
        ('999 B', '12.3 kB', '3 GB')
    """
    power = 0
    # 999.6 is written with three digits as 1e+03.
    while power < len(_UNITS) - 1 and float(f"{size_bytes / 1000**power:.3g}") >= 1000:
        power += 1
    size = size_bytes / 1000**power
    return f"{size:.0f} {_UNITS[power]}" if size >= 100 else f"{size:.3g} {_UNITS[power]}"


def duration_text(time_s: float) -> str:
    """Two largest units of a duration; a tenth of a second below ten of them.

    Example:
        >>> duration_text(0.42), duration_text(12), duration_text(200), duration_text(7_200)
        ('0.4 s', '12 s', '3 min 20 s', '2 h')
    """
    if round(time_s, 1) < 10:
        return f"{time_s:.1f} s"
    whole_s = round(time_s)
    for large_s, large, small_s, small in _PARTS:
        if whole_s >= large_s:
            count, rest = divmod(round(whole_s / small_s), large_s // small_s)
            return f"{count} {large} {rest} {small}" if rest else f"{count} {large}"
    return f"{whole_s} s"


def count_text(mean: float) -> str:
    """A mean of counts, with one decimal unless it is whole.

    Example:
        >>> count_text(12.0), count_text(12.333)
        ('12', '12.3')
    """
    return f"{mean:.1f}".removesuffix(".0")


def counted(number: int, name: str) -> str:
    """A number of things, with their name in the singular or the plural.

    Example:
        >>> counted(1, "sample"), counted(0, "sample"), counted(2, "class")
        ('1 sample', '0 samples', '2 classes')
    """
    plural = f"{name}es" if name.endswith("s") else f"{name}s"
    return f"{number} {name if number == 1 else plural}"


def epsilon_text(epsilon: float) -> str:
    """ε to three digits, rounded up: no promise is rounded to a better one.

    Example:
        >>> epsilon_text(0.71801), epsilon_text(12.0), epsilon_text(1234.5), epsilon_text(0.0)
        ('0.719', '12', '1240', '0')
    """
    if epsilon == 0 or not math.isfinite(epsilon):
        return f"{epsilon:g}"
    decimals = 2 - math.floor(math.log10(epsilon))
    # What is a whole number of units but for the last bits is not rounded to the next one.
    units = math.ceil(epsilon * 10.0**decimals - 1e-9)
    return f"{units / 10.0**decimals:.12g}"


def decimals_of(mean: float) -> int:
    """Number of decimals of a mean: three from a hundredth to ten; else enough for four digits, or three below that.

    Example:
        >>> decimals_of(0.9286), decimals_of(41.238), decimals_of(0.0012345)
        (3, 2, 5)
    """
    # 0 and infinity have no logarithm.
    if not math.isfinite(mean) or mean == 0 or 0.01 <= abs(mean) < 10:
        return 3
    exponent = math.floor(math.log10(abs(mean)))
    return max(0, 3 - exponent) if exponent > 0 else 2 - exponent


def mean_text(mean: float | None, deviation: float | None) -> str:
    """A mean, and ± its standard deviation where there is one; a dash where nothing was measured.

    Means below ten have three decimals, larger ones four digits, and those below a hundredth three.

    Example:
        >>> mean_text(0.9286, 0.008), mean_text(0.9286, None), mean_text(None, None)
        ('0.929 ± 0.008', '0.929', '–')
        >>> mean_text(0.0012345, 0.0001), mean_text(41.238, 3.0), mean_text(123456.7, None)
        ('0.00123 ± 0.00010', '41.24 ± 3.00', '123457')
    """
    if mean is None:
        return "–"
    decimals = decimals_of(mean)
    return f"{mean:.{decimals}f}" if deviation is None else f"{mean:.{decimals}f} ± {deviation:.{decimals}f}"


def score_text(score: float) -> str:
    """A measured value with four decimals, or four digits where it is small or large.

    Example:
        >>> score_text(0.92857), score_text(0.00012345), score_text(1234.5678)
        ('0.9286', '0.0001234', '1235')
    """
    return f"{score:.4f}" if score == 0 or 0.01 <= abs(score) < 100 else f"{score:.4g}"
