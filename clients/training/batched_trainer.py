"""Batched trainer: local training of a group of clients as one computation, each with its own parameters and samples.

Shapes: see :mod:`fed.vectors.layout`.
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, cast

import numpy as np
from torch import Tensor, fx
from torch.func import functional_call, vmap

from fed.clients.data import Pair
from fed.clients.scoring.losses import of_each_sample
from fed.clients.training.batches import Block, GroupSteps
from fed.clients.training.channel_groups import ChannelGroups
from fed.clients.training.flat import StackedStates
from fed.clients.training.local_context import LocalContext
from fed.clients.training.local_trainer import TorchTrainer
from fed.clients.training.op_graphs import record
from fed.clients.training.optimizers import optimizer_for
from fed.clients.training.recurrent_layers import RecurrentLayers
from fed.errors import InvalidModel
from fed.vectors.fixed_part import in_training
from fed.vectors.tensors import torch

__all__ = ["BatchedTrainer"]

_NOTHING = LocalContext()
_EMBEDDED = torch.ops.aten.embedding_dense_backward.default  # its options reach the first of many clients alone


class BatchedTrainer(TorchTrainer):
    r"""Trains many clients with one module at once, as :class:`fed.clients.training.trainer.Trainer` trains one.

    Parameters are stacked, one operation serves all clients, and the gradient is that of

    .. math:: \sum_k \sum_b w_{kb} \, ℓ(f(x_k; a_{kb}), y_{kb}), \qquad w_{kb} = 1 / B_k

    whose part for :math:`x_k` is client k's own. Where a client has fewer samples in a step than another, one of its
    samples fills its empty places, with weight 0. Clients with fewer steps than others drop out as they finish.

    The model's operations are recorded on a first step of each shape and replayed, so its forward pass must be the same
    sequence of operations every time: it draws no random numbers, does not look at numbers, and changes neither
    parameters nor buffers. It must treat each sample of a batch as if it were alone, and the loss must be the mean of
    its samples' losses. A model or loss that breaks these rules raises an error when a step is recorded, as far as the
    step's samples show it.

    The model is only read. The phase's rule adds no term to the loss.

    Raises:
        InvalidModel: if the precision is float16.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.half is torch.float16:
            raise _unfit("local.precision must be float32 or bfloat16, got float16")
        rule = self.phase.rule
        local = self.local
        assert rule is None or not rule.contrasts
        in_training(self.module)
        self._lr = local.lr
        self._names = [part.name for part in self.layout.parts]
        self._constants = {name: part for name, part in self.module.named_buffers() if name not in self._names}
        self._moves_in_place = self.is_plain and local.accumulate == 1
        self._steps = GroupSteps(local, self.device, self.layout.trained[0].dtype)
        self._stack = cache(partial(StackedStates, self.layout, device=self.device, in_rows=not self._moves_in_place))
        self._held_to = 0
        self._programs: dict[tuple[object, ...], fx.GraphModule] = {}

    def train(
        self,
        start_V: Tensor,
        integers_I: Tensor,
        samples: Sequence[Pair],
        orders: Sequence[Callable[[], np.random.Generator]],
        context: LocalContext = _NOTHING,
    ) -> tuple[tuple[Tensor, Tensor], list[float]]:
        """Train a group.

        Args:
            start_V: the state from which all clients start; or [K, V], each client's own.
            integers_I: the integer buffers to start with; or [K, I].
            samples: each client's (inputs, targets).
            orders: each client's stream that shuffles them, made when something is drawn.
            context: contents of the tasks beside the model.

        Returns:
            The trained states, vectors [K, V] and integers [K, I], on the CPU; and each client's mean loss over the
            samples that it trained on.

        Raises:
            InvalidModel: if the model or the loss is none that can be trained in groups; PyTorch's errors of vmap, too.
        """
        said = context.steps or (None,) * len(samples)
        plans = [
            self._steps.plan(targets.shape[0], self.phase.steps(steps))
            for (_, targets), steps in zip(samples, said, strict=True)
        ]
        # So that clients with steps left are always the first rows.
        rows = sorted(range(len(plans)), key=lambda row: -plans[row].steps)
        back = None if rows == list(range(len(rows))) else torch.tensor(rows).argsort()
        if back is not None:
            start_V = start_V if start_V.ndim == 1 else start_V[rows]
            integers_I = integers_I if integers_I.ndim == 1 else integers_I[rows]
            context = context.of(rows)
        stack = self._stack(len(rows))
        stack.load(start_V, integers_I)
        inputs_E, targets_E = (torch.cat(parts).to(self.device) for parts in zip(*samples, strict=True))
        blocks = self._steps.blocks(plans, orders, rows)
        self._set_lr(self.local.lr if context.lr is None else context.lr)
        with torch.no_grad():
            sums_K = self._run(stack, (inputs_E, targets_E), blocks, context).cpu()
        params_KV, integers_KI = (part.cpu() for part in stack.states())
        if back is not None:
            sums_K = sums_K[back]
            params_KV = params_KV[back]
            integers_KI = integers_KI[back]
        losses = [loss_sum / plan.seen for loss_sum, plan in zip(sums_K.tolist(), plans, strict=True)]
        return (params_KV, integers_KI), losses

    def _set_lr(self, lr: float) -> None:
        """Set the step size of all later steps."""
        self._lr = lr
        for program in self._programs.values() if self._moves_in_place else ():
            program.step = cast(Any, -lr)  # a plain attribute, whatever modules are said to have

    def _run(self, stack: StackedStates, group: Pair, blocks: Iterable[Block], context: LocalContext) -> Tensor:
        """Take all steps; the sum [K] of each client's losses over the samples that it saw."""
        sums_K = torch.zeros(stack.rows, dtype=torch.float64, device=self.device)
        if self.phase.rule is not None:
            context = context.spread(stack.spread, stack.x_KQ[:, : stack.shared])
        moves = self.phase.moves(stack.shared)
        optimizer = None if self._moves_in_place else optimizer_for(self.local, self._lr)
        running = stack.rows  # number of rows that are not finished
        for block in blocks:
            step = 0
            for rows, steps in itertools.groupby(block.active, key=lambda active: _bucket(active, stack.rows)):
                tensors = stack.tensors(rows)
                losses: list[Tensor] = []
                for active in steps:
                    batches = block.batches(step + len(losses), rows)
                    if optimizer is None:
                        if active < running:
                            stack.finish(slice(active, running))
                        (losses_K,) = self._replay(tensors, group, *batches[0])
                    else:
                        gradient_KQ, losses_K = self._gradient(stack, tensors, group, batches)
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
        return sums_K

    def _gradient(
        self, stack: StackedStates, tensors: list[Tensor], group: Pair, batches: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """The gradients [K, Q] of a step's mean losses, and those losses [K]: sums over its batches."""
        first, *others = batches
        results = self._replay(tensors, group, *first)
        for batch in others:
            results = torch._foreach_add(results, self._replay(tensors, group, *batch))
        *gradients, losses_K = results
        return stack.joined(gradients), losses_K

    def _replay(self, tensors: list[Tensor], group: Pair, index_E: Tensor, weights_KB: Tensor) -> tuple[Tensor, ...]:
        inputs, targets = (part.index_select(0, index_E).view(*weights_KB.shape, *part.shape[1:]) for part in group)
        key = inputs.shape, targets.shape, inputs.dtype, targets.dtype
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._record([*tensors, inputs, targets, weights_KB])
        results: tuple[Tensor, ...] = program.forward(*tensors, inputs, targets, weights_KB)
        return results

    def _record(self, examples: list[Tensor]) -> fx.GraphModule:
        *state, inputs, targets, _ = examples
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # vmap takes some operations one by one
            with torch.enable_grad():  # training runs under no_grad
                recording = record(self._gradients_and_losses, examples)
            if not recording.keeps(len(state)):
                raise _unfit("a model's forward pass must not write into its parameters or buffers")
            if any(node.target is _EMBEDDED and node.args[3:] != (-1, False) for node in recording.graph.nodes):
                raise _unfit("embeddings must have neither padding_idx nor scale_grad_by_freq")
            if inputs.shape[1] > self._held_to:  # a batch of one shows nothing
                self._hold_to_samples(state, inputs, targets)
                self._held_to = inputs.shape[1]
        if self._moves_in_place:
            recording.move_in_place(len(self.layout.trained), -self._lr)
        return recording.program()

    def _hold_to_samples(self, state: Sequence[Tensor], inputs: Tensor, targets: Tensor) -> None:
        """Refuse a model that mixes the samples of a batch, and a loss that is not their mean."""
        half = -(-inputs.shape[1] // 2)
        with self.precision:
            # Copies, for a model may change its inputs in place.
            outputs = self._outputs(state, inputs.clone())
            of_half = self._outputs(state, inputs[:, :half].clone())
            if not self._agree(outputs[:, :half], of_half):
                raise _unfit("a model's output for a sample must not depend on others of its batch")
            pairs = zip(outputs.clone(), targets.clone(), strict=True)  # vmap would import PyTorch's compiler
            means_K = torch.stack([self.loss(output, target) for output, target in pairs])
            losses_KB = self._losses(outputs.clone(), targets.clone())
        if not self._agree(means_K, losses_KB.mean(1), 1e-5 * _largest(outputs)):
            raise _unfit("a loss must be the mean of its samples' losses")

    def _agree(self, one: Tensor, other: Tensor, allowance: float = 0.0) -> bool:
        """True if numbers are equal but for rounding."""
        tolerance = 1e-3 if self.local.precision == "float32" else 5e-2
        limits = {"rtol": tolerance, "atol": tolerance * _largest(one) + allowance}
        return torch.allclose(one.double(), other.double(), **limits, equal_nan=True)

    def _gradients_and_losses(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each trainable tensor's gradient [K, ...], and losses [K]."""
        *state, inputs, targets, weights_KB = tensors
        trained = [tensor.detach().requires_grad_() for tensor in state[: len(self.layout.trained)]]
        with self.precision:
            losses_KB = self._losses(self._outputs((*trained, *state[len(trained) :]), inputs), targets)
        losses_K = (losses_KB * weights_KB).sum(1)
        gradients = torch.autograd.grad(losses_K.sum(), trained, allow_unused=True, materialize_grads=True)
        return *gradients, losses_K.detach()

    def _outputs(self, state: Sequence[Tensor], inputs: Tensor) -> Tensor:
        with ChannelGroups(), RecurrentLayers():
            outputs: Tensor = vmap(self._forward)(tuple(state), inputs)
        return outputs

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses_n = of_each_sample(self.loss, outputs.flatten(0, 1), targets.flatten(0, 1))
        return losses_n.view(targets.shape[:2])

    def _forward(self, state: tuple[Tensor, ...], inputs: Tensor) -> Tensor:
        given = self._constants | dict(zip(self._names, state, strict=True))
        after = dict(given)
        # functional_call writes into ``after`` whatever the module has set.
        output: Tensor = functional_call(self.module, after, (inputs,))
        if any(after[name] is not part for name, part in given.items()):
            raise _unfit("a model's forward pass must not set its parameters or buffers")
        return output


def _bucket(active: int, rows: int) -> int:
    """The fewest rows that hold all active ones, among all, half, a quarter and so on: few shapes to record."""
    while active <= (half := -(-rows // 2)) < rows:
        rows = half
    return rows


def _largest(numbers: Tensor) -> float:
    return float(numbers.nan_to_num(0, 0, 0).abs().max())


def _unfit(rule: str) -> InvalidModel:
    return InvalidModel(f"where clients train in groups, {rule}: train them one by one")
