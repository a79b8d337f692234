"""Clients with code of their own: what they are told, what their answers become, and what of theirs is refused."""

import logging
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits
from torch import nn

import fed
from fed.clients.apps.app import App
from fed.clients.apps.arrays import AppModel, arrays_in, named_arrays, specs_of, state_of
from fed.config.apps import AppSection
from fed.config.registry import ALGORITHMS
from fed.errors import AppFailed, InvalidExperiment, InvalidInput, InvalidModel
from fed.vectors.layout import Layout
from tests.clients.apps.arrays_only import Broken, Reals, Regression, client_fn

RUN: dict[str, Any] = {"rounds": {"count": 2}, "simulation": {"workers": 0}}


def experiment(**changed: Any) -> fed.Experiment:
    return fed.Experiment(**{"app": {"clients": 3}, **RUN, **changed})


def arrays_of(run: fed.Run) -> dict[str, Any]:
    assert isinstance(run.model, AppModel)
    return run.model.arrays()


def test_fedavg_over_an_app_is_the_weighted_mean() -> None:
    run = fed.simulate(experiment(rounds={"count": 1}, app={"clients": 3, "config": {"bonus": 2}}), app=Regression)
    assert run.metrics[0]["fit_bonus"] == 2.0
    mean = np.zeros(3)
    for client in range(3):
        own = Regression(client)
        step = 0.1 * own.inputs.T @ own.targets / len(own.targets)
        mean += step * len(own.targets) / (20 + 21 + 22)
    # The noise that each client adds has a deviation of 0.001, that of their mean is below that.
    found = arrays_of(run)
    np.testing.assert_allclose(found["0"], mean, atol=0.004)
    assert (found["0"].dtype, int(found["1"]), found["2"].shape) == (np.float32, 1, (1, 2))


def test_flowers_shape_of_a_client_has_the_same_bits() -> None:
    runs = [fed.simulate(experiment(), app=app) for app in (Regression, client_fn)]
    first, second = (arrays_of(run) for run in runs)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    drop = {"wall_s"}
    lines = [[{key: line[key] for key in line.keys() - drop} for line in run.metrics] for run in runs]
    assert lines[0] == lines[1]
    assert 0 < lines[0][1]["test_accuracy"] <= 1
    assert lines[0][1]["train_loss"] < lines[0][0]["train_loss"]


def test_mean_of_numbers_that_clients_tell_weighs_samples() -> None:
    run = fed.simulate(experiment(algorithm={"kind": "fedprox", "mu": 0.5}), app=Regression)
    assert run.metrics[0]["fit_mu"] == 0.5
    score = [Regression(client).evaluate(list(arrays_of(run).values()), {}) for client in range(3)]
    expected = sum(loss * samples for loss, samples, _ in score) / sum(samples for _, samples, _ in score)
    assert run.metrics[-1]["test_loss"] == pytest.approx(expected, rel=1e-12)


class Counting(Regression):
    """A client that tells how many threads the libraries of linear algebra have."""

    evaluate = None  # type: ignore[assignment]

    def fit(self, arrays: Any, config: Any) -> Any:
        threads = [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]
        return *super().fit(arrays, config)[:2], {"threads": max(threads)}


def test_an_app_has_as_many_threads_as_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    with threadpool_limits(limits=2):  # as in a process on two cores
        run = fed.simulate(experiment(), app=Counting)
    assert [line["fit_threads"] for line in run.metrics] == [1.0, 1.0]
    assert [record.getMessage() for record in caplog.records if "nobody scores" in record.getMessage()] == [
        "nobody scores the model, for Counting has no evaluate(arrays, config): add it for scores"
    ]


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("raises", "raises at .*arrays_only.py:.*: ValueError: no luck"),
        ("is not finite", r"must return finite numbers, got nan in array 0 at \[2\]"),
        ("has another shape", r"must return array 0 of shape \(3,\), got \(2,\): make one model"),
        ("has another number of arrays", "must return 3 arrays, as the model has, got 2"),
        ("has no samples", "must return a whole number of samples, at least 1, got 0: return how many it used"),
        ("has samples of no number", "must return a whole number of samples, at least 1, got nan: return how many"),
        ("has negative samples", "must return a whole number of samples, at least 1, got -3: return how many it used"),
        ("forgets the metrics", r"must return \(arrays, samples, metrics\), got 2 parts: return all three"),
        ("has metrics of no numbers", r"must return metrics that are numbers, got dict for history: convert it with"),
        ("names a metric badly", "must name its metrics by at most 60 letters, got '1st': rename it"),
    ],
)
def test_a_client_that_fails_costs_its_task_alone(how: str, what: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    run = fed.simulate(experiment(app={"clients": 3, "config": {"how": how}}), app=Broken)
    assert [(line["replied"], line["failed"]) for line in run.metrics] == [(2, 1), (2, 1)]
    (said,) = [record.getMessage() for record in caplog.records if "fit of client 1" in record.getMessage()]
    assert re.search(what, said)


@pytest.mark.parametrize("how", ["raises", "has another shape"])
def test_a_client_that_fails_in_a_worker_is_said_alike(how: str, caplog: pytest.LogCaptureFixture) -> None:
    told: list[list[str]] = []
    for workers in (0, 2):
        caplog.clear()
        app = {"clients": 3, "config": {"how": how}}
        run = fed.simulate(experiment(app=app, simulation={"workers": workers}), app=Broken)
        assert [line["failed"] for line in run.metrics] == [1, 1]
        told.append([record.getMessage() for record in caplog.records if "fit of client 1" in record.getMessage()])
    assert told[0]
    assert told[1] == told[0]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_metric_that_evaluate_does_not_return_is_said(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    app = {"clients": 3, "metrics": ["auc", "accuracy"]}
    run = fed.simulate(experiment(app=app, simulation={"workers": workers}), app=Regression)
    assert all(math.isnan(line["test_auc"]) and line["test_accuracy"] > 0 for line in run.metrics)
    (said,) = [message for message in caplog.messages if "auc" in message]
    assert said == (
        "app.metrics names auc, and a client's evaluate returned accuracy, told_round in its place: the client has no "
        "part in test_auc; have evaluate return it, or name another in app.metrics"
    )


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.long) for kind in ALGORITHMS.builtin])
def test_every_algorithm_goes_with_apps_or_is_refused(kind: str) -> None:
    try:
        described = experiment(algorithm=kind, app={"clients": 11})
    except InvalidExperiment as error:
        said = str(error)
    else:
        said = "an app"
        run = fed.simulate(described, app=Regression)
        assert all(np.isfinite(array).all() for array in arrays_of(run).values())
    assert "an app" in said


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("scaffold", "because it corrects each gradient, got an app, whose clients train"),
        ("moon", "because it adds a term to the loss"),
        ("fednova", "because it asks each client for its steps"),
        ("ffa_lora", "because it looks at the layers of a PyTorch model"),
        ("fedex_lora", "because it looks at the layers of a PyTorch model"),
        ("fedbn", "because parts of the model stay with each client"),
        ("dpsgd", "an app needs clients that report to a coordinator"),
    ],
)
def test_algorithms_that_change_local_steps_are_refused(kind: str, why: str) -> None:
    with pytest.raises(InvalidExperiment, match=why):
        experiment(algorithm=kind)


def test_numbers_that_a_module_draws_at_its_import_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "drawing_app.py").write_text(
        "import numpy as np\nnp.random.seed(3)\n\n\nclass Client:\n"
        "    def initial(self):\n        return [np.random.normal(size=3)]\n\n"
        "    def fit(self, arrays, config):\n        return [arrays[0] + np.random.normal(size=3)], 5, {}\n"
    )
    # The module is imported in the first run, and is there already in the second.
    described = experiment(app={"kind": "python:drawing_app:Client", "clients": 2})
    first, second = (arrays_of(fed.simulate(described)) for _ in range(2))
    assert np.array_equal(first["0"], second["0"])


def test_an_apps_run_is_resumed_with_its_code_alone(tmp_path: Path) -> None:
    described = experiment(checkpoints={"every": 1})
    fed.simulate(described, app=Reals, output=tmp_path)
    (tmp_path / "metrics.jsonl").write_text((tmp_path / "metrics.jsonl").read_text().splitlines(True)[0])
    (tmp_path / "summary.json").unlink()
    with pytest.raises(InvalidInput, match="resumed with the app that it began with, but the SHA-256 of the app is"):
        fed.simulate(described, app=Renamed, output=tmp_path, resume=True)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"model": "mlp"}, "an app brings its own"),
        ({"app": {}}, "app.clients must say how many"),
        ({"rounds": {"count": 1, "cohort": 2, "sampling": "weighted"}}, "rounds.sampling weighted needs"),
        ({"adversaries": "label_flip"}, "changes samples, which an app keeps"),
        ({"app": {"clients": 2, "initial": "first.pkl"}}, "must be a file whose name ends in"),
        ({"local": {"momentum": 0.9}}, "local.momentum changes nothing where an app trains"),
        ({"local": {"precision": "bfloat16"}}, "write it into app.config"),
        ({"evaluation": {"kind": "clients", "fraction": 0.5}}, "evaluation.fraction changes nothing"),
    ],
)
def test_what_an_app_has_no_use_for_is_refused(changed: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidExperiment, match=what):
        fed.simulate(experiment(**changed), app=Regression)


class Renamed(Reals):
    """The same arrays from other code."""


def needs_two(model: object, loader: object) -> None:
    """A maker of a client that nobody can call."""


def test_makers_that_cannot_be_called_are_refused() -> None:
    makers: list[tuple[object, str]] = [(needs_two, "got model, loader"), (dict, "must make a client"), (None, "null")]
    for target, what in makers:
        with pytest.raises(InvalidExperiment, match=what):
            App(target, AppSection(clients=1)).client(0)


def test_codecs_rules_and_secure_sums_work_over_apps() -> None:
    plain = fed.simulate(experiment(app={"clients": 7}), app=Reals)
    masks = {"kind": "masks", "max_weight": 30}
    changes: list[dict[str, Any]] = [{"uplink": ["int8"]}, {"algorithm": "median"}, {"secure_aggregation": masks}]
    for changed in changes:
        run = fed.simulate(experiment(app={"clients": 7}, **changed), app=Reals)
        # An honest median, and rounding to 8 bits or to the fixed point, move the mean of alike updates little.
        np.testing.assert_allclose(arrays_of(run)["0"], arrays_of(plain)["0"], atol=0.1)
        if "secure_aggregation" in changed:
            assert not [key for key in run.metrics[0] if key.startswith("fit_")]
            assert run.metrics[0]["train_loss"] is None


class Layers(nn.Linear):
    """A module that has weights in Keras' way too, as its models on PyTorch are."""

    def get_weights(self) -> list[Any]:
        return [self.weight.detach().numpy()]


def test_first_arrays_come_from_files_and_models(tmp_path: Path) -> None:
    first = [np.full(3, 2.0, np.float32), np.array(5), np.ones((1, 2))]
    np.savez(tmp_path / "first.npz", *first)
    section = AppSection(clients=1, initial=str(tmp_path / "first.npz"))
    assert [part.tolist() for part in App(Regression, section).first_arrays(0).values()] == [p.tolist() for p in first]
    assert list(named_arrays(nn.Linear(2, 1), "a model")) == ["weight", "bias"]
    assert list(named_arrays(Layers(2, 1), "a model")) == ["0"]
    for wrong, what in (({"a": {"b": 1}}, "array a of it"), (3, "must give a list"), ([], "at least one array")):
        with pytest.raises(InvalidModel, match=what):
            named_arrays(wrong, "it")


def test_arrays_survive_the_way_through_the_vector() -> None:
    arrays = {
        "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([True, False]),
        "c": np.array(1 / 3),
        "d": np.array([7], np.uint8),
    }
    specs = specs_of(arrays)
    model = AppModel(specs, arrays)
    layout = Layout.of(model)
    vector_V, integers_I = layout.pack(model)
    assert vector_V.dtype == torch.float64
    found = arrays_in(vector_V, integers_I, specs)
    for array, before, named in zip(found, arrays.values(), model.arrays().values(), strict=True):
        assert array.dtype == before.dtype
        assert np.array_equal(array, before)
        assert np.array_equal(named, before)
    again = state_of(found, specs, vector_V.dtype)
    assert torch.equal(again[0], vector_V)
    assert torch.equal(again[1], integers_I)
    with pytest.raises(AppFailed, match="as whole numbers"):
        state_of([*found[:3], np.array([0.5])], specs, vector_V.dtype)
