"""What algorithms are for, on real data: fewer rounds, or a better model where clients disagree."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import fed
from tests.observing import after_round

pytestmark = pytest.mark.usefixtures("device")

MNIST = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "mnist"
TARGET = 0.95


def rounds_to_target(epochs: int, most: int) -> int:
    """How many rounds FedAvg needs; one more than the most if it needs more."""

    class Enough(Exception):
        pass

    rounds = 0

    def watch(line: Mapping[str, Any]) -> None:
        nonlocal rounds
        rounds = line["round"]
        if line["test_accuracy"] >= TARGET:
            raise Enough

    experiment = fed.Experiment(
        data={"kind": "idx", "path": str(MNIST), "clients": 100},
        model={"kind": "cnn"},
        local={"lr": 0.1, "batch_size": 10, "epochs": epochs},
        rounds={"count": most, "cohort": 10},
    )
    try:
        fed.simulate(experiment, observers=[after_round(watch)])
    except Enough:
        return rounds
    return most + 1


@pytest.mark.long
@pytest.mark.skipif(not MNIST.is_dir(), reason="MNIST's files are not beside this checkout")
def test_five_local_epochs_halve_the_rounds_on_mnist() -> None:
    five = rounds_to_target(epochs=5, most=20)
    assert five <= 20
    assert rounds_to_target(epochs=1, most=2 * five - 1) == 2 * five, "one epoch gets there sooner"


@pytest.mark.long
def test_scaffold_beats_fedavg_where_clients_hold_two_classes() -> None:
    """The means over three seeds."""

    def accuracies(kind: str) -> list[float]:
        runs = [
            fed.simulate(
                fed.Experiment(
                    seed=seed,
                    data={"kind": "digits", "clients": 20, "partition": {"kind": "shards"}},
                    model={"kind": "logistic"},
                    algorithm={"kind": kind},
                    local={"lr": 0.1, "batch_size": 16, "epochs": 10},
                    rounds={"count": 60, "cohort": 5},
                )
            )
            for seed in (0, 1, 2)
        ]
        return [
            fmean(lines)
            for lines in zip(*([line["test_accuracy"] for line in run.metrics] for run in runs), strict=True)
        ]

    fedavg, scaffold = accuracies("fedavg"), accuracies("scaffold")
    first = next(number for number, accuracy in enumerate(scaffold, 1) if accuracy >= fedavg[-1])
    assert first <= 30
    assert scaffold[-1] >= fedavg[-1] + 0.02
