"""Speed and memory on a GPU as tables."""

from collections.abc import Iterator, Mapping
from typing import Any

from ratios import Ratio
from report import Report, Table, digits


def tables(report: Report) -> Iterator[Table]:
    """All tables: the limits, and for each workload its sides."""
    limits = report["limits"]
    rows = [[f"{name}, a matrix product", f"{rate / 1e12:,.3g} TFLOP/s"] for name, rate in _operations(limits)]
    rows.append(["memory, a copy", f"{limits['bytes_per_s'] / 1e9:,.4g} GB/s"])
    yield Table(f"Limits of {report['gpu'].get('name', report['gpu']['device'])}, measured", ["", ""], rows)
    for measured in report["workloads"].values():
        yield _sides(measured, report["repetitions"])


def _operations(limits: Mapping[str, Any]) -> list[tuple[str, float]]:
    return list(limits["operations_per_s"].items())


def _sides(measured: Mapping[str, Any], repetitions: int) -> Table:
    title = f"{measured['settings']['title']}: median of {repetitions}"
    if "deterministic_to_free" in measured:
        title += f"; rates of deterministic algorithms to others {Ratio(*measured['deterministic_to_free'])}"
    rows = []
    for name, side in measured["sides"].items():
        memory = side.get("memory") or {}
        rows.append(
            [
                side["title"],
                digits(side["median"]),
                f"{side['share_of_limit']:.1%}",
                _ratio_to_pfl(measured, name),
                *(_gigabytes(memory.get(key)) for key in ("allocated_mb", "reserved_mb", "peak_resident_mb")),
            ]
        )
    head = ["", "rounds/s", "of the limit", ": pfl", "GPU, allocated", "GPU, reserved", "process"]
    return Table(title, head, rows)


def _ratio_to_pfl(measured: Mapping[str, Any], name: str) -> str:
    other = "pfl-tf32" if name.endswith("tf32") else "pfl"
    ratio = measured["ratios"].get(name, {}).get(other)
    return "–" if ratio is None else str(Ratio(*ratio))


def _gigabytes(megabytes: float | None) -> str:
    return "–" if megabytes is None else f"{megabytes / 1e3:.2f} GB"
