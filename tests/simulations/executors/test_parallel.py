"""Whole runs in worker processes: to the bit those of one process, whoever dies meanwhile."""

import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fed
from fed.clients.training.devices import devices_of
from fed.clients.training.executor import InProcess, Result
from fed.config.registry import EXECUTORS
from fed.errors import Diverged, InvalidData, RunFailed
from fed.server.observer import Essential
from fed.simulations import choice as hiring
from fed.simulations.executors.pool import Workers
from fed.simulations.simulate import simulate
from tests.simulations import users_parts as parts
from tests.thinned import thinned

pytestmark = pytest.mark.xdist_group("parallel")  # so that processes are lent from test to test

PATIENCE_S = 60.0
KINDS: dict[str, dict[str, Any]] = {
    "fedavg": {"kind": "fedavg"},
    "fedprox": {"kind": "fedprox", "mu": 0.3},
    "fedavgm": {"kind": "fedavgm"},
    "bmuf": {"kind": "bmuf", "nesterov": True},
    "ditto": {"kind": "ditto"},
    "dpsgd": {"kind": "dpsgd"},
    "local": {"kind": "local"},
}


def experiment(algorithm: str = "fedavg", *, batching: str = "on", **keys: Any) -> fed.Experiment:
    """Five groups of two or one, for three rounds."""
    simulation = {"batching": batching, "group": 2, "workers": 0}
    rounds = {"count": 3, "cohort": "all" if algorithm in ("dpsgd", "local") else 6}
    own = KINDS.get(algorithm, {"kind": algorithm})
    return fed.Experiment(
        **{"rounds": rounds, "local": {"batch_size": 4}, "algorithm": own, "simulation": simulation, **keys}
    )


def in_workers(keys: fed.Experiment, workers: int = 2) -> fed.Experiment:
    return keys.override({"simulation.workers": workers})


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    with Workers(parts.lend, devices_of(2), 1 << 20, hiring._SMALL_BYTES) as workers:
        yield workers


@pytest.fixture
def borrowed(pool: Workers, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs borrow their workers; how many each asked for."""
    monkeypatch.setattr(parts.Borrowed, "pool", pool, raising=False)
    monkeypatch.setattr(parts.Borrowed, "asked", [], raising=False)
    monkeypatch.setattr(EXECUTORS.section("workers"), "target", parts.Borrowed)
    return parts.Borrowed.asked


# The same bits.


@pytest.mark.parametrize("batching", ["on", pytest.param("off", marks=pytest.mark.long)])
@pytest.mark.parametrize("algorithm", KINDS)
def test_workers_change_nothing(algorithm: str, batching: str, borrowed: list[int]) -> None:
    """In float64, which shows if sums are grouped otherwise."""
    keys, data = experiment(algorithm, batching=batching), parts.unequal(torch.float64)
    alone, apart = (simulate(run, data=data, model=parts.double) for run in (keys, in_workers(keys, 7)))
    assert borrowed == [7]
    assert parts.outcome(alone) == parts.outcome(apart)
    assert alone.experiment.simulation.batching == batching


@pytest.mark.parametrize("algorithm", ["fedavg", "dpsgd"])
def test_workers_change_nothing_where_one_group_is_all_there_is(algorithm: str, borrowed: list[int]) -> None:
    keys = experiment(algorithm).override({"simulation.group": 32})
    alone, apart = (simulate(run, data=parts.unequal(), model=parts.small) for run in (keys, in_workers(keys)))
    assert borrowed == [2]
    assert parts.outcome(alone) == parts.outcome(apart)


@pytest.mark.parametrize("algorithm", ["fedavg", pytest.param("dpsgd", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "given",
    [
        {"model": parts.with_dropout},
        {"model": parts.with_batch_norm, "data": fed.FederatedData({n: parts.samples(9 + n, n) for n in range(9)})},
        {"model": parts.small, "loss": parts.brier, "metric": parts.second_guess},
        {"model": parts.small, "metric": parts.correlation, "data": parts.unequal(test=5000)},
        {"model": parts.small, "loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"model": parts.small, "data": parts.unequal(test=0)},
        {"model": parts.small, "data": parts.on_demand()},
    ],
    ids=["dropout", "batch norm", "loss and metric", "no mean", "loss with state", "no test set", "on demand"],
)
def test_workers_change_nothing_for_parts_of_a_users_own(
    given: dict[str, Any], algorithm: str, borrowed: list[int]
) -> None:
    keys = experiment(algorithm, batching="auto", local={"optimizer": "adam", "batch_size": 4, "lr": 0.01})
    given = {"data": parts.unequal(), **given}
    alone, apart = (simulate(run, **given) for run in (keys, in_workers(keys)))
    assert borrowed == [2]
    assert parts.outcome(alone) == parts.outcome(apart)
    batched = alone.experiment.simulation.batching == "on"
    assert batched == (given["model"] is not parts.with_batch_norm)


@pytest.mark.parametrize("algorithm", thinned(["dpsgd", "fedavg", "centralized"], quick=1))
@pytest.mark.parametrize("data", [parts.unequal(), parts.on_demand()], ids=["in memory", "on demand"])
def test_workers_change_nothing_where_clients_evaluate(
    data: fed.FederatedData, algorithm: str, borrowed: list[int]
) -> None:
    keys = experiment(algorithm, batching="auto", evaluation="clients")
    alone, apart = (simulate(run, data=data, model=parts.with_dropout) for run in (keys, in_workers(keys)))
    assert borrowed == [2]
    assert parts.outcome(alone) == parts.outcome(apart)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["fedavg", "dpsgd"])
def test_any_number_of_workers_draws_the_same_masks(algorithm: str) -> None:
    """Clients of unequal sizes in groups of two, or one by one."""
    for batching in ("on", "off"):
        keys = experiment(algorithm, batching=batching)
        first, *others = (
            parts.outcome(simulate(in_workers(keys, workers), data=parts.unequal(), model=parts.with_dropout))
            for workers in range(8)
        )
        assert all(other == first for other in others)


def test_model_draws_depend_on_seed_client_and_round_alone(borrowed: list[int]) -> None:
    """A client draws the same whoever trains before it: of one run every client, of the other one alone."""
    keys = experiment("local", batching="off", rounds={"count": 2})
    every = simulate(keys, data=parts.unequal(), model=parts.with_dropout)
    one = fed.FederatedData({"c4": parts.unequal().train["c4"]}, parts.samples(40, 99), classes=3)
    alone = simulate(in_workers(keys), data=one, model=parts.with_dropout)
    assert borrowed == [2]
    bits = [[part.tolist() for part in run.models["c4"].state_dict().values()] for run in (every, alone)]
    assert bits[0] == bits[1]
    other = simulate(keys.override({"seed": 1}), data=one, model=parts.with_dropout)
    assert bits[0] != [part.tolist() for part in other.models["c4"].state_dict().values()]


@pytest.mark.parametrize("batching", ["on", "off"])
def test_a_nonlinear_aggregator_sees_every_client_by_itself(
    batching: str, borrowed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.Median, "counted", [])
    keys = experiment(f"python:{parts.__name__}:Median", batching=batching)
    medians = [simulate(run, data=parts.unequal(), model=parts.small) for run in (keys, in_workers(keys))]
    assert parts.Median.counted == [6] * 6
    mean = simulate(experiment("fedavg", batching=batching), data=parts.unequal(), model=parts.small)
    assert parts.outcome(medians[0]) == parts.outcome(medians[1]) != parts.outcome(mean)
    assert borrowed == [2]


def test_the_folder_holds_the_same_files(borrowed: list[int], tmp_path: Path) -> None:
    for algorithm in ("bmuf", "dpsgd"):
        keys = experiment(algorithm)
        for run in (keys, in_workers(keys)):
            folder = tmp_path / algorithm / str(run.simulation.workers)
            simulate(run, data=parts.unequal(), model=parts.small, output=folder)
        alone, apart = (parts.kept(tmp_path / algorithm / workers) for workers in "02")
        assert alone == apart
        assert len(alone) == 8 + (algorithm == "dpsgd"), "its clients' models beside"
    assert borrowed == [2, 2]


# Deaths.


@pytest.fixture
def hired_now() -> Callable[[], list[BaseProcess]]:
    """The children that were started in this test and are alive."""
    before = set(multiprocessing.active_children())
    return lambda: sorted(set(multiprocessing.active_children()) - before, key=lambda child: child.name)


@pytest.mark.long
def test_run_with_killed_workers_ends_with_the_same_bits(
    hired_now: Callable[[], list[BaseProcess]], caplog: pytest.LogCaptureFixture
) -> None:
    killed: list[int | None] = []

    def kill_one(number: int) -> None:
        if number < 3:
            victim = hired_now()[number % 2]
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
            victim.join(PATIENCE_S)
            killed.append(victim.pid)

    keys = experiment(rounds={"count": 5, "cohort": 6})
    watcher = parts.Watcher(kill_one)
    with caplog.at_level(logging.WARNING):
        apart = simulate(in_workers(keys), data=parts.unequal(), model=parts.small, observers=[Essential(watcher)])
    assert len(set(killed)) == 2
    assert caplog.text.count("killed by signal 9 (SIGKILL)") == 2
    assert watcher.rounds == [1, 2, 3, 4, 5]
    assert parts.outcome(apart) == parts.outcome(simulate(keys, data=parts.unequal(), model=parts.small))
    assert hired_now() == []


def test_training_error_stops_the_run_and_names_client_and_line(
    borrowed: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Client c3 holds one sample, and is the only one whose steps have one."""
    keys = experiment(batching="off", seed=3, rounds={"count": 9, "cohort": 3}, local={"steps": 2, "batch_size": 8})
    alone = simulate(keys, data=parts.unequal(), model=partial(parts.Breaks, 1))
    with caplog.at_level(logging.WARNING), pytest.raises(RunFailed) as caught:
        simulate(in_workers(keys), data=parts.unequal(), model=partial(parts.Breaks, 1), output=tmp_path / "run")
    said = str(caught.value)
    assert "\n" not in said
    assert "client 'c3' of round" in said
    assert "ArithmeticError: the sample is cursed" in said
    assert "users_parts.py" in said
    number = int(said.split("of round ")[1].split(" ", 1)[0])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["reason"], summary["rounds"]) == ("failed", said, number - 1)
    assert number > 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["test_loss"] for line in lines] == [line["test_loss"] for line in alone.metrics[: number - 1]]
    assert summary["virtual_s"] == lines[-1]["virtual_s"]
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert borrowed == [2]


def test_an_error_that_comes_once_changes_nothing(borrowed: list[int], tmp_path: Path) -> None:
    keys = experiment(batching="off", local={"steps": 2, "batch_size": 8})
    marker = tmp_path / "marker"
    apart = simulate(in_workers(keys), data=parts.unequal(), model=partial(parts.Breaks, 1, marker))
    assert marker.exists()
    assert parts.outcome(apart) == parts.outcome(
        simulate(keys, data=parts.unequal(), model=partial(parts.Breaks, 1, marker))
    )
    assert borrowed == [2]


@pytest.mark.parametrize("algorithm", ["fedavg", "dpsgd"])
@pytest.mark.parametrize("batching", ["on", "off"])
def test_divergence_is_the_same_error_and_leaves_the_same_folder(
    algorithm: str, batching: str, borrowed: list[int], tmp_path: Path
) -> None:
    keys = experiment(algorithm, batching=batching, local={"lr": 300.0, "batch_size": 4})
    data = parts.unequal()
    for client in ("c2", "c4", "c7"):
        data.train[client][0].mul_(1e12)
    said = {}
    for run in (keys, in_workers(keys)):
        folder = tmp_path / str(run.simulation.workers)
        with pytest.raises(Diverged) as caught:
            simulate(run, data=data, model=parts.small, loss=parts.squared, output=folder)
        said[folder] = str(caught.value)
    assert len(set(said.values())) == 1
    alone, apart = map(parts.kept, said)
    assert alone == apart
    assert borrowed == [2]


@pytest.mark.parametrize("algorithm", ["dpsgd", "local"])
def test_workers_score_the_same_sample(algorithm: str, borrowed: list[int]) -> None:
    keys = experiment(algorithm).override({"evaluation": {"kind": "coordinator", "samples": 7}})
    alone, apart = (simulate(run, data=parts.unequal(), model=parts.small) for run in (keys, in_workers(keys)))
    assert borrowed == [2]
    assert alone.metrics[0]["client_test_samples"] == 7
    assert parts.outcome(alone) == parts.outcome(apart)


@pytest.mark.parametrize("batching", ["on", "off"])
def test_workers_drop_the_same_clients(batching: str, borrowed: list[int]) -> None:
    keys = experiment("fedavg", batching=batching, local={"lr": 300.0, "batch_size": 4})
    keys, data = keys.override({"rounds.diverged": "drop"}), parts.unequal()
    for client in ("c2", "c4", "c7"):
        data.train[client][0].mul_(1e12)
    alone, apart = (simulate(run, data=data, model=parts.small, loss=parts.squared) for run in (keys, in_workers(keys)))
    assert borrowed == [2]
    assert alone.summary["diverged"] > 0
    assert parts.outcome(alone) == parts.outcome(apart)


@pytest.mark.parametrize("algorithm", ["fedavg", "dpsgd"])
def test_same_error_is_raised_in_any_order_of_work(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Backwards(InProcess):
        def results(self, tickets: Iterable[int]) -> Iterator[Result]:
            for ticket in sorted(tickets, reverse=True):
                yield from super().results([ticket])

    keys, said = experiment(algorithm, rounds={"count": 1}), []
    for executor in (InProcess, Backwards):
        monkeypatch.setattr(EXECUTORS.section("in_process"), "target", executor)
        with pytest.raises(InvalidData, match=r"client \d+ must be in 0 … 2") as caught:
            simulate(keys, data=parts.on_demand(bad=(2, 5, 9)), model=parts.small)
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("algorithm", ["fedavg", "local"])
def test_unusable_data_give_the_same_error_and_folder(algorithm: str, borrowed: list[int], tmp_path: Path) -> None:
    keys = experiment(algorithm, seed=2, rounds={"count": 9, "cohort": 2 if algorithm == "fedavg" else "all"})
    said = {}
    for run in (keys, in_workers(keys)):
        folder = tmp_path / str(run.simulation.workers)
        with pytest.raises(InvalidData) as caught:
            simulate(run, data=parts.on_demand(bad=(2, 5, 9)), model=parts.small, output=folder)
        said[folder] = str(caught.value)
    assert len(set(said.values())) == 1
    alone, apart = map(parts.kept, said)
    assert alone == apart
    assert borrowed == [2]
