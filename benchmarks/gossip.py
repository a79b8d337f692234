"""A thousand simulated peers: how long they train and mix, and what share of the memory's bandwidth mixing takes.

Each peer of a static exponential graph takes one step of 10 samples of ``synthetic`` in a round, with an MLP 60-128-10,
and mixes. Mixing must read the peers' own vectors (float64) and those that were sent (float32), and write its result
(float64): at the speed at which memory is copied here, that takes the least time that there can be.

    python benchmarks/gossip.py --rounds 10
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from machine import machine
from rich.console import Console
from torch import Tensor

import fed
import fed.vectors.mixing
from fed.vectors.mixing import Weights

PEERS = 1000
ROUNDS = 100
MOST_S = 180.0
COPIED_BYTES = 2**28
COPIES = 7


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=PEERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--workers", type=int, default=0)
    given = parser.parse_args(arguments)
    mixing = Mixing()
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        run = fed.simulate(experiment(given.peers, given.rounds, given.workers), output=Path(folder) / "run")
    wall_s = time.perf_counter() - began
    bandwidth = copied_bytes_per_s()
    least_s = mixing.touched_bytes / bandwidth
    out = Console(width=120, highlight=False)
    found = machine()
    out.print(f"{found['processor']}, {found['cores']} cores, {found['date']}, torch {torch.__version__}")
    out.print(f"{given.peers} peers, {given.rounds} rounds: {wall_s:.1f} s, at most {MOST_S:.0f} s for 1000 and 100")
    out.print(f"mixing: {mixing.spent_s:.2f} s, {1e3 * mixing.spent_s / mixing.calls:.1f} ms each")
    out.print(f"memory: copies {bandwidth / 1e9:.1f} GB/s, reading and writing; mixing must move {least_s:.2f} s of it")
    out.print(f"sums of neighbours' products, in one order: {1e3 * mixing.summed_s / mixing.calls:.1f} ms of each")
    out.print(f"mixing takes {mixing.spent_s / least_s:.1f} times the limit, {mixing.spent_s / wall_s:.0%} of the run")
    out.print(f"test accuracy {run.summary['final_test_accuracy']:.3f}")
    out.print(f"consensus distance {run.summary['final_consensus_distance']:.3g}")


def experiment(peers: int, rounds: int, workers: int) -> fed.Experiment:
    """D-PSGD, scored after the last round."""
    return fed.Experiment(
        name="gossip",
        data={"kind": "synthetic", "clients": peers},
        model={"kind": "mlp", "hidden": [128]},
        local={"lr": 0.05, "steps": 1, "batch_size": 10},
        algorithm="dpsgd",
        topology="exponential",
        rounds={"count": rounds, "evaluate_every": rounds},
        evaluation="coordinator",
        checkpoints={"every": None},
        simulation={"workers": workers},
    )


class Mixing:
    """Time and memory of all products W x, and the time of the sums within them, from now on."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.summed_s = 0.0
        self.touched_bytes = 0
        self.calls = 0
        mixed = Weights.mixed
        summed = fed.vectors.mixing.embedding_bag

        def timed_sum(products_X: Tensor, products_YM: Tensor, firsts_N: Tensor, mode: str) -> Tensor:
            began = time.perf_counter()
            sums_NM = summed(products_X, products_YM, firsts_N, mode=mode)
            if len(sums_NM) > 1:
                self.summed_s += time.perf_counter() - began
            return sums_NM

        def timed(weights: Weights, own_NM: Tensor, sent_SM: Tensor) -> Tensor:
            began = time.perf_counter()
            mixed_NM = mixed(weights, own_NM, sent_SM)
            if len(own_NM) > 1:  # messages are tried with a single peer
                self.spent_s += time.perf_counter() - began
                self.touched_bytes += own_NM.nbytes + sent_SM.nbytes + mixed_NM.nbytes
                self.calls += 1
            return mixed_NM

        vars(fed.vectors.mixing)["embedding_bag"] = timed_sum
        Weights.mixed = timed  # type: ignore[method-assign]


def copied_bytes_per_s() -> float:
    """Bytes read and written a second where a tensor is copied by one thread, the median."""
    torch.set_num_threads(1)
    source = torch.zeros(COPIED_BYTES // 8, dtype=torch.float64)
    target = torch.ones_like(source)
    times_s = []
    for _ in range(COPIES):
        began = time.perf_counter()
        target.copy_(source)
        times_s.append(time.perf_counter() - began)
    return 2 * COPIED_BYTES / statistics.median(times_s)


if __name__ == "__main__":
    main()
