"""How good a model is on samples that it was not trained on.

Shapes: N samples; B, those of a batch; C classes; K models; V, a model's floating-point state; I, its integers.
"""

import copy
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap

from fed.clients.data import Pair
from fed.clients.training.losses import Loss
from fed.clients.training.op_graphs import record
from fed.layout import Layout

__all__ = ["BatchedEvaluator", "Metric", "Score", "accuracy", "evaluate"]

Metric: TypeAlias = Callable[[Tensor, Tensor], Tensor | float]
"""(output, target) → a number, the mean over the batch."""

_BATCH = 128  # so that what a convolution computes stays in the cache


class Score(NamedTuple):
    """A model's mean loss and mean metric: accuracy, unless the user gave another; None where there is none."""

    loss: float
    accuracy: float | None


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of labels that score highest, over samples and positions.

    Args:
        output: [B, C, ...], scores of C classes.
        target: [B, ...], labels.
    """
    return (output.argmax(1) == target.long()).to(torch.float64).mean()  # some integers cannot be compared with others


def evaluate(module: nn.Module, loss: Loss, metric: Metric | None, samples: Pair, device: torch.device) -> Score:
    """Score a module, in evaluation mode, over all samples, in batches of 128.

    Args:
        module: on ``device``.
        loss: (output, target) → a scalar, the mean over the batch.
        metric: (output, target) → a number, the mean over the batch; or None.
        samples: (inputs, targets), anywhere.
        device: where to compute.
    """
    module.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with torch.no_grad():  # not inference_mode: what a module caches here it may train with later
        for inputs, target in _batches(samples, device):
            sums += _means(loss, metric, module(inputs), target) * len(target)
    return _score(sums / len(samples[1]), metric)


class BatchedEvaluator:
    """Scores many models of one kind on the same samples, as :func:`evaluate` scores one.

    The forward pass, in evaluation mode, is recorded once a shape and replayed for all models at once, so it must be
    one that :class:`fed.clients.training.batched_trainer.BatchedTrainer` could train.

    Args:
        module: the model; it is only read.
        loss: (output, target) → a scalar, the mean over the batch.
        metric: (output, target) → a number, the mean over the batch; or None.
        device: where to compute.
        private: the names of what the model does not share.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        metric: Metric | None,
        device: torch.device,
        private: Collection[str] = (),
    ) -> None:
        self._module = copy.deepcopy(module).to(device).eval()
        self._layout = Layout.of(self._module, private)
        self._names = [part.name for part in self._layout.parts]
        self._loss = loss
        self._metric = metric
        self._device = device
        self._programs: dict[tuple[int, torch.Size], fx.GraphModule] = {}

    def scores(self, vectors_KV: Tensor, integers_KI: Tensor, samples: Pair) -> list[Score]:
        """Each model's score over all samples."""
        states = [part.to(self._device) for part in self._layout.tensors(vectors_KV, integers_KI)]
        sums_K = torch.zeros(len(vectors_KV), 2, dtype=torch.float64, device=self._device)
        with torch.no_grad():
            for inputs, target in _batches(samples, self._device):
                for row, output in enumerate(self._outputs(states, inputs)):
                    sums_K[row] += _means(self._loss, self._metric, output, target) * len(target)
        return [_score(means, self._metric) for means in sums_K / len(samples[1])]

    def _outputs(self, states: list[Tensor], inputs: Tensor) -> Tensor:
        key = len(states[0]), inputs.shape
        if key not in self._programs:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")  # of what vmap takes one by one
                self._programs[key] = record(self._forward, [*states, inputs])
        outputs_KB: Tensor = self._programs[key].forward(*states, inputs)[0]
        return outputs_KB

    def _forward(self, *tensors: Tensor) -> tuple[Tensor]:
        *states, inputs = tensors
        return (vmap(self._one, in_dims=(0, None))(tuple(states), inputs),)

    def _one(self, state: tuple[Tensor, ...], inputs: Tensor) -> Tensor:
        output: Tensor = functional_call(self._module, dict(zip(self._names, state, strict=True)), (inputs,))
        return output


def _batches(samples: Pair, device: torch.device) -> Iterator[Pair]:
    inputs_N, targets_N = samples
    for begin in range(0, len(inputs_N), _BATCH):
        # Copies, for a model may change its inputs in place.
        batch = slice(begin, begin + _BATCH)
        yield (
            inputs_N[batch].to(device, non_blocking=True, copy=True),
            targets_N[batch].to(device, non_blocking=True, copy=True),
        )


def _means(loss: Loss, metric: Metric | None, output: Tensor, target: Tensor) -> Tensor:
    """A batch's mean loss and metric, in float64."""
    values = loss(output, target), metric(output, target) if metric else 0.0
    return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=target.device) for value in values])


def _score(means: Tensor, metric: Metric | None) -> Score:
    mean_loss, mean_metric = means.tolist()
    return Score(mean_loss, mean_metric if metric else None)
