"""Scores found in shards, beside the next round: those of the whole test set, each of its own round and told once."""

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from fed.clients.training.executor import InProcess, Item, Make, Result
from fed.clients.training.work_items import Evaluate
from fed.clients.training.worker import Work
from fed.errors import InvalidData
from fed.server.evaluation import MODELS_AT_ONCE
from fed.server.observer import Essential
from fed.simulations.scoring import begin_scoring
from fed.simulations.simulate import simulate
from fed.simulations.simulation import Simulation
from tests.simulations import users_parts as parts
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

CPU = torch.device("cpu")
SAMPLES = 4096 + 1500


class Late(InProcess):
    """Does nothing before it must, as if others were at work meanwhile."""

    is_parallel = True

    def __init__(self, make: Make, devices: Sequence[torch.device]) -> None:
        super().__init__(make, devices)
        self.lease: list[str] = []
        self.asked: list[Item] = []

    def submit(self, item: Item) -> int:
        self.asked.append(item)
        return super().submit(item)

    def results(self, tickets: Iterable[int]) -> Iterator[Result]:
        for result in super().results(tickets):
            self.lease.append(type(result.content).__name__)
            yield result


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """Runs score a round beside the next one."""
    executors: list[Late] = []

    @contextmanager
    def hired(simulation: Simulation, expectation: object) -> Iterator[Late]:
        executors.append(Late(partial(Work, simulation.recipe), devices_of(1)))
        yield executors[-1]

    monkeypatch.setattr("fed.simulations.simulate.hired", hired)
    return executors


def experiment(algorithm: str = "fedavg", **keys: Any) -> fed.Experiment:
    rounds = {"count": 4, "cohort": "all" if algorithm == "dpsgd" else 6, **keys.pop("rounds", {})}
    return fed.Experiment(algorithm={"kind": algorithm}, rounds=rounds, **keys)


@pytest.mark.parametrize("batching", ["on", "off"])
@pytest.mark.parametrize("algorithm", thinned(["fedavg", "dpsgd", "local"], quick=1))
def test_scores_of_shards_are_those_of_the_whole_test_set(algorithm: str, batching: str, late: list[Late]) -> None:
    """In float64: within 1e-12, the rounding of a sum of some thousand terms."""
    data = parts.unequal(torch.float64, test=SAMPLES)
    assert data.test is not None
    run = simulate(experiment(algorithm, simulation={"batching": batching}), data=data, model=parts.double)
    whole = {
        client: evaluate(module, cross_entropy, {"accuracy": accuracy}, data.test, CPU)
        for client, module in {"": run.model, **run.models}.items()
    }
    mean, own = whole.pop(""), list(whole.values())
    accuracies = [score.metrics[0] for score in own]
    last = run.metrics[-1]
    if algorithm == "local":
        assert last["test_loss"] == pytest.approx(statistics.fmean(score.loss for score in own), abs=1e-12)
        assert last["test_accuracy"] == last["client_accuracy_mean"]
    else:
        assert last["test_loss"] == pytest.approx(mean.loss, abs=1e-12)
        assert last["test_accuracy"] == pytest.approx(mean.metrics[0], abs=1e-12)
    if own:
        assert last["client_accuracy_mean"] == pytest.approx(statistics.fmean(accuracies), abs=1e-12)
        assert last["client_accuracy_std"] == pytest.approx(statistics.pstdev(accuracies), abs=1e-12)


@pytest.mark.parametrize("batching", ["auto", pytest.param("off", marks=pytest.mark.long)])
@pytest.mark.parametrize("algorithm", ["fedavg", pytest.param("dpsgd", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "given", thinned([{"metric": parts.correlation}, {"loss": parts.cox, "metric": parts.concordance}], quick=1)
)
def test_measures_other_than_means_use_the_whole_test_set(
    given: dict[str, Any], algorithm: str, batching: str, late: list[Late]
) -> None:
    """In float64: within 1e-12, the rounding of forward passes in batches of another size."""
    data = parts.unequal(torch.float64, test=SAMPLES)
    assert data.test is not None
    inputs, targets = data.test
    run = simulate(experiment(algorithm, simulation={"batching": batching}), data=data, model=parts.double, **given)
    last, loss, metric = run.metrics[-1], given.get("loss", cross_entropy), given["metric"]
    with torch.no_grad():
        output = run.model(inputs)
        own = [float(metric(module(inputs), targets)) for module in run.models.values()]
    assert last["test_loss"] == pytest.approx(float(loss(output, targets)), abs=1e-12)
    assert last["test_accuracy"] == pytest.approx(float(metric(output, targets)), abs=1e-12)
    if own:
        assert last["client_accuracy_mean"] == pytest.approx(statistics.fmean(own), abs=1e-12)


def test_every_model_meets_every_sample_once(late: list[Late]) -> None:
    simulate(experiment("dpsgd", rounds={"count": 1}), data=parts.unequal(test=SAMPLES), model=parts.small)
    seen = [
        (row.numpy().tobytes(), place)
        for item in late[0].asked
        if isinstance(item.content, Evaluate)
        for row in item.tensors[0]
        for place in range(item.content.first, item.content.last)
    ]
    assert len(seen) == len(set(seen)) == (len(parts.UNEQUAL) + 1) * SAMPLES
    assert max(len(item.tensors[0]) for item in late[0].asked if isinstance(item.content, Evaluate)) == MODELS_AT_ONCE


@pytest.mark.parametrize("algorithm", thinned(["dpsgd", "fedavg", "bmuf", "local"], quick=1))
@pytest.mark.parametrize("evaluation", ["coordinator", "clients"])
@pytest.mark.parametrize("evaluate_every", [1, 3])
def test_scores_beside_the_next_round_are_those_of_their_own(
    algorithm: str, evaluation: str, evaluate_every: int, late: list[Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = experiment(algorithm, evaluation=evaluation, rounds={"evaluate_every": evaluate_every})
    watcher = parts.Watcher()
    beside = simulate(keys, data=parts.unequal(), model=parts.small, observers=[Essential(watcher)])
    assert watcher.rounds == [line["round"] for line in beside.metrics] == [1, 2, 3, 4]
    assert [line["test_loss"] is not None for line in beside.metrics] == [
        number % evaluate_every == 0 or number == 4 for number in (1, 2, 3, 4)
    ]
    if evaluate_every == 1:
        (executor,) = late
        assert executor.lease.index("Evaluated") > executor.lease.count("Trained") // 4, "of round 2 trained before"
    monkeypatch.undo()
    after = simulate(keys, data=parts.unequal(), model=parts.small, observers=[Essential(parts.Watcher())])
    assert parts.outcome(beside) == parts.outcome(after)
    assert list(beside.metrics[0]) == list(after.metrics[0])


def test_without_a_test_set_nothing_is_asked_for(late: list[Late]) -> None:
    for algorithm, own in (("fedavg", []), ("local", ["client_accuracy_mean", "client_accuracy_std"])):
        run = simulate(experiment(algorithm), data=parts.unequal(test=0), model=parts.small)
        for line in run.metrics:
            assert {line[key] for key in ("test_accuracy", "test_loss", *own)} == {None}
        assert not [item for item in late[-1].asked if isinstance(item.content, Evaluate)]
        assert (run.summary["final_test_loss"], run.summary["rounds"]) == (None, 4)


def test_without_a_metric_accuracies_are_none_and_losses_are_not(late: list[Late]) -> None:
    run = simulate(experiment("dpsgd"), data=parts.unequal(), model=parts.small, loss=parts.brier)
    assert {line["test_accuracy"] for line in run.metrics} == {None}
    assert not any("client_accuracy_mean" in line for line in run.metrics)
    assert all(line["test_loss"] > 0 for line in run.metrics)


def test_an_error_in_a_round_still_records_the_round_before(late: list[Late], tmp_path: Path) -> None:
    """The round before has trained, and is not scored yet; the cohorts of rounds before the last know no bad client."""
    keys = experiment(seed=2, rounds={"cohort": 2})
    whole = simulate(keys, data=parts.on_demand(), model=parts.small)
    cohorts = [set(item.content.clients) for item in late[0].asked if not isinstance(item.content, Evaluate)]
    (bad, *_) = cohorts[-1] - set().union(*cohorts[:-1])
    watcher = parts.Watcher()
    with pytest.raises(InvalidData, match=f"client {bad} "):
        simulate(
            keys,
            data=parts.on_demand([bad]),
            model=parts.small,
            output=tmp_path / "run",
            observers=[Essential(watcher)],
        )
    assert watcher.rounds == [1, 2, 3]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["test_loss"] for line in lines] == [line["test_loss"] for line in whole.metrics[:3]]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("failed", 3)
    assert summary["final_test_loss"] == lines[-1]["test_loss"]


def test_an_interruption_keeps_the_round_that_was_scored_last(late: list[Late], tmp_path: Path) -> None:
    def stop(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    keys = experiment()
    with pytest.raises(KeyboardInterrupt):
        simulate(
            keys,
            data=parts.unequal(),
            model=parts.small,
            output=tmp_path / "run",
            observers=[Essential(parts.Watcher(stop))],
        )
    two = simulate(keys.override({"rounds.count": 2}), data=parts.unequal(), model=parts.small, output=tmp_path / "two")
    assert two.summary["rounds"] == 2
    kept, expected = (parts.kept(tmp_path / name)["model.safetensors"] for name in ("run", "two"))
    assert kept == expected
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 2


def test_an_observer_that_fails_is_told_nothing_twice(late: list[Late], tmp_path: Path) -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise RuntimeError("enough")

    watcher = parts.Watcher(fail)
    with pytest.raises(RuntimeError, match="enough"):
        simulate(
            experiment(),
            data=parts.unequal(),
            model=parts.small,
            output=tmp_path / "run",
            observers=[Essential(watcher)],
        )
    assert watcher.rounds == [1, 2]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("evaluation", ["coordinator", "clients"])
@pytest.mark.parametrize("algorithm", ["fedavg", "dpsgd"])
def test_a_federation_may_go_on_while_its_models_are_scored(algorithm: str, evaluation: str) -> None:
    """What is scored is what was there when it was asked for."""
    simulation = Simulation(experiment(algorithm, evaluation=evaluation), parts.unequal(), parts.small)
    executor = Late(partial(Work, simulation.recipe), devices_of(1))
    federation = simulation.federation(executor)
    federation.round(1)
    begun = simulation, federation, executor
    now, then = begin_scoring(*begun)(), begin_scoring(*begun)
    federation.round(2)
    assert then() == now
    assert begin_scoring(*begun)() != now
