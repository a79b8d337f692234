"""Speed of two nodes of a Ray cluster beside one, and beside two workers without Ray, in one call.

    python benchmarks/ray_nodes.py

Each node has one core, to which its processes are bound. Ten clients with 600 samples of MNIST's shape train an MLP for
ten epochs a round, each client an item of its own. The sides take turns; a side's time is that of its rounds but the
first, in which workers begin. Needs the extra ray.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

import fed
from fed.server.observer import Essential, Event, Kinds, RoundEnded

_TURNS = 3
_ROUNDS = 4


class Stopwatch:
    """Observer that notes when rounds end."""

    kinds: Kinds = (RoundEnded,)

    def __init__(self) -> None:
        self.ended_s: list[float] = []

    def observe(self, event: Event) -> None:
        """Note the time."""
        self.ended_s.append(time.perf_counter())


def data() -> fed.FederatedData:
    """Ten clients with 600 samples of MNIST's shape."""
    generator = torch.Generator().manual_seed(0)
    return fed.FederatedData(
        {
            client: (torch.rand(600, 784, generator=generator), torch.randint(10, (600,), generator=generator))
            for client in range(10)
        },
        classes=10,
    )


def seconds_of_a_round(executor: Any, workers: int) -> float:
    """Seconds of a round after the first."""
    experiment = fed.Experiment(
        model={"kind": "mlp", "hidden": [200, 200]},
        local={"epochs": 10, "batch_size": 32, "lr": 0.01},
        rounds={"count": 1 + _ROUNDS, "cohort": "all"},
        simulation={"executor": executor, "workers": workers, "batching": "off", "group": 1, "device": "cpu"},
    )
    watch = Stopwatch()
    fed.simulate(experiment, data=data(), observers=[Essential(watch)])
    return (watch.ended_s[-1] - watch.ended_s[0]) / _ROUNDS


@contextlib.contextmanager
def nodes(count: int) -> Iterator[str]:
    """Address of a cluster with so many nodes of one core each."""
    from ray.cluster_utils import Cluster

    cores = sorted(os.sched_getaffinity(0))
    store_bytes = 200 << 20
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": store_bytes},
    )
    try:
        for core in cores[:count]:
            os.sched_setaffinity(0, {core})  # of this thread, whose children inherit it
            cluster.add_node(num_cpus=1, object_store_memory=store_bytes)
        os.sched_setaffinity(0, cores)
        yield cluster.address
    finally:
        os.sched_setaffinity(0, cores)
        cluster.shutdown()


def main() -> None:
    """Print medians and ratios."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    times: dict[str, list[float]] = {"one node": [], "two nodes": [], "two workers without Ray": []}
    with nodes(2) as address:
        on_ray = {"kind": "ray", "address": address}
        for _ in range(_TURNS):
            times["one node"].append(seconds_of_a_round(on_ray, 1))
            times["two workers without Ray"].append(seconds_of_a_round("workers", 2))
            times["two nodes"].append(seconds_of_a_round(on_ray, 2))
    medians = {side: statistics.median(found) for side, found in times.items()}
    for side, median in medians.items():
        print(f"{side}: {median:.2f} s a round ({', '.join(f'{found:.2f}' for found in times[side])})")
    two = medians["two nodes"]
    print(f"two nodes: {medians['one node'] / two:.2f} × one node")
    print(f"two nodes: {medians['two workers without Ray'] / two:.2f} × two workers without Ray")


if __name__ == "__main__":
    main()
