"""Metrics of a model's outputs; those that need all outputs are scikit-learn's, loaded when used, where it has them.

A predicted label is the class of C that the model scores highest. Where outputs have the shape of the targets, which
are 0 or 1, it is 1 for a score above 0. Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import PositiveInt

from fed.clients.scoring.measures import IGNORED, alike, declared, risks_and_times, scores_of
from fed.errors import InvalidData, InvalidExperiment, InvalidModel
from fed.vectors.tensors import Tensor, nn, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "accuracy",
    "auroc",
    "balanced_accuracy",
    "c_index",
    "calibration_error",
    "log_loss",
    "macro_f1",
    "mae",
    "mse",
    "r2",
]

_MOST_PAIRS = 1 << 22  # number of pairs compared at a time


class _Scored(NamedTuple):
    """Scores and labels: [N, C] and [N] of C classes; [N] and [N], or [N, C] twice, of targets that are 0 or 1."""

    scores: Tensor
    labels: Tensor
    are_classes: bool

    @property
    def predicted(self) -> Tensor:
        # Scores come before the sigmoid: 0 is a probability of one half.
        return self.scores.argmax(1) if self.are_classes else (self.scores > 0).long()


def _scored(output: Tensor, target: Tensor) -> _Scored:
    """Scores and labels, flattened over samples and positions.

    Args:
        output: [B, C, ...] of C classes, or logits [B, ..., C]; else in the shape of the targets.
        target: [B, ...]; labels of classes that are −100 do not count.
    """
    output = scores_of(output)
    if _are_of_classes(output, target):
        scores, labels = _flattened(output, target)
        # One look at the lowest label settles nearly all cases.
        if labels.numel() and int(labels.amin()) < 0:
            counts = labels != IGNORED
            scores = scores[counts]
            labels = labels[counts]
        return _Scored(scores, labels, are_classes=True)
    scores, labels = alike(output, target)
    if not bool(((labels >= 0) & (labels <= 1)).all()):
        raise InvalidData(
            f"targets must be in [0, 1] for a metric of labels where the output has one number for each, got from "
            f"{labels.min().item():g} to {labels.max().item():g}: use mae, mse or r2 for a regression, or a model with "
            "one output for each class"
        )
    return _Scored(scores, (labels > 0.5).long(), are_classes=False)


def _are_of_classes(scores: Tensor, target: Tensor) -> bool:
    """True if there is a score of each of several classes for each label."""
    has_classes = scores.ndim == target.ndim + 1 and scores.shape[1] > 1
    return has_classes and (*scores.shape[:1], *scores.shape[2:]) == target.shape


def _flattened(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [N, C] and labels [N] of all samples and positions."""
    return scores.movedim(1, -1).flatten(0, -2), target.long().flatten()


@declared(mean_over_samples=True, over_counted=True)
def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Share of labels that are right, over samples and positions."""
    scores = scores_of(output)
    if not target.is_cpu and _are_of_classes(scores, target):
        # To leave labels out, the program would have to wait for the device.
        scores_NC, labels_N = _flattened(scores, target)
        right = (scores_NC.argmax(1) == labels_N).sum()
        return right.to(torch.float64) / (labels_N != IGNORED).sum()
    scored = _scored(output, target)
    return (scored.predicted == scored.labels).to(torch.float64).mean()


@declared()
def balanced_accuracy(output: Tensor, target: Tensor) -> float:
    """Mean over the classes that occur of the share of their samples that are right (Brodersen et al. 2010)."""
    scored = _one_label("balanced_accuracy", output, target)
    labels = _numpy(scored.labels)
    with _scikit_learn():
        from sklearn.metrics import recall_score
    return float(recall_score(labels, _numpy(scored.predicted), labels=sorted({*labels.tolist()}), average="macro"))


@declared()
def macro_f1(output: Tensor, target: Tensor) -> float:
    """Mean over classes of F1, which is 2 · precision · recall / (precision + recall); 0 where nothing is right."""
    scored = _scored(output, target)
    with _scikit_learn():
        from sklearn.metrics import f1_score
    return float(f1_score(_numpy(scored.labels), _numpy(scored.predicted), average="macro", zero_division=0))


@declared()
def auroc(output: Tensor, target: Tensor) -> float:
    """Area under the ROC curve, of each class against the rest, the mean over classes (Hand & Till 2001).

    Classes that all samples have, or none, have no curve and are left out; NaN if that is all of them, or a score is
    not finite.
    """
    scored = _scored(output, target)
    if not torch.isfinite(scored.scores).all():
        return math.nan
    if scored.are_classes:
        # Probabilities: the scores of one class order samples otherwise.
        scores = scored.scores.double().softmax(1)
        labels = nn.functional.one_hot(scored.labels, scores.shape[1])
    else:
        scores = scored.scores.double()
        labels = scored.labels
    # Not scikit-learn's own multi-class mean, which refuses classes that do not occur.
    columns = [(_numpy(labels.reshape(len(labels), -1)[:, place]), place) for place in range(labels[0].numel())]
    with _scikit_learn():
        from sklearn.metrics import roc_auc_score
    found = _numpy(scores.reshape(len(labels), -1))
    areas = [roc_auc_score(column, found[:, place]) for column, place in columns if 0 < column.sum() < len(column)]
    return math.fsum(areas) / len(areas) if areas else math.nan


@declared(mean_over_samples=True, over_counted=True, higher_is_better=False)
def log_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean negative logarithm of the probability of the true labels, in float64."""
    scores = scores_of(output)
    if _are_of_classes(scores, target):
        # Not of the labels that count, for which the program would have to wait for a GPU.
        scores_NC, labels_N = _flattened(scores, target)
        return nn.functional.cross_entropy(scores_NC.double(), labels_N, ignore_index=IGNORED)
    scored = _scored(output, target)
    return nn.functional.binary_cross_entropy_with_logits(scored.scores.double(), scored.labels.double())


@declared(mean_over_samples=True, higher_is_better=False)
def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error, in float64."""
    return nn.functional.mse_loss(*alike(output, target, torch.float64))


@declared(mean_over_samples=True, higher_is_better=False)
def mae(output: Tensor, target: Tensor) -> Tensor:
    """Mean absolute error, in float64."""
    return nn.functional.l1_loss(*alike(output, target, torch.float64))


@declared()
def r2(output: Tensor, target: Tensor) -> float:
    """Coefficient of determination, 1 - squared error / variance of the targets; NaN of fewer than two samples.

    NaN also where an output is not finite.
    """
    outputs, targets = alike(output, target, torch.float64)
    # Here scikit-learn would raise or warn, and a diverged model is no reason to end a run.
    if len(targets) < 2 or not torch.isfinite(outputs).all():
        return math.nan
    with _scikit_learn():
        from sklearn.metrics import r2_score
    return float(r2_score(*(_numpy(values.reshape(len(values), -1)) for values in (targets, outputs))))


@declared()
def c_index(output: Tensor, target: Tensor) -> float:
    """Share of comparable pairs in which the sample with the earlier event has the higher risk (Harrell et al. 1982).

    Pairs are comparable where one sample's event comes before the other's time, or at it if the other is censored.
    Equal risks count half. NaN without such pairs, or where a risk is NaN.

    Args:
        output: [B] or [B, 1], the risks.
        target: [B, 2], times and events, which are 1 where seen and 0 where censored.
    """
    risk_B, time_B, event_B = risks_and_times(output, target)
    if torch.isnan(risk_B).any():
        return math.nan
    comparable = right = 0.0
    events_K = event_B.nonzero().flatten()
    rows = max(1, _MOST_PAIRS // max(len(time_B), 1))
    for first in range(0, len(events_K), rows):  # in parts, since all pairs may not fit into memory
        at = events_K[first : first + rows]
        risk_K = risk_B[at, None]
        time_K = time_B[at, None]
        later_KB = (time_B > time_K) | ((time_B == time_K) & ~event_B)
        comparable += int(later_KB.sum())
        right += int((later_KB & (risk_B < risk_K)).sum()) + int((later_KB & (risk_B == risk_K)).sum()) / 2
    return right / comparable if comparable else math.nan


@declared(higher_is_better=False)
def calibration_error(output: Tensor, target: Tensor, bins: PositiveInt = 15) -> float:
    """Expected calibration error: how far confidence and accuracy are apart in bins of confidence (Guo et al. 2017).

    Args:
        output: [B, C, ...] of C classes, or in the shape of the targets, before softmax or sigmoid.
        target: [B, ...].
        bins: number of bins of equal width.
    """
    scored = _one_label("calibration_error", output, target)
    scores_N = scored.scores.double()
    # Torchmetrics has it too, but imports torchvision wherever that is installed, of whatever build it is.
    confidence_N = scores_N.softmax(1).amax(1) if scored.are_classes else scores_N.abs().sigmoid()
    excess_N = confidence_N - (scored.predicted == scored.labels).double()
    # Bins are open below and closed above, as in the paper: a confidence of 1 is in the last one.
    bin_N = (confidence_N * bins).ceil().long().clamp(1, bins) - 1
    of_bins = torch.zeros(bins, dtype=torch.float64, device=excess_N.device).index_add_(0, bin_N, excess_N)
    return float(of_bins.abs().sum()) / len(excess_N)


def _one_label(name: str, output: Tensor, target: Tensor) -> _Scored:
    """Scores and labels for a metric that takes one label a sample."""
    scored = _scored(output, target)
    if scored.labels.ndim > 1:
        raise InvalidModel(
            f"{name} needs one label a sample, got targets of shape {tuple(target.shape)}: use accuracy, macro_f1, "
            "auroc or log_loss for several"
        )
    return scored


def _numpy(tensor: Tensor) -> "NDArray[Any]":
    return tensor.detach().cpu().numpy()


@contextmanager
def _scikit_learn() -> Iterator[None]:
    """Turn a missing scikit-learn into a sentence."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidExperiment(f"this metric needs scikit-learn, got {error}: pip install 'fed[metrics]'") from None
