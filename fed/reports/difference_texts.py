"""Differences to a comparison's baseline in words: their figures, what they support, and how they were found."""

from collections.abc import Sequence

from fed.quantities import decimals_of
from fed.reports.differences import PairedDifference
from fed.reports.summary import ComparisonResult

__all__ = ["against_the_baseline", "difference_notes", "difference_text", "interval_text", "mark_of"]

_NAMED = 4
"""Largest number of variants that a sentence names."""

_PAIRED_BY = {
    "student": "Intervals are by Student's t over paired seeds.",
    "bootstrap": "Intervals are by the studentised bootstrap over paired seeds, with 9,999 resamples.",
    "folds": (
        "There is one seed: its folds are paired, by Student's t with Nadeau and Bengio's variance, which is corrected "
        "for folds that train on the same samples. That says nothing of other seeds."
    ),
}
_VARIED = {
    "both": "Each seed sets data and training: the spread is of both.",
    "training": "Each seed sets training alone, on the same data: the spread is of training.",
    "data": "Each seed sets the data alone, under the same seed of training: the spread is of the data.",
}


def against_the_baseline(result: ComparisonResult, names: Sequence[str]) -> str:
    """Sentence on which of these variants differ from the baseline beyond the noise; empty where that is not known."""
    found = [one for one in result.differences if one.name in names and one.interval is not None]
    if not found:
        return ""
    metric = result.metrics()[0]
    parts = []
    larger = [one for one in found if one.is_larger_than_noise and one.mean is not None]
    for word, is_better in (("better", True), ("worse", False)):
        of_this_sign = [one for one in larger if ((one.mean or 0.0) > 0) == (metric.higher_is_better == is_better)]
        figures = [f"{one.name} by {_size(result, one)}" for one in of_this_sign]
        parts += [f"{word} by more than the noise: {_named(figures)}"] if figures else []
    within = [_with_seeds(one) for one in found if not one.is_larger_than_noise]
    parts += [f"not told apart from it: {_named(within)}"] if within else []
    baseline = result.comparison.baseline_in_force()
    return (
        f"Against the baseline {baseline}, with {100 * result.comparison.confidence:g} % intervals, {'; '.join(parts)}."
    )


def difference_notes(result: ComparisonResult) -> list[str]:
    """Sentences on how values were paired, and what intervals and marks mean."""
    found = result.differences
    comparison = result.comparison
    if not found:
        return []
    methods = dict.fromkeys(one.interval.method for one in found if one.interval is not None)
    notes = [f"Differences in {result.metrics()[0].words} to {comparison.baseline_in_force()}, in the mean over pairs."]
    notes += [_PAIRED_BY[method] for method in methods]
    if len(comparison.repetitions()) == 1:
        notes.append("With one seed there is no interval: nobody can say how much of a difference is chance.")
    # Equal differences are suspicious rather than certain: the noise is not zero, it is not seen.
    elif any(one.pairs > 1 and one.interval is None for one in found):
        notes.append("Where all pairs differ by the same, the noise is not known, and there is no interval.")
    # With several seeds folds are no pairs: a seed's folds are averaged first.
    if comparison.folds is not None and "folds" not in methods:
        notes.append("A seed's value is the mean over its folds.")
    notes += [_VARIED[comparison.vary]] if len(comparison.seeds) > 1 else []
    if methods:
        most = 1 - comparison.confidence
        count = sum(one.interval is not None for one in found)
        notes.append(
            f"*: larger than the noise, since p is at most {most:.2g} after Holm's adjustment for the number of "
            f"differences, {count}. (*): the interval excludes 0, but p is larger after the adjustment."
        )
    if any(one.seeds_to_tell_apart is not None for one in found):
        notes.append(
            "Seeds to tell apart: with so many a difference of this mean and deviation is found four times in five, "
            "after the adjustment too."
        )
    return notes


def difference_text(result: ComparisonResult, difference: PairedDifference) -> str:
    """Mean difference with its sign and mark; a dash where there is no pair.

    Args:
        result: result that the difference belongs to; its values decide the number of decimals.
        difference: difference to write, one of ``result.differences``.
    """
    if difference.mean is None:
        return "–"
    return f"{difference.mean:+.{_decimals(result)}f} {mark_of(difference)}".rstrip()


def interval_text(result: ComparisonResult, difference: PairedDifference) -> str:
    """Interval of a difference; a dash where there is none.

    Args:
        result: result that the difference belongs to; its values decide the number of decimals.
        difference: difference to write, one of ``result.differences``.
    """
    if difference.interval is None:
        return "–"
    low, high, *_ = difference.interval
    return f"{low:+.{_decimals(result)}f} to {high:+.{_decimals(result)}f}"


def mark_of(difference: PairedDifference) -> str:
    """``*`` where a difference is larger than the noise, ``(*)`` where that holds of its interval alone, else empty."""
    if difference.is_larger_than_noise:
        return "*"
    return "(*)" if difference.excludes_zero else ""


def _decimals(result: ComparisonResult) -> int:
    """Number of decimals of the variants' values."""
    final = result.metrics()[0].final
    # As many as the values have, so that a difference does not look more exact than they are.
    return max(decimals_of(row[final]) for row in result.rows if row.get(final) is not None)


def _size(result: ComparisonResult, difference: PairedDifference) -> str:
    return f"{abs(difference.mean or 0.0):.{_decimals(result)}f} ({interval_text(result, difference)})"


def _with_seeds(difference: PairedDifference) -> str:
    seeds = difference.seeds_to_tell_apart
    # The bootstrap is another test than the one that the number is computed for.
    if seeds is None or seeds <= difference.pairs:
        return difference.name
    return f"{difference.name} (some {seeds:,} seeds would)"


def _named(texts: Sequence[str]) -> str:
    more = len(texts) - _NAMED
    return ", ".join(texts) if more <= 0 else f"{', '.join(texts[:_NAMED])} and {more} more"
