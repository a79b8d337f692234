"""Processor time of a work item: what a worker takes for it, and what the main process takes for it.

Their ratio is the number of workers that one main process keeps at work. Data are random, of the shapes of the
workloads, for the time does not depend on their values.

    python benchmarks/items.py
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import fed
from fed.clients.models import cnn, mlp
from fed.server.observer import Essential, Event, RoundEnded


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its clients' data, and the rounds that are measured.

    Args:
        title: name in the table.
        model: the module.
        shape: shape of a sample.
        samples: number of samples of each client.
        batch_size: samples of a step.
        epochs: passes over a client's samples in a round.
        cohort: clients a round.
        group: largest number of clients in an item.
        rounds: number of rounds that count.
    """

    title: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int
    batch_size: int
    epochs: int
    cohort: int
    group: int
    rounds: int


CASES = [
    Case(
        title="digits, groups of 2",
        model=lambda: mlp((64,), 10, hidden=(128,)),
        shape=(64,),
        samples=15,
        batch_size=16,
        epochs=1,
        cohort=10,
        group=2,
        rounds=200,
    ),
    Case(
        title="digits, groups of 32",
        model=lambda: mlp((64,), 10, hidden=(128,)),
        shape=(64,),
        samples=15,
        batch_size=16,
        epochs=1,
        cohort=1000,
        group=32,
        rounds=15,
    ),
    Case(
        title="MNIST's shape, MLP",
        model=lambda: mlp((1, 28, 28), 10, hidden=(200,)),
        shape=(1, 28, 28),
        samples=600,
        batch_size=10,
        epochs=5,
        cohort=10,
        group=3,
        rounds=5,
    ),
    Case(
        title="FEMNIST's shape, CNN",
        model=lambda: cnn((1, 28, 28), 62, channels=(16, 32), hidden=128),
        shape=(1, 28, 28),
        samples=100,
        batch_size=20,
        epochs=1,
        cohort=20,
        group=2,
        rounds=8,
    ),
]
_WARM_UP_ROUNDS = 3


class _Watch:
    """Observer that notes the processor time of this process and of its workers at the end of each round."""

    kinds = (RoundEnded,)

    def __init__(self) -> None:
        self.here_s: list[float] = []
        self.workers_s: list[float] = []

    def observe(self, event: Event) -> None:
        """Note the times."""
        self.here_s.append(time.process_time())
        self.workers_s.append(_descendants_s(os.getpid()))


def _descendants_s(process: int) -> float:
    """Processor time of the processes that descend from one, on Linux."""
    found_s = 0.0
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found_s += int(Path(f"/proc/{child}/schedstat").read_text().split()[0]) / 1e9 + _descendants_s(child)
    return found_s


def measure(case: Case, workers: int) -> tuple[float, float]:
    """Seconds of this process, and of workers, for an item.

    Args:
        case: model, data and rounds.
        workers: number of workers; 0: this process does the items, too.
    """
    generator = torch.Generator().manual_seed(0)
    data = {
        client: (
            torch.randn(case.samples, *case.shape, generator=generator),
            torch.randint(10, (case.samples,), generator=generator),
        )
        for client in range(max(case.cohort, 100))
    }
    experiment = fed.Experiment(
        local={"lr": 0.05, "batch_size": case.batch_size, "epochs": case.epochs},
        rounds={"count": _WARM_UP_ROUNDS + case.rounds, "cohort": case.cohort},
        simulation={"workers": workers, "batching": "on", "group": case.group},
    )
    watch = _Watch()
    fed.simulate(experiment, data=fed.FederatedData(data), model=case.model, observers=[Essential(watch)])
    items = case.rounds * -(-case.cohort // case.group)
    here_s, workers_s = ((noted[-1] - noted[_WARM_UP_ROUNDS - 1]) / items for noted in (watch.here_s, watch.workers_s))
    return here_s, workers_s


def main() -> None:
    """Measure each case in one process, and with a worker."""
    torch.set_num_threads(1)
    print("| | in one process, ms an item | main process | worker | workers that it keeps at work |")
    print("|---|---:|---:|---:|---:|")
    for case in CASES:
        alone_s, _ = measure(case, 0)
        here_s, worker_s = measure(case, 1)
        times = " | ".join(f"{1000 * seconds:.3g}" for seconds in (alone_s, here_s, worker_s))
        print(f"| {case.title} | {times} | {worker_s / here_s:.2g} |", flush=True)


if __name__ == "__main__":
    main()
