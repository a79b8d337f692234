"""Scores before the last round: many models on a fixed sample of the test set, one model on all of it."""

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fed
from fed.clients.scoring.losses import cross_entropy
from fed.clients.scoring.metrics import accuracy
from fed.clients.training.devices import devices_of
from fed.clients.training.evaluation import evaluate
from fed.clients.training.executor import Item
from fed.clients.training.work_items import Evaluate
from fed.clients.training.worker import Work
from fed.config.evaluation import ByCoordinator
from fed.reports.html import write_run_report
from fed.simulations import estimate
from fed.simulations.scoring import begin_scoring
from fed.simulations.simulate import simulate
from fed.simulations.simulation import Simulation
from fed.vectors.randomness import Streams
from tests.simulations import users_parts as parts

pytestmark = pytest.mark.usefixtures("device")

OWN = ["dpsgd", "local"]
TESTS, SAMPLES, CLIENTS = 40, 10, 9


def experiment(algorithm: str, samples: int | str = SAMPLES, rounds: int = 3) -> fed.Experiment:
    return fed.Experiment(
        algorithm=algorithm,
        rounds={"count": rounds},
        local={"batch_size": 4},
        evaluation={"kind": "coordinator", "samples": samples},
        simulation={"batching": "off"},
    )


def run(keys: fed.Experiment, **given: Any) -> fed.Run:
    return simulate(keys, data=parts.unequal(test=TESTS), model=parts.small, **given)


def places() -> list[int]:
    return list(ByCoordinator(samples=SAMPLES).sample(TESTS, Streams(0)))


def of_clients(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key.startswith("client_")}


@pytest.mark.parametrize("algorithm", OWN)
def test_own_models_are_scored_on_a_sample_before_last(algorithm: str) -> None:
    """The models after a round are those of a run that ends with it."""
    whole, sampled = run(experiment(algorithm, "all")), run(experiment(algorithm))
    after_two = run(experiment(algorithm, rounds=2)).models
    inputs, targets = parts.unequal(test=TESTS).test or (torch.empty(0), torch.empty(0))
    sample = inputs[places()], targets[places()]
    cpu, metrics = torch.device("cpu"), {"accuracy": accuracy}
    scores = [evaluate(model, cross_entropy, metrics, sample, cpu).metrics[0] for model in after_two.values()]
    second = sampled.metrics[1]
    assert second["client_accuracy_mean"] == pytest.approx(statistics.fmean(scores), abs=1e-12)
    assert second["client_accuracy_std"] == pytest.approx(statistics.pstdev(scores), abs=1e-12)
    assert second["client_test_samples"] == SAMPLES
    assert whole.metrics[1]["client_accuracy_mean"] != second["client_accuracy_mean"]


@pytest.mark.parametrize("algorithm", OWN)
def test_last_scores_are_of_the_whole_test_set(algorithm: str) -> None:
    whole, sampled = run(experiment(algorithm, "all")), run(experiment(algorithm))
    last = [{key: value for key, value in one.metrics[-1].items() if key != "wall_s"} for one in (whole, sampled)]
    assert last[0] == last[1]
    assert sampled.summary["final_test_samples"] == sampled.summary["final_client_test_samples"] == TESTS


def test_mean_of_peers_is_scored_on_the_whole_set() -> None:
    whole, sampled = run(experiment("dpsgd", "all")), run(experiment("dpsgd"))
    for ours, theirs in zip(whole.metrics, sampled.metrics, strict=True):
        assert (ours["test_loss"], ours["test_accuracy"]) == (theirs["test_loss"], theirs["test_accuracy"])
        assert theirs["test_samples"] == TESTS
    assert [line["client_test_samples"] for line in sampled.metrics] == [SAMPLES, SAMPLES, TESTS]


def test_single_model_is_never_scored_on_a_sample() -> None:
    whole, sampled = run(experiment("fedavg", "all")), run(experiment("fedavg", 1))
    assert parts.outcome(whole) == parts.outcome(sampled)
    assert not any("test_samples" in line for line in sampled.metrics)


def test_sample_is_drawn_once_without_replacement() -> None:
    first = places()
    assert first == places() == sorted(set(first))
    assert len(first) == SAMPLES
    assert first[-1] < TESTS
    assert first != list(ByCoordinator(samples=SAMPLES).sample(TESTS, Streams(1)))
    for samples in ("all", TESTS, TESTS + 1):
        assert [*ByCoordinator(samples=samples).sample(TESTS, Streams(0))] == [*range(TESTS)]


class Counting(estimate._Counting):
    """Counts the samples that models are scored on."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(partial(Work, simulation.recipe), devices_of(1))
        self.scored = 0

    def submit(self, item: Item) -> int:
        assert isinstance(item.content, Evaluate)
        self.scored += (item.content.last - item.content.first) * len(item.tensors[0])
        return super().submit(item)


@pytest.mark.parametrize("algorithm", ["fedavg", *OWN])
def test_estimate_counts_what_each_evaluation_scores(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves by a second for each sample scored, and stands while clients train."""
    simulation = Simulation(experiment(algorithm, rounds=5), parts.unequal(test=TESTS), parts.small)
    counts = []
    for is_last in (False, True):
        executor = Counting(simulation)
        begin_scoring(simulation, simulation.federation(executor), executor, is_last=is_last)()
        counts.append(executor.scored)
    models = {"fedavg": 1, "dpsgd": CLIENTS + 1, "local": CLIENTS}[algorithm]
    assert counts[1] == models * TESTS
    probe = Counting(simulation)
    monkeypatch.setattr(estimate, "_Counting", lambda make, devices: probe)
    monkeypatch.setattr(time, "perf_counter", lambda: float(probe.scored))
    assert estimate.expect(simulation).wall_s == pytest.approx(4 * counts[0] + counts[1])


@pytest.mark.usefixtures("undrawn")
def test_report_names_the_sample(tmp_path: Path) -> None:
    run(experiment("dpsgd"), output=tmp_path / "run")
    page = write_run_report(tmp_path / "run").read_text()
    assert f"{SAMPLES} before the last round, then {TESTS}" in page
