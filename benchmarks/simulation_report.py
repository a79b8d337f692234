"""Rates, ratios and whole processes as tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aggregation
import clock
import models
from ratios import Ratio
from report import Report, Table

SIMULATION = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"


def tables(report: Report) -> Iterator[Table]:
    """All tables."""
    if report.get("workloads"):
        yield _rates(report)
        if any(workload["ratios"] for workload in report["workloads"].values()):
            yield _ratios(report)
    if report.get("populations"):
        yield _populations(report)
    if report.get("command"):
        yield _command(report)
    if report.get("clock"):
        yield clock.table(report["clock"], report["repetitions"])
    yield from aggregation.tables(report.get("sums", ()), report.get("rules", ()))
    if report.get("models"):
        yield models.table(report["models"])


def _rates(report: Report) -> Table:
    workloads = report["workloads"].values()
    rounds = ", ".join(str(workload["settings"]["agreement_rounds"]) for workload in workloads)
    title = (
        f"Training rounds a second, median of {report['repetitions']} (least – most); of ours the share of the "
        f"products alone; test accuracy after {rounds} rounds" + (f". {report['absent']}" if "absent" in report else "")
    )
    rows = []
    for side in _sides(report):
        measured = [workload["sides"].get(side) for workload in workloads]
        name = next(found["title"] for found in measured if found)
        rows.append([name, *(_rate(found) if found else "–" for found in measured)])
    return Table(title, ["", *(workload["settings"]["title"] for workload in workloads)], rows)


def _rate(side: Mapping[str, Any]) -> str:
    text = f"{_digits(side['median'])} ({_digits(side['min'])} – {_digits(side['max'])})"
    details = []
    if side.get("share_of_products") is not None:
        details.append(f"{side['share_of_products']:.0%}")
    if side["accuracy"] is not None:
        details.append(f"{side['accuracy']:.3f}")
    return f"{text}, {', '.join(details)}" if details else text


def _ratios(report: Report) -> Table:
    workloads = report["workloads"].values()
    titles = {name: side["title"] for workload in workloads for name, side in workload["sides"].items()}
    pairs = dict.fromkeys(pair for workload in workloads for pair in _comparable(workload))
    rows = [
        [f"{titles[ours]} : {titles[other]}", *(_ratio(workload["ratios"], ours, other) for workload in workloads)]
        for ours, other in pairs
    ]
    return Table(
        "Ratios of these rates, of sides that took turns, with the interval that holds 95 of 100",
        ["", *(workload["settings"]["title"] for workload in workloads)],
        rows,
    )


def _comparable(workload: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each of the others, after the first of ours that trains in as many processes."""
    sides = workload["sides"]
    ratios = workload["ratios"]
    for other in dict.fromkeys(name for of_ours in ratios.values() for name in of_ours):
        for ours in ratios:
            if sides[ours]["processes"] == sides[other]["processes"]:
                yield ours, other
                break


def _ratio(ratios: Mapping[str, Mapping[str, Sequence[float]]], ours: str, other: str) -> str:
    ratio = ratios.get(ours, {}).get(other)
    return "–" if ratio is None else str(Ratio(*ratio))


def _populations(report: Report) -> Table:
    rows = [
        [
            f"{found['clients']:,}",
            f"{found['round_s']:.3f}",
            f"{found['wall_s']:.2f}",
            _megabytes(found["peak_resident_mb"]),
        ]
        for found in report["populations"]
    ]
    head = ["clients in all", "seconds a round", "whole process, s", "peak memory, MB"]
    return Table("1,000 clients a round, their data made on demand", head, rows)


def _command(report: Report) -> Table:
    found = report["command"]
    times = str(Ratio(*found["times_import"]))
    memory = _megabytes(found["peak_resident_mb"])
    row = [f"`{found['command']}`", f"{found['wall_s']:.2f}", f"{found['import_s']:.2f}", times, memory]
    head = ["", "seconds", "`import torch`, s", "ratio", "peak memory, MB"]
    return Table("The whole command, in turn with PyTorch's import alone", head, [row])


def _sides(report: Report) -> Sequence[str]:
    return list(dict.fromkeys(side for workload in report["workloads"].values() for side in workload["sides"]))


def _digits(rate: float) -> str:
    """Three significant digits."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _megabytes(size: float | None) -> str:
    return "–" if size is None else f"{size:.0f}"
