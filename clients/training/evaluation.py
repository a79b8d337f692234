"""Scores of models on held-out samples.

Shapes: see :mod:`fed.vectors.layout`.
"""

import copy
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

from fed.clients.data import Pair
from fed.clients.scoring.measures import Loss, Metrics, is_mean_over_samples, measured
from fed.clients.training.channel_groups import ChannelGroups
from fed.clients.training.op_graphs import record
from fed.clients.training.recurrent_layers import RecurrentLayers
from fed.vectors.layout import Layout
from fed.vectors.tensors import torch

__all__ = ["BatchedEvaluator", "Score", "confusion_counts", "evaluate"]

_MOST_CLASSES = 100
_BATCH = 128  # so that a convolution's results stay in the cache


class Score(NamedTuple):
    """A model's loss and its metrics, in the order of their names; NaN where one is undefined for these samples."""

    loss: float
    metrics: tuple[float, ...] = ()


def evaluate(module: "nn.Module", loss: Loss, metrics: Metrics, samples: Pair, device: "torch.device") -> Score:
    """Score a module, in evaluation mode, over all samples; the forward passes are in batches of 128.

    Args:
        module: model, on ``device``.
        loss: (output, target) → a scalar.
        metrics: name → (output, target) → a number.
        samples: (inputs, targets), on any device.
        device: device that computes.
    """
    module.eval()
    tally = _Tally(loss, metrics, device)
    # Not inference_mode: a module may train later with tensors that it caches here.
    with torch.no_grad():
        for inputs, target in _batches(samples, device):
            tally.add(module(inputs), target)
        return tally.score(samples[1])


def confusion_counts(module: "nn.Module", samples: Pair, device: "torch.device") -> Tensor | None:
    """Number of samples by true class (a row) and by the class that a module takes them for (a column), [C, C].

    Args:
        module: model, on ``device``, whose outputs are scores [B, C].
        samples: (inputs, labels [E]), on any device. Labels of no class, which a loss may ignore, are not counted.
        device: device that computes.

    Returns:
        The counts; None if outputs have another shape, or more than 100 classes.
    """
    module.eval()
    counts: Tensor | None = None
    with torch.no_grad():
        for inputs, target in _batches(samples, device):
            output = module(inputs)
            if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[1] > _MOST_CLASSES:
                return None
            classes = output.shape[1]
            label = target.long()
            is_one = (label >= 0) & (label < classes)
            cell = (label * classes + output.argmax(1))[is_one]
            found = torch.bincount(cell, minlength=classes**2)
            counts = found if counts is None else counts + found
    return None if counts is None else counts.view(classes, classes).cpu()


@dataclass(eq=False)
class BatchedEvaluator:
    """Evaluation of many models of one kind on the same samples, as :func:`evaluate` scores one.

    The forward pass, in evaluation mode, is recorded once for each shape and replayed for all models at once. It must
    be one that :class:`fed.clients.training.batched_trainer.BatchedTrainer` could train.

    Args:
        module: the model; it is only read.
        loss: (output, target) → a scalar.
        metrics: name → (output, target) → a number.
        device: device that computes.
        private: the names of the tensors that the model does not share.
        moved: the names of the tensors that the coordinator alone moves.
    """

    module: "nn.Module"
    loss: Loss
    metrics: Metrics
    device: "torch.device"
    private: Collection[str] = ()
    moved: Collection[str] = ()

    def __post_init__(self) -> None:
        self._module = copy.deepcopy(self.module).to(self.device).eval()
        self._layout = Layout.of(self._module, self.private, self.moved)
        self._names = [part.name for part in self._layout.parts]
        self._programs: dict[tuple[int, torch.Size], fx.GraphModule] = {}

    def scores(self, vectors_KV: Tensor, integers_KI: Tensor, samples: Pair) -> list[Score]:
        """Score each model over all samples.

        Args:
            vectors_KV: the models' floating-point states.
            integers_KI: the models' integers.
            samples: (inputs, targets), on any device.
        """
        states = [part.to(self.device) for part in self._layout.tensors(vectors_KV, integers_KI)]
        tallies_K = [_Tally(self.loss, self.metrics, self.device) for _ in vectors_KV]
        with torch.no_grad():
            for inputs, target in _batches(samples, self.device):
                for tally, output in zip(tallies_K, self._outputs(states, inputs), strict=True):
                    tally.add(output, target)
            return [tally.score(samples[1]) for tally in tallies_K]

    def _outputs(self, states: list[Tensor], inputs: Tensor) -> Tensor:
        key = len(states[0]), inputs.shape
        if key not in self._programs:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")  # vmap runs some one by one
                self._programs[key] = record(self._forward, [*states, inputs]).program()
        outputs_KB: Tensor = self._programs[key].forward(*states, inputs)[0]
        return outputs_KB

    def _forward(self, *tensors: Tensor) -> tuple[Tensor]:
        *states, inputs = tensors
        named = dict(zip(self._names, states, strict=True))
        with ChannelGroups(), RecurrentLayers():
            return (vmap(lambda state: functional_call(self._module, state, (inputs,)))(named),)


class _Tally:
    """The loss and the metrics of one model while its outputs come batch by batch."""

    def __init__(self, loss: Loss, metrics: Metrics, device: "torch.device") -> None:
        self._measures = [("loss", loss), *metrics.items()]
        self._device = device
        self._streams_all = all(is_mean_over_samples(measure) for _, measure in self._measures)
        self._sums = torch.zeros(len(self._measures), dtype=torch.float64, device=device)
        self._outputs: list[Any] = []

    def add(self, output: Any, target: Tensor) -> None:
        """Take a batch's output: means over samples are summed now, other measures wait for all outputs."""
        self._sums += self._values(output, target, streamed=True) * len(target)
        if not self._streams_all:
            self._outputs.append(output)

    def score(self, targets_E: Tensor) -> Score:
        """The score over all samples, with their targets in order."""
        values = self._sums / len(targets_E)
        if not self._streams_all:
            output = tree_map(lambda *batches: torch.cat(batches), *self._outputs)  # outputs may be tuples or dicts
            values += self._values(output, targets_E.to(self._device, copy=True), streamed=False)
        loss, *metrics = values.tolist()
        return Score(loss, tuple(metrics))

    def _values(self, output: Any, target: Tensor, *, streamed: bool) -> Tensor:
        """Loss and metrics in float64: those that are ``streamed`` batch by batch, or the others; 0 for the rest."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        values = []
        for name, measure in self._measures:
            is_asked_for = is_mean_over_samples(measure) == streamed
            values.append(measured(name, measure, output, target, self._device) if is_asked_for else zero)
        return torch.stack(values)


def _batches(samples: Pair, device: "torch.device") -> Iterator[Pair]:
    inputs_E, targets_E = samples
    for begin in range(0, len(inputs_E), _BATCH):
        # Copies, for a model may change its inputs in place.
        batch = slice(begin, begin + _BATCH)
        yield (
            inputs_E[batch].to(device, non_blocking=True, copy=True),
            targets_E[batch].to(device, non_blocking=True, copy=True),
        )
