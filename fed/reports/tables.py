"""Table of a comparison: the same columns in a terminal and in a report."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fed.quantities import bytes_text, count_text, duration_text, epsilon_text, mean_text
from fed.reports.conclusions import final_text
from fed.reports.difference_texts import difference_text, interval_text
from fed.reports.summary import ComparisonResult
from fed.storage.scores import CLIENT_FIGURES, NamedMetric

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Column", "columns", "difference_columns", "epsilon_column", "table"]

_WORD = 32
"""Length of a name's word beyond which it may break, so that it does not take the table for itself."""


@dataclass(frozen=True)
class Column:
    """A heading, and a text for each row; ``is_number`` is set right.

    Args:
        heading: heading of the column.
        texts: text of each row.
        is_number: True if the texts are figures.
        values: number of each row by which a reader may sort, or None where there is none; empty: by the texts.
    """

    heading: str
    texts: list[str]
    is_number: bool = True
    values: Sequence[float | None] = ()


def columns(result: ComparisonResult) -> list[Column]:
    """Columns that hold a value for at least one variant of this comparison."""
    rows = result.rows
    target = result.comparison.target
    metrics = result.metrics()
    shown = [
        Column("variant", [row["name"] for row in rows], is_number=False),
        *(_final(rows, metric) for metric in metrics),
        *epsilon_column(rows),
    ]
    if target is not None:
        rounds = _values(rows, "rounds_to_target")
        shown.append(Column(f"rounds to {target:g}", [_rounds(row) for row in rows], values=rounds))
        shown.append(_column(f"bytes to {target:g}", rows, "bytes_to_target", bytes_text))
        if any(row["virtual_s_to_target"] for row in rows):
            shown.append(_column(f"simulated time to {target:g}", rows, "virtual_s_to_target", duration_text))
    shown += [_column(f"bytes {way}", rows, f"bytes_{way}", bytes_text) for way in ("up", "down")]
    if any(row["uplink_pays_below_bytes_per_s"] for row in rows):
        shown.append(_column("codecs pay below", rows, "uplink_pays_below_bytes_per_s", _rate_text))
    shown += _of_clients(rows, metrics[0])
    shown += _of_tasks(rows)
    shown.append(_column("wall time", rows, "wall_s", duration_text))
    # A column that says the same of all variants takes room from the names.
    if any(row["status"] != "finished" for row in rows):
        shown.append(Column("status", [str(row["status"]) for row in rows], is_number=False))
    return shown


def epsilon_column(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """Column of the ε that one run of each variant has cost; none where no variant is private.

    Args:
        rows: figures of the variants; those that earlier versions wrote have no ε.
    """
    values = _values(rows, "epsilon")
    deltas = {row["delta"] for row in rows if row.get("epsilon") is not None}
    if not deltas:
        return []
    texts = ["–" if value is None else epsilon_text(value) for value in values]
    if len(deltas) > 1:  # figures at several δ are not to be compared as they are
        texts = [
            text if text == "–" else f"{text} at δ = {row['delta']:.3g}" for text, row in zip(texts, rows, strict=True)
        ]
    return [Column("ε of a run", texts, values=values)]


def difference_columns(result: ComparisonResult) -> list[Column]:
    """Columns of the differences to the baseline, a row for each other variant; none where there is no difference."""
    found = result.differences
    if not found:
        return []
    has_folds = any(one.interval is not None and one.interval.method == "folds" for one in found)
    shown = [
        Column("variant", [one.name for one in found], is_number=False),
        Column("difference", [difference_text(result, one) for one in found], values=[one.mean for one in found]),
        Column(
            f"{100 * result.comparison.confidence:g} % interval",
            [interval_text(result, one) for one in found],
            values=[one.interval and one.interval.low for one in found],
        ),
        Column("p, adjusted", [_p_text(one.p_adjusted) for one in found], values=[one.p_adjusted for one in found]),
        Column(
            f"paired {'folds' if has_folds else 'seeds'}",
            [str(one.pairs) for one in found],
            values=[one.pairs for one in found],
        ),
    ]
    if any(one.seeds_to_tell_apart is not None for one in found):
        seeds = ["–" if one.seeds_to_tell_apart is None else f"{one.seeds_to_tell_apart:,}" for one in found]
        shown.append(Column("seeds to tell apart", seeds, values=[one.seeds_to_tell_apart for one in found]))
    return shown


def _p_text(p: float | None) -> str:
    if p is None:
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _of_clients(rows: Sequence[dict[str, Any]], metric: NamedMetric) -> Iterator[Column]:
    """Columns on differences between clients: their own models on the test set, or scores on each one's own samples."""
    mean, deviation, worst = ([row.get(metric.of_clients(figure)) for row in rows] for figure in CLIENT_FIGURES)
    for heading, by_clients in ((f"clients' own {metric.words}", False), ("mean of clients", True)):
        texts = [
            mean_text(*of_row[:2]) if (of_row[2] is not None) == by_clients else "–"
            for of_row in zip(mean, deviation, worst, strict=True)
        ]
        if set(texts) != {"–"}:
            values = [None if text == "–" else value for text, value in zip(texts, mean, strict=True)]
            yield Column(heading, texts, values=values)
    if set(worst) != {None}:
        yield Column("worst tenth of clients", [mean_text(value, None) for value in worst], values=worst)


def _of_tasks(rows: Sequence[dict[str, Any]]) -> Iterator[Column]:
    """Columns on late, failed and stale tasks, where there are any, and on clients' idle time."""
    found = [
        _column(key, rows, key, text)
        for key, text in (("late", "{:.0%}".format), ("failed", "{:.0%}".format), ("staleness", count_text))
        if any(row[key] for row in rows)
    ]
    yield from found
    if found:
        yield _column("idle", rows, "idle_share", "{:.0%}".format)


def table(shown: Sequence[Column], width: int = 160) -> "Table":
    """Table for a terminal of that width, with rich; names are wrapped between words before figures are."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    first, *others = shown
    # Figures are never broken: names get what is left of the width.
    left = width - sum(max(map(len, (column.heading, *column.texts))) + 2 for column in others) - 2
    names = [_wrapped(name, max(left, _longest_word(first.texts))) for name in first.texts]
    rendered = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in (first, *others):
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        rendered.add_column(Text(column.heading), justify=justify, overflow="fold", no_wrap=not column.is_number)
    for texts in zip(names, *(column.texts for column in others), strict=True):
        rendered.add_row(*(Text(text, no_wrap=False) for text in texts))  # as it stands: a name may look like markup
    return rendered


def _wrapped(name: str, width: int) -> str:
    return "\n".join(textwrap.wrap(name, width, break_on_hyphens=False)) if len(name) > width else name


def _longest_word(names: list[str]) -> int:
    return min(_WORD, max((len(word) for name in names for word in name.split()), default=1))


def _rounds(row: dict[str, Any]) -> str:
    if not row["reached"]:
        return "–"
    unit = "seeds" if row["runs"] == len(row["seeds"]) else "runs"
    part = "" if row["reached"] == row["runs"] else f" ({row['reached']} of {row['runs']} {unit})"
    return count_text(row["rounds_to_target"]) + part


def _final(rows: Sequence[dict[str, Any]], metric: NamedMetric) -> Column:
    texts = [final_text(row, metric) for row in rows]
    return Column(f"final {metric.words}", texts, values=_values(rows, metric.final))


def _rate_text(bytes_per_s: float) -> str:
    return f"{bytes_text(bytes_per_s)}/s"


def _column(heading: str, rows: Sequence[dict[str, Any]], key: str, text: Callable[[Any], str]) -> Column:
    """Values of a key, with a dash where there is none."""
    texts = ["–" if row[key] is None else text(row[key]) for row in rows]
    return Column(heading, texts, values=_values(rows, key))


def _values(rows: Sequence[dict[str, Any]], key: str) -> list[float | None]:
    return [row.get(key) for row in rows]
