"""Speed of federated simulation, side by side: fed, pfl-research, a compiled loop of JAX, Flower and byzfl.

Every side runs in a process of its own, with one thread a process, on the same samples, partition and first model. Each
first trains a fixed number of rounds, after which all must be about as accurate, and which tell how fast it is; then
the sides take turns, each as many rounds as take some seconds. What counts are rounds after the first 1.5 seconds, so
that neither starting processes nor the first, slower rounds do. Ratios are of sides that took turns, with the interval
that holds 95 of 100. Other parts are large populations, the whole command, the simulator's clock, exact sums, robust
rules, and the models that people bring. Without options it measures all parts, and writes ``results.json`` beside this
file and docs/benchmarks.md.

    python benchmarks/simulation.py --workloads digits --sides ours-1,plain --repetitions 5
"""

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import aggregation
import clock
import models
from comparison import HERE, PEERS, SIDES, Comparison
from machine import machine
from processes import CommandFailed
from report import conclude
from rich.console import Console
from simulation_report import SIMULATION, tables
from whole import measure_command, measure_populations, over_limits
from workloads import MNIST, WORKLOADS

PARTS = ("rounds", "populations", "command", "clock", "sums", "rules", "models")
USUAL_SIDES = ("ours-0", "ours-2", "pfl-1", "jax", "flower", "products")
CLOCK_POPULATIONS = (1_000, 1_000_000)
CLOCK_S = 2.0
MODELS_S = 0.25
LEFT_TO_MODELS = ("mlp-nesterov", "mlp-adamw", "dropout-momentum", "dropout-adam")  # like others: models.py has all
BLAZEFL = "BlazeFL 3.0 needs Python 3.14 or later"

console = Console(highlight=False)


def available(workloads: list[str], sides: list[str]) -> tuple[list[str], list[str]]:
    """Workloads and sides that can run here; for the others a line says why they cannot."""
    if "mnist_mlp" in workloads and not MNIST.is_dir():
        console.print(f"mnist_mlp is left out: there is no folder {os.path.relpath(MNIST)} with MNIST's files")
        workloads = [name for name in workloads if name != "mnist_mlp"]
    if not PEERS.exists():
        peers = [name for name in sides if SIDES[name].python == str(PEERS)]
        if peers:
            console.print(f"{', '.join(peers)} are left out: make benchmark installs what they need")
        sides = [name for name in sides if name not in peers]
    return workloads, sides


def some_of(known: Collection[str], usual: Collection[str] = ()) -> dict[str, Any]:
    """Settings of an option that names some of those known, by default the usual ones, or all."""

    def parse(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"no such name: {', '.join(unknown)}; known: {', '.join(known)}")
        return text.split(",")

    return {"type": parse, "default": list(usual or known), "metavar": "NAME,…"}


def arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description="Speed of federated simulation, side by side.")
    for option, known, usual in (
        ("--workloads", WORKLOADS, ()),
        ("--sides", SIDES, USUAL_SIDES),
        ("--parts", PARTS, ()),
    ):
        parser.add_argument(option, **some_of(known, usual), help=f"of {', '.join(known)}")
    parser.add_argument("--repetitions", type=int, default=4, help="measurements of each side; their median counts")
    parser.add_argument("--seconds", type=float, default=1.5, help="about how long a measurement takes")
    parser.add_argument("--output", type=Path, help="where to write the results; all of them go beside this program")
    return parser.parse_args()


def main() -> int:
    """Measure, print and write; 1 where the sides do not agree or a limit is exceeded."""
    given = arguments()
    is_all = (given.workloads, given.sides, given.parts) == (list(WORKLOADS), list(USUAL_SIDES), list(PARTS))
    workloads, sides = available(given.workloads, given.sides)
    results: dict[str, Any] = {"machine": machine(), "versions": {}, "repetitions": given.repetitions}
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "rounds" in given.parts:
            results["workloads"] = {}
            for workload in workloads:
                comparison = Comparison(WORKLOADS[workload], {side: SIDES[side] for side in sides}, folder, console)
                measured = comparison.measure(given.repetitions, given.seconds)
                results["workloads"][workload] = measured
                results["versions"] |= comparison.versions
                failures += comparison.disagreements(measured)
        if "populations" in given.parts:
            results["populations"] = measure_populations(given.repetitions, console)
        if "command" in given.parts:
            results["command"] = measure_command(given.repetitions, folder)
            failures += over_limits(results["command"])
    if "clock" in given.parts:
        results["clock"] = clock.measure_all(CLOCK_POPULATIONS, given.repetitions, CLOCK_S, console)
        failures += clock.too_slow(results["clock"])
    sums = results["sums"] = aggregation.measure_sums(given.repetitions) if "sums" in given.parts else []
    rules = results["rules"] = aggregation.measure_rules(given.repetitions, console) if "rules" in given.parts else []
    failures += aggregation.over_limits(sums, rules)
    if "models" in given.parts:
        names = [name for name in models.CASES if name not in LEFT_TO_MODELS]
        results["models"] = models.measure_all(names, given.repetitions, MODELS_S, console)
    if "flower" in given.sides and sys.version_info < (3, 14):
        results["absent"] = f"{BLAZEFL}, and this is {platform.python_version()}"
    output = given.output or (HERE / "results.json" if is_all else None)
    return conclude(console, results, tables(results), output, SIMULATION if is_all else None, failures=failures)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CommandFailed as error:
        sys.exit(f"error: {error}")
