"""The table of a comparison: the same columns in a terminal and in a report."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fed.quantities import bytes_text, count_text, duration_text, mean_text
from fed.simulations.findings import accuracy_text
from fed.simulations.outcomes import ComparisonResult

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Column", "columns", "table"]


@dataclass(frozen=True)
class Column:
    """A heading, and a text for each row; ``is_number`` is set right."""

    heading: str
    texts: list[str]
    is_number: bool = True


def columns(result: ComparisonResult) -> list[Column]:
    """The columns that have something to say of this comparison."""
    rows, target = result.rows, result.comparison.target_accuracy
    shown = [
        Column("variant", [row["name"] for row in rows], is_number=False),
        Column("final accuracy", [accuracy_text(row) for row in rows]),
    ]
    if all(row["final_test_accuracy"] is None for row in rows):
        shown[1] = Column("final loss", [_or_dash(row["final_test_loss"], lambda loss: f"{loss:.4g}") for row in rows])
    if target is not None:
        shown += [
            Column(f"rounds to {target:g}", [_rounds(row) for row in rows]),
            Column(f"bytes to {target:g}", [_or_dash(row["bytes_to_target"], bytes_text) for row in rows]),
        ]
        if any(row["virtual_s_to_target"] for row in rows):
            texts = [_or_dash(row["virtual_s_to_target"], duration_text) for row in rows]
            shown.append(Column(f"simulated time to {target:g}", texts))
    shown += [
        Column("bytes up", [_or_dash(row["bytes_up"], bytes_text) for row in rows]),
        Column("bytes down", [_or_dash(row["bytes_down"], bytes_text) for row in rows]),
    ]
    if any(row["client_accuracy_mean"] is not None for row in rows):
        texts = [mean_text(row["client_accuracy_mean"], row["client_accuracy_std"]) for row in rows]
        shown.append(Column("clients' own accuracy", texts))
    shown.append(Column("wall time", [_or_dash(row["wall_s"], duration_text) for row in rows]))
    if any(row["status"] != "finished" for row in rows):
        shown.append(Column("status", [_status(row) for row in rows], is_number=False))
    return shown


def table(result: ComparisonResult) -> "Table":
    """For a terminal, with rich."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = columns(result)
    rendered = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in shown:
        rendered.add_column(Text(column.heading), justify="right" if column.is_number else "left", overflow="fold")
    for texts in zip(*(column.texts for column in shown), strict=True):
        rendered.add_row(*(Text(text) for text in texts))  # as it stands: a name may look like markup
    return rendered


def _rounds(row: dict[str, Any]) -> str:
    if not row["reached"]:
        return "–"
    part = "" if row["reached"] == len(row["seeds"]) else f" ({row['reached']} of {len(row['seeds'])} seeds)"
    return count_text(row["rounds_to_target"]) + part


def _status(row: dict[str, Any]) -> str:
    return f"{row['status']}: {row['reason']}" if row["reason"] else str(row["status"])


def _or_dash(value: float | None, text: Any) -> str:
    return "–" if value is None else str(text(value))
