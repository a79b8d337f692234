"""Private trainer: local training by DP-SGD, of one client or of a group as one computation.

Shapes: see :mod:`fed.vectors.layout`.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fed.clients.data import Held, Pair
from fed.clients.data.held import may_ignore, size_of
from fed.clients.scoring.losses import cross_entropy
from fed.clients.training.batches import Batches, Places
from fed.clients.training.clipped_gradients import ClippedGradients, GradientWay
from fed.clients.training.devices import read_back, uploaded
from fed.clients.training.draws import UnlikeDraws
from fed.clients.training.flat import StackedStates
from fed.clients.training.group_reading import GroupReading, group_reading
from fed.clients.training.local_context import LocalContext
from fed.clients.training.local_trainer import TorchTrainer
from fed.clients.training.optimizers import optimizer_for
from fed.privacy.dp_sgd import Inclusion, SamplePrivacy, noised_means, sampling_rate
from fed.privacy.normals import Normals
from fed.vectors.fixed_part import in_training
from fed.vectors.randomness import seeded_torch
from fed.vectors.tensors import Tensor, torch

__all__ = ["ClientDraws", "PrivateTrainer"]

_NOTHING = LocalContext()
_NUMBERS_AT_ONCE = 1 << 26  # of gradients of single samples, a quarter of a gigabyte in float32
_PROBED_SAMPLES = 3


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
    """Task of a group's clients, in descending order of steps.

    Args:
        plans: plan of each client.
        begins: place of each client's first sample among those of all.
        draws: streams of each client.
        ignores: True if a target may be a label that does not count.
    """

    plans: list[_Plan]
    begins: list[int]
    draws: list[ClientDraws]
    ignores: bool


class _Noise(NamedTuple):
    """Noise of the steps of a task.

    Args:
        normals: standard normal numbers of the clients; None where no step has noise.
        expected_K1: expected size of each client's batches.
        noise_K1: noise multiplier z of each client.
        gaps_Q: 1 at parameters, 0 at gaps between them, into which no noise must fall.
        moves: numbers of a state that the phase moves.
    """

    normals: Normals | None
    expected_K1: Tensor
    noise_K1: Tensor
    gaps_Q: Tensor
    moves: slice

    def means(self, sums_KQ: Tensor, clip: float) -> Tensor:
        """Noised mean gradients of the clients that take the step.

        Args:
            sums_KQ: sums of their clipped gradients, of the numbers that the phase moves.
            clip: C, largest norm of a sample's gradient.
        """
        active = len(sums_KQ)
        normals_KQ = None if self.normals is None else uploaded(self.normals.next(active), sums_KQ.device)
        means_KQ = noised_means(
            sums_KQ, normals_KQ, self.expected_K1[:active], clip=clip, noise_K1=self.noise_K1[:active]
        )
        return means_KQ.mul_(self.gaps_Q[self.moves])


@dataclass(eq=False)
class PrivateTrainer(TorchTrainer):
    r"""Trains clients by DP-SGD (:mod:`fed.privacy.dp_sgd`), many of them as one computation.

    A step's batch holds each of the client's n samples with probability q = min(batch_size · accumulate / n, 1), and
    may be empty. The number of steps is that of plain training, whatever is drawn. A sample whose gradient is not
    finite counts as a gradient of zero. Optimizer, weight decay and the phase's rule see the noised gradient alone.

    The model must treat each sample as if it were alone, its forward pass must be the same sequence of operations every
    time, and it may not change its buffers.

    Args:
        privacy: clip and noise.
    """

    privacy: SamplePrivacy = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        in_training(self.module)
        self._stack = cache(partial(StackedStates, self.layout, device=self.device, in_rows=True))
        self._plan = cache(self._planned)
        self._gradients = ClippedGradients(
            self.module,
            self.layout,
            self.loss,
            moving=[*range(len(self.layout.trained))][self.phase.moves(len(self.layout.shared.trained))],
            clip=self.privacy.clip,
            device=self.device,
        )
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
        task = _Task(
            plans=[plans[row] for row in rows],
            begins=[[0, *itertools.accumulate(plan.samples for plan in plans)][row] for row in rows],
            draws=[draws[row] for row in rows],
            ignores=looks and any(may_ignore(held, is_collated=False) for held in samples),
        )
        with torch.no_grad(), seeded_torch(draws[0].seed, self.device):
            self._run(stack, group, task, context.of(rows) if len(rows) > 1 else context)
        vectors_KV, integers_KI = stack.states(dtype or self.layout.dtype)
        integers_KI, vectors_KV = read_back([integers_KI, vectors_KV])
        return vectors_KV[back], integers_KI[back]

    def _planned(self, samples: int, steps: int | None) -> _Plan:
        batches = Batches(self.local, samples, steps=self.phase.steps(steps))
        rate = sampling_rate(samples, self.local.batch_size * self.local.accumulate)
        return _Plan(samples=samples, steps=batches.steps, rate=rate, noise=self.privacy.noise_of(samples))

    def _run(self, stack: StackedStates, group: GroupReading, task: _Task, context: LocalContext) -> None:
        """Take all steps."""
        if self.phase.rule is not None:
            context = context.spread(stack.spread, stack.x_KQ[:, : stack.shared])
        optimizer = optimizer_for(self.local, self.local.lr if context.lr is None else context.lr)
        moves = self.phase.moves(stack.shared)
        steps = task.plans[0].steps
        inclusions = [
            Inclusion(draws.inclusion, plan.samples, plan.rate, plan.steps)
            for plan, draws in zip(task.plans, task.draws, strict=True)
        ]
        noise = self._noise(stack, task, moves)
        way = self._way(stack, group, task)
        if way.draws and stack.rows > 1:
            raise UnlikeDraws("it draws random numbers")
        for step in range(steps):
            active = sum([plan.steps > step for plan in task.plans])
            batches = [inclusion.next() for inclusion in inclusions[:active]]
            gradient_KQ = self._sums(stack, group, way, task.begins, batches)
            gradient_KQ[:, moves] = noise.means(gradient_KQ[:, moves], clip=self.privacy.clip)
            self._note_release(gradient_KQ, noise.gaps_Q)
            x_KQ = stack.x_KQ[:active]
            if self.phase.rule is not None:
                of_active = context.of(slice(active))
                gradient_KQ = of_active.corrected(self.phase.rule, gradient_KQ, x_KQ, stack.shared)
            optimizer.step(x_KQ[:, moves], gradient_KQ[:, moves])

    def _noise(self, stack: StackedStates, task: _Task, moves: slice) -> _Noise:
        """Noise of the steps of a task.

        Args:
            stack: states of the clients.
            task: task of the clients.
            moves: numbers of a state that the phase moves.
        """
        normals = None
        if any(plan.noise for plan in task.plans):
            numbers = stack.x_KQ[:, moves].shape[1]
            normals = Normals([draws.noise for draws in task.draws], numbers, task.plans[0].steps)
        expected_K1 = torch.tensor([[plan.rate * plan.samples] for plan in task.plans], dtype=torch.float64)
        noise_K1 = torch.tensor([[plan.noise] for plan in task.plans], dtype=torch.float64)
        gaps_Q = stack.joined([torch.ones_like(part) for part in stack.tensors(1)[: len(self.layout.trained)]])[0]
        return _Noise(
            normals=normals,
            expected_K1=uploaded(expected_K1, self.device),
            noise_K1=uploaded(noise_K1, self.device),
            gaps_Q=gaps_Q,
            moves=moves,
        )

    def _note_release(self, gradient_KQ: Tensor, gaps_Q: Tensor) -> None:
        """Take note of a step's noised gradients, which is what it releases; an audit listens here.

        Args:
            gradient_KQ: noised means of the clients that take the step.
            gaps_Q: 1 at parameters, 0 at gaps between them.
        """

    def _sums(
        self,
        stack: StackedStates,
        group: GroupReading,
        way: GradientWay,
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
        index_KW, mask_KW = _in_rows(begins[:rows], batches, width)
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
        way: GradientWay,
        index_KB: NDArray[np.int64],
        mask_KB: NDArray[np.bool_],
    ) -> Tensor:
        """Sums [K, Q] over a piece of a step's batches."""
        *sums, squares_KB = self._sums_and_squares(stack, group, way, index_KB, mask_KB)
        if squares_KB.is_cpu and not math.isfinite(squares_KB.sum()):
            is_finite_KB = squares_KB.isfinite()
            # Zero times infinity is not a number: a sample whose gradient counts as zero must leave the batch.
            is_finite = is_finite_KB.numpy()
            mask_KB = mask_KB & is_finite
            index_KB = np.where(is_finite, index_KB, np.take_along_axis(index_KB, is_finite.argmax(1)[:, None], 1))
            *sums, _ = self._sums_and_squares(stack, group, way, index_KB, mask_KB)
            has_one_K = is_finite_KB.any(1)
            sums = [part.where(has_one_K.view(-1, *[1] * (part.ndim - 1)), 0) for part in sums]
        return stack.joined(sums)

    def _sums_and_squares(
        self,
        stack: StackedStates,
        group: GroupReading,
        way: GradientWay,
        index_KB: NDArray[np.int64],
        mask_KB: NDArray[np.bool_],
    ) -> tuple[Tensor, ...]:
        """Each trained parameter's sum [K, ...], and the squared norms [K, B]."""
        dtype = self.layout.trained[0].dtype
        mask = uploaded(torch.from_numpy(mask_KB).to(dtype), self.device)
        batch = self._batch(group, index_KB)
        state = stack.tensors(len(index_KB))
        return self._gradients.sums(way, state, batch, mask, is_group=stack.rows > 1)

    def _batch(self, group: GroupReading, index_KB: NDArray[np.int64]) -> Pair:
        # Every place is read, whether it counts or not.
        clients, samples = index_KB.shape
        index_E = uploaded(torch.from_numpy(index_KB.ravel()), group.index_device)
        places = Places(index_E, torch.ones(clients, samples), [samples] * clients)
        batch = next(group.batches([places], [0]))
        return batch.inputs, batch.targets

    def _way(self, stack: StackedStates, group: GroupReading, task: _Task) -> GradientWay:
        """Way of a model for inputs of a form, tried on the first samples of the client that takes most steps."""
        tried = min(task.plans[0].samples, _PROBED_SAMPLES)
        batch = self._batch(group, task.begins[0] + np.arange(tried)[None])
        return self._gradients.way(stack.tensors(1), batch, ignores=task.ignores)


def _in_rows(
    begins: Sequence[int], batches: Sequence[NDArray[np.int64]], width: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Batches of several sizes in one array.

    Args:
        begins: place of each client's first sample among those of all.
        batches: batches of the first of these clients, as places among their own samples.
        width: W, size of the largest batch or more.

    Returns:
        Places [K, W] among the samples of all, and True [K, W] where a sample counts.
    """
    shape = len(begins), width
    index_KW = np.empty(shape, dtype=np.int64)
    index_KW[:] = np.array(begins)[:, None]  # empty places have a sample, which does not count
    mask_KW = np.zeros(shape, dtype=bool)
    for row, places in enumerate(batches):
        index_KW[row, : len(places)] += places
        mask_KW[row, : len(places)] = True
    return index_KW, mask_KW
