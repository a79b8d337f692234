"""Speed of federated simulation on a GPU: fed and pfl-research side by side, and beside what the GPU could do.

Sides take turns as in ``simulation.py``. fed trains with deterministic algorithms and without, in float32 and in TF32,
and with two workers. The GPU's limits are measured first, and tell which share of them each side reaches. Writes
``gpu.json`` beside this file.

    python benchmarks/gpu.py --workloads transformer --output runs/gpu.json
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu_limits
import torch
from comparison import HERE, PEERS, Comparison, Side
from gpu_report import tables
from gpu_workloads import workloads
from machine import machine
from processes import CommandFailed
from ratios import Ratio
from report import conclude
from rich.console import Console

OURS = ("--workers", "0")
PRECISION_OF = {"ours-tf32": "tf32", "pfl-tf32": "tf32"}
"""Precision of each side's products; others: float32."""

console = Console(highlight=False)


def sides(device: str) -> dict[str, Side]:
    """All sides by name.

    Args:
        device: name of the device that they train on.
    """
    on = ("--device", device)
    return {
        "ours": Side("fed", "ours.py", (*OURS, *on)),
        "ours-free": Side("fed, deterministic: false", "ours.py", (*OURS, *on, "--deterministic", "off")),
        "ours-tf32": Side("fed, TF32", "ours.py", (*OURS, *on, "--precision", "tf32")),
        "ours-2": Side("fed, 2 workers", "ours.py", ("--workers", "2", *on), processes=2),
        "pfl": Side("pfl-research", "pfl_research.py", on),
        "pfl-tf32": Side("pfl-research, TF32", "pfl_research.py", (*on, "--precision", "tf32")),
    }


def described(device: torch.device) -> dict[str, Any]:
    """The device, its driver and PyTorch's version."""
    found: dict[str, Any] = {"device": str(device), "torch": torch.__version__}
    if device.type != "cuda":
        return found
    properties = torch.cuda.get_device_properties(device)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device.index or 0}"]
    return found | {
        "name": properties.name,
        "memory_gb": properties.total_memory / 1e9,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None,
    }


def add_shares(measured: dict[str, Any], work: gpu_limits.Work, limits: gpu_limits.Limits) -> None:
    """Add the work of a round, and to each side the least seconds of it and the share of that which it reaches.

    Args:
        measured: answer of :meth:`comparison.Comparison.measure`.
        work: work of a round.
        limits: limits of the device.
    """
    measured["work"] = {"operations": work.operations, "bytes": work.bytes}
    for name, side in measured["sides"].items():
        least_s = limits.least_s(work, PRECISION_OF.get(name, "float32"))
        side["least_s"] = least_s
        side["share_of_limit"] = least_s * side["median"]
    rates = {name: side["rounds_per_s"] for name, side in measured["sides"].items()}
    if {"ours", "ours-free"} <= rates.keys():
        measured["deterministic_to_free"] = list(Ratio.of(rates["ours"], rates["ours-free"]))


def arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    known = sides("cpu")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="device of all sides; cpu: tiny sizes, to try the program")
    parser.add_argument("--workloads", default=",".join(workloads()), help=f"of {', '.join(workloads())}")
    parser.add_argument("--sides", default=",".join(known), help=f"of {', '.join(known)}")
    parser.add_argument("--repetitions", type=int, default=5, help="measurements of each side; their median counts")
    parser.add_argument("--seconds", type=float, default=3.0, help="about how long a measurement takes")
    parser.add_argument("--output", type=Path, help="where to write the results; those of a GPU go beside this program")
    given = parser.parse_args()
    for option, names in (("workloads", workloads()), ("sides", known)):
        asked = getattr(given, option).split(",")
        if unknown := [name for name in asked if name not in names]:
            parser.error(f"--{option} knows {', '.join(names)}, got {', '.join(unknown)}")
        setattr(given, option, asked)
    return given


def main() -> int:
    """Measure, print and write; 1 where the sides do not agree, 2 without a GPU."""
    given = arguments()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        console.print("error: this benchmark needs a GPU of NVIDIA, and PyTorch finds none here", style="red")
        return 2
    is_tiny = device.type == "cpu"
    taking_part = {name: side for name, side in sides(given.device).items() if name in given.sides}
    left_out = [name for name, side in taking_part.items() if side.python == str(PEERS) and not PEERS.exists()]
    if left_out:
        console.print(f"{', '.join(left_out)} are left out: make benchmark-gpu installs what they need")
    taking_part = {name: side for name, side in taking_part.items() if name not in left_out}
    limits = gpu_limits.measured(device, tiny=is_tiny, seconds=0.01 if is_tiny else 1.0)
    results: dict[str, Any] = {
        "machine": machine(),
        "gpu": described(device),
        "limits": {"operations_per_s": limits.operations_per_s, "bytes_per_s": limits.bytes_per_s},
        "repetitions": given.repetitions,
        "versions": {},
        "workloads": {},
    }
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.workloads:
            workload = workloads(tiny=is_tiny)[name]
            comparison = Comparison(workload, taking_part, Path(folder), console)
            measured = comparison.measure(given.repetitions, given.seconds)
            add_shares(measured, gpu_limits.Work.of_round(workload), limits)
            results["workloads"][name] = measured
            results["versions"] |= comparison.versions
            failures += comparison.disagreements(measured)
    output = given.output or (None if is_tiny else HERE / "gpu.json")
    return conclude(console, results, tables(results), output, None, failures=failures)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CommandFailed as error:
        sys.exit(f"error: {error}")
