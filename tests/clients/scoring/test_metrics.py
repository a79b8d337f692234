"""Built-in metrics are those of scikit-learn, or of a plain loop over samples and pairs, on the whole test set.

Shapes: N samples; C classes.
"""

import math
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from torch import Tensor, nn

from fed.clients.scoring import metrics
from fed.clients.scoring.measures import is_higher_better, is_mean_over_samples
from fed.clients.training.evaluation import evaluate
from fed.config.registry import METRICS
from fed.errors import InvalidData, InvalidExperiment, InvalidModel

CPU = torch.device("cpu")
EXACT = 1e-12  # the rounding of sums of some hundred terms in float64


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def evaluated(name: str, output: Tensor, target: Tensor, **keys: Any) -> float:
    """The metric as evaluation computes it, in batches of 128 where it streams."""
    metric = METRICS.make(name, **keys).make()
    return evaluate(nn.Identity(), _nothing, {name: metric}, (output, target), CPU).metrics[0]


def _nothing(output: Tensor, target: Tensor) -> Tensor:
    return torch.zeros(())


def labelled(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    output = torch.randn(300, 4, dtype=dtype)
    return output, (output + torch.randn_like(output)).argmax(1)


def _macro_auroc(labels: Any, scores: Any) -> float:
    return float(sk.roc_auc_score(labels, scores, multi_class="ovr", average="macro"))


OF_CLASSES: dict[str, Callable[[Any, Any], float]] = {
    "accuracy": lambda labels, chances: sk.accuracy_score(labels, chances.argmax(1)),
    "balanced_accuracy": lambda labels, chances: sk.balanced_accuracy_score(labels, chances.argmax(1)),
    "macro_f1": lambda labels, chances: sk.f1_score(labels, chances.argmax(1), average="macro"),
    "auroc": _macro_auroc,
    "log_loss": sk.log_loss,
}
OF_LABELS: dict[str, Callable[[Any, Any], float]] = {
    "accuracy": lambda labels, scores: sk.accuracy_score(labels.ravel(), scores.ravel() > 0),
    "macro_f1": lambda labels, scores: sk.f1_score(labels, scores > 0, average="macro"),
    "auroc": lambda labels, scores: sk.roc_auc_score(labels, scores, average="macro"),
    "log_loss": lambda labels, scores: sk.log_loss(labels.ravel(), 1 / (1 + np.exp(-scores.ravel()))),
}
OF_NUMBERS: dict[str, Callable[[Any, Any], float]] = {
    "mse": sk.mean_squared_error,
    "mae": sk.mean_absolute_error,
    "r2": sk.r2_score,
}


@pytest.mark.parametrize("name", OF_CLASSES)
def test_metrics_of_classes_are_those_of_scikit_learn(name: str) -> None:
    output, labels = labelled()
    expected = OF_CLASSES[name](labels.numpy(), output.softmax(1).numpy())
    assert evaluated(name, output, labels) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("name", OF_CLASSES)
def test_positions_of_sequences_count_like_samples(name: str) -> None:
    output, labels = torch.randn(140, 3, 5, dtype=torch.float64), torch.randint(3, (140, 5))
    flat = output.movedim(1, 2).reshape(-1, 3)
    expected = OF_CLASSES[name](labels.flatten().numpy(), flat.softmax(1).numpy())
    assert evaluated(name, output, labels) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("shape", [(300,), (300, 1), (300, 3)])
@pytest.mark.parametrize("name", OF_LABELS)
def test_metrics_of_several_labels_are_those_of_scikit_learn(name: str, shape: tuple[int, ...]) -> None:
    """Also of one label whose output has a dimension more."""
    output = torch.randn(shape, dtype=torch.float64)
    labels = (output + torch.randn_like(output) > 0).double()
    target = labels.flatten() if shape[-1] == 1 else labels
    if name == "macro_f1" and len(labels.squeeze().shape) == 1:
        expected = sk.f1_score(labels.flatten(), output.flatten() > 0, average="macro")
    else:
        expected = OF_LABELS[name](labels.numpy(), output.numpy())
    assert evaluated(name, output, target) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("shape", [(300,), (300, 1), (300, 3)])
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_metrics_of_numbers_are_those_of_scikit_learn(name: str, shape: tuple[int, ...]) -> None:
    output = torch.randn(shape)  # float32, whose squares are not exact
    target = output + torch.randn(shape)
    expected = OF_NUMBERS[name](target.double().numpy(), output.double().numpy())
    assert evaluated(name, output, target.flatten() if shape[-1] == 1 else target) == pytest.approx(expected, abs=EXACT)


def test_c_index_is_that_of_a_loop_over_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal times, equal risks and several blocks of pairs among them."""
    monkeypatch.setattr(metrics, "_MOST_PAIRS", 1000)
    risk = torch.randint(8, (200,)).double()
    target = torch.stack([torch.randint(1, 30, (200,)), torch.randint(2, (200,))], 1).double()
    comparable = right = 0.0
    for (mine, (time, event)), (others, (later, its)) in product(zip(risk, target, strict=True), repeat=2):
        if event and (time < later or (time == later and not its)):
            comparable += 1
            right += 1.0 if mine > others else 0.5 if mine == others else 0.0
    assert evaluated("c_index", risk[:, None], target) == pytest.approx(right / comparable, abs=EXACT)
    assert evaluated("c_index", risk, target) + evaluated("c_index", -risk, target) == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize("bins", [1, 7])
def test_calibration_error_is_that_of_a_loop_over_bins(bins: int) -> None:
    output, labels = labelled()
    confidence, predicted = output.softmax(1).max(1)
    total = 0.0
    for number in range(bins):
        inside = (confidence > number / bins) & (confidence <= (number + 1) / bins)
        if inside.any():
            gap = (predicted[inside] == labels[inside]).double().mean() - confidence[inside].mean()
            total += abs(float(gap)) * int(inside.sum()) / len(labels)
    assert evaluated("calibration_error", output, labels, bins=bins) == pytest.approx(total, abs=EXACT)
    two = torch.randn(300, dtype=torch.float64)
    as_classes = torch.stack([torch.zeros_like(two), two], 1)
    target = (two > 0.3).long()
    assert evaluated("calibration_error", two, target) == pytest.approx(
        evaluated("calibration_error", as_classes, target), abs=EXACT
    )


def test_directions_and_streams_are_those_of_the_field() -> None:
    made = {name: METRICS.make(name).make() for name in METRICS.builtin}
    low = {name for name, metric in made.items() if not is_higher_better(metric)}
    assert low == {"log_loss", "mse", "mae", "calibration_error"}
    assert low == {name for name in made if METRICS.make(name).best == "min"}
    streams = {name for name, metric in made.items() if is_mean_over_samples(metric)}
    assert streams == {"accuracy", "log_loss", "mse", "mae"}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("auroc", torch.zeros(3)),
        ("r2", torch.ones(1)),
        ("c_index", torch.tensor([[1.0, 0.0], [2.0, 1.0]])),
    ],
)
def test_what_samples_do_not_define_is_nan(name: str, target: Tensor) -> None:
    assert math.isnan(evaluated(name, torch.zeros(len(target)), target))


@pytest.mark.parametrize("outlier", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("auroc", torch.tensor([0, 1, 2, 1])),
        ("auroc", torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])),
        ("r2", torch.rand(4, 3)),
    ],
    ids=["classes", "labels", "r2"],
)
def test_outputs_that_are_not_finite_have_no_score(name: str, target: Tensor, outlier: float) -> None:
    output = torch.randn(4, 3)
    output[2, 1] = outlier
    assert math.isnan(evaluated(name, output, target))


def test_risks_that_are_no_numbers_have_no_c_index() -> None:
    survival = torch.tensor([[3.0, 1.0], [1.0, 1.0], [2.0, 0.0]])
    assert math.isnan(evaluated("c_index", torch.tensor([0.5, math.nan, 0.1]), survival))


def test_classes_without_a_curve_are_left_out_of_auroc() -> None:
    output, labels = labelled()
    labels = labels.clamp(max=2)
    areas = [sk.roc_auc_score(labels == one, output.softmax(1)[:, one]) for one in range(3)]
    assert evaluated("auroc", output, labels) == pytest.approx(sum(areas) / 3, abs=EXACT)


@pytest.mark.parametrize("name", ["balanced_accuracy", "calibration_error"])
def test_metrics_of_one_label_refuse_several(name: str) -> None:
    with pytest.raises(InvalidModel, match=f"{name} needs one label a sample, got targets of shape"):
        evaluated(name, torch.randn(4, 3), torch.ones(4, 3))


@pytest.mark.parametrize("name", [*OF_LABELS, "balanced_accuracy", "calibration_error"])
def test_metrics_of_labels_refuse_targets_of_a_regression(name: str) -> None:
    with pytest.raises(InvalidData, match=r"must be in \[0, 1\].* got from -1 to 2\.5: use mae"):
        evaluated(name, torch.randn(3, 1), torch.tensor([[-1.0], [0.5], [2.5]]))


@pytest.mark.parametrize("name", METRICS.builtin)
def test_shapes_that_do_not_fit_are_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(InvalidModel, match=r"got shapes \(5, 3\) and \(5, 2\)"):
        evaluated(name, torch.randn(5, 3), torch.ones(5, 2))


def test_a_missing_scikit_learn_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(InvalidExperiment, match=r"needs scikit-learn, got .*: pip install 'fed\[metrics\]'"):
        evaluated("auroc", *labelled())
