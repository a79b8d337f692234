"""Events a second of the simulator's clock, and how the cost of one grows with the population.

An event is a task that is dispatched or an answer that arrives. Nobody trains: an update of zero comes at once, so that
what is measured is all the rest, from drawing who is asked to moving a trivial model. Devices are lognormal, so that no
two answers arrive together, and 1,000 clients have tasks at any time. A second is one of a core's time. Each
measurement has a process of its own; populations take turns, and the median counts. Without options it writes
``clock.json`` beside this file.

    python benchmarks/clock.py --populations 1000 1000000 --repetitions 1
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from machine import machine, memory_mb
from processes import ONE_THREAD, run
from report import Table
from rich.console import Console
from torch import Tensor

import fed
from fed.clients.training.executor import Executor, Item, Result
from fed.clients.training.work_items import Trained
from fed.processes.machine import frozen_objects
from fed.simulations.simulation import Simulation

HERE = Path(__file__).resolve().parent
POPULATIONS = (1_000, 10_000, 100_000, 1_000_000)
CONCURRENCY = 1_000
BUFFER = 10
ROUNDS: dict[str, dict[str, Any]] = {
    "asynchronous": {"kind": "asynchronous", "concurrency": CONCURRENCY},
    "buffered": {"kind": "buffered", "concurrency": CONCURRENCY, "buffer": BUFFER},
}
LEAST = {"asynchronous": 20_000, "buffered": 30_000}
"""Events a second that are wanted."""
HELD = 20
SAMPLES = torch.zeros(HELD, 4), torch.zeros(HELD, dtype=torch.int64)


class AtOnce(Executor):
    """Answers with updates of zero."""

    is_parallel = False

    def __init__(self, size: int) -> None:
        self._update_KM = torch.zeros(CONCURRENCY, size, dtype=torch.float64)
        self._items: dict[int, Item] = {}
        self._submitted = 0

    def submit(self, item: Item) -> int:
        """Take it."""
        self._submitted += 1
        self._items[self._submitted] = item
        return self._submitted

    def results(self, tickets: Iterable[int]) -> Iterator[Result]:
        """The answers."""
        for ticket in tickets:
            item = self._items.pop(ticket)
            count = len(item.content.clients)
            integers = item.tensors[1]
            update: Tensor = self._update_KM[:count]
            if item.content.wants == "mean":
                update = update[0]
                integers = integers if integers.ndim == 1 else integers[0]
            elif integers.ndim == 1:
                integers = integers.expand(count, -1)
            samples = (HELD,) * count
            trained = Trained(samples, (0.0,) * count, tuple(map(float, samples)))
            yield Result(ticket, trained, (update, integers))

    def close(self) -> None:
        """Do nothing: no process is left."""


def measure(kind: str, population: int, seconds: float) -> dict[str, float]:
    """One run, in this process: what it took until the first round, and events a second from then on."""
    began_s = perf_counter()
    clients = fed.ClientsOnDemand(range(population), lambda client: SAMPLES, lambda client: HELD)
    experiment = fed.Experiment(
        rounds={**ROUNDS[kind], "count": 10**9, "evaluate_every": 10**9},
        devices={"kind": "lognormal"},
        simulation={"workers": 0},
    )
    torch.set_num_threads(1)
    data = fed.FederatedData(clients, classes=2)
    simulation = Simulation(experiment, data, torch.nn.Linear(4, 2))
    federation = simulation.federation(AtOnce(simulation.layout.size))
    with frozen_objects():  # as in fed.simulate
        federation.round(1)
        first_s = perf_counter()
        first_cpu_s = process_time()
        events = 0
        number = 1
        while perf_counter() < first_s + seconds:
            for _ in range(100):
                number += 1
                stats = federation.round(number)
                events += stats.selected + stats.replied
        rate = events / (process_time() - first_cpu_s)
    return {"events_per_s": rate, "begins_s": first_s - began_s, "peak_resident_mb": memory_mb("VmHWM")}


def measured(kind: str, population: int, seconds: float) -> dict[str, float]:
    """The same in a process of its own."""
    options = ["--one", kind, "--populations", str(population), "--seconds", str(seconds)]
    found: dict[str, float] = json.loads(run([sys.executable, __file__, *options], ONE_THREAD).stdout.splitlines()[-1])
    return found


def measure_all(populations: Sequence[int], repetitions: int, seconds: float, console: Console) -> list[dict[str, Any]]:
    """Each kind of rounds with each population, medians; how often the least population's cost an event's is."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for repetition in range(repetitions):
        for kind in ROUNDS:
            for population in populations:
                found.setdefault((kind, population), []).append(measured(kind, population, seconds))
                rate = found[kind, population][-1]["events_per_s"]
                console.print(f"{repetition + 1}: {kind}, {population:,} clients: {rate:,.0f} events/s", style="dim")
    medians = {
        key: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for key, runs in found.items()
    }
    return [
        {
            "rounds": kind,
            "clients": population,
            **median,
            "cost": medians[kind, populations[0]]["events_per_s"] / median["events_per_s"],
        }
        for (kind, population), median in medians.items()
    ]


def too_slow(results: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences on rounds that take fewer events a second than they should."""
    return [
        f"{one['rounds']} rounds of {one['clients']:,} clients must take {LEAST[one['rounds']]:,} events a second, got "
        f"{one['events_per_s']:,.0f}"
        for one in results
        if one["events_per_s"] < LEAST[one["rounds"]]
    ]


def table(results: Sequence[dict[str, Any]], repetitions: int) -> Table:
    """Table of the medians."""
    title = f"Events a second with {CONCURRENCY:,} tasks under way, one core, median of {repetitions}"
    rows = [
        [
            one["rounds"],
            f"{one['clients']:,}",
            f"{one['events_per_s']:,.0f}",
            f"{one['cost']:.2f} times the first",
            f"{one['begins_s']:.2f} s",
            f"{one['peak_resident_mb']:,.0f} MB",
        ]
        for one in results
    ]
    return Table(title, ["rounds", "clients", "events/s", "cost of an event", "begins after", "peak memory"], rows)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--populations", type=int, nargs="+", default=POPULATIONS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a measurement")
    parser.add_argument("--output", type=Path, default=HERE / "clock.json")
    parser.add_argument("--one", choices=ROUNDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.populations[0], options.seconds)))
        return
    console = Console(highlight=False)
    results = measure_all(options.populations, options.repetitions, options.seconds, console)
    console.print(table(results, options.repetitions).for_terminal())
    report = {"machine": machine(), "repetitions": options.repetitions, "seconds": options.seconds, "results": results}
    options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
