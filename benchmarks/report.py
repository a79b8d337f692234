"""Tables, for the terminal and in Markdown, and the end of each benchmark, where it reports what it has found."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import rich.table
from rich.console import Console

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"

Report = Mapping[str, Any]


class Table(NamedTuple):
    """Table of figures.

    Args:
        title: line above the table.
        head: titles of the columns.
        rows: cells, row by row.
        first: alignment of the first column; all others are aligned right.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    first: Literal["left", "right"] = "left"

    def for_terminal(self) -> rich.table.Table:
        """Table that rich prints."""
        table = rich.table.Table(title=self.title, title_justify="left")
        for number, cell in enumerate(self.head):
            table.add_column(cell, justify="right" if number else self.first)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Lines of the table, without its title."""
        rule = ["---" if self.first == "left" else "---:", *["---:"] * (len(self.head) - 1)]
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.head, rule, *self.rows))


def conclude(
    console: Console,
    report: Report,
    tables: Iterable[Table],
    output: Path | None,
    markers: tuple[str, str] | None,
    text: str | None = None,
    failures: Sequence[str] = (),
) -> int:
    """Print tables, write the report, bring the page up to date, and print what falls short.

    Args:
        console: terminal for the tables and the failures.
        report: all that was measured.
        tables: all tables, printed in this order.
        output: file for the report as JSON; None writes none.
        markers: lines of docs/benchmarks.md between which the text belongs; None leaves the page as it is.
        text: paragraphs for the page; the machine and the tables by default.
        failures: sentences on what falls short.

    Returns:
        Exit status: 1 where something falls short.
    """
    tables = list(tables)
    for table in tables:
        console.print(table.for_terminal())
    if output:
        output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        console.print(f"written: {os.path.relpath(output)}")
    if markers and not put_into(PAGE, text or paragraphs(measured_on(report), tables), markers):
        console.print(f"docs/benchmarks.md has no table: the lines {' and '.join(markers)} are missing")
    for failure in failures:
        console.print(f"error: {failure}", style="red")
    return 1 if failures else 0


def put_into(page: Path, text: str, markers: tuple[str, str]) -> bool:
    """Replace what stands between two markers of a page; False where it lacks them.

    Args:
        page: file.
        text: new paragraphs between the markers.
        markers: begin and end.
    """
    before, begin, rest = page.read_text().partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not begin or not end:
        return False
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
    return True


def paragraphs(heading: str, tables: Iterable[Table]) -> str:
    """Heading and all tables, each under its title."""
    return "\n\n".join([heading, *(f"{table.title}\n\n{table.markdown()}" for table in tables)])


def measured_on(report: Report) -> str:
    """The machine, the day, the software, and the machine's load where the report has it."""
    machine = report["machine"]
    versions = report["versions"]
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    load = f"; load when it began: {report['load']:.1f}" if "load" in report else ""
    return f"{machine['processor']}, {machine['cores']} cores, {machine['date']}; {software}{load}."


def digits(number: float) -> str:
    """Three significant digits, at most two behind the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
