"""Speed of the simulator beside a lean PyTorch loop, for the models that people bring.

Both train the same clients, with as many steps of the same batch size, in one process with one thread. They take turns
within one run: after some rounds of the simulator, the loop trains as many. Seconds are those of the processor, so that
other programs of the machine disturb little. The simulator is measured as it chooses to train, and with clients one by
one.

    python benchmarks/models.py --only mlp,gru --output runs/models.json
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from brought_models import CASES, COHORT, Case
from lean_loop import LeanLoop
from machine import machine
from ratios import Ratio
from report import Table, conclude, digits
from rich.console import Console

import fed
from fed.config.experiment import Local
from fed.server.observer import Essential, Event, RoundEnded

SIDES = {"auto": "fed : loop", "off": "one by one : loop"}
_WARM_UP_TURNS = 2
_TRIAL_ROUNDS = 3


class Turns:
    """Observer of a simulation that has the loop train as many rounds whenever some have ended.

    Attributes:
        ours_s: seconds of a round in each of the simulator's turns.
        lean_s: seconds of a round in each of the loop's turns.

    Args:
        loop: the other side.
        rounds: number of rounds in a turn.
    """

    kinds = (RoundEnded,)

    def __init__(self, loop: LeanLoop, rounds: int) -> None:
        self._loop = loop
        self._rounds = rounds
        self._ended = 0
        self._began_s = math.nan
        self.ours_s: list[float] = []
        self.lean_s: list[float] = []

    def observe(self, event: Event) -> None:
        """Note the end of a round, and have the loop take its turn after the last of ours."""
        self._ended += 1
        if self._ended % self._rounds:
            return
        ended_s = time.process_time()
        for _ in range(self._rounds):
            self._loop.round()
        now_s = time.process_time()
        self.ours_s.append((ended_s - self._began_s) / self._rounds)
        self.lean_s.append((now_s - ended_s) / self._rounds)
        self._began_s = now_s


def measure(case: Case, batching: str, turns: int, seconds: float) -> dict[str, Any]:
    """Seconds of a round of both sides, and the ratio of their rates.

    Args:
        case: model, data and optimizer.
        batching: the experiment's key of that name.
        turns: number of turns of each side, after two that do not count.
        seconds: approximate duration of a turn.
    """
    clients = case.clients()
    pairs = list(clients.values())
    loop = LeanLoop(case.made(), pairs, Local(**case.keys), COHORT, channels_last=case.channels_last)
    rounds = max(1, round(seconds / _round_s(loop)))
    taken = Turns(loop, rounds)
    experiment = fed.Experiment(
        local=case.keys,
        rounds={"count": rounds * (_WARM_UP_TURNS + turns), "cohort": COHORT},
        simulation={"workers": 0, "batching": batching},
    )
    data = fed.FederatedData(clients)  # no test set: nothing is evaluated between rounds
    fed.simulate(experiment, data=data, model=case.made(), observers=[Essential(taken)])
    ours_s = taken.ours_s[_WARM_UP_TURNS:]
    lean_s = taken.lean_s[_WARM_UP_TURNS:]
    return {
        "ours_s": statistics.median(ours_s),
        "lean_s": statistics.median(lean_s),
        "ratio": list(Ratio.of(lean_s, ours_s)),
        "rounds": rounds,
    }


def _round_s(loop: LeanLoop) -> float:
    """Seconds of a round of the loop, after a first one."""
    loop.round()
    began_s = time.process_time()
    for _ in range(_TRIAL_ROUNDS):
        loop.round()
    return (time.process_time() - began_s) / _TRIAL_ROUNDS


def measure_all(names: Collection[str], turns: int, seconds: float, console: Console) -> dict[str, Any]:
    """Each model by its name, as the simulator chooses to train and one client after another.

    Args:
        names: names of cases.
        turns: number of turns of each side.
        seconds: approximate duration of a turn.
        console: terminal for the progress.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names:
        found[name] = {side: measure(CASES[name], side, turns, seconds) for side in SIDES}
        ratios = ", ".join(f"{title} {Ratio(*found[name][side]['ratio'])}" for side, title in SIDES.items())
        console.print(f"{CASES[name].title}: {ratios}", style="dim")
    torch.set_num_threads(threads)
    return found


def table(found: Mapping[str, Any]) -> Table:
    """All models, the one with the lowest ratio first."""
    lowest = sorted(found, key=lambda name: min(found[name][side]["ratio"][0] for side in SIDES))
    rows = [
        [
            CASES[name].title,
            *(digits(1000 * found[name]["auto"][side]) for side in ("lean_s", "ours_s")),
            *(str(Ratio(*found[name][side]["ratio"])) for side in SIDES),
        ]
        for name in lowest
    ]
    return Table(
        "Rounds a second beside a lean PyTorch loop, of sides that took turns, with the interval that holds 95 of 100",
        ["model", "loop, ms a round", "fed, ms a round", *SIDES.values()],
        rows,
    )


def some_names(text: str) -> list[str]:
    """Names of cases, as the command line has them."""
    if unknown := [name for name in text.split(",") if name not in CASES]:
        raise argparse.ArgumentTypeError(f"no such name: {', '.join(unknown)}; known: {', '.join(CASES)}")
    return text.split(",")


def main() -> int:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=some_names, default=list(CASES), metavar="NAME,…", help=f"of {', '.join(CASES)}")
    parser.add_argument("--turns", type=int, default=8, help="turns of each side, two or more")
    parser.add_argument("--seconds", type=float, default=0.25, help="about how long a turn takes")
    parser.add_argument("--output", type=Path, help="file for the results as JSON; the table goes beside it as .md")
    given = parser.parse_args()
    console = Console(highlight=False)
    found = measure_all(given.only, given.turns, given.seconds, console)
    report = {"machine": machine(), "versions": {"torch": version("torch")}, "models": found}
    if given.output:
        given.output.with_suffix(".md").write_text(table(found).markdown() + "\n", encoding="utf-8")
    return conclude(console, report, [table(found)], given.output, None)


if __name__ == "__main__":
    sys.exit(main())
