"""Batched trainer: local training of a group of clients as one computation, each with its own parameters and samples.

Shapes: see :mod:`fed.vectors.layout`.
"""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, partial
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.func import vmap

from fed.clients.data import Held, Pair
from fed.clients.data.held import may_ignore, size_of
from fed.clients.scoring.losses import cross_entropy, model_loss, of_each_client, of_each_sample
from fed.clients.training.batches import Batches, Block, GroupBatch, GroupSteps, Places
from fed.clients.training.channel_groups import ChannelGroups
from fed.clients.training.copies_ahead import lane_to
from fed.clients.training.devices import read_back, room_for_samples, uploaded
from fed.clients.training.draws import RandomDraw, UnlikeDraws
from fed.clients.training.embeddings import PaddedEmbeddings
from fed.clients.training.flat import StackedStates
from fed.clients.training.group_draws import ClientStreams, Drawing, GroupDraws, MemoryOfClients
from fed.clients.training.group_reading import GroupReading, group_reading
from fed.clients.training.interpreted import Function
from fed.clients.training.local_context import LocalContext
from fed.clients.training.local_trainer import TorchTrainer
from fed.clients.training.op_graphs import record_batch, told_of_recording
from fed.clients.training.optimizers import optimizer_for
from fed.clients.training.recurrent_layers import RecurrentLayers
from fed.clients.training.stateless_model import StatelessModel
from fed.clients.training.step_graphs import StepGraphs, graphs_on
from fed.clients.training.trainer import Trainer
from fed.errors import InvalidModel
from fed.vectors import trees
from fed.vectors.fixed_part import in_training
from fed.vectors.tensors import torch
from fed.vectors.trees import Tree

__all__ = ["BatchedTrainer", "GroupMean"]

_NOTHING = LocalContext()
_KEPT_GROUPS = 64  # number of groups whose plans may be used again
_SEVERAL_LENGTHS = (
    "it draws random numbers, and its collate gives clients' batches of several lengths: pad to one length"
)
_EMBEDDED = torch.ops.aten.embedding_dense_backward.default  # its options reach the first of many clients alone


class GroupMean(NamedTuple):
    """Mean of a group's trained states.

    Args:
        mean_V: weighted mean of the vectors, in float64.
        integers_KI: each client's trained integers.
        losses: each client's mean loss over the samples that it trained on.
        not_finite: rows of the clients whose vectors are not finite.
    """

    mean_V: Tensor
    integers_KI: Tensor
    losses: list[float]
    not_finite: list[int]


class _Group(NamedTuple):
    """Clients that train together.

    Args:
        start_V: the state from which all clients start; or [K, V], each client's own.
        integers_I: the integer buffers to start with; or [K, I].
        samples: each client's (inputs, targets).
        orders: each client's stream that shuffles them, made when something is drawn.
        context: contents of the tasks beside the model.
        seeds: each client's seed of the module's own draws and of what makes its batches, made when something is drawn.
        weights: weight of each client in the mean of the trained states; empty where the states are wanted themselves.
    """

    start_V: Tensor
    integers_I: Tensor
    samples: Sequence[Held]
    orders: Sequence[Callable[[], np.random.Generator]]
    context: LocalContext
    seeds: Sequence[Callable[[], int]]
    weights: Sequence[float] = ()

    def part(self, rows: slice) -> "_Group":
        """Some of the clients, with their own numbers of steps."""
        return _Group(
            start_V=_of_rows(self.start_V, rows),
            integers_I=_of_rows(self.integers_I, rows),
            samples=self.samples[rows],
            orders=self.orders[rows],
            context=self.context.of(rows)._replace(steps=self.context.steps[rows]),
            seeds=self.seeds[rows],
            weights=self.weights[rows],
        )


class _Done(NamedTuple):
    """Trained clients: their vectors, or with a weight above 0 the mean [1, V] of these."""

    params_KV: Tensor
    integers_KI: Tensor
    losses: list[float]
    are_finite: list[bool]
    weight: float


class BatchedTrainer(TorchTrainer):
    r"""Trains many clients with one module at once, as :class:`fed.clients.training.trainer.Trainer` trains one.

    Parameters are stacked, one operation serves all clients, and the gradient is that of

    .. math:: \sum_k \sum_b w_{kb} \, ℓ(f(x_k; a_{kb}), y_{kb}), \qquad w_{kb} = 1 / B_k

    whose part for :math:`x_k` is client k's own. Where a client has fewer samples in a step than another, one of its
    samples fills its empty places, with weight 0. Clients with fewer steps than others drop out as they finish. Where
    cross-entropy leaves labels of −100 out, :func:`fed.clients.scoring.losses.of_each_client` has a client's loss.

    The model's operations are recorded on a first step of each shape and replayed, so its forward pass must be the same
    sequence of operations every time: it does not look at numbers, and changes neither parameters nor buffers. On a CPU
    it may draw random numbers: each client's are those that it draws alone, from a stream of its own. It must treat
    each sample of a batch as if it were alone, and the loss must be the mean of its samples' losses. A model or loss
    that breaks these rules raises an error when a step is recorded, as far as the step's samples show it.

    The model is only read. The phase's rule adds no term to the loss.

    A group that does not fit into the device's memory is computed in halves, and so are later ones.

    Attributes:
        most_together: largest number of clients that are computed together; None: as many as a group has.

    Raises:
        InvalidModel: if the precision is float16, or the model finds its loss itself.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.half is torch.float16:
            raise _unfit("local.precision must be float32 or bfloat16, got float16")
        if self.loss is model_loss:
            raise _unfit("a loss must be found of each sample, got that of the model, which is of its whole batch")
        rule = self.phase.rule
        local = self.local
        assert rule is None or not rule.contrasts
        in_training(self.module)
        self.most_together: int | None = None
        self._model = StatelessModel(self.module, self.layout, self.loss, _unfit)
        self._moves_in_place = self.is_plain and local.accumulate == 1
        backend = graphs_on(self.device)
        self._graphs = None if backend is None else StepGraphs(backend)
        self._step: tuple[float, ...] = ()
        self._set_lr(local.lr)
        self._steps = GroupSteps(local, self.device, self.layout.trained[0].dtype)
        self._stack = cache(partial(StackedStates, self.layout, device=self.device, in_rows=not self._moves_in_place))
        self._plans = lru_cache(_KEPT_GROUPS)(self._planned)
        self._alone = cache(self._trainer_alone)
        self._streams = ClientStreams()
        self._lane = lane_to(self.device)
        self._room_bytes = room_for_samples(self.device)
        self._held_to = 0
        self._ignores = False  # True if labels of a group may not count
        self._replays: dict[tuple[object, ...], Function] = {}
        self._draws: dict[tuple[object, ...], GroupDraws | None] = {}

    def train(
        self,
        start_V: Tensor,
        integers_I: Tensor,
        samples: Sequence[Held],
        orders: Sequence[Callable[[], np.random.Generator]],
        context: LocalContext = _NOTHING,
        seeds: Sequence[Callable[[], int]] = (),
        dtype: "torch.dtype | None" = None,
    ) -> tuple[tuple[Tensor, Tensor], list[float]]:
        """Train a group.

        Args:
            start_V: the state from which all clients start; or [K, V], each client's own.
            integers_I: the integer buffers to start with; or [K, I].
            samples: each client's (inputs, targets).
            orders: each client's stream that shuffles them, made when something is drawn.
            context: contents of the tasks beside the model.
            seeds: each client's seed of the module's own draws, such as those of dropout, and of those that make
                batches, made when something is drawn; empty: 0 for all.
            dtype: type of the trained vectors; None: the model's.

        Returns:
            The trained states, vectors [K, V] and integers [K, I], on the CPU; and each client's mean loss over the
            samples that it trained on.

        Raises:
            InvalidModel: if the model or the loss is none that can be trained in groups; PyTorch's errors of vmap, too.
            UnequalBatches: if a collate gives clients' batches several shapes.
            torch.OutOfMemoryError: if one client alone does not fit into the device's memory.
        """
        group = _Group(
            start_V=start_V,
            integers_I=integers_I,
            samples=samples,
            orders=orders,
            context=context,
            seeds=seeds or [lambda: 0] * len(samples),
        )
        done = self._in_parts(group, dtype)
        if len(done) == 1:
            (whole,) = done
            return (whole.params_KV, whole.integers_KI), whole.losses
        params_KV = torch.cat([part.params_KV for part in done])
        integers_KI = torch.cat([part.integers_KI for part in done])
        return (params_KV, integers_KI), [loss for part in done for loss in part.losses]

    def train_mean(
        self,
        start_V: Tensor,
        integers_I: Tensor,
        samples: Sequence[Held],
        orders: Sequence[Callable[[], np.random.Generator]],
        context: LocalContext,
        seeds: Sequence[Callable[[], int]],
        weights: Sequence[float],
    ) -> GroupMean:
        """Train a group, and find the mean of its states where they are: one vector leaves the device.

        Args:
            start_V: the state from which all clients start; or [K, V], each client's own.
            integers_I: the integer buffers to start with; or [K, I].
            samples: each client's (inputs, targets).
            orders: each client's stream that shuffles them, made when something is drawn.
            context: contents of the tasks beside the model.
            seeds: each client's seed of what makes its batches, made when something is drawn.
            weights: weight of each client in the mean, > 0.

        Raises:
            InvalidModel: as :meth:`train` does, and all its other errors.
        """
        group = _Group(
            start_V=start_V,
            integers_I=integers_I,
            samples=samples,
            orders=orders,
            context=context,
            seeds=seeds,
            weights=weights,
        )
        done = self._in_parts(group, torch.float64)
        shares = torch.tensor([part.weight for part in done], dtype=torch.float64) / sum(weights)
        means_KV = torch.cat([part.params_KV for part in done])
        are_finite = [is_finite for part in done for is_finite in part.are_finite]
        return GroupMean(
            mean_V=means_KV[0] if len(done) == 1 else shares @ means_KV,
            integers_KI=torch.cat([part.integers_KI for part in done]),
            losses=[loss for part in done for loss in part.losses],
            not_finite=[row for row, is_finite in enumerate(are_finite) if not is_finite],
        )

    def _in_parts(self, group: _Group, dtype: "torch.dtype | None") -> list[_Done]:
        """Results of a group, or of parts of it that fit into the device's memory, one after another."""
        count = len(group.samples)
        if count <= (self.most_together or count):
            try:
                return [self._together(group, dtype)]
            except torch.OutOfMemoryError:
                if count == 1:
                    raise
            # Not in the handler: the error holds the group's tensors.
            if self._graphs is not None:
                self._graphs.clear()
            self._stack.cache_clear()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self.most_together = -(-count // 2)
        assert self.most_together is not None
        pieces = -(-count // self.most_together)
        done = []
        for number in range(pieces):
            rows = slice(number * count // pieces, (number + 1) * count // pieces)
            done += self._in_parts(group.part(rows), dtype)
        return done

    def _together(self, group: _Group, dtype: "torch.dtype | None") -> _Done:
        """Train a group as one computation, as :meth:`train` says, or with weights as :meth:`train_mean` does."""
        samples = group.samples
        start_V = group.start_V
        integers_I = group.integers_I
        context = group.context
        plans, rows, back = self._plans(tuple([size_of(held) for held in samples]), context.steps)
        if back is not None:
            start_V = _of_rows(start_V, rows)
            integers_I = _of_rows(integers_I, rows)
            context = context.of(rows)
        stack = self._stack(len(rows))
        stack.load(start_V, integers_I)
        self._streams.begin([group.seeds[row] for row in rows])
        reading = group_reading(
            samples,
            rows,
            self.collate,
            device=self.device,
            seeds=group.seeds,
            lane=self._lane,
            room_bytes=self._room_bytes,
        )
        looks = self.loss is cross_entropy and self.may_ignore
        self._ignores = looks and any(may_ignore(held, is_collated=self.collate is not None) for held in samples)
        blocks = self._steps.blocks(plans, group.orders, rows, reading.index_device)
        self._set_lr(self.local.lr if context.lr is None else context.lr)
        with torch.no_grad():
            sums_K = self._run(stack, reading, blocks, context)
        params_KV, integers_KI = stack.states(dtype or self.layout.dtype)
        if group.weights:
            in_order = group.weights if back is None else [group.weights[row] for row in rows]
            found = [sums_K, params_KV.isfinite().all(1), integers_KI, _mean(params_KV, in_order)]
            sums_K, finite_K, integers_KI, params_KV = read_back(found)
        else:
            sums_K, integers_KI, params_KV = read_back([sums_K, integers_KI, params_KV])
            finite_K = None
        if back is not None:
            sums_K = sums_K[back]
            integers_KI = integers_KI[back]
            if finite_K is None:
                params_KV = params_KV[back]
            else:
                finite_K = finite_K[back]
        losses = [loss_sum / plan.seen for loss_sum, plan in zip(sums_K.tolist(), plans, strict=True)]
        are_finite = [] if finite_K is None else finite_K.tolist()
        return _Done(params_KV, integers_KI, losses, are_finite=are_finite, weight=sum(group.weights))

    @property
    def uncaptured(self) -> str:
        """Reason why a GPU is asked for each operation of a step; empty where steps are graphs, or need not be."""
        return "" if self._graphs is None else self._graphs.problem

    def _planned(
        self, sizes: Sequence[int], said: Sequence[int | None]
    ) -> tuple[list[Batches], list[int], Tensor | None]:
        """Plans of a group's clients, which later groups of the same numbers use again.

        Args:
            sizes: number of samples of each client.
            said: number of steps of each client, as :class:`.LocalContext` has it.

        Returns:
            The plan of each client; the clients in descending order of steps; and the place of each client in that
            order, None where it is the clients' own.
        """
        each = zip(sizes, said or [None] * len(sizes), strict=True)
        plans = [self._steps.plan(size, self.phase.steps(steps)) for size, steps in each]
        # So that clients with steps left are always the first rows.
        rows = sorted(range(len(plans)), key=lambda row: -plans[row].steps)
        back = None if rows == list(range(len(rows))) else torch.tensor(rows).argsort()
        return plans, rows, back

    def _set_lr(self, lr: float) -> None:
        """Set the step size of all later steps."""
        step = (-lr,) if self._moves_in_place else ()
        if self._graphs is not None and step != self._step:
            self._graphs.clear()  # the number is part of what they have captured
        self._lr = lr
        self._step = step

    def _run(self, stack: StackedStates, group: GroupReading, blocks: Iterable[Block], context: LocalContext) -> Tensor:
        """Take all steps; the sum [K] of each client's losses over the samples that it saw."""
        sums_K = torch.zeros(stack.rows, dtype=torch.float64, device=self.device)
        if self.phase.rule is not None:
            context = context.spread(stack.spread, stack.x_KQ[:, : stack.shared])
        moves = self.phase.moves(stack.shared)
        optimizer = None if self._moves_in_place else optimizer_for(self.local, self._lr)
        running = stack.rows  # number of rows that are not finished
        taken = 0  # number of steps of all blocks before
        for block in blocks:
            step = 0
            for rows, steps in itertools.groupby(block.active, key=stack.rows_for):
                tensors = stack.tensors(rows)
                losses: list[Tensor] = []
                actives = list(steps)
                numbers = range(step, step + len(actives))
                batches = group.batches(_places(block, numbers, rows), self._batch_numbers(block, numbers, taken))
                for active in actives:
                    if optimizer is None:
                        if active < running:
                            stack.finish(slice(active, running))
                        (losses_K,) = self._replay(tensors, group, next(batches))
                    else:
                        gradient_KQ, losses_K = self._gradient(
                            stack, tensors, group, itertools.islice(batches, block.batches_in_step)
                        )
                        x_KQ = stack.x_KQ[:active]
                        gradient_KQ = gradient_KQ[:active]
                        if self.phase.rule is not None:
                            of_active = context.of(slice(active))
                            gradient_KQ = of_active.corrected(self.phase.rule, gradient_KQ, x_KQ, stack.shared)
                        optimizer.step(x_KQ[:, moves], gradient_KQ[:, moves])
                    losses.append(losses_K)
                    running = active
                end = step + len(losses)
                sizes_LK = block.sizes_LK[step:end, :rows]
                step = end
                losses_LK = torch.stack(losses) * sizes_LK
                # 0 × NaN is NaN: the losses of a finished row must not count.
                sums_K[:rows].add_((losses_LK if running == rows else losses_LK.where(sizes_LK > 0, 0)).sum(0))
            taken += step
        return sums_K

    def _batch_numbers(self, block: Block, steps: Iterable[int], taken: int) -> Iterator[int]:
        """Number of each batch of some steps among those of a task.

        Args:
            block: block of the steps.
            steps: places of the steps in it.
            taken: number of the task's steps before the block.
        """
        for step in steps:
            first = (taken + step) * self.local.accumulate
            yield from range(first, first + block.batches_in_step)

    def _gradient(
        self, stack: StackedStates, tensors: list[Tensor], group: GroupReading, batches: Iterable[GroupBatch]
    ) -> tuple[Tensor, Tensor]:
        """The gradients [K, Q] of a step's mean losses, and those losses [K]: sums over its batches."""
        results: tuple[Tensor, ...] = ()
        for batch in batches:
            found = self._replay(tensors, group, batch)
            results = torch._foreach_add(results, found) if results else found
        *gradients, losses_K = results
        return stack.joined(gradients), losses_K

    def _replay(self, tensors: list[Tensor], group: GroupReading, batch: GroupBatch) -> tuple[Tensor, ...]:
        leaves = [*trees.leaves(batch.inputs), *trees.leaves(batch.targets)]
        key = (self._ignores, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._draws:
            self._draws[key] = self._draws_for(batch.inputs)
        draws = self._draws[key]
        if draws is not None and group.is_padded:
            raise UnlikeDraws(_SEVERAL_LENGTHS)
        replay = self._replays.get(key)
        if replay is None:
            replay = self._replays[key] = self._record(tensors, batch, draws)
        self._streams.samples_K = batch.samples_K
        if self._graphs is None or draws is not None:
            return replay(*tensors, *leaves, batch.weights_KB, *self._step)
        return self._graphs.run(
            key,
            replay,
            state=tensors,
            inputs=[*leaves, batch.weights_KB],
            numbers=self._step,
            # Losses are read after all steps. Gradients of a step with several batches are summed.
            lasting=1 if self.local.accumulate == 1 else len(self.layout.trained) + 1,
        )

    def _record(self, state: list[Tensor], batch: GroupBatch, draws: GroupDraws | None) -> Function:
        inputs, targets, weights_KB, _ = batch
        gradients_and_losses = partial(self._gradients_and_losses, draws=draws)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # vmap takes some operations one by one
            with torch.enable_grad(), _rehearsed(draws):  # training runs under no_grad
                recording = record_batch(gradients_and_losses, state, (inputs, targets), weights_KB, draws)
            if not recording.keeps(len(state)):
                raise _unfit("a model's forward pass must not write into its parameters or buffers")
            if any(node.target is _EMBEDDED and node.args[3:] != (-1, False) for node in recording.graph.nodes):
                raise _unfit("embeddings must have neither padding_idx nor scale_grad_by_freq")
            if weights_KB.shape[1] > self._held_to:  # a batch of one shows nothing
                self._hold_to_samples(state, inputs, targets, draws)
                self._held_to = weights_KB.shape[1]
        if self._moves_in_place:
            recording.move_in_place(len(self.layout.trained))
        return recording.replay()

    def _trainer_alone(self) -> Trainer:
        return Trainer(
            copy.deepcopy(self.module), self.loss, self.local, self.phase, self.device, self.private, self.moved
        )

    def _draws_for(self, inputs: Tree) -> GroupDraws | None:
        """Draws of a forward pass of the group; None if it draws nothing, or on a GPU, where nobody can."""
        if self.device.type != "cpu":
            return None
        clients, samples = trees.leaves(inputs)[0].shape[:2]
        of_first = trees.mapped(lambda leaf: leaf[0].clone(), inputs)

        @cache
        def alone(size: int) -> list[RandomDraw]:
            return self._alone().draws(trees.mapped(lambda leaf: leaf[:size].clone(), of_first))

        return GroupDraws(self._streams, alone, clients, samples) if alone(samples) else None

    def _hold_to_samples(self, state: Sequence[Tensor], inputs: Tree, targets: Tree, draws: GroupDraws | None) -> None:
        """Refuse a model that mixes the samples of a batch, and a loss that is not their mean."""
        half = -(-trees.leaves(inputs)[0].shape[1] // 2)
        halves = trees.mapped(lambda leaf: leaf[:, :half], inputs)
        with self.precision:
            outputs = self._rehearsed_outputs(state, inputs, draws, half)
            of_half = self._rehearsed_outputs(state, halves, draws and self._draws_for(halves), half)
            if draws is not None and not self._agree(outputs[:, :half], of_half):
                self._streams.samples_first = False
                outputs = self._rehearsed_outputs(state, inputs, draws, half)
            if not self._agree(outputs[:, :half], of_half):
                raise _unfit("a model's output for a sample must not depend on others of its batch")
            if self.loss is cross_entropy:  # known to be one, but for labels that do not count
                return
            own = trees.mapped(torch.clone, targets)
            # One by one: vmap would import PyTorch's compiler.
            means_K = torch.stack(
                [self.loss(output, trees.sample(own, row)) for row, output in enumerate(outputs.clone())]
            )
            losses_KB = self._losses(outputs.clone(), own)
        if not self._agree(means_K, losses_KB.mean(1), 1e-5 * _largest(outputs)):
            raise _unfit("a loss must be the mean of its samples' losses")

    def _agree(self, one: Tensor, other: Tensor, allowance: float = 0.0) -> bool:
        """True if numbers are equal but for rounding."""
        tolerance = 1e-3 if self.local.precision == "float32" else 5e-2
        limits = {"rtol": tolerance, "atol": tolerance * _largest(one) + allowance}
        return torch.allclose(one.double(), other.double(), **limits, equal_nan=True)

    def _gradients_and_losses(
        self, state: Sequence[Tensor], batch: Pair, weights_KB: Tensor, draws: GroupDraws | None
    ) -> tuple[Tensor, ...]:
        """Each trainable tensor's gradient [K, ...], and losses [K]."""
        inputs, targets = batch
        trained = [tensor.detach().requires_grad_() for tensor in state[: len(self.layout.trained)]]
        with self.precision:
            outputs = self._outputs((*trained, *state[len(trained) :]), inputs, draws)
            if self._ignores:
                losses_K = of_each_client(outputs.flatten(0, 1), targets.flatten(0, 1), weights_KB)
            else:
                losses_KB = self._losses(outputs, targets)
        if not self._ignores:
            losses_K = (losses_KB * weights_KB).sum(1)
        gradients = torch.autograd.grad(losses_K.sum(), trained, allow_unused=True, materialize_grads=True)
        return *gradients, losses_K.detach()

    def _rehearsed_outputs(self, state: Sequence[Tensor], inputs: Tree, draws: GroupDraws | None, size: int) -> Tensor:
        """Outputs for draws that do not count, of clients with ``size`` samples each before their places are filled."""
        copied = trees.mapped(torch.clone, inputs)  # for a model may change its inputs in place
        if draws is None:
            return self._outputs(state, copied, None)
        with draws.rehearsed(size), Drawing(draws):
            return self._outputs(state, copied, draws)

    def _outputs(self, state: Sequence[Tensor], inputs: Tree, draws: GroupDraws | None) -> Tensor:
        forward = vmap(self._model) if draws is None else vmap(self._drawing_forward, randomness="different")
        with ChannelGroups(), RecurrentLayers(), PaddedEmbeddings(), told_of_recording():
            outputs: Tensor = forward(tuple(state), inputs)
        return outputs

    def _drawing_forward(self, state: tuple[Tensor, ...], inputs: Tree) -> Tensor:
        with MemoryOfClients(state[0]):
            return self._model(state, inputs)

    def _losses(self, outputs: Tensor, targets: Tree) -> Tensor:
        of_all = trees.mapped(lambda leaf: leaf.flatten(0, 1), targets)
        return of_each_sample(self.loss, outputs.flatten(0, 1), of_all).view(outputs.shape[:2])


def _mean(params_KV: Tensor, weights: Sequence[float]) -> Tensor:
    """The weighted mean of vectors, [1, V], in float64; of a single vector the vector itself."""
    if len(weights) == 1:
        return params_KV
    shares_K = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    return (uploaded(shares_K, params_KV.device) @ params_KV).unsqueeze(0)


def _of_rows(states: Tensor, rows: slice | list[int]) -> Tensor:
    """The states of some clients; one state for all stays as it is."""
    return states if states.ndim == 1 else states[rows]


def _rehearsed(draws: GroupDraws | None) -> AbstractContextManager[None]:
    return nullcontext() if draws is None else draws.rehearsed()


def _places(block: Block, steps: Iterable[int], rows: int) -> Iterator[Places]:
    """Places of the samples of each batch of some steps, for the first rows."""
    for step in steps:
        yield from block.batches(step, rows)


def _largest(numbers: Tensor) -> float:
    return float(numbers.nan_to_num(0, 0, 0).abs().max())


def _unfit(rule: str) -> InvalidModel:
    return InvalidModel(f"where clients train in groups, {rule}: train them one by one")
