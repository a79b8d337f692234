"""Whole processes, from their start to their end: rounds of large populations, and the command."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from processes import ONE_THREAD, Finished, run
from rich.console import Console
from workloads import ROOT

LIMITS = {"wall_s": 5.0, "peak_resident_mb": 600.0}


def measure_populations(repetitions: int, console: Console) -> list[dict[str, Any]]:
    """Rounds of 1,000 clients out of a thousand and out of a million."""
    sizes = (1_000, 1_000_000)
    found: dict[int, list[Finished]] = {clients: [] for clients in sizes}
    for _ in range(repetitions):
        for clients in sizes:
            command = [sys.executable, str(Path(__file__).with_name("population.py")), str(clients)]
            found[clients].append(run(command, ONE_THREAD, watch_memory=True))
            console.print(f"{clients:,} clients: {found[clients][-1].wall_s:.1f} s", style="dim")
    return [_population(clients, runs) for clients, runs in found.items()]


def _population(clients: int, runs: list[Finished]) -> dict[str, Any]:
    answers = [json.loads(one.stdout.splitlines()[-1]) for one in runs]
    return {
        "clients": clients,
        "round_s": statistics.median(seconds for answer in answers for seconds in answer["rounds_s"]),
        "accuracy": answers[0]["accuracy"],
        **_whole(runs),
    }


def measure_command(repetitions: int, folder: Path) -> dict[str, Any]:
    """``fed simulate`` on digits, 20 rounds, from its start to its end."""
    written = "fed simulate examples/experiment.yaml --set rounds.count=20"
    fed, *arguments = written.split()
    command = [str(Path(sys.executable).with_name(fed)), *arguments, "--output", str(folder / "run"), "--overwrite"]
    command[2] = str(ROOT / command[2])
    return {"command": written, **_whole([run(command, watch_memory=True) for _ in range(repetitions)])}


def _whole(runs: list[Finished]) -> dict[str, Any]:
    """Median seconds and largest peaks of memory."""
    return {
        "wall_s": statistics.median(one.wall_s for one in runs),
        "peak_resident_mb": max((one.peak_resident_mb for one in runs if one.peak_resident_mb), default=None),
        "peak_mb": max((one.peak_mb for one in runs if one.peak_mb), default=None),
    }


def over_limits(measured: dict[str, Any]) -> list[str]:
    """Where the whole command takes more than it may."""
    return [
        f"{measured['command']}: {name} must be at most {limit:g}, got {measured[name]:.2f}"
        for name, limit in LIMITS.items()
        if measured[name] is not None and measured[name] > limit
    ]
