"""Costs of deployments as a table."""

from collections.abc import Mapping
from typing import Any

from report import Report, Table, measured_on

DEPLOYMENTS = "<!-- deployment: begin -->", "<!-- deployment: end -->"
HEAD = ["", "nodes", "model", "rounds", "failed", "seconds a round", "server's peak, MB"]
TITLES = {
    "empty": "`fed server`, nodes that answer at once",
    "whole": "`fed server` and `fed client`, each with its training process",
    "flower": "Flower, its FedAvg, nodes that answer at once",
    "flower-whole": "`fed flower-app` on Flower, a process for each task",
    "large": "`fed server`, nodes that answer at once",
    "flower-large": "Flower, its FedAvg, nodes that answer at once",
    "many": "`fed server`, nodes that answer at once",
}


def table(report: Report) -> Table:
    """Table with the short names of the parts."""
    return Table("Deployments", HEAD, [[name, *_cells(found)] for name, found in report["results"].items()])


def markdown(report: Report) -> str:
    """Markdown of the machine, the table, and the server's memory."""
    rows = [[TITLES[name], *cells] for name, *cells in table(report).rows]
    parts = [measured_on(report), Table("", HEAD, rows).markdown()]
    beyond = report["results"].get("large", {}).get("models_beyond_state")
    if beyond is not None:
        parts.append(
            "The server's peak memory with the model of 100 MB, less its peak with a model of four numbers and less "
            f"the\nalgorithm's state (one model in float64), is {beyond:.1f} times the model at most."
        )
    return "\n\n".join(parts)


def _cells(found: Mapping[str, Any]) -> list[str]:
    model = "4 numbers" if found["model_mb"] < 0.001 else f"{found['model_mb']:.0f} MB"
    least = _digits(found["least_s"])
    most = _digits(found["most_s"])
    return [
        str(found["nodes"]),
        model,
        str(found["rounds"]),
        "–" if found["failed"] is None else str(found["failed"]),
        f"{_digits(found['round_s'])} ({least} – {most})",
        "–" if found["peak_mb"] is None else f"{found['peak_mb']:,.0f}",
    ]


def _digits(seconds: float) -> str:
    """Two significant digits."""
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
