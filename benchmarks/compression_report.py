"""Speeds, bytes and accuracies of codecs as tables: for the terminal, and in Markdown for docs/benchmarks.md."""

from collections.abc import Iterator, Mapping
from typing import Any

from report import measured_on
from rich.table import Table

COMPRESSION = "<!-- compression: begin -->", "<!-- compression: end -->"

Report = Mapping[str, Any]


def terminal_tables(report: Report) -> Iterator[Table]:
    """Tables that rich prints."""
    for title, head, rows in _tables(report):
        table = Table(title=title, title_justify="left")
        for number, cell in enumerate(head):
            table.add_column(cell, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        yield table


def markdown(report: Report) -> str:
    """Markdown of the machine and the tables."""
    where = measured_on(report).removesuffix(".")
    parts = [f"{where}; load when it began: {report['load']:.1f}."]
    for title, head, rows in _tables(report):
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        parts.append(f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def _tables(report: Report) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    if report["speeds"]:
        yield _speeds(report)
    if report["mnist"].keys() - report["speeds"].keys():
        yield _accuracies(report)


def _speeds(report: Report) -> tuple[str, list[str], list[list[str]]]:
    lengths = [one["numbers"] for one in next(iter(report["speeds"].values()))]
    head = ["", "bits", "ratio", "points lost", *(f"{length:,}" for length in lengths), "pays below"]
    rows = []
    for name, found in report["speeds"].items():
        last, trained = found[-1], report["mnist"].get(name)
        rows.append(
            [
                name,
                f"{last['bits']:.3g}",
                _digits(last["ratio"]),
                f"{trained['points_lost']:.2f}" if trained else "–",
                *(f"{_digits(one['encode_gb_s'])} / {_digits(one['decode_gb_s'])}" for one in found),
                _bandwidth(last["pays_below_mbit_s"]),
            ]
        )
    copies = [
        _digits(max(found[place]["copy_gb_s"] for found in report["speeds"].values())) for place in range(len(lengths))
    ]
    rows.append(["copy", "32", "1", "–", *copies, "–"])
    title = (
        f"GB of float32 a second that one core encodes / decodes, median of {report['repetitions']}, by the length of "
        "the vector; the rest for the longest"
    )
    return title, head, rows


def _accuracies(report: Report) -> tuple[str, list[str], list[list[str]]]:
    rows = [
        [
            name,
            f"{found['accuracy']:.4f}",
            f"{min(found['accuracies']):.4f} – {max(found['accuracies']):.4f}",
            f"{found['points_lost']:.2f}",
            _digits(found["times_fewer"]),
        ]
        for name, found in report["mnist"].items()
        if name not in report["speeds"]
    ]
    head = ["", "test accuracy", "least – most", "points lost", "times fewer bytes up"]
    return "MNIST, MLP 784-200-10, ten clients, 30 rounds, mean of three seeds", head, rows


def _bandwidth(megabits_s: float) -> str:
    return f"{_digits(megabits_s / 1000)} Gbit/s" if megabits_s >= 1000 else f"{_digits(megabits_s)} Mbit/s"


def _digits(number: float) -> str:
    """Three significant digits, at most two behind the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
