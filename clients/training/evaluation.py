"""Scores of models on held-out samples.

Shapes: see :mod:`fed.vectors.layout`.
"""

import copy
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from fed.clients.data import Held
from fed.clients.data.collate import Collating
from fed.clients.data.held import is_read, labels_of, may_ignore, size_of, taken
from fed.clients.scoring.losses import counted
from fed.clients.scoring.measures import (
    Loss,
    Metrics,
    is_mean_over_samples,
    is_over_counted,
    measured,
    scores_of,
    takes_scores,
)
from fed.clients.training.channel_groups import ChannelGroups
from fed.clients.training.devices import scoring_device, uploaded
from fed.clients.training.op_graphs import record, told_of_recording
from fed.clients.training.reading import AsNeeded, Batch, called, moved, with_parameters
from fed.clients.training.recurrent_layers import RecurrentLayers
from fed.errors import InvalidModel
from fed.vectors import trees
from fed.vectors.layout import Layout
from fed.vectors.tensors import torch
from fed.vectors.trees import Tree

if TYPE_CHECKING:
    from fed.clients.training.interpreted import Function

__all__ = ["BatchedEvaluator", "Score", "confusion_counts", "evaluate"]

_MOST_CLASSES = 100
_BATCH = 128  # so that a convolution's results stay in the cache


class Score(NamedTuple):
    """A model's loss and its metrics, in the order of their names; NaN where one is undefined for these samples."""

    loss: float
    metrics: tuple[float, ...] = ()


def evaluate(
    module: "nn.Module",
    loss: Loss,
    metrics: Metrics,
    samples: Held,
    device: "torch.device",
    collate: Collating | None = None,
) -> Score:
    """Score a module, in evaluation mode, over all samples; the forward passes are in batches of 128.

    Args:
        module: model, on ``device``.
        loss: (output, target) → a scalar, on the device's :func:`~fed.clients.training.devices.scoring_device`.
        metrics: name → (output, target) → a number, on that device, too.
        samples: (inputs, targets), on any device, or samples on demand.
        device: device that computes.
        collate: the run's collate, or None.
    """
    module.eval()
    scores = scoring_device(device)
    tally = _Tally(loss, metrics, scores, counts=may_ignore(samples, is_collated=collate is not None))
    # Not inference_mode: a module may train later with tensors that it caches here.
    with torch.no_grad():
        for batch in _batches(samples, device, collate):
            output = called(module, batch.inputs)
            if scores != device:
                output = tree_map(lambda part: part.to(scores) if isinstance(part, Tensor) else part, output)
                batch = batch._replace(targets=moved(batch.targets, scores))
            tally.add(output, batch)
        loss_value, *values = tally.values().tolist()
    return Score(loss_value, tuple(values))


def confusion_counts(
    module: "nn.Module", samples: Held, device: "torch.device", collate: Collating | None = None
) -> Tensor | None:
    """Number of samples by true class (a row) and by the class that a module takes them for (a column), [C, C].

    Args:
        module: model, on ``device``, whose outputs are scores [B, C].
        samples: (inputs, labels [E]), on any device. Labels of no class, which a loss may ignore, are not counted.
        device: device that computes.
        collate: the run's collate, or None.

    Returns:
        The counts; None if outputs have another shape, or more than 100 classes.
    """
    module.eval()
    counts: Tensor | None = None
    with torch.no_grad():
        for inputs, target, _ in _batches(samples, device, collate):
            output = _scores(called(module, inputs))
            if output is None or output.ndim != 2 or output.shape[1] > _MOST_CLASSES or not isinstance(target, Tensor):
                return None
            classes = output.shape[1]
            label = target.long()
            is_one = (label >= 0) & (label < classes)
            cell = (label * classes + output.argmax(1))[is_one]
            found = torch.bincount(cell, minlength=classes**2)
            counts = found if counts is None else counts + found
    return None if counts is None else counts.view(classes, classes).cpu()


def _scores(output: Any) -> Tensor | None:
    try:
        scores: Tensor = scores_of(output)
    except InvalidModel:
        return None
    return scores


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
        collate: the run's collate, or None.
    """

    module: "nn.Module"
    loss: Loss
    metrics: Metrics
    device: "torch.device"
    private: Collection[str] = ()
    moved: Collection[str] = ()
    collate: Collating | None = None

    def __post_init__(self) -> None:
        self._module = copy.deepcopy(self.module).to(self.device).eval()
        self._layout = Layout.of(self._module, self.private, self.moved)
        self._names = [part.name for part in self._layout.parts]
        self._takes_scores = all(map(takes_scores, (self.loss, *self.metrics.values())))
        self._replays: dict[tuple[Any, ...], Function] = {}

    def scores(self, vectors_KV: Tensor, integers_KI: Tensor, samples: Held) -> list[Score]:
        """Score each model over all samples.

        Args:
            vectors_KV: the models' floating-point states.
            integers_KI: the models' integers.
            samples: (inputs, targets), on any device, or samples on demand.
        """
        on_device = [uploaded(part, self.device) for part in (vectors_KV, integers_KI)]
        states = self._layout.tensors(*on_device)
        counts = may_ignore(samples, is_collated=self.collate is not None)
        tallies_K = [_Tally(self.loss, self.metrics, self.device, counts=counts) for _ in vectors_KV]
        with torch.no_grad():
            for batch in _batches(samples, self.device, self.collate):
                for tally, output in zip(tallies_K, self._outputs(states, batch.inputs), strict=True):
                    tally.add(output, batch)
            values_KX = torch.stack([tally.values() for tally in tallies_K])
        return [Score(loss, tuple(measures)) for loss, *measures in values_KX.tolist()]

    def _outputs(self, states: list[Tensor], inputs: Tree) -> Tensor:
        leaves = trees.leaves(inputs)
        key = len(states[0]), trees.outline(inputs), *(leaf.shape for leaf in leaves)
        if key not in self._replays:

            def forward(*tensors: Tensor) -> tuple[Tensor]:
                return self._forward(tensors[: len(states)], trees.with_leaves(inputs, tensors[len(states) :]))

            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")  # vmap runs some one by one
                self._replays[key] = record(forward, [*states, *leaves]).replay()
        (outputs_KB,) = self._replays[key](*states, *leaves)
        return outputs_KB

    def _forward(self, states: Sequence[Tensor], inputs: Tree) -> tuple[Tensor]:
        named = dict(zip(self._names, states, strict=True))

        def output_of(state: dict[str, Tensor]) -> Any:
            output = with_parameters(self._module, state, inputs)
            return scores_of(output) if self._takes_scores else output

        with ChannelGroups(), RecurrentLayers(), told_of_recording():
            return (vmap(output_of)(named),)


class _Tally:
    """The loss and the metrics of one model while its outputs come batch by batch.

    Args:
        loss: (output, target) → a scalar.
        metrics: name → (output, target) → a number.
        device: device of the values.
        counts: True if labels may be −100, so that batches have the weights of the labels that count.
    """

    def __init__(self, loss: Loss, metrics: Metrics, device: "torch.device", *, counts: bool) -> None:
        self._measures = [("loss", loss), *metrics.items()]
        self._device = device
        self._streams_all = all(is_mean_over_samples(measure) for _, measure in self._measures)
        self._counts = counts and any(is_over_counted(measure) for _, measure in self._measures)
        self._sums: Tensor | float = 0.0  # with the first batch a tensor
        self._weights: Tensor | float = 0.0
        self._samples = 0
        self._outputs: list[Any] = []
        self._targets: list[Tree] = []

    def add(self, output: Any, batch: Batch) -> None:
        """Take a batch's output: means over samples are summed now, other measures wait for all outputs."""
        values = self._values(output, batch.targets, streamed=True)
        if self._counts:
            weights = self._weights_of(batch)
            self._weights = self._weights + weights
            self._sums = self._sums + (values * weights).where(weights > 0, 0)  # 0 × NaN is NaN
        else:
            self._sums = self._sums + values * batch.samples
        self._samples += batch.samples
        if not self._streams_all:
            self._outputs.append(output)
            self._targets.append(batch.targets)

    def values(self) -> Tensor:
        """Loss and metrics over all samples, on the device."""
        values = torch.as_tensor(self._sums) / (self._weights if self._counts else self._samples)
        if not self._streams_all:
            if self._counts:
                values = values.where(self._are(streamed=True), 0)
            values += self._values(_joined(self._outputs), trees.concatenated(self._targets), streamed=False)
        return values

    def _weights_of(self, batch: Batch) -> Tensor:
        """Weight of the batch in each measure: its samples, or the share of their labels that count."""
        target = batch.targets
        share = torch.full((), float(batch.samples), dtype=torch.float64, device=self._device)
        if labels_of(target) is None:
            return share.expand(len(self._measures))
        counted_share = counted(target).sum().to(torch.float64) / max(target[0].numel(), 1)
        return torch.stack([counted_share if is_over_counted(measure) else share for _, measure in self._measures])

    def _are(self, *, streamed: bool) -> Tensor:
        kinds = [is_mean_over_samples(measure) == streamed for _, measure in self._measures]
        return torch.tensor(kinds, device=self._device)

    def _values(self, output: Any, target: Tree, *, streamed: bool) -> Tensor:
        """Loss and metrics in float64: those that are ``streamed`` batch by batch, or the others; 0 for the rest."""
        values = []
        for name, measure in self._measures:
            if is_mean_over_samples(measure) == streamed:
                values.append(measured(name, measure, output, target, self._device))
            else:
                values.append(torch.zeros((), dtype=torch.float64, device=self._device))
        return torch.stack(values)


def _joined(outputs: Sequence[Any]) -> Any:
    """Outputs of all batches as one: their tensors with a row for each sample, in whatever holds them."""
    first = outputs[0]
    try:
        if isinstance(first, Mapping):
            rows = {key: part for key, part in first.items() if isinstance(part, Tensor) and part.ndim}
            return type(first)(**{key: torch.cat([output[key] for output in outputs]) for key in rows})
        return tree_map(lambda *batches: torch.cat(batches), *outputs)  # outputs may be tuples
    except RuntimeError as error:
        raise InvalidModel(
            f"loss and metrics that are no means over samples need all outputs in one shape, got several ({error}): "
            "pad all batches to one length"
        ) from None


def _batches(samples: Held, device: "torch.device", collate: Collating | None) -> Iterator[Batch]:
    count = size_of(samples)
    is_in_memory = collate is None and not is_read(samples)
    # What is drawn for a batch is the same at each evaluation.
    its = None if is_in_memory else AsNeeded(samples, collate, device, seed=0, training=False)
    for number, begin in enumerate(range(0, count, _BATCH)):
        end = min(begin + _BATCH, count)
        if its is not None:
            yield its.batch(torch.arange(begin, end), number)
            continue
        inputs, targets = samples if count <= _BATCH else taken(samples, slice(begin, end))
        # Copies, for a model may change its inputs in place.
        yield Batch(moved(inputs, device, copy=True), moved(targets, device, copy=True), end - begin)
