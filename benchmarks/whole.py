"""Whole processes, from their start to their end: rounds of large populations, and the command."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from processes import ONE_THREAD, Finished, run
from ratios import Ratio
from rich.console import Console

LIMITS = {"times_import": 1.6, "peak_resident_mb": 350.0}
_AS_INSTALLED = {"PYTHONDONTWRITEBYTECODE": ""}  # pip leaves the package's bytecode, as it leaves PyTorch's


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
    """``fed simulate`` on digits, ten rounds, from its start to its end, in turn with PyTorch's import alone."""
    written = "fed simulate examples/experiment.yaml --set rounds.count=10"
    fed, *arguments = written.split()
    command = [str(Path(sys.executable).with_name(fed)), *arguments, "--output", str(folder / "run"), "--overwrite"]
    importing = [sys.executable, "-c", "import torch"]
    for warmed_up in (importing, command):  # files come from the disk, and bytecode is written
        run(warmed_up, _AS_INSTALLED)
    pairs = [(run(command, _AS_INSTALLED), run(importing, _AS_INSTALLED)) for _ in range(repetitions)]
    runs = [one for one, _ in pairs]
    imports_s = [one.wall_s for _, one in pairs]
    ratio = Ratio.of([one.wall_s for one in runs], imports_s)
    found = _whole(*runs, run(command, _AS_INSTALLED, watch_memory=True))
    return {"command": written, **found, "import_s": statistics.median(imports_s), "times_import": list(ratio)}


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
    found = {"times_import": measured["times_import"][0], "peak_resident_mb": measured["peak_resident_mb"]}
    return [
        f"{measured['command']}: {name} must be at most {limit:g}, got {found[name]:.2f}"
        for name, limit in LIMITS.items()
        if found[name] is not None and found[name] > limit
    ]
