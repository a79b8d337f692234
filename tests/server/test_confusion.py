"""Confusion matrices: exact counts of the final model, kept with a run and drawn in its report."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fed
from fed.clients.data import load
from fed.clients.training.evaluation import confusion_counts
from fed.reports.html import run_report, write_run_report
from fed.reports.population import Confusion, described, read
from fed.vectors.randomness import Streams
from fed.vectors.tensors import nn
from tests.simulations import users_parts as parts
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("device")

KEYS: dict[str, Any] = {"data": {"clients": 5}, "rounds": {"count": 2}, "model": {"kind": "logistic"}}


def kept(folder: Path) -> Any:
    return json.loads((folder / "population.json").read_text())["confusion"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "changes",
    thinned([{}, {"metrics": ["balanced_accuracy"]}, {"algorithm": "dpsgd"}], quick=1),
    ids=str,
)
def test_confusion_equals_a_count_of_the_kept_models_outputs(changes: dict[str, Any], tmp_path: Path) -> None:
    run = fed.simulate(fed.Experiment(**{**KEYS, **changes}), output=tmp_path / "run")
    assert run.experiment.data is not None
    data = load(run.experiment.data, Streams(run.experiment.seed))
    assert data.test is not None
    inputs, labels = data.test
    with torch.no_grad():
        predicted = run.model(inputs).argmax(1)
    expected = np.zeros((10, 10), int)
    for true, taken in zip(labels.tolist(), predicted.tolist(), strict=True):
        expected[true, taken] += 1
    counts = np.array(kept(tmp_path / "run")["counts"])
    assert counts.tolist() == expected.tolist()
    assert counts.sum(1).tolist() == np.bincount(labels.numpy(), minlength=10).tolist()
    if "metrics" not in changes:
        assert counts.trace() / counts.sum() == pytest.approx(run.summary["final_test_accuracy"], abs=1e-15)
    else:  # the mean of the classes' shares
        recall = counts.diagonal() / counts.sum(1)
        assert recall.mean() == pytest.approx(run.summary["final_test_balanced_accuracy"], abs=1e-12)
    page = write_run_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "Confusion matrix" in page


def test_parts_of_the_test_set_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed.simulate(fed.Experiment(**KEYS), output=tmp_path / "whole")
    monkeypatch.setattr("fed.server.evaluation._SAMPLES", 100)
    fed.simulate(fed.Experiment(**KEYS), output=tmp_path / "parts")
    assert kept(tmp_path / "whole") is not None
    assert kept(tmp_path / "parts") == kept(tmp_path / "whole")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "changes", [{"evaluation": "clients"}, pytest.param({"algorithm": "local"}, marks=pytest.mark.long)], ids=str
)
def test_there_is_none_where_no_model_meets_a_test_set(changes: dict[str, Any], tmp_path: Path) -> None:
    fed.simulate(fed.Experiment(**{**KEYS, **changes}), output=tmp_path / "run")
    assert kept(tmp_path / "run") is None
    assert "Confusion matrix" not in write_run_report(tmp_path / "run").read_text(encoding="utf-8")


def test_another_loss_is_no_classification(tmp_path: Path) -> None:
    fed.simulate(
        fed.Experiment(rounds={"count": 1}), data=parts.unequal(), model=parts.small, loss=parts.brier, output=tmp_path
    )
    assert kept(tmp_path) is None


def test_more_than_100_classes_are_left_out_and_said() -> None:
    cpu, samples = torch.device("cpu"), (torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    most, more = (confusion_counts(nn.Linear(2, classes), samples, cpu) for classes in (100, 101))
    assert more is None
    assert most is not None
    assert most.sum(1)[:3].tolist() == [1, 2, 0]
    run = fed.simulate(fed.Experiment().override({"data.clients": 2, "rounds.count": 1}))
    assert "at most 100 classes" in run_report(run, None, None, Confusion(None, []))


def test_labels_of_no_class_are_not_counted() -> None:
    samples = torch.zeros(4, 2), torch.tensor([-100, 1, 1, 7])
    counts = confusion_counts(nn.Linear(2, 3), samples, torch.device("cpu"))
    assert counts is not None
    assert counts.sum(1).tolist() == [0, 2, 0]


def test_a_matrix_is_read_back_as_it_was_kept() -> None:
    matrix = Confusion(np.array([[2, 1], [0, 3]]), ["no", "yes"])
    (*_, again) = read(json.loads(json.dumps(described(None, None, matrix))))
    assert again is not None
    assert again.counts_CC is not None
    assert (again.counts_CC.tolist(), again.names) == ([[2, 1], [0, 3]], ["no", "yes"])
    (*_, too_many) = read(described(None, None, Confusion(None, [])))
    assert too_many is not None
    assert too_many.counts_CC is None
    assert read({"partition": None, "graph": None}) == (None, None, None), "of an older run"
