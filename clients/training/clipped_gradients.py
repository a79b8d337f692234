"""Clipped gradients of a model: each client's sum over a batch, by layers' rules where these hold, else by sample.

Shapes: see :mod:`fed.vectors.layout`.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch.func import vmap

from fed.clients.data import Pair
from fed.clients.scoring.losses import of_each_client, of_each_sample
from fed.clients.scoring.measures import Loss
from fed.clients.training.channel_groups import ChannelGroups
from fed.clients.training.embeddings import PaddedEmbeddings
from fed.clients.training.layer_taps import LayerTaps, OtherUse, gradients_by_layer, seen_by_layers
from fed.clients.training.op_graphs import record_batch, told_of_recording
from fed.clients.training.recorded_gradients import is_recordable
from fed.clients.training.recurrent_layers import RecurrentLayers
from fed.clients.training.sample_gradients import SampleGradients, clipped_sums, gradients_of_each
from fed.clients.training.sample_mixing import mixes_samples
from fed.clients.training.stateless_model import StatelessModel
from fed.errors import InvalidModel, first_line
from fed.vectors import trees
from fed.vectors.layout import Layout
from fed.vectors.randomness import seeded_torch
from fed.vectors.tensors import Tensor, torch
from fed.vectors.trees import Tree

if TYPE_CHECKING:
    from fed.clients.training.interpreted import Function
    from fed.vectors.tensors import nn

__all__ = ["ClippedGradients", "GradientWay"]

_DRAWS = "called random operation"  # PyTorch's words for a model that draws under vmap


class GradientWay(NamedTuple):
    """Way in which a model's gradients are computed.

    Args:
        is_tapped: True if they follow from layers' inputs and outputs.
        held: number of numbers that are held for each sample.
        draws: True if the model draws random numbers.
        ignores: True if a target may be a label that does not count.
    """

    is_tapped: bool
    held: int
    draws: bool
    ignores: bool


class ClippedGradients:
    """Gradients of each sample of clients' batches, clipped and summed by client.

    The model is tried on a few samples of each form of inputs, which shows the way. What is computed is recorded for
    each shape, and replayed.

    Args:
        module: the model, which is only read.
        layout: layout of its state.
        loss: (output, target) → scalar, a mean over samples.
        moving: places of the trained parameters that the phase moves.
        clip: C > 0, largest norm of a sample's gradient over all of these.
        device: device that computes.
    """

    def __init__(
        self,
        module: "nn.Module",
        layout: Layout,
        loss: Loss,
        *,
        moving: Sequence[int],
        clip: float,
        device: "torch.device",
    ) -> None:
        self._model = StatelessModel(module, layout, loss, _unfit)
        self._loss = loss
        self._moving = moving
        self._trained = len(layout.trained)
        self._clip = clip
        self._device = device
        self._is_recordable = is_recordable(module)
        self._ways: dict[tuple[object, ...], GradientWay] = {}
        self._functions: dict[tuple[object, ...], Function] = {}
        self._held_apart: set[tuple[object, ...]] = set()

    def way(self, state: list[Tensor], batch: Pair, *, ignores: bool) -> GradientWay:
        """Way for batches of a form.

        Args:
            state: state of one client, a tensor for each part of the layout.
            batch: inputs and targets of a few of its samples.
            ignores: True if a target may be a label that does not count.

        Raises:
            InvalidModel: if PyTorch cannot compute the model of many states at once.
        """
        key = (ignores, *_form(batch))
        if key not in self._ways:
            with seeded_torch(0, self._device):
                self._ways[key] = self._found_way(state, batch, ignores=ignores)
        return self._ways[key]

    def sums(
        self, way: GradientWay, state: list[Tensor], batch: Pair, mask_KB: Tensor, *, is_group: bool
    ) -> tuple[Tensor, ...]:
        """Sums of the clipped gradients of batches; recorded where the model is the same in every step.

        Args:
            way: way for batches of this form.
            state: states of the clients.
            batch: inputs and targets of the clients' samples.
            mask_KB: 1 for each sample that counts, 0 for the others.
            is_group: True if several clients train together, for which a model must be the same in every step.

        Returns:
            Each trained parameter's sum [K, ...], and the squared norms [K, B].

        Raises:
            InvalidModel: if the model mixes samples in batches of this form, or writes into its state.
        """
        if way.is_tapped:
            self._hold_apart(way, state, batch)
        if way.draws or not (self._is_recordable or is_group):
            return self._sums(way, state, batch, mask_KB)
        key = (way, *_form(batch))
        if key not in self._functions:
            recording = record_batch(partial(self._sums, way), state, batch, mask_KB)
            if not recording.keeps(len(state)):
                raise _unfit("a model's forward pass must not write into its parameters or buffers")
            self._functions[key] = recording.replay()
        return self._functions[key](*state, *trees.leaves(batch[0]), *trees.leaves(batch[1]), mask_KB)

    def of_samples(self, way: GradientWay, state: Sequence[Tensor], batch: Pair) -> dict[int, SampleGradients]:
        """Gradients of every sample, before they are clipped.

        Args:
            way: way for batches of this form.
            state: states of the clients.
            batch: inputs and targets of the clients' samples.

        Returns:
            Place of a parameter that the phase moves → its gradients; those that the losses do not depend on are left
            out.
        """
        inputs, targets = batch
        samples = trees.leaves(inputs)[0].shape[1]
        with warnings.catch_warnings(), torch.enable_grad():  # training runs under no_grad
            warnings.filterwarnings("ignore", "There is a performance drop")  # vmap takes some operations one by one
            if way.is_tapped:
                taps = LayerTaps(samples)
                constant = [part.detach() for part in state]
                outputs = self._outputs(constant, inputs, way, taps)
                return gradients_by_layer(self._losses(outputs, targets, way), taps.calls)
            # Each sample is a client of its own.
            own = [part.detach().repeat_interleave(samples, 0) for part in state]
            parameters = {place: own[place].requires_grad_() for place in self._moving}
            inputs, targets = (trees.mapped(lambda leaf: leaf.flatten(0, 1).unsqueeze(1), part) for part in batch)
            outputs = self._outputs(own, inputs, way, None)
            return gradients_of_each(self._losses(outputs, targets, way), parameters, samples)

    def _found_way(self, state: list[Tensor], batch: Pair, *, ignores: bool) -> GradientWay:
        def found(*, is_tapped: bool, draws: bool) -> dict[int, SampleGradients]:
            inputs, targets = batch
            copied = trees.mapped(torch.clone, inputs), trees.mapped(torch.clone, targets)  # a model may change them
            return self.of_samples(
                GradientWay(is_tapped=is_tapped, held=0, draws=draws, ignores=ignores), state, copied
            )

        draws = False
        try:
            each = found(is_tapped=False, draws=False)
        except (RuntimeError, ValueError) as error:
            if _DRAWS not in str(error):
                raise _unfit(f"PyTorch must be able to compute it under vmap, got {first_line(error)}") from error
            draws = True
            each = found(is_tapped=False, draws=True)
        one_by_one = GradientWay(is_tapped=False, held=_held(each), draws=draws, ignores=ignores)
        if trees.leaves(batch[0])[0].shape[1] == 1:  # which shows nothing of a model that mixes samples
            return one_by_one
        try:
            by_layer = found(is_tapped=True, draws=draws)
        except OtherUse:
            return one_by_one
        except RuntimeError as error:  # it has just been computed: something was kept from then
            raise _unfit(
                f"it must be computed anew each time, from its input alone, got {first_line(error)}"
            ) from error
        tapped = one_by_one._replace(is_tapped=True, held=_held(by_layer))
        if self._mixes(tapped, state, batch):
            return one_by_one
        return tapped if draws or _agree(each, by_layer) else one_by_one

    def _hold_apart(self, way: GradientWay, state: Sequence[Tensor], batch: Pair) -> None:
        """Refuse a model that treats each sample by itself in some batches, and not in one of this form."""
        key = (way, *((shape[1:], dtype) for shape, dtype in _form(batch)))
        if key in self._held_apart:
            return
        try:
            is_apart = not self._mixes(way, state, batch)
        except OtherUse:
            is_apart = False
        if not is_apart:
            raise _unfit("a model must treat each sample as if it were alone, in a batch of any size")
        self._held_apart.add(key)

    def _mixes(self, way: GradientWay, state: Sequence[Tensor], batch: Pair) -> bool:
        """True if samples of the first client's batch change what layers see of each other."""
        own = [part[:1] for part in state]
        inputs, targets = (trees.mapped(lambda leaf: leaf[:1], part) for part in batch)

        def seen(batch: Pair) -> list[Tensor]:
            with seeded_torch(0, self._device), torch.enable_grad():
                taps = LayerTaps(trees.leaves(batch[0])[0].shape[1])
                outputs = self._outputs(own, batch[0], way, taps)
                return seen_by_layers(self._losses(outputs, batch[1], way), taps.calls)

        return mixes_samples(seen, (inputs, targets))

    def _sums(self, way: GradientWay, state: Sequence[Tensor], batch: Pair, mask_KB: Tensor) -> tuple[Tensor, ...]:
        gradients = self.of_samples(way, state, batch)
        # A look at the numbers is free on the CPU alone: a GPU would be waited for in every step.
        sums, squares_KB = clipped_sums(gradients, mask_KB, self._clip, finite_alone=not mask_KB.is_cpu)
        parts = [
            sums[place].view(part.shape) if place in sums else torch.zeros_like(part)
            for place, part in enumerate(state[: self._trained])
        ]
        return *parts, squares_KB

    def _outputs(self, state: Sequence[Tensor], inputs: Tree, way: GradientWay, taps: LayerTaps | None) -> Tensor:
        forward = vmap(partial(self._forward, taps), randomness="different" if way.draws else "error")
        tapping: AbstractContextManager[object] = nullcontext() if taps is None else taps
        with ChannelGroups(), RecurrentLayers(), PaddedEmbeddings(), told_of_recording(), tapping:
            outputs: Tensor = forward(tuple(state), inputs)
        return outputs

    def _forward(self, taps: LayerTaps | None, state: tuple[Tensor, ...], inputs: Tree) -> Tensor:
        if taps is not None:
            taps.trains({place: state[place] for place in self._moving})
        return self._model(state, inputs)

    def _losses(self, outputs: Tensor, targets: Tree, way: GradientWay) -> Tensor:
        """Loss of each sample, in the form [K, B] of the outputs."""
        of_all = trees.mapped(lambda leaf: leaf.flatten(0, 1), targets)
        flat = outputs.flatten(0, 1)
        if way.ignores:
            losses = of_each_client(flat, of_all, flat.new_ones(len(flat), 1))
        else:
            losses = of_each_sample(self._loss, flat, of_all)
        return losses.view(outputs.shape[:2])


def _form(batch: Pair) -> list[tuple[torch.Size, torch.dtype]]:
    """Shapes and types of a batch's tensors."""
    return [(leaf.shape, leaf.dtype) for leaf in (*trees.leaves(batch[0]), *trees.leaves(batch[1]))]


def _held(gradients: Mapping[int, SampleGradients]) -> int:
    """Number of numbers that are held for each sample."""
    return sum(part.held for part in gradients.values())


def _agree(some: Mapping[int, SampleGradients], others: Mapping[int, SampleGradients]) -> bool:
    """True if gradients of the same samples are equal but for rounding; those that are not finite show nothing."""
    if some.keys() != others.keys():
        return False
    if not some:
        return True
    pairs = [(some[place].each(), others[place].each()) for place in some]
    is_finite_KB = torch.stack([(one + other).isfinite().all(-1) for one, other in pairs]).all(0)
    if not is_finite_KB.any():
        return False
    finite = [(one[is_finite_KB], other[is_finite_KB]) for one, other in pairs]
    return all(torch.allclose(one, other, rtol=1e-3, atol=1e-3 * _largest(one)) for one, other in finite)


def _largest(numbers: Tensor) -> float:
    return float(numbers.abs().max())


def _unfit(rule: str) -> InvalidModel:
    return InvalidModel(f"where samples are private, {rule}: change the model")
