"""The lean loop that models are measured beside does the simulator's work, and all of it."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import fed

ROOT = Path(__file__).resolve().parent.parent.parent
OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
    {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1},
    {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("models")


def test_the_lean_loop_trains_what_the_simulator_does(models: Any) -> None:
    """With all samples in a batch and all clients in the cohort nothing is drawn; rounding alone differs."""
    of_optimizers = [replace(models.CASES["mlp"], local=keys, epochs=3) for keys in OPTIMIZERS]
    of_images = [models.CASES["group-norm"], models.CASES["group-norm-usual-order"]]
    for case in (*of_optimizers, *of_images):
        case = replace(case, samples=12, batch_size=12)
        clients = dict(list(case.clients().items())[:3])
        experiment = fed.Experiment(
            local=case.keys, rounds={"count": 2, "cohort": 3}, simulation={"workers": 0, "batching": "off"}
        )
        trained = fed.simulate(experiment, data=fed.FederatedData(clients), model=case.made()).model
        pairs = list(clients.values())
        loop = models.LeanLoop(case.made(), pairs, experiment.local, 3, channels_last=case.channels_last)
        for _ in range(2):
            loop.round()
        for ours, its in zip(trained.parameters(), loop.model().parameters(), strict=True):
            torch.testing.assert_close(ours, its, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_each_model_is_measured_and_the_lowest_comes_first(models: Any) -> None:
    found = models.measure_all(models.CASES, 2, 0.001, Console())
    assert list(found) == list(models.CASES)
    lowest = [min(found[name][side]["ratio"][0] for side in models.SIDES) for name in found]
    titles = [models.CASES[name].title for _, name in sorted(zip(lowest, found, strict=True))]
    assert [row[0] for row in models.table(found).rows] == titles
