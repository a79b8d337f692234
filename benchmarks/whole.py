"""Whole processes, from their start to their end: rounds of large populations, and the command."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from processes import ONE_THREAD, Finished, run
from rich.console import Console

LIMITS = {"wall_s": 5.0, "peak_resident_mb": 600.0}


def measure_populations(repetitions: int, console: Console) -> list[dict[str, Any]]:
    """Rounds of 1,000 clients out of a thousand and out of a million."""
    program = str(Path(__file__).with_name("population.py"))
    sizes = (1_000, 1_000_000)
    found: dict[int, list[Finished]] = {clients: [] for clients in sizes}
    for watch_memory in (*[False] * repetitions, True):
        for clients in sizes:
            found[clients].append(run([sys.executable, program, str(clients)], ONE_THREAD, watch_memory=watch_memory))
            console.print(f"{clients:,} clients: {found[clients][-1].wall_s:.1f} s", style="dim")
    return [_population(clients, *runs) for clients, runs in found.items()]


def _population(clients: int, *runs: Finished) -> dict[str, Any]:
    answers = [json.loads(timed.stdout.splitlines()[-1]) for timed in runs[:-1]]
    return {
        "clients": clients,
        "round_s": statistics.median(seconds for answer in answers for seconds in answer["rounds_s"]),
        "accuracy": answers[0]["accuracy"],
        **_whole(*runs),
    }


def measure_command(repetitions: int, folder: Path) -> dict[str, Any]:
    """``fed simulate`` on digits, 20 rounds, from its start to its end."""
    written = "fed simulate examples/experiment.yaml --set rounds.count=20"
    fed, *arguments = written.split()
    command = [str(Path(sys.executable).with_name(fed)), *arguments, "--output", str(folder / "run"), "--overwrite"]
    runs = [run(command, watch_memory=watch_memory) for watch_memory in (*[False] * repetitions, True)]
    return {"command": written, **_whole(*runs)}


def _whole(*runs: Finished) -> dict[str, Any]:
    """Seconds of all runs but the last, which was watched, and its peaks of memory."""
    *timed, watched = runs
    return {
        "wall_s": statistics.median(one.wall_s for one in timed),
        "peak_resident_mb": watched.peak_resident_mb,
        "peak_mb": watched.peak_mb,
    }


def over_limits(measured: dict[str, Any]) -> list[str]:
    """Sentences on limits that the whole command exceeds."""
    return [
        f"{measured['command']}: {name} must be at most {limit:g}, got {measured[name]:.2f}"
        for name, limit in LIMITS.items()
        if measured[name] is not None and measured[name] > limit
    ]
