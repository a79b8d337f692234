"""Local training of a group of clients as one computation, each with parameters, samples and steps of its own.

Shapes: K, clients of a group; Q, a client's trainable parameters as they are computed with, P of them and gaps; V, a
client's whole floating-point state; I, its integers; N, samples of all clients; S, optimizer steps; W, places for
samples in a step; B, those in each batch of it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap

from fed.aggregators.contracts import LocalRule
from fed.clients.batches import Batches
from fed.clients.data import Pair
from fed.clients.losses import Loss, of_each_sample
from fed.clients.optimizers import optimizer_for
from fed.clients.programs import move_in_place, record
from fed.experiment import Local
from fed.layout import Layout, Part

__all__ = ["BatchedTrainer", "TrainedGroup"]

_ALIGNMENT_BYTES = 64
_STEPS_AT_ONCE = 512  # for so many steps the indices of samples are made at a time


@dataclass(frozen=True)
class TrainedGroup:
    """What training leaves of each client of a group: its state, mean loss, and the samples it has seen.

    Args:
        vectors_KV: the trained states.
        integers_KI: the trained integer buffers.
        train_losses: K means over the samples trained on.
        samples_seen: K counts.
    """

    vectors_KV: Tensor
    integers_KI: Tensor
    train_losses: list[float]
    samples_seen: list[int]


class BatchedTrainer:
    r"""Trains many clients with one module at once, as :class:`fed.clients.training.Trainer` trains one.

    Parameters are stacked, one operation serves all clients, and the gradient is that of

    .. math:: \sum_k \sum_b w_{kb} \, ℓ(f(x_k; a_{kb}), y_{kb}), \qquad w_{kb} = 1 / B_k

    whose part for :math:`x_k` is client k's own. Where a client has fewer samples in a step than another, one of its
    samples fills its places, with weight 0; clients with fewer steps than others drop out as they finish.

    The model's operations are recorded on a first step of each shape and replayed, so its forward pass must be the same
    sequence of operations every time: it draws no random numbers, does not look at numbers, and changes no buffers. The
    loss must be the mean of its samples' losses.

    Args:
        module: the model; it is only read.
        loss: (output, target) → scalar.
        local: the experiment's section of that name; its precision is not float16.
        rule: a correction of the gradient, or None.
        device: where to compute.
    """

    def __init__(
        self, module: nn.Module, loss: Loss, local: Local, rule: LocalRule | None, device: torch.device
    ) -> None:
        self.layout = Layout.of(module)
        self._module = module.to(device).train()
        self._loss = loss
        self._local = local
        self._rule = rule
        self._device = device
        self._names = [part.name for part in (*self.layout.trained, *self.layout.averaged, *self.layout.integers)]
        self._moves_in_place = rule is None and local.accumulate == 1 and _is_plain(local)
        self._plans: dict[int, Batches] = {}
        self._ordered: tuple[list[Batches], list[_Block]] | None = None
        self._stacks: dict[int, _Stack] = {}
        self._programs: dict[tuple[object, ...], fx.GraphModule] = {}

    def train(
        self,
        start_V: Tensor,
        integers_I: Tensor,
        samples: Sequence[Pair],
        orders: Sequence[Callable[[], np.random.Generator]],
        broadcast: tuple[Tensor, ...] = (),
    ) -> TrainedGroup:
        """Train a group.

        Args:
            start_V: where all clients start; or [K, V], each from its own.
            integers_I: the integer buffers to start with; or [K, I].
            samples: each client's (inputs, targets).
            orders: each client's stream that shuffles them, made when something is drawn.
            broadcast: what the rule sent along, [P] each.

        Returns:
            What training leaves, on the CPU.
        """
        plans = [self._plan(len(targets)) for _, targets in samples]
        rows = sorted(range(len(plans)), key=lambda row: -plans[row].steps)
        back = None if rows == list(range(len(rows))) else torch.tensor(rows).argsort()
        stack = self._stacks.get(len(rows)) or self._stacks.setdefault(
            len(rows), _Stack(self.layout, len(rows), self._device)
        )
        stack.load(*(part if back is None or part.ndim == 1 else part[rows] for part in (start_V, integers_I)))
        inputs_N, targets_N = (torch.cat(parts).to(self._device) for parts in zip(*samples, strict=True))
        blocks = self._blocks([plans[row] for row in rows], [orders[row] for row in rows], _begins(plans, rows))
        with torch.no_grad():
            sums_K = self._run(stack, (inputs_N, targets_N), blocks, broadcast).cpu()
        vectors_KV, integers_KI = (part.cpu() for part in stack.states())
        if back is not None:
            sums_K, vectors_KV, integers_KI = sums_K[back], vectors_KV[back], integers_KI[back]
        seen = [plan.seen for plan in plans]
        losses = [loss_sum / count for loss_sum, count in zip(sums_K.tolist(), seen, strict=True)]
        return TrainedGroup(vectors_KV, integers_KI, losses, seen)

    def _plan(self, samples: int) -> Batches:
        if samples not in self._plans:
            self._plans[samples] = Batches(self._local, samples)
        return self._plans[samples]

    def _blocks(
        self, plans: list[Batches], orders: list[Callable[[], np.random.Generator]], begins: list[int]
    ) -> Iterable["_Block"]:
        """The group's steps; the same as the last group's, if it had as many samples and all keep their order."""
        dtype = self.layout.trained[0].dtype
        if not all(plan.keeps_order for plan in plans):
            return _blocks(plans, orders, begins, self._local.batch_size, self._device, dtype)
        if self._ordered is None or self._ordered[0] != plans:
            self._ordered = plans, [*_blocks(plans, orders, begins, self._local.batch_size, self._device, dtype)]
        return self._ordered[1]

    def _run(self, stack: "_Stack", group: Pair, blocks: Iterable["_Block"], broadcast: tuple[Tensor, ...]) -> Tensor:
        """Take all steps; the sum [K] of each client's losses over the samples that it saw."""
        sums_K = torch.zeros(stack.rows, dtype=torch.float64, device=self._device)
        spread = tuple(stack.spread(part_P.to(self._device)) for part_P in broadcast)
        anchor_KQ = stack.x_KQ.clone() if self._rule else stack.x_KQ
        optimizer = optimizer_for(self._local)
        for block in blocks:
            begin = 0
            for rows, steps in itertools.groupby(block.active, key=lambda active: _bucket(active, stack.rows)):
                tensors = stack.tensors(rows)
                losses: list[Tensor] = []
                for active in steps:
                    batches = block.batches(begin + len(losses), rows)
                    if self._moves_in_place:
                        (losses_K,) = self._replay(tensors, group, *batches[0])
                    else:
                        gradient_KQ, losses_K = self._gradient(stack, tensors, group, batches)
                        x_KQ, gradient_KQ = stack.x_KQ[:active], gradient_KQ[:active]
                        if self._rule is not None:
                            gradient_KQ = self._rule.correct(gradient_KQ, x_KQ, anchor_KQ[:active], None, spread)
                        optimizer.step(x_KQ, gradient_KQ)
                    losses.append(losses_K)
                end = begin + len(losses)
                sums_K[:rows] += (torch.stack(losses) * block.sizes_SK[begin:end, :rows]).sum(0)
                begin = end
        return sums_K

    def _gradient(
        self, stack: "_Stack", tensors: list[Tensor], group: Pair, batches: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """The gradients [K, Q] of a step's mean losses, and those losses [K]: sums over its batches."""
        first, *others = batches
        results = self._replay(tensors, group, *first)
        for batch in others:
            results = torch._foreach_add(results, self._replay(tensors, group, *batch))
        *gradients, losses_K = results
        return stack.joined(gradients), losses_K

    def _replay(self, tensors: list[Tensor], group: Pair, index_KB: Tensor, weights_KB: Tensor) -> tuple[Tensor, ...]:
        places = index_KB.reshape(-1)
        inputs, targets = (part.index_select(0, places).view(*index_KB.shape, *part.shape[1:]) for part in group)
        key = (index_KB.shape, inputs.shape, targets.shape)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._record([*tensors, inputs, targets, weights_KB])
        results: tuple[Tensor, ...] = program.forward(*tensors, inputs, targets, weights_KB)
        return results

    def _record(self, examples: list[Tensor]) -> fx.GraphModule:
        with torch.enable_grad():
            program = record(self._gradients_and_losses, examples)
        trained = len(self.layout.trained)
        return move_in_place(program, trained, -self._local.lr) if self._moves_in_place else program

    def _gradients_and_losses(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each trainable tensor's gradient [K, ...], and losses [K]."""
        *state, inputs, targets, weights_KB = tensors
        trained = [tensor.detach().requires_grad_() for tensor in state[: len(self.layout.trained)]]
        half = torch.bfloat16 if self._local.precision == "bfloat16" else None
        with torch.autocast(inputs.device.type, dtype=half) if half else nullcontext():
            outputs = vmap(self._forward)((*trained, *state[len(trained) :]), inputs)
            losses_KB = of_each_sample(self._loss, outputs.flatten(0, 1), targets.flatten(0, 1)).view(weights_KB.shape)
        gradients = torch.autograd.grad(
            losses_KB, trained, grad_outputs=weights_KB.to(losses_KB.dtype), allow_unused=True, materialize_grads=True
        )
        return *gradients, (losses_KB.detach() * weights_KB).sum(1)

    def _forward(self, state: tuple[Tensor, ...], inputs: Tensor) -> Tensor:
        output: Tensor = functional_call(self._module, dict(zip(self._names, state, strict=True)), (inputs,))
        return output


class _Block(NamedTuple):
    """Some steps of a group: which samples stand in each place, with which weights, and of how many clients."""

    index_SKW: Tensor
    weights_SKW: Tensor
    sizes_SK: Tensor
    active: list[int]
    batch: int

    def batches(self, step: int, rows: int) -> Sequence[tuple[Tensor, Tensor]]:
        """The batches of a step of the first rows: indices and weights [rows, B] each."""
        index_KW, weights_KW = self.index_SKW[step, :rows], self.weights_SKW[step, :rows]
        if index_KW.shape[1] == self.batch:
            return [(index_KW, weights_KW)]
        return [*zip(torch.split(index_KW, self.batch, 1), torch.split(weights_KW, self.batch, 1), strict=True)]


def _blocks(
    plans: Sequence[Batches],
    orders: Sequence[Callable[[], np.random.Generator]],
    begins: Sequence[int],
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[_Block]:
    """The steps of a group, some at a time; clients are in descending order of steps."""
    largest = max(plan.sizes[0] for plan in plans)
    batch = min(batch_size, 1 << (largest - 1).bit_length())  # few shapes, for each of them is recorded
    places = -(-largest // batch) * batch
    epochs = [_epochs(plan, order, begin, places) for plan, order, begin in zip(plans, orders, begins, strict=True)]
    for begin in range(0, plans[0].steps, _STEPS_AT_ONCE):
        steps = min(_STEPS_AT_ONCE, plans[0].steps - begin)
        index_SKW = np.zeros((steps, len(plans), places), dtype=np.int64)
        sizes_SK = np.zeros((steps, len(plans)), dtype=np.int64)
        for row in range(len(plans)):
            epochs[row] = _fill(index_SKW[:, row], sizes_SK[:, row], epochs[row])
        weights_SKW = (np.arange(places) < sizes_SK[..., None]) / np.maximum(sizes_SK, 1)[..., None]
        yield _Block(
            torch.from_numpy(index_SKW).to(device),
            torch.from_numpy(weights_SKW).to(device, dtype),
            torch.from_numpy(sizes_SK).to(device, torch.float64),
            (sizes_SK > 0).sum(1).tolist(),
            batch,
        )


_Epochs: TypeAlias = Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]


def _fill(index_SW: NDArray[np.int64], sizes_S: NDArray[np.int64], epochs: _Epochs) -> _Epochs:
    """Write a client's next steps, as many as there are places or as it has left; what remains of its epochs."""
    filled = 0
    while filled < len(sizes_S) and (epoch := next(epochs, None)) is not None:
        epoch_SW, epoch_S = epoch
        taken = min(len(epoch_S), len(sizes_S) - filled)
        index_SW[filled : filled + taken], sizes_S[filled : filled + taken] = epoch_SW[:taken], epoch_S[:taken]
        filled += taken
        if taken < len(epoch_S):
            return itertools.chain([(epoch_SW[taken:], epoch_S[taken:])], epochs)
    return epochs


def _epochs(plan: Batches, order: Callable[[], np.random.Generator], begin: int, places: int) -> _Epochs:
    """A client's steps, epoch by epoch: which samples stand in all places [S, W], and how many of these count [S]."""
    sizes_S = np.array(plan.sizes)
    size, left = plan.sizes[0], plan.steps
    for order_N in itertools.repeat(np.arange(plan.samples)) if plan.keeps_order else plan.orders(order()):
        index_SW = np.full((len(sizes_S), places), begin + order_N[0])
        whole = len(order_N) // size
        index_SW[:whole, :size] = begin + order_N[: whole * size].reshape(whole, size)
        if whole < len(sizes_S):
            index_SW[whole, : sizes_S[whole]] = begin + order_N[whole * size :]
        yield index_SW[:left], sizes_S[:left]
        if (left := left - len(sizes_S)) <= 0:
            return


class _Stack:
    """The states of some clients, a row each; every tensor of every row as aligned as if it stood alone."""

    def __init__(self, layout: Layout, rows: int, device: torch.device) -> None:
        self.rows = rows
        self._layout = layout
        dtype = layout.trained[0].dtype
        unit = _ALIGNMENT_BYTES // dtype.itemsize
        begins = [0, *itertools.accumulate(-(-part.size // unit) * unit for part in layout.trained)]
        self.x_KQ = torch.zeros(rows, begins[-1], dtype=dtype, device=device)
        self._trained = [
            self.x_KQ[:, begin : begin + part.size].view(rows, *part.shape)
            for begin, part in zip(begins, layout.trained, strict=False)
        ]
        self._gaps = [
            self.x_KQ.new_zeros(rows, end - begin - part.size)
            for (begin, end), part in zip(itertools.pairwise(begins), layout.trained, strict=True)
        ]
        self._others: list[Tensor] = []

    def load(self, start_V: Tensor, integers_I: Tensor) -> None:
        """Start all rows from one state, or each from its own row [K, V] and [K, I]."""
        starts, integers = (
            (part if part.ndim > 1 else part.unsqueeze(0)).to(self.x_KQ.device) for part in (start_V, integers_I)
        )
        self.x_KQ.copy_(self.joined([_tensors_of(part, starts) for part in self._layout.trained]))
        self._others = [self._each_its_own(part, starts) for part in self._layout.averaged]
        self._others += [self._each_its_own(part, integers) for part in self._layout.integers]

    def _each_its_own(self, part: Part, vectors: Tensor) -> Tensor:
        return _tensors_of(part, vectors).to(part.dtype).expand(self.rows, *part.shape).contiguous()

    def tensors(self, rows: int) -> list[Tensor]:
        """All tensors of the first rows' states: [rows, ...] each, those to be trained first."""
        return [tensor[:rows] for tensor in (*self._trained, *self._others)]

    def joined(self, gradients: Sequence[Tensor]) -> Tensor:
        """Gradients of the trainable tensors as they stand in the rows: [K, Q]."""
        rows = len(gradients[0])
        pairs = zip(gradients, self._gaps, strict=True)
        return torch.cat([part for gradient, gap in pairs for part in (gradient.reshape(rows, -1), gap[:rows])], 1)

    def spread(self, vector_P: Tensor) -> Tensor:
        """A vector [P] with the gaps of a row, [Q]."""
        return self.joined([part.view(vector_P).unsqueeze(0) for part in self._layout.trained])[0]

    def states(self) -> tuple[Tensor, Tensor]:
        """The rows as (vectors [K, V], integers [K, I])."""
        dtype, averaged = self._layout.dtype, len(self._layout.averaged)
        floats = [tensor.reshape(self.rows, -1).to(dtype) for tensor in (*self._trained, *self._others[:averaged])]
        integers = [tensor.reshape(self.rows, -1).long() for tensor in self._others[averaged:]]
        integers_KI = torch.cat(integers, 1) if integers else self.x_KQ.new_zeros(self.rows, 0, dtype=torch.int64)
        return torch.cat(floats, 1), integers_KI


def _tensors_of(part: Part, vectors: Tensor) -> Tensor:
    """A tensor's numbers in each of some vectors, in its shape."""
    return vectors[:, part.offset : part.offset + part.size].reshape(-1, *part.shape)


def _begins(plans: Sequence[Batches], rows: list[int]) -> list[int]:
    """Where each of these clients' samples begin among those of all."""
    begins = [0, *itertools.accumulate(plan.samples for plan in plans)]
    return [begins[row] for row in rows]


def _bucket(active: int, rows: int) -> int:
    """The fewest rows, of all, half, a quarter and so on, that hold all active ones: few shapes."""
    while active <= (half := -(-rows // 2)) < rows:
        rows = half
    return rows


def _is_plain(local: Local) -> bool:
    return local.optimizer == "sgd" and not local.momentum and not local.weight_decay
