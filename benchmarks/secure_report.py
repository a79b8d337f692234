"""Milliseconds of secure aggregation as tables, and the most that they may be."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from report import Report, Table, digits, measured_on, paragraphs

SECURE = "<!-- secure: begin -->", "<!-- secure: end -->"
MANY_CLIENTS = "<!-- secure-many: begin -->", "<!-- secure-many: end -->"
BUSY = 1.0
STAGES = {
    "clients": {"sharing": "keys and shares", "masking": "masking", "unmasking": "consent, shares"},
    "coordinator": {
        "sharing": "keys and shares",
        "adding": "sum",
        "revealing": "consents, shares",
        "unmasking": "unmasking",
    },
}
OF_MASKS = {"clients": "masking", "coordinator": "unmasking"}

_SIZE = ["clients", "numbers", "dropped", "max_drop_out", "cores"]


class Bound(NamedTuple):
    """Most that a figure may be.

    Args:
        side: clients or coordinator.
        figure: name of a figure in the rows.
        most: seconds, or times the limit.
        text: the same for readers.
        with_all_cores: True if the bound is for a coordinator that uses all cores, else it is for one core.
    """

    side: str
    figure: str
    most: float
    text: str
    with_all_cores: bool = False


BOUNDS = {
    (100, 1_000_000, 0.1, 0.1): (
        Bound("clients", "times_limit", 2.2, "masking : limit ≤ 2.2"),
        Bound("coordinator", "times_limit", 1.9, "unmasking : limit ≤ 1.9"),
    ),
    (1000, 1_000_000, 0.1, 0.1): (
        Bound("clients", "masking_s", 0.06, "masking ≤ 60 ms"),
        Bound("coordinator", "total_s", 5.0, "together ≤ 5,000 ms", with_all_cores=True),
    ),
    (10_000, 100_000, 0.1, 0.1): (Bound("coordinator", "total_s", 12.0, "together ≤ 12,000 ms", with_all_cores=True),),
}


def shortfalls(report: Report) -> list[str]:
    """Sentences on what misses its target."""
    return [
        f"{', '.join(size_cells(row))}: {bound.side}: {bound.text} must hold, got "
        f"{row[bound.side][bound.figure]:.3g} {'s' if bound.figure.endswith('_s') else 'times'}"
        for row in report["rows"]
        for bound in _bounds(row)
        if row[bound.side][bound.figure] > bound.most
    ]


def markdown(report: Report) -> str:
    """Markdown of the machine and the tables."""
    speed = statistics.median(row["keystream_gb_s"] for row in report["rows"])
    where = f"{measured_on(report).removesuffix('.')}; limit: {speed:.1f} GB of masks a second."
    if report["load"] > BUSY:
        where += " Other work kept the machine busy."
    return paragraphs(where, tables(report))


def tables(report: Report) -> Iterator[Table]:
    """All tables."""
    titles = {"clients": "Milliseconds of a client", "coordinator": "Milliseconds of the coordinator"}
    for side, stages in STAGES.items():
        rows = []
        for row in report["rows"]:
            found = row[side]
            spent = [digits(1000 * found[f"{stage}_s"]) for stage in (*stages, "total")]
            targets = ", ".join(bound.text for bound in _bounds(row) if bound.side == side)
            rows.append(
                [*size_cells(row), *spent, f"{found['masks']:,}", f"{found['times_limit']:.2f}", targets or "–"]
            )
        head = [*_SIZE, *stages.values(), "together", "masks", f"{OF_MASKS[side]} : limit", "target"]
        yield Table(titles[side], head, rows, "right")
    if report["flower"]:
        yield _beside_flower(report)


def size_cells(row: Mapping[str, Any]) -> list[str]:
    """Cells of a row that say what was measured."""
    clients, numbers, dropped, max_drop_out, cores = _size(row)
    return [f"{clients:,}", f"{numbers:,}", f"{dropped:.0%}", f"{max_drop_out:.0%}", f"{cores}"]


def _size(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row["size"][name] for name in _SIZE)


def _bounds(row: Mapping[str, Any]) -> Sequence[Bound]:
    *size, cores = _size(row)
    return [bound for bound in BOUNDS.get(tuple(size), ()) if bound.with_all_cores == (cores > 1)]


def _beside_flower(report: Report) -> Table:
    title = "Milliseconds of fed / of Flower's SecAgg+, how many times as long"
    if "absent" in report["flower"]:
        return Table(title, ["", ""], [["Flower's SecAgg+", f"absent: {report['flower']['absent']}"]], "right")
    ours = {_size(row): row for row in report["rows"]}
    figures = [("clients", f"{stage}_s") for stage in STAGES["clients"]] + [("coordinator", "unmasking_s")]
    rows = []
    for theirs in report["flower"]["rows"]:
        pairs = [(ours[_size(theirs)][side][figure], theirs[side][figure]) for side, figure in figures]
        cells = [f"{digits(1000 * a)} / {digits(1000 * b)}, {digits(b / a)} ×" for a, b in pairs]
        if not theirs["was_run"]:
            cells[-1] += ", estimated"
        rows.append([*size_cells(theirs), *cells])
    heads = [f"client: {stage}" for stage in STAGES["clients"].values()]
    return Table(title, [*_SIZE, *heads, "coordinator: unmasking"], rows, "right")
