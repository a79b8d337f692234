"""The sides, and how they take turns on one workload."""

import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import ONE_THREAD, CommandFailed, Finished, run
from ratios import Ratio
from rich.console import Console
from workloads import Workload

HERE = Path(__file__).resolve().parent
PEERS = HERE / ".venv" / "bin" / "python"
WARM_UP_S = 1.5  # in which the slowest worker has started
FEWEST_ROUNDS = 3
_ATTEMPTS_OF_PEERS = 3
_OF_PEERS = ("pfl_research.py", "flower.py", "jax_loop.py")


@dataclass(frozen=True)
class Side:
    """One of those compared.

    Args:
        title: name in the table.
        program: file in ``sides/``.
        options: arguments for the program.
        processes: number that train at the same time.
        most_turns: the most measurements, of one that takes long to start, or that is no part of a ratio.
    """

    title: str
    program: str
    options: tuple[str, ...] = ()
    processes: int = 1
    most_turns: int = sys.maxsize

    @property
    def python(self) -> str:
        """The interpreter, and with it the environment."""
        return str(PEERS) if self.program in _OF_PEERS else sys.executable


SIDES = {
    "ours-0": Side("fed, in one process", "ours.py", ("--workers", "0")),
    "ours-0-single": Side("fed, in one process, client by client", "ours.py", ("--workers", "0", "--batching", "off")),
    "ours-1": Side("fed, 1 worker", "ours.py", ("--workers", "1")),
    "ours-2": Side("fed, 2 workers", "ours.py", ("--workers", "2"), processes=2),
    "plain": Side("plain PyTorch loop", "plain.py"),
    "lean": Side("lean PyTorch loop", "lean.py"),
    "pfl-1": Side("pfl-research, 1 process", "pfl_research.py"),
    "pfl-2": Side("pfl-research, 2 processes", "pfl_research.py", ("--processes", "2"), processes=2),
    "flower": Side("Flower, 2 actors", "flower.py", ("--actors", "2"), processes=2, most_turns=3),
    "jax": Side("JAX, a compiled loop, 1 core", "jax_loop.py"),
    "products": Side("PyTorch's products alone, 1 thread", "products.py", most_turns=1),
}


class Comparison:
    """The sides on one workload.

    Args:
        workload: problem that all sides train.
        sides: name → side.
        folder: place for files that last as long as the program.
        console: terminal for the progress.
    """

    def __init__(self, workload: Workload, sides: dict[str, Side], folder: Path, console: Console) -> None:
        self._workload = workload
        self._sides = sides
        self._console = console
        self._problem = folder / "problem.npz"
        self._environment = {**ONE_THREAD, "FLWR_HOME": str(folder / "flwr")}
        self.versions: dict[str, str] = {}
        workload.write(self._problem)

    def measure(self, repetitions: int, seconds: float) -> dict[str, Any]:
        """Settings, accuracies and rates of all sides, and the ratios between them."""
        rounds = self._workload.agreement_rounds
        first = {name: self._train(name, rounds) for name in self._sides}
        plan = {name: _plan(answer["ends_s"], seconds) for name, answer in first.items()}
        rates: dict[str, list[float]] = {name: [] for name in self._sides}
        for turn in range(repetitions):
            for name, (warm_up, timed) in plan.items():
                if turn >= self._sides[name].most_turns:
                    continue
                ends_s = self._train(name, warm_up + timed)["ends_s"]
                rates[name].append(timed / (ends_s[-1] - ends_s[warm_up - 1]))
        sides = {
            name: {
                "title": side.title,
                "processes": side.processes,
                "accuracy": first[name]["accuracy"],
                "memory": first[name].get("memory"),
                "warm_up_rounds": plan[name][0],
                "timed_rounds": plan[name][1],
                "rounds_per_s": rates[name],
                "median": statistics.median(rates[name]),
                "min": min(rates[name]),
                "max": max(rates[name]),
            }
            for name, side in self._sides.items()
        }
        _add_shares(sides)
        return {"settings": self._workload.settings(), "sides": sides, "ratios": _ratios(sides)}

    def _train(self, name: str, rounds: int) -> dict[str, Any]:
        side = self._sides[name]
        program = str(HERE / "sides" / side.program)
        command = [side.python, program, str(self._problem), "--rounds", str(rounds), *side.options]
        answer: dict[str, Any] = json.loads(self._run(side, command).stdout.splitlines()[-1])
        self.versions |= answer["versions"]
        ends_s = answer["ends_s"]
        rate = (rounds - 1) / (ends_s[-1] - ends_s[0])
        self._console.print(f"{self._workload.title}: {side.title}: {rounds} rounds, {rate:,.2f} a second", style="dim")
        return answer

    def _run(self, side: Side, command: list[str]) -> Finished:
        """Run it; a peer, which may crash as it ends, so many times."""
        for _ in range(_ATTEMPTS_OF_PEERS - 1 if side.python == str(PEERS) else 0):
            try:
                return run(command, self._environment)
            except CommandFailed as error:
                self._console.print(f"again, for {error}", style="dim")
        return run(command, self._environment)

    def disagreements(self, measured: dict[str, Any]) -> list[str]:
        """Sentences on sides whose accuracy differs from the median of all."""
        accuracies = {
            side["title"]: side["accuracy"] for side in measured["sides"].values() if side["accuracy"] is not None
        }
        middle = statistics.median(accuracies.values()) if accuracies else 0.0
        return [
            f"{self._workload.title}: {title} has accuracy {accuracy:.3f} after {self._workload.agreement_rounds} "
            f"rounds, the median of all is {middle:.3f}; they must agree within {self._workload.tolerance}"
            for title, accuracy in accuracies.items()
            if abs(accuracy - middle) > self._workload.tolerance
        ]


def _plan(ends_s: list[float], seconds: float) -> tuple[int, int]:
    """Numbers of rounds to leave out and to time, by the times at which earlier rounds ended."""
    middle = len(ends_s) // 2
    rate = (len(ends_s) - middle) / (ends_s[-1] - ends_s[middle - 1])
    return max(1, math.ceil(rate * WARM_UP_S)), max(FEWEST_ROUNDS, round(rate * seconds))


def _add_shares(sides: dict[str, Any]) -> None:
    """Add to each of our sides its share of the rate of PyTorch's products alone, in as many processes."""
    for name, side in sides.items():
        if name.startswith("ours") and "products" in sides:
            side["share_of_products"] = side["median"] / (sides["products"]["median"] * side["processes"])


def _ratios(sides: dict[str, Any]) -> dict[str, dict[str, Ratio]]:
    """Ratios of the rates: each of ours over each of the others, in the turns that both had."""

    def ratio(ours: str, other: str) -> Ratio:
        rates = [sides[name]["rounds_per_s"] for name in (ours, other)]
        turns = min(map(len, rates))
        return Ratio.of(*(of_side[:turns] for of_side in rates))

    others = [name for name in sides if not name.startswith("ours") and name != "products"]
    return {ours: {other: ratio(ours, other) for other in others} for ours in sides if ours.startswith("ours")}
