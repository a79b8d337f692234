"""Results as tables: for the terminal, and in Markdown for docs/benchmarks.md."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"

Results = Mapping[str, Any]


def terminal_tables(results: Results) -> Iterator[Table]:
    """All tables, to be printed by rich."""
    for title, head, rows in _tables(results):
        table = Table(title=title, title_justify="left")
        for number, cell in enumerate(head):
            table.add_column(cell, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        yield table


def markdown(results: Results) -> str:
    """All tables, and where they were measured."""
    parts = [measured_on(results)]
    for title, head, rows in _tables(results):
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        parts.append(f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def put_into(page: Path, text: str, markers: tuple[str, str] = (BEGIN, END)) -> bool:
    """Replace what stands between two markers of a page; False where it lacks them."""
    before, begin, rest = page.read_text().partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not begin or not end:
        return False
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
    return True


def measured_on(results: Results) -> str:
    """The machine, the day and the software."""
    machine, versions = results["machine"], results["versions"]
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{machine['processor']}, {machine['cores']} cores, {machine['date']}; {software}."


def _tables(results: Results) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    if results.get("workloads"):
        yield _rates(results)
        if any(workload["ratios"] for workload in results["workloads"].values()):
            yield _ratios(results)
    if results.get("populations"):
        yield _populations(results)
    if results.get("command"):
        yield _command(results)


def _rates(results: Results) -> tuple[str, list[str], list[list[str]]]:
    workloads = results["workloads"].values()
    rounds = ", ".join(str(workload["settings"]["agreement_rounds"]) for workload in workloads)
    title = (
        f"Training rounds a second, median of {results['repetitions']} (least – most); of ours the share of the limit; "
        f"test accuracy after {rounds} rounds"
    )
    rows = []
    for side in _sides(results):
        measured = [workload["sides"].get(side) for workload in workloads]
        name = next(found["title"] for found in measured if found)
        rows.append([name, *(_rate(found) if found else "–" for found in measured)])
    return title, ["", *(workload["settings"]["title"] for workload in workloads)], rows


def _rate(side: Mapping[str, Any]) -> str:
    text = f"{_digits(side['median'])} ({_digits(side['min'])} – {_digits(side['max'])})"
    details = []
    if side.get("share_of_limit") is not None:
        details.append(f"{side['share_of_limit']:.0%}")
    if side["accuracy"] is not None:
        details.append(f"{side['accuracy']:.3f}")
    return f"{text}, {', '.join(details)}" if details else text


def _ratios(results: Results) -> tuple[str, list[str], list[list[str]]]:
    workloads = results["workloads"].values()
    titles = {name: side["title"] for workload in workloads for name, side in workload["sides"].items()}
    pairs = dict.fromkeys(pair for workload in workloads for pair in _comparable(workload))
    rows = [
        [f"{titles[ours]} : {titles[other]}", *(_ratio(workload["ratios"], ours, other) for workload in workloads)]
        for ours, other in pairs
    ]
    return "Ratios of these medians", ["", *(workload["settings"]["title"] for workload in workloads)], rows


def _comparable(workload: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each of the others, after the first of ours that trains in as many processes."""
    sides, ratios = workload["sides"], workload["ratios"]
    for other in dict.fromkeys(name for of_ours in ratios.values() for name in of_ours):
        for ours in ratios:
            if sides[ours]["processes"] == sides[other]["processes"]:
                yield ours, other
                break


def _ratio(ratios: Mapping[str, Mapping[str, float]], ours: str, other: str) -> str:
    ratio = ratios.get(ours, {}).get(other)
    return "–" if ratio is None else f"{ratio:.2f}"


def _populations(results: Results) -> tuple[str, list[str], list[list[str]]]:
    rows = [
        [
            f"{found['clients']:,}",
            f"{found['round_s']:.3f}",
            f"{found['wall_s']:.2f}",
            _megabytes(found["peak_resident_mb"]),
        ]
        for found in results["populations"]
    ]
    head = ["clients in all", "seconds a round", "whole process, s", "peak memory, MB"]
    return "1,000 clients a round, their data made on demand", head, rows


def _command(results: Results) -> tuple[str, list[str], list[list[str]]]:
    found = results["command"]
    row = [f"`{found['command']}`", f"{found['wall_s']:.2f}", _megabytes(found["peak_resident_mb"])]
    return "The whole command", ["", "seconds", "peak memory, MB"], [row]


def _sides(results: Results) -> Sequence[str]:
    return list(dict.fromkeys(side for workload in results["workloads"].values() for side in workload["sides"]))


def _digits(rate: float) -> str:
    """Three significant digits."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _megabytes(size: float | None) -> str:
    return "–" if size is None else f"{size:.0f}"
