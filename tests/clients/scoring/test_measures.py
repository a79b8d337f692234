"""Losses and metrics of experiments: functions of (output, target) from sections, objects and Python, each a number."""

import math
import pickle
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fed
from fed.clients.scoring import metrics
from fed.clients.scoring.losses import cross_entropy, huber
from fed.clients.scoring.measures import directions, is_mean_over_samples, loss_in_force, measured, metrics_in_force
from fed.config.registry import LOSSES, METRICS
from fed.errors import InvalidExperiment, InvalidModel

HERE = f"python:{__name__}:"
CPU = torch.device("cpu")


def bias(output: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
    return scale * (output.argmax(1) - target).double().mean()


bias.higher_is_better = False  # type: ignore[attr-defined]  # as a user marks it


class Weighted(nn.Module):
    """A loss of a user's own, with a key."""

    def __init__(self, weight: float = 2.0) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.weight * functional.cross_entropy(output, target.long())


class Constant:
    """Nothing that can be called."""


class Directed:
    """Metric whose keys say its direction."""

    def __init__(self, is_error: bool = True) -> None:
        self.higher_is_better = not is_error

    def __call__(self, output: Tensor, target: Tensor) -> float:
        return 0.0


def metric_names(**keys: Any) -> list[str]:
    return list(metrics_in_force(fed.Experiment(**keys), None, None))


def test_a_built_in_loss_without_keys_is_the_function_itself() -> None:
    """Trainers know cross-entropy by that."""
    assert loss_in_force(fed.Experiment(), None) is cross_entropy
    assert LOSSES.make("huber", delta=2.0).make() is not huber


def test_functions_with_keys_are_pickled_with_their_attributes() -> None:
    made = pickle.loads(pickle.dumps(LOSSES.make("huber", delta=2.0).make()))
    output, target = torch.tensor([0.0, 5.0]), torch.zeros(2)
    assert made(output, target) == functional.huber_loss(output, target, delta=2.0)
    assert is_mean_over_samples(made)


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        ("cross_entropy", ["accuracy"]),
        ("bce", ["accuracy"]),
        ("mse", ["mae"]),
        ({"kind": "huber", "delta": 0.5}, ["mae"]),
        ("cox", ["c_index"]),
        (f"{HERE}Weighted", []),
    ],
)
def test_default_metrics_are_those_of_the_loss(loss: Any, names: list[str]) -> None:
    assert metric_names(loss=loss) == names
    assert metric_names(loss=loss, metrics=["r2", "mse"]) == ["r2", "mse"]


@pytest.mark.parametrize("kind", ["python:torch.nn.functional:smooth_l1_loss", "python:torch.nn:SmoothL1Loss"])
def test_functions_and_classes_of_others_are_kinds(kind: str) -> None:
    """Whatever a function calls its two arguments."""
    loss = loss_in_force(fed.Experiment(loss={"kind": kind, "beta": 0.5}), None)
    output, target = torch.tensor([0.0, 5.0]), torch.zeros(2)
    assert loss(output, target) == functional.smooth_l1_loss(output, target, beta=0.5)


def test_a_metric_is_called_by_its_key_or_its_kind() -> None:
    sections = ["accuracy", {"kind": f"{HERE}bias", "scale": 2.0}, {"kind": f"{HERE}bias", "name": "off_2"}]
    found = metrics_in_force(fed.Experiment(metrics=sections), None, None)
    assert directions(found) == {"accuracy": "max", "bias": "min", "off_2": "min"}
    output, target = torch.eye(3), torch.tensor([0, 0, 0])
    assert found["bias"](output, target) == 2 * found["off_2"](output, target) == 2


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        (["mse", "mse"], "metrics must have names of their own, got mse twice: give one the key name"),
        ([{"kind": "mse", "name": "loss"}], "none of loss, round, client, .*, got loss"),
        ([{"kind": "mse", "name": "fold"}], "none of loss, .*, fold, got fold"),
        (["mse", {"kind": "mae", "name": "mse_std"}], "without _std at its end, .* got mse_std"),
        ([{"kind": "mse", "name": "a b"}], "name must match pattern"),
        ([lambda output, target: 0.0], "a metric's name must be letters, digits and _, .* got <lambda>"),
        (["acuracy"], "no such metric; did you mean accuracy"),
        ([{"kind": "accuracy", "k": 1}], "k: unknown key"),
    ],
)
def test_metrics_that_results_cannot_name_are_refused(sections: list[Any], problem: str) -> None:
    with pytest.raises(InvalidExperiment, match=problem):
        fed.Experiment(metrics=sections)


def test_objects_given_in_python_are_named_where_they_can_be() -> None:
    experiment = fed.Experiment(loss=functional.mse_loss, metrics=[metrics.accuracy, bias])
    assert experiment.dump()["loss"] == {"kind": "python:torch.nn.functional:mse_loss", **LOSS_KEYS}
    assert [section["kind"] for section in experiment.dump()["metrics"]] == ["accuracy", f"{HERE}bias"]
    held = fed.Experiment(loss=Weighted(3.0), metrics=["mse", Weighted(1.0)])
    assert held.loss is not None
    assert held.loss.kind == f"object:{__name__}:Weighted"
    again = held.override({"rounds.count": 3})
    assert vars(loss_in_force(again, None))["weight"] == 3.0
    assert list(metrics_in_force(again, None, None)) == ["mse", "Weighted"]


LOSS_KEYS = {"size_average": None, "reduce": None, "reduction": "mean", "weight": None}


def test_a_section_has_the_direction_of_what_it_makes() -> None:
    experiment = fed.Experiment(
        metrics=[f"{HERE}Directed", {"kind": f"{HERE}Directed", "is_error": False, "name": "up"}]
    )
    assert experiment.metrics is not None
    found = {section.called: section.best for section in experiment.metrics}
    assert found == directions(metrics_in_force(experiment, None, None)) == {"Directed": "min", "up": "max"}


def test_a_kind_that_makes_no_function_is_refused() -> None:
    with pytest.raises(
        InvalidExperiment, match=r"loss .*Constant must be a function of \(output, target\), or a class"
    ):
        loss_in_force(fed.Experiment(loss=f"{HERE}Constant"), None)


def test_what_python_gives_takes_the_experiments_place() -> None:
    experiment = fed.Experiment(metrics=["mse"])
    one, two = (lambda output, target: 1.0), (lambda output, target: 2.0)
    assert metrics_in_force(fed.Experiment(), Weighted(), None) == {}
    assert list(metrics_in_force(experiment, Weighted(), None)) == ["mse"]
    assert metrics_in_force(experiment, None, one) == {"accuracy": one}
    assert metrics_in_force(experiment, None, {"a": one, "b": two}) == {"a": one, "b": two}
    with pytest.raises(InvalidExperiment, match="a metric's name must be"):
        metrics_in_force(experiment, None, {"a b": one})
    with pytest.raises(InvalidExperiment, match="loss: null needs a loss given in Python"):
        loss_in_force(fed.Experiment(loss=None), None)
    with pytest.raises(InvalidExperiment, match="metrics: null needs metrics given in Python"):
        metrics_in_force(fed.Experiment(metrics=None), None, None)


@pytest.mark.parametrize("value", [0.5, 1, True, Fraction(1, 2), np.float32(0.5), torch.tensor([0.5]), np.array(0.5)])
def test_one_real_number_of_any_type_is_a_value(value: Any) -> None:
    assert float(measured("m", lambda output, target: value, None, torch.zeros(1), CPU)) == float(value)


def test_a_number_of_python_keeps_its_bits() -> None:
    assert float(measured("m", lambda output, target: 0.1, None, torch.zeros(1), CPU)) == 0.1


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (None, "got None"),
        ("0.5", "got '0.5'"),
        ((0.5, 1.0), r"got \(0.5, 1.0\)"),
        (1j, "got 1j"),
        (torch.zeros(3), r"got Tensor of shape \(3,\)"),
        (np.zeros((2, 2)), r"got ndarray of shape \(2, 2\)"),
        (torch.zeros((), dtype=torch.complex64), r"got Tensor of shape \(\)"),
    ],
)
def test_whatever_else_a_metric_gives_is_refused(value: Any, got: str) -> None:
    with pytest.raises(InvalidModel, match=f"the metric m must give one real number, {got}: "):
        measured("m", lambda output, target: value, None, torch.zeros(1), CPU)


@pytest.mark.parametrize("kind", [KeyError, AttributeError, NameError, ZeroDivisionError])
def test_what_a_metric_raises_becomes_a_sentence(kind: type[Exception]) -> None:
    def fails(output: Tensor, target: Tensor) -> float:
        raise kind("seen nothing\nlike it")

    with pytest.raises(
        InvalidModel, match=rf"the metric m must take .* got {kind.__name__} for targets of shape \(1,\): "
    ) as caught:
        measured("m", fails, None, torch.zeros(1), CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", [LOSSES, METRICS], ids=lambda one: one.name)
def test_sections_of_built_in_kinds_are_read_back_equal(family: Any) -> None:
    for kind in family.builtin:
        section = family.make(kind)
        written = section.model_dump(mode="json")
        assert family.validate(written).model_dump(mode="json") == written
        assert re.fullmatch("[a-z0-9_]+", kind)
        assert callable(section.make())


def test_nan_is_a_value() -> None:
    assert math.isnan(float(measured("m", lambda output, target: math.nan, None, torch.zeros(1), CPU)))
