"""Losses and metrics as functions of (output, target): their names, directions and shapes.

Such a function may have the attributes ``mean_over_samples`` (True: the mean over batches, by their sizes, is the value
over all samples) and, where it is a metric, ``higher_is_better`` (True unless it says False).
"""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeAlias, TypeVar

import numpy as np

from fed.config.components import Component
from fed.config.experiment import Experiment, check_metric_names
from fed.errors import FedError, InvalidExperiment, InvalidModel, first_line
from fed.vectors import trees
from fed.vectors.tensors import Tensor, torch
from fed.vectors.trees import Tree

__all__ = [
    "IGNORED",
    "Loss",
    "Metric",
    "Metrics",
    "alike",
    "as_number",
    "declared",
    "directions",
    "is_higher_better",
    "is_mean_over_samples",
    "is_over_counted",
    "loss_in_force",
    "measured",
    "metrics_in_force",
    "risks_and_times",
    "scores_of",
    "takes_scores",
]

IGNORED = -100
"""Label of a target that does not count, as PyTorch's own losses have it."""

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(output, target) → a scalar, the mean over the batch."""

Metric: TypeAlias = Callable[[Tensor, Tensor], "Tensor | float"]
"""(output, target) → a number."""

Metrics: TypeAlias = Mapping[str, Metric]
"""Metrics by name; results are compared by the first one."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def declared(**attributes: object) -> Callable[[_Function], _Function]:
    """Decorator that gives a function these attributes, which mypy does not let it be assigned.

    It has ``takes_scores`` in any case: True unless told otherwise.
    """

    def with_attributes(function: _Function) -> _Function:
        vars(function).update({"takes_scores": True, **attributes})
        return function

    return with_attributes


def is_mean_over_samples(measure: Loss | Metric) -> bool:
    """True for a loss or metric that says so by an attribute ``mean_over_samples``.

    Such a measure is computed batch by batch. Any other gets all outputs and targets in one call: the mean over batches
    of a correlation, a C-index or a Cox loss is another number.
    """
    return bool(getattr(measure, "mean_over_samples", False))


def takes_scores(measure: Loss | Metric) -> bool:
    """True for a measure that looks at nothing but :func:`scores_of` an output, by an attribute ``takes_scores``."""
    return bool(getattr(measure, "takes_scores", False))


def is_over_counted(measure: Loss | Metric) -> bool:
    """True for a mean over labels that leaves those of −100 out, by an attribute ``over_counted``."""
    return bool(getattr(measure, "over_counted", False))


def is_higher_better(metric: Metric) -> bool:
    """False for a metric that says so by an attribute ``higher_is_better``, such as an error."""
    return getattr(metric, "higher_is_better", True) is not False


def directions(metrics: Metrics) -> dict[str, str]:
    """Each metric's name → "max" or "min", the best of its values."""
    return {name: "max" if is_higher_better(metric) else "min" for name, metric in metrics.items()}


def loss_in_force(experiment: Experiment, given: "Loss | None") -> "Loss":
    """The loss of a run.

    Args:
        experiment: experiment that names a loss.
        given: loss in place of the experiment's; None: the experiment's.

    Raises:
        InvalidExperiment: if there is none, or the kind that the experiment names makes no function.
    """
    if given is not None:
        return given
    if experiment.loss is None:
        raise InvalidExperiment("loss: null needs a loss given in Python: fed.simulate(…, loss=…)")
    loss: Loss = _function(experiment.loss, "loss")
    return loss


def metrics_in_force(experiment: Experiment, loss: "Loss | None", given: "Metric | Metrics | None") -> Metrics:
    """The metrics of a run; with a loss given in Python, only those that the experiment itself names.

    Args:
        experiment: experiment that names metrics.
        loss: loss given in Python, or None.
        given: metrics in place of the experiment's: one, to be called accuracy, or several by name; None: the
            experiment's.

    Raises:
        InvalidExperiment: if there are none, names are no keys, or a kind that the experiment names makes no function.
    """
    if isinstance(given, Mapping):
        check_metric_names(list(given))
        return dict(given)
    if given is not None:
        return {"accuracy": given}
    # The default metrics suit built-in losses; of another loss they may say nothing.
    if loss is not None and "metrics" not in experiment.model_fields_set:
        return {}
    if experiment.metrics is None:
        raise InvalidExperiment("metrics: null needs metrics given in Python: fed.simulate(…, metric=…)")
    return {section.called: _function(section, "metrics") for section in experiment.metrics}


def _function(section: Component, key: str) -> Any:
    try:
        made = section.make()
    except FedError:
        raise
    except Exception as error:
        raise InvalidExperiment(
            f"{key} {section.kind} cannot be made: {first_line(error)}: correct its keys"
        ) from error
    if not callable(made):
        raise InvalidExperiment(
            f"{key} {section.kind} must be a function of (output, target), or a class whose objects are called so, got "
            f"an object of {type(made).__name__} that cannot be called"
        )
    return made


def measured(name: str, measure: Loss | Metric, output: Any, target: Tree, device: "torch.device") -> Tensor:
    """A measure's value, a scalar in float64.

    Args:
        name: name of the metric, or "loss".
        measure: loss or metric to compute.
        output: output of the model.
        target: targets that belong to the output.
        device: device of the value.

    Raises:
        InvalidModel: if the measure raises, or its value is not one real number.
    """
    try:
        value = measure(output, target)
    except FedError:
        raise
    except Exception as error:
        raise InvalidModel(
            f"{_said(name)} must take the model's output and the targets, got {type(error).__name__} for targets "
            f"{_shape_of(target)}: {first_line(error)}"
        ) from error
    return as_number(name, value, device)


def as_number(name: str, value: Any, device: "torch.device") -> Tensor:
    """Value that a measure gives, as a scalar in float64.

    Args:
        name: name of the metric, or "loss".
        value: value that the metric or the loss gives.
        device: device of the scalar.

    Raises:
        InvalidModel: if it is not one real number.
    """
    # A float as a tensor would have PyTorch's default type.
    if not isinstance(value, Tensor) and isinstance(value, Real):
        return torch.tensor(float(value), dtype=torch.float64, device=device)
    is_number = isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) == 1 and value.dtype != object
    if not is_number or (tensor := torch.as_tensor(value, device=device)).is_complex():
        got = f"{type(value).__name__} of shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)[:60]
        raise InvalidModel(f"{_said(name)} must give one real number, got {got}: let it return the mean, for example")
    scalar = tensor.detach().to(torch.float64)
    return scalar.reshape(()) if scalar.ndim else scalar


def _shape_of(target: Tree) -> str:
    return f"of shape {tuple(target.shape)}" if isinstance(target, Tensor) else trees.outline(target)


def _said(name: str) -> str:
    return "the loss" if name == "loss" else f"the metric {name}"


def scores_of(output: Any) -> Any:
    """Scores of a model's output [B, C, ...], classes second.

    A tensor is what it is. Of a dictionary or an object it is ``logits``, whose classes are last as in
    ``transformers``, and which come back with classes second; of any other tuple it is the first tensor that has a row
    for each sample.

    Args:
        output: output of a model.

    Raises:
        InvalidModel: if there are no scores in it.

    Example:
        >>> scores_of({"logits": torch.zeros(4, 7, 3)}).shape
        torch.Size([4, 3, 7])
    """
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits.movedim(-1, 1) if logits.ndim > 2 else logits
    for part in output if isinstance(output, tuple | list) else ():
        if isinstance(part, Tensor) and part.ndim:
            return part
    got = sorted(map(str, output)) if isinstance(output, Mapping) else type(output).__name__
    raise InvalidModel(
        f"the model's output must be a tensor or have logits for this loss or metric, got {got}: let the model return "
        "them, or write a loss of your own"
    )


def alike(output: Any, target: Tensor, dtype: "torch.dtype | None" = None) -> tuple[Tensor, Tensor]:
    """Output and target in one shape and type; a dimension of one number may be missing in either.

    Args:
        output: [B, ...], or one with ``logits``.
        target: [B, ...].
        dtype: type of both; the output's unless given.

    Raises:
        InvalidModel: if they have other shapes, which PyTorch would spread over each other.
    """
    output = scores_of(output)
    if output.ndim == target.ndim + 1 and output.shape[1] == 1:
        output = output.squeeze(1)
    elif target.ndim == output.ndim + 1 and target.shape[1] == 1:
        target = target.squeeze(1)
    # [B, 1] against [B] would broadcast to [B, B], and train without an error.
    if output.shape != target.shape:
        raise InvalidModel(
            f"output and targets must have as many numbers a sample, got shapes {tuple(output.shape)} and "
            f"{tuple(target.shape)}: change the model's outputs, the targets or the loss"
        )
    return output.to(dtype or output.dtype), target.to(dtype or output.dtype)


def risks_and_times(output: Any, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Samples' risks, times and events [B] each, the events as true or false.

    Args:
        output: [B] or [B, 1].
        target: [B, 2], times and events.

    Raises:
        InvalidModel: if they have other shapes.
    """
    output = scores_of(output)
    if target.shape != (len(target), 2) or output.numel() != len(target):
        raise InvalidModel(
            "survival needs one output and the two targets (time, event) a sample, got shapes "
            f"{tuple(output.shape)} and {tuple(target.shape)}: change the model's outputs or the targets"
        )
    return output.reshape(-1), target[:, 0], target[:, 1] > 0.5
