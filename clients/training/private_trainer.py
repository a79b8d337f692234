"""Private trainer: local training by DP-SGD, of one client or of a group as one computation.

Shapes: see :mod:`fed.vectors.layout`.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.func import vmap

from fed.clients.data import Held, Pair
from fed.clients.data.held import may_ignore, size_of
from fed.clients.scoring.losses import cross_entropy, of_each_client, of_each_sample
from fed.clients.training.batches import Batches, Places
from fed.clients.training.channel_groups import ChannelGroups
from fed.clients.training.devices import read_back, uploaded
from fed.clients.training.draws import UnlikeDraws
from fed.clients.training.embeddings import PaddedEmbeddings
from fed.clients.training.flat import StackedStates
from fed.clients.training.group_reading import GroupReading, group_reading
from fed.clients.training.interpreted import Function
from fed.clients.training.local_context import LocalContext
from fed.clients.training.local_trainer import TorchTrainer
from fed.clients.training.op_graphs import record, told_of_recording
from fed.clients.training.optimizers import optimizer_for
from fed.clients.training.recorded_gradients import is_recordable
from fed.clients.training.recurrent_layers import RecurrentLayers
from fed.clients.training.sample_gradients import (
    LayerTaps,
    OtherUse,
    SampleGradients,
    clipped_sums,
    gradients_by_layer,
    gradients_of_each,
    seen_by_layers,
)
from fed.clients.training.sample_mixing import mixes_samples
from fed.clients.training.stateless_model import StatelessModel
from fed.errors import InvalidModel, first_line
from fed.privacy.dp_sgd import Inclusion, SamplePrivacy, noised_means, sampling_rate
from fed.privacy.normals import Normals
from fed.vectors import trees
from fed.vectors.fixed_part import in_training
from fed.vectors.randomness import seeded_torch
from fed.vectors.tensors import Tensor, torch
from fed.vectors.trees import Tree

__all__ = ["ClientDraws", "PrivateTrainer"]

_NOTHING = LocalContext()
_NUMBERS_AT_ONCE = 1 << 26  # of gradients of single samples, a quarter of a gigabyte in float32
_PROBED_SAMPLES = 3
_DRAWS = "called random operation"  # PyTorch's words for a model that draws under vmap


class ClientDraws(NamedTuple):
    """Streams of one client's task.

    Args:
        inclusion: stream by which samples come into batches; secret, like the noise's.
        noise: stream that keys the noise.
        seed: seed of the module's own draws, such as those of dropout.
    """

    inclusion: np.random.Generator
    noise: np.random.Generator
    seed: int = 0


class _Plan(NamedTuple):
    """Plan of a client's task.

    Args:
        samples: number of its samples.
        steps: number of its steps.
        rate: probability with which a sample is in a batch.
        noise: noise multiplier z.
    """

    samples: int
    steps: int
    rate: float
    noise: float


class _Task(NamedTuple):
    """Clients in descending order of steps: plans, places of their first samples among all, and streams."""

    plans: list[_Plan]
    begins: list[int]
    draws: list[ClientDraws]


class _Way(NamedTuple):
    """Way in which a model's gradients are computed.

    Args:
        is_tapped: True if they follow from layers' inputs and outputs.
        held: number of numbers that are held for each sample.
        draws: True if the model draws random numbers.
    """

    is_tapped: bool
    held: int
    draws: bool


@dataclass(eq=False)
class PrivateTrainer(TorchTrainer):
    r"""Trains clients by DP-SGD (:mod:`fed.privacy.dp_sgd`), many of them as one computation.

    A step's batch holds each of the client's n samples with probability q = min(batch_size · accumulate / n, 1), and
    may be empty. The number of steps is that of plain training, whatever is drawn. A sample whose gradient is not
    finite counts as a gradient of zero. Optimizer, weight decay and the phase's rule see the noised gradient alone.

    The model must treat each sample as if it were alone, its forward pass must be the same sequence of operations every
    time, and it may not change its buffers.

    Attributes:
        most_together: None: groups are never halved.

    Args:
        privacy: clip and noise.
    """

    privacy: SamplePrivacy = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.most_together: int | None = None
        in_training(self.module)
        self._model = StatelessModel(self.module, self.layout, self.loss, _unfit)
        self._stack = cache(partial(StackedStates, self.layout, device=self.device, in_rows=True))
        self._plan = cache(self._planned)
        self._moving = [*range(len(self.layout.trained))][self.phase.moves(len(self.layout.shared.trained))]
        self._is_recordable = is_recordable(self.module)
        self._ways: dict[tuple[object, ...], _Way] = {}
        self._functions: dict[tuple[object, ...], Function] = {}
        self._tried: set[tuple[object, ...]] = set()
        self._ignores = False
        # About the deviation of a batch's size: a handful of shapes, and few empty places.
        self._bucket = max(4, 1 << self.local.batch_size.bit_length() // 2)
        self._most_samples = -(-2 * self.local.batch_size // self._bucket) * self._bucket

    def train(
        self,
        start_V: Tensor,
        integers_I: Tensor,
        samples: Sequence[Held],
        draws: Sequence[ClientDraws],
        context: LocalContext = _NOTHING,
        dtype: "torch.dtype | None" = None,
    ) -> tuple[Tensor, Tensor]:
        """Train clients.

        Args:
            start_V: the state from which all start; or [K, V], each client's own.
            integers_I: the integer buffers to start with; or [K, I].
            samples: each client's (inputs, targets).
            draws: each client's streams.
            context: contents of the tasks beside the model.
            dtype: type of the trained vectors; None: the model's.

        Returns:
            The trained states, vectors [K, V] and integers [K, I], on the CPU.

        Raises:
            UnlikeDraws: if the model draws random numbers, and there are several clients.
            InvalidModel: if the model breaks a rule of this class.
        """
        said = context.steps or (None,) * len(samples)
        plans = [self._plan(size_of(held), its_steps) for held, its_steps in zip(samples, said, strict=True)]
        # So that clients with steps left are always the first rows.
        rows = sorted(range(len(plans)), key=lambda row: -plans[row].steps)
        back = torch.tensor(rows).argsort()
        start_V = start_V if start_V.ndim == 1 else start_V[rows]
        integers_I = integers_I if integers_I.ndim == 1 else integers_I[rows]
        stack = self._stack(len(rows))
        stack.load(start_V, integers_I)
        seeds: list[Callable[[], int]] = [partial(int, draws[row].seed) for row in rows]
        group = group_reading(samples, rows, None, device=self.device, seeds=seeds)
        looks = self.loss is cross_entropy and self.may_ignore
        self._ignores = looks and any(may_ignore(held, is_collated=False) for held in samples)
        task = _Task(
            plans=[plans[row] for row in rows],
            begins=[[0, *itertools.accumulate(plan.samples for plan in plans)][row] for row in rows],
            draws=[draws[row] for row in rows],
        )
        with torch.no_grad(), seeded_torch(draws[0].seed, self.device):
            self._run(stack, group, task, context.of(rows) if len(rows) > 1 else context)
        vectors_KV, integers_KI = stack.states(dtype or self.layout.dtype)
        integers_KI, vectors_KV = read_back([integers_KI, vectors_KV])
        return vectors_KV[back], integers_KI[back]

    def _planned(self, samples: int, steps: int | None) -> "_Plan":
        batches = Batches(self.local, samples, steps=self.phase.steps(steps))
        rate = sampling_rate(samples, self.local.batch_size * self.local.accumulate)
        return _Plan(samples=samples, steps=batches.steps, rate=rate, noise=self.privacy.noise_of(samples))

    def _run(self, stack: StackedStates, group: GroupReading, task: "_Task", context: LocalContext) -> None:
        """Take all steps."""
        if self.phase.rule is not None:
            context = context.spread(stack.spread, stack.x_KQ[:, : stack.shared])
        optimizer = optimizer_for(self.local, self.local.lr if context.lr is None else context.lr)
        moves = self.phase.moves(stack.shared)
        numbers = stack.x_KQ[:, moves].shape[1]
        steps = task.plans[0].steps
        normals = None
        if any(plan.noise for plan in task.plans):
            normals = Normals([draws.noise for draws in task.draws], numbers, steps)
        inclusions = [
            Inclusion(draws.inclusion, plan.samples, plan.rate, plan.steps)
            for plan, draws in zip(task.plans, task.draws, strict=True)
        ]
        expected_K1 = torch.tensor([[plan.rate * plan.samples] for plan in task.plans], dtype=torch.float64)
        expected_K1 = uploaded(expected_K1, self.device)
        noise_K1 = uploaded(torch.tensor([[plan.noise] for plan in task.plans], dtype=torch.float64), self.device)
        # Noise must not fall into the gaps between parameters.
        gaps_Q = stack.joined([torch.ones_like(part) for part in stack.tensors(1)[: len(self.layout.trained)]])[0]
        way = self._way(stack, group, task)
        if way.draws and stack.rows > 1:
            raise UnlikeDraws("it draws random numbers")
        for step in range(steps):
            active = sum([plan.steps > step for plan in task.plans])
            batches = [inclusion.next() for inclusion in inclusions[:active]]
            gradient_KQ = self._sums(stack, group, way, task.begins, batches)
            noise_KQ = None if normals is None else uploaded(normals.next(active), self.device)
            means_KQ = noised_means(
                gradient_KQ[:, moves],
                noise_KQ,
                expected_K1[:active],
                clip=self.privacy.clip,
                noise_K1=noise_K1[:active],
            )
            gradient_KQ[:, moves] = means_KQ.mul_(gaps_Q[moves])
            self._told(gradient_KQ, gaps_Q)
            x_KQ = stack.x_KQ[:active]
            if self.phase.rule is not None:
                of_active = context.of(slice(active))
                gradient_KQ = of_active.corrected(self.phase.rule, gradient_KQ, x_KQ, stack.shared)
            optimizer.step(x_KQ[:, moves], gradient_KQ[:, moves])

    def _told(self, gradient_KQ: Tensor, gaps_Q: Tensor) -> None:
        """Take note of a step's noised gradients, which is what it releases; an audit listens here.

        Args:
            gradient_KQ: noised means of the clients that take the step.
            gaps_Q: 1 at parameters, 0 at gaps between them.
        """

    def _sums(
        self,
        stack: StackedStates,
        group: GroupReading,
        way: _Way,
        begins: Sequence[int],
        batches: Sequence[NDArray[np.int64]],
    ) -> Tensor:
        """Sums [K, Q] of the clipped gradients of batches, each of a client that takes the step."""
        active = len(batches)
        largest = max(map(len, batches))
        if not largest:
            return torch.zeros_like(stack.x_KQ[:active])
        rows = stack.rows_for(active)
        width = -(-largest // self._bucket) * self._bucket  # few shapes, for each of them is recorded
        index_KW = np.empty((rows, width), dtype=np.int64)
        index_KW[:] = np.array(begins[:rows])[:, None]  # empty places have a sample, which does not count
        mask_KW = np.zeros((rows, width), dtype=bool)
        for row, places in enumerate(batches):
            index_KW[row, : len(places)] += places
            mask_KW[row, : len(places)] = True
        at_once = max(1, min(self._most_samples, _NUMBERS_AT_ONCE // (way.held * rows)))
        total = self._of_piece(stack, group, way, index_KW[:, :at_once], mask_KW[:, :at_once])
        for first in range(at_once, width, at_once):
            piece = slice(first, first + at_once)
            total += self._of_piece(stack, group, way, index_KW[:, piece], mask_KW[:, piece])
        return total[:active]

    def _of_piece(
        self,
        stack: StackedStates,
        group: GroupReading,
        way: _Way,
        index_KB: NDArray[np.int64],
        mask_KB: NDArray[np.bool_],
    ) -> Tensor:
        """Sums [K, Q] over a piece of a step's batches."""
        *sums, squares_KB = self._computed(stack, group, way, index_KB, mask_KB)
        if squares_KB.is_cpu and not math.isfinite(squares_KB.sum()):
            is_finite_KB = squares_KB.isfinite()
            # Zero times infinity is not a number: a sample whose gradient counts as zero must leave the batch.
            is_finite = is_finite_KB.numpy()
            mask_KB = mask_KB & is_finite
            index_KB = np.where(is_finite, index_KB, np.take_along_axis(index_KB, is_finite.argmax(1)[:, None], 1))
            *sums, _ = self._computed(stack, group, way, index_KB, mask_KB)
            has_one_K = is_finite_KB.any(1)
            sums = [part.where(has_one_K.view(-1, *[1] * (part.ndim - 1)), 0) for part in sums]
        return stack.joined(sums)

    def _computed(
        self,
        stack: StackedStates,
        group: GroupReading,
        way: _Way,
        index_KB: NDArray[np.int64],
        mask_KB: NDArray[np.bool_],
    ) -> tuple[Tensor, ...]:
        """Each trained parameter's sum [K, ...], and the squared norms [K, B]; recorded where it is a usual shape."""
        dtype = self.layout.trained[0].dtype
        mask = uploaded(torch.from_numpy(mask_KB).to(dtype), self.device)
        batch = self._batch(group, index_KB)
        state = stack.tensors(len(index_KB))
        if way.is_tapped:
            self._try_apart(way, state, batch)
        if way.draws or not (self._is_recordable or stack.rows > 1):
            return self._sums_and_squares(way, state, batch, mask)
        leaves = [*trees.leaves(batch[0]), *trees.leaves(batch[1])]
        key = (self._ignores, way, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._functions:
            self._functions[key] = self._recorded(way, state, batch, mask)
        return self._functions[key](*state, *leaves, mask)

    def _try_apart(self, way: _Way, state: Sequence[Tensor], batch: Pair) -> None:
        """Refuse a model that treats each sample by itself in some batches, and not in one of this form."""
        leaves = [*trees.leaves(batch[0]), *trees.leaves(batch[1])]
        key = (self._ignores, way, *((leaf.shape[1:], leaf.dtype) for leaf in leaves))
        if key in self._tried:
            return
        try:
            is_apart = not self._mixes(way, state, batch)
        except OtherUse:
            is_apart = False
        if not is_apart:
            raise _unfit("a model must treat each sample as if it were alone, in a batch of any size")
        self._tried.add(key)

    def _mixes(self, way: _Way, state: Sequence[Tensor], batch: Pair) -> bool:
        """True if samples of the first client's batch change what layers see of each other."""
        own = [part[:1] for part in state]
        inputs, targets = (trees.mapped(lambda leaf: leaf[:1], part) for part in batch)

        def seen(batch: Pair) -> list[Tensor]:
            with seeded_torch(0, self.device), torch.enable_grad():
                taps = LayerTaps(trees.leaves(batch[0])[0].shape[1])
                outputs = self._outputs(own, batch[0], way, taps)
                return seen_by_layers(self._losses(outputs, batch[1]), taps.calls)

        return mixes_samples(seen, (inputs, targets))

    def _recorded(self, way: _Way, state: list[Tensor], batch: Pair, mask_KB: Tensor) -> Function:
        inputs, targets = batch
        count = len(trees.leaves(inputs))

        def sums_and_squares(*tensors: Tensor) -> tuple[Tensor, ...]:
            *leaves, mask_KB = tensors[len(state) :]
            own = trees.with_leaves(inputs, leaves[:count]), trees.with_leaves(targets, leaves[count:])
            return self._sums_and_squares(way, tensors[: len(state)], own, mask_KB)

        recording = record(sums_and_squares, [*state, *trees.leaves(inputs), *trees.leaves(targets), mask_KB])
        if not recording.keeps(len(state)):
            raise _unfit("a model's forward pass must not write into its parameters or buffers")
        return recording.replay()

    def _batch(self, group: GroupReading, index_KB: NDArray[np.int64]) -> Pair:
        # Every place is read, whether it counts or not.
        clients, samples = index_KB.shape
        index_E = uploaded(torch.from_numpy(index_KB.ravel()), group.index_device)
        places = Places(index_E, torch.ones(clients, samples), [samples] * clients)
        batch = next(group.batches([places], [0]))
        return batch.inputs, batch.targets

    def _way(self, stack: StackedStates, group: GroupReading, task: _Task) -> _Way:
        """Way of a model for inputs of a form, tried on the first samples of the client that takes most steps."""
        tried = min(task.plans[0].samples, _PROBED_SAMPLES)
        batch = self._batch(group, task.begins[0] + np.arange(tried)[None])
        leaves = [*trees.leaves(batch[0]), *trees.leaves(batch[1])]
        key = (self._ignores, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._ways:
            with seeded_torch(0, self.device):
                self._ways[key] = self._found_way(stack.tensors(1), batch)
        return self._ways[key]

    def _found_way(self, state: list[Tensor], batch: Pair) -> _Way:
        def found(*, is_tapped: bool, draws: bool) -> dict[int, SampleGradients]:
            inputs, targets = batch
            copied = trees.mapped(torch.clone, inputs), trees.mapped(torch.clone, targets)  # a model may change them
            return self._gradients(_Way(is_tapped=is_tapped, held=0, draws=draws), state, copied)

        draws = False
        try:
            each = found(is_tapped=False, draws=False)
        except RuntimeError as error:
            if _DRAWS not in str(error):
                raise _unfit(f"PyTorch must be able to compute it under vmap, got {first_line(error)}") from error
            draws = True
            each = found(is_tapped=False, draws=True)
        one_by_one = _Way(is_tapped=False, held=sum(part.held for part in each.values()), draws=draws)
        if trees.leaves(batch[0])[0].shape[1] == 1:  # which shows nothing of a model that mixes samples
            return one_by_one
        try:
            by_layer = found(is_tapped=True, draws=draws)
        except OtherUse:
            return one_by_one
        tapped = _Way(is_tapped=True, held=sum(part.held for part in by_layer.values()), draws=draws)
        if self._mixes(tapped, state, batch):
            return one_by_one
        return tapped if draws or _agree(each, by_layer) else one_by_one

    def _sums_and_squares(self, way: _Way, state: Sequence[Tensor], batch: Pair, mask_KB: Tensor) -> tuple[Tensor, ...]:
        gradients = self._gradients(way, state, batch)
        # A look at the numbers is free on the CPU alone: a GPU would be waited for in every step.
        sums, squares_KB = clipped_sums(gradients, mask_KB, self.privacy.clip, finite_alone=not mask_KB.is_cpu)
        trained = state[: len(self.layout.trained)]
        parts = [
            sums[place].view(part.shape) if place in sums else torch.zeros_like(part)
            for place, part in enumerate(trained)
        ]
        return *parts, squares_KB

    def _gradients(self, way: _Way, state: Sequence[Tensor], batch: Pair) -> dict[int, SampleGradients]:
        """Gradients of every sample, of the parameters that the phase moves."""
        samples = trees.leaves(batch[0])[0].shape[1]
        with warnings.catch_warnings(), torch.enable_grad():  # training runs under no_grad
            warnings.filterwarnings("ignore", "There is a performance drop")  # vmap takes some operations one by one
            if way.is_tapped:
                taps = LayerTaps(samples)
                constant = [part.detach() for part in state]
                outputs = self._outputs(constant, batch[0], way, taps)
                return gradients_by_layer(self._losses(outputs, batch[1]), taps.calls)
            # Each sample is a client of its own.
            own = [part.detach().repeat_interleave(samples, 0) for part in state]
            parameters = {place: own[place].requires_grad_() for place in self._moving}
            inputs, targets = (trees.mapped(lambda leaf: leaf.flatten(0, 1).unsqueeze(1), part) for part in batch)
            outputs = self._outputs(own, inputs, way, None)
            return gradients_of_each(self._losses(outputs, targets), parameters, samples)

    def _outputs(self, state: Sequence[Tensor], inputs: Tree, way: _Way, taps: LayerTaps | None) -> Tensor:
        forward = vmap(partial(self._forward, taps), randomness="different" if way.draws else "error")
        tapping: AbstractContextManager[object] = nullcontext() if taps is None else taps
        with ChannelGroups(), RecurrentLayers(), PaddedEmbeddings(), told_of_recording(), tapping:
            outputs: Tensor = forward(tuple(state), inputs)
        return outputs

    def _losses(self, outputs: Tensor, targets: Tree) -> Tensor:
        """Loss of each sample, in the form [K, B] of the outputs."""
        of_all = trees.mapped(lambda leaf: leaf.flatten(0, 1), targets)
        flat = outputs.flatten(0, 1)
        if self._ignores:
            losses = of_each_client(flat, of_all, flat.new_ones(len(flat), 1))
        else:
            losses = of_each_sample(self.loss, flat, of_all)
        return losses.view(outputs.shape[:2])

    def _forward(self, taps: LayerTaps | None, state: tuple[Tensor, ...], inputs: Tree) -> Tensor:
        if taps is not None:
            taps.trains({place: state[place] for place in self._moving})
        return self._model(state, inputs)


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
