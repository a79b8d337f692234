"""Runs with losses and metrics of their own: the same wherever they are scored, on disk, and after an interruption."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fed
from fed.clients.data import Pair
from fed.clients.scoring import metrics
from fed.clients.scoring.losses import cox
from fed.clients.scoring.metrics import c_index
from fed.errors import InvalidData, InvalidModel
from fed.server.observer import Essential
from fed.simulations.simulate import simulate
from tests.simulations import users_parts as parts
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

EXACT = 1e-12


def survival(count: int, seed: int) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    time = (3 + inputs[:, 0] + torch.rand(count, generator=generator)).abs()
    return inputs, torch.stack([time, (torch.rand(count, generator=generator) > 0.3).double()], 1)


def patients(make: Any = survival) -> fed.FederatedData:
    return fed.FederatedData({f"h{number}": make(9 + number, number) for number in range(6)}, make(300, 99))


def experiment(**keys: Any) -> fed.Experiment:
    simulation = {"workers": 0, **keys.pop("simulation", {})}
    return fed.Experiment(
        **{"rounds": {"count": 3, "cohort": 4}, "local": {"lr": 0.05}, "simulation": simulation, **keys}
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("model", ["logistic", {"kind": "mlp", "hidden": [5]}])
def test_survival_is_scored_on_the_whole_test_set(model: Any) -> None:
    """Cox's risk set and the C-index's pairs are all test samples, in which batches and workers change nothing."""
    data = patients()
    run = simulate(experiment(loss="cox", model=model), data=data)
    assert data.test is not None
    with torch.no_grad():
        output = run.model(data.test[0])
    last = run.metrics[-1]
    assert output.shape == (300, 1)
    assert last["test_loss"] == pytest.approx(float(cox(output, data.test[1])), abs=EXACT)
    assert last["test_c_index"] == run.summary["final_test_c_index"] == c_index(output, data.test[1])
    assert (last["test_accuracy"], run.summary["metrics"]) == (None, {"c_index": "max"})
    assert run.metrics[0]["test_c_index"] < last["test_c_index"]


def numbers(count: int, seed: int) -> Pair:
    inputs, _ = survival(count, seed)
    return inputs, inputs[:, 0] + inputs[:, 1].square()


def labels(count: int, seed: int) -> Pair:
    inputs, _ = survival(count, seed)
    return inputs, (inputs[:, :3] > 0).long()


@pytest.mark.parametrize(
    ("loss", "make", "named"),
    [("cox", survival, "c_index"), ("mse", numbers, "r2"), ("huber", numbers, "mae"), ("bce", labels, "macro_f1")],
)
@pytest.mark.parametrize("evaluation", ["coordinator", "clients"])
@pytest.mark.parametrize("algorithm", thinned(["fedavg", "dpsgd"], quick=1))
def test_batches_of_clients_score_as_each_alone(
    algorithm: str, evaluation: str, loss: str, make: Any, named: str
) -> None:
    """Batched where the loss is a mean over samples, else not; within 1e-9, the rounding of three rounds."""
    keys: dict[str, Any] = {"loss": loss, "metrics": [named, "mse"], "algorithm": algorithm, "evaluation": evaluation}
    keys |= {"model": "logistic", "rounds": {"count": 2}}
    if loss == "cox":
        keys["metrics"] = [named]
    alone = simulate(experiment(**keys, simulation={"batching": "off"}), data=patients(make))
    together = simulate(experiment(**keys), data=patients(make))
    assert together.experiment.simulation.batching == ("off" if loss == "cox" else "on")
    scores = [{key: value for key, value in run.metrics[-1].items() if named in key} for run in (alone, together)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-9)
    assert {f"client_{named}_mean", f"test_{named}"} <= scores[0].keys() or algorithm == "fedavg"


def test_cox_is_not_batched_where_a_client_has_no_events() -> None:
    """Whose loss is 0, alone and in a batch, so that a trial on its samples cannot tell."""
    data = patients()
    data.train["h0"][1][:, 1] = 0
    run = simulate(experiment(loss="cox", model="logistic", rounds={"count": 1}), data=data)
    assert run.experiment.simulation.batching == "off"


def test_worst_tenth_follows_the_direction_and_leaves_nan_out(tmp_path: Path) -> None:
    """Of eleven clients the worst tenth is two, and one where AUROC is defined for ten or fewer."""
    train = {number: parts.samples(20 + number, number) for number in range(11)}
    train[3] = train[3][0], torch.zeros(23, dtype=torch.int64)
    data = fed.FederatedData(train, classes=3)
    keys = experiment(evaluation="clients", metrics=["log_loss", "auroc"])
    run = simulate(keys, data=data, model=parts.small, output=tmp_path / "run")
    last, found = run.metrics[-1], [row for row in rows(tmp_path / "run") if row["round"] == 3]
    assert [row["client"] for row in found] == list(range(11))
    assert [list(row) for row in found] == [["round", "client", "samples", "loss", "log_loss", "auroc"]] * 11
    assert sum(row["samples"] for row in found) == sum(round(0.2 * len(part[1])) for part in train.values())
    losses = np.array([row["log_loss"] for row in found])
    areas = np.array([row["auroc"] for row in found if row["auroc"] is not None])
    sizes = np.array([row["samples"] for row in found if row["auroc"] is not None])
    assert found[3]["auroc"] is None
    assert 5 < len(areas) < 11
    assert last["client_log_loss_worst_decile"] == pytest.approx(np.sort(losses)[-2:].mean(), abs=EXACT)
    assert last["client_auroc_worst_decile"] == pytest.approx(areas.min(), abs=EXACT)
    assert last["client_auroc_mean"] == pytest.approx(areas.mean(), abs=EXACT)
    assert last["client_auroc_std"] == pytest.approx(areas.std(), abs=EXACT)
    assert last["test_auroc"] == pytest.approx(np.average(areas, weights=sizes), abs=EXACT)
    assert run.summary["metrics"] == {"log_loss": "min", "auroc": "max"}
    assert run.summary["final_client_auroc_worst_decile"] == last["client_auroc_worst_decile"]


@pytest.mark.parametrize("evaluation", ["coordinator", "clients"])
def test_resumed_runs_have_the_clients_lines_once(evaluation: str, tmp_path: Path) -> None:
    """Lines of rounds after the checkpoint are written again, and no number has become None."""

    class Interruption(parts.Watcher):
        def round(self, line: Any) -> None:
            if line["round"] == 5:
                raise KeyboardInterrupt

    keys = experiment(
        algorithm="dpsgd", evaluation=evaluation, metrics=["auroc"], rounds={"count": 6}, checkpoints={"every": 2}
    )
    train = {number: parts.samples(9, number) for number in range(4)}
    train[1] = train[1][0], torch.zeros(9, dtype=torch.int64)
    data = fed.FederatedData(train, (train[1] if evaluation == "coordinator" else None), classes=3)
    where: dict[str, Any] = {"data": data, "model": parts.small}
    whole = simulate(keys, **where, output=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        simulate(keys, **where, output=tmp_path / "cut", observers=[Essential(Interruption())])
    assert {row["round"] for row in rows(tmp_path / "cut")} == {1, 2, 3, 4, 5}
    resumed = simulate(keys, **where, output=tmp_path / "cut", resume=True)
    assert (tmp_path / "cut" / "clients.jsonl").read_bytes() == (tmp_path / "whole" / "clients.jsonl").read_bytes()
    assert len(rows(tmp_path / "whole")) == 6 * 4
    for ours, theirs in zip(resumed.metrics, whole.metrics, strict=True):
        np.testing.assert_equal({**ours, "wall_s": 0}, {**theirs, "wall_s": 0})
    assert evaluation == "clients" or math.isnan(resumed.metrics[0]["test_auroc"])


def test_several_metrics_may_be_given_in_python(tmp_path: Path) -> None:
    def error(output: Tensor, target: Tensor) -> float:
        return float((output.argmax(1) != target).double().mean())

    error.higher_is_better = False  # type: ignore[attr-defined]  # as a user marks it
    run = simulate(
        experiment(), data=parts.unequal(), model=parts.small, metric={"error": error, "right": metrics.accuracy}
    )
    assert run.summary["metrics"] == {"error": "min", "right": "max"}
    assert run.summary["final_test_error"] == pytest.approx(1 - run.summary["final_test_right"], abs=EXACT)
    assert (run.summary["final_test_accuracy"], run.experiment.metrics) == (None, None)
    assert run.experiment.loss is not None
    given = simulate(experiment(), data=parts.unequal(), model=parts.small, loss=parts.brier)
    assert (given.experiment.loss, given.summary["metrics"]) == (None, {})


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=[pytest.mark.long, pytest.mark.processes])])
def test_a_metric_without_a_number_stops_the_run(workers: int) -> None:
    """Of more than the two samples that it is tried on before, in a worker too."""
    keys = experiment(rounds={"count": 1}, metrics=[f"python:{__name__}:several"], simulation={"workers": workers})
    with pytest.raises(
        InvalidModel, match=r"the metric several must give one real number, got Tensor of shape \(40,\)"
    ):
        simulate(keys, data=parts.unequal(), model=parts.small)


def several(output: Tensor, target: Tensor) -> Tensor:
    return torch.zeros(len(target) if len(target) > 2 else ())


def test_a_metric_without_a_number_is_refused_before_training() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(InvalidModel, match="the metric accuracy must give one real number, got None"):
        fed.simulate(experiment(), data=parts.unequal(), model=model, metric=lambda output, target: None)  # type: ignore[arg-type,return-value]  # what is wrong


@pytest.mark.parametrize(
    ("loss", "targets", "problem"),
    [
        ("bce", torch.tensor([0.0, 2.0, 1.0]), r"client 'a' must be in \[0, 1\] for the loss bce"),
        ("cox", torch.tensor([[1.0, 0.0], [2.0, 3.0], [1.0, 1.0]]), r"\(time, event\) with events 0 or 1"),
        ("cross_entropy", torch.tensor([0.0, 1.0, 0.5]), "must be integer labels for cross-entropy"),
        ("cross_entropy", torch.tensor([[0], [1], [2]]), r"got \(\d, 1\): give them without the last dimension"),
    ],
)
def test_targets_that_a_loss_cannot_take_are_refused(loss: str, targets: Tensor, problem: str) -> None:
    data = fed.FederatedData({"a": (torch.randn(3, 2), targets)})
    with pytest.raises(InvalidData, match=problem):
        simulate(experiment(loss=loss, model="logistic", rounds={"count": 1}), data=data)
