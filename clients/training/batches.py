"""Batches: a client's samples cut into optimizer steps, and a group's samples into steps that all clients take at once.

Shapes: see :mod:`fed.vectors.layout`.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.nn.modules.batchnorm import _BatchNorm

from fed.clients.training.devices import uploaded
from fed.config.experiment import Local
from fed.vectors.fixed_part import fixed_layers
from fed.vectors.tensors import Tensor, nn, torch
from fed.vectors.trees import Tree

__all__ = ["Batches", "Block", "GroupBatch", "GroupSteps", "Places", "normalises_batches"]

_STEPS_AT_ONCE = 512  # steps for which the indices of samples are made at a time
_KEPT_GROUPS = 64  # number of groups whose blocks may be used again
_KEPT_SAMPLES = 1 << 16  # largest number of samples, over all steps, of a group whose blocks are kept: a megabyte

_Order: TypeAlias = Callable[[], np.random.Generator]


class Batches:
    """Batches of a task: each epoch has a fresh order, and is cut into steps of one size, of which the last is shorter.

    Args:
        local: the experiment's section of that name.
        samples: number of the client's samples, at least 1.
        never_single: True if no step may have a single sample, as BatchNorm needs it: a last single sample joins the
            step before it.
        steps: number of optimizer steps of a task; None: the section's.

    Attributes:
        samples: number of the client's samples.
        steps: number of optimizer steps of a task.
        sizes: number of samples of each step of one epoch.
        seen: number of samples of all steps of a task, each counted as often as it is seen.
        keeps_order: True if every batch has all samples. Their order then means nothing: they keep it, and nothing is
            drawn.

    Example:
        >>> batches = Batches(Local(batch_size=4, epochs=2), 10)
        >>> batches.steps, batches.sizes, batches.seen
        (6, [4, 4, 2], 20)
        >>> [sorted(order) == [*range(10)] for order in batches.orders(np.random.default_rng(0))]
        [True, True]
    """

    def __init__(self, local: Local, samples: int, never_single: bool = False, steps: int | None = None) -> None:
        self.samples = samples
        self._size = local.batch_size
        self._never_single = never_single
        self.sizes = _cut(samples, local.batch_size * local.accumulate, never_single)
        steps = local.steps if steps is None else steps
        self.steps = (local.epochs or 1) * len(self.sizes) if steps is None else steps
        epochs, rest = divmod(self.steps, len(self.sizes))
        self.seen = epochs * samples + sum(self.sizes[:rest])
        self.keeps_order = len(self.sizes) == 1 and (local.accumulate == 1 or samples <= local.batch_size)

    def orders(self, generator: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Order [E] in which each epoch takes the samples; of the last epoch a task may take the first steps alone.

        Args:
            generator: the stream that shuffles them; one permutation an epoch, drawn when its order is asked for.
        """
        for _ in range(-(-self.steps // len(self.sizes))):
            yield np.arange(self.samples) if self.keeps_order else generator.permutation(self.samples)

    @cached_property
    def within(self) -> list[list[int]]:
        """Number of samples in each batch of each step of one epoch."""
        return [_cut(step, self._size, self._never_single) for step in self.sizes]

    @cached_property
    def of_epoch(self) -> list[int]:
        """Number of samples in each batch of one epoch."""
        return list(itertools.chain.from_iterable(self.within))


def normalises_batches(module: "nn.Module") -> bool:
    """True if a model has batch normalisation in training, for which a single sample has no variance.

    Example:
        >>> normalises_batches(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
        True
    """
    # The base of all kinds, SyncBatchNorm among them.
    layers = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    return bool(layers) and not {*layers} <= {*fixed_layers(module)}


def _cut(samples: int, size: int, never_single: bool) -> list[int]:
    """Sizes of parts: all equal but the last; a last single sample joins the part before it."""
    whole, rest = divmod(samples, size)
    sizes = [size] * whole + [rest] * bool(rest)
    if never_single and len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [sizes[-2] + 1]
    return sizes


class Places(NamedTuple):
    """Samples of a group's batch.

    Args:
        index_E: index of the sample in each of the K · B places, among all samples.
        weights_KB: weight of each loss in its client's mean, in [0, 1], 0 where a place is filled up.
        samples_K: number of samples of each client.
    """

    index_E: Tensor
    weights_KB: Tensor
    samples_K: list[int]


class GroupBatch(NamedTuple):
    """Batch of a group's clients, side by side.

    Args:
        inputs: tree of [K, B, ...].
        targets: tree of [K, B, ...].
        weights_KB: weight of each sample's loss, 0 where a place is filled up.
        samples_K: number of samples of each client.
    """

    inputs: Tree
    targets: Tree
    weights_KB: Tensor
    samples_K: list[int]


class Block(NamedTuple):
    """Consecutive steps of a group, clients in descending order of their steps.

    Args:
        index_E: index of the sample in each of a batch's K · B places, among all samples; a tensor a batch.
        weights_KB: weight of each loss in its client's mean, in [0, 1], 0 where a place is filled up; a tensor a
            batch.
        samples_UK: number of samples of each client in each batch; an entry a batch.
        sizes_LK: number of samples of each client in each step, in float64; 0 once it has finished.
        active: number of clients that take part in each step.
    """

    index_E: tuple[Tensor, ...]
    weights_KB: tuple[Tensor, ...]
    samples_UK: list[list[int]]
    sizes_LK: Tensor
    active: list[int]

    @property
    def batches_in_step(self) -> int:
        """Number of batches of each step."""
        return len(self.index_E) // len(self.active)

    def batches(self, step: int, rows: int) -> list[Places]:
        """Batches of a step for the first rows."""
        batches = self.batches_in_step
        its = slice(step * batches, (step + 1) * batches)
        parts = zip(self.index_E[its], self.weights_KB[its], self.samples_UK[its], strict=True)
        if rows == self.sizes_LK.shape[1]:
            return [Places(index_E, weights_KB.contiguous(), samples_K) for index_E, weights_KB, samples_K in parts]
        # What is recorded once takes weights in one piece, and those of several batches of a step lie apart.
        return [
            Places(index_E[: rows * weights_KB.shape[1]], weights_KB[:rows].contiguous(), samples_K[:rows])
            for index_E, weights_KB, samples_K in parts
        ]


class _Client(NamedTuple):
    plan: Batches
    order: _Order | None  # None: its samples keep theirs
    begin: int  # place of its first sample among the samples of the group


class GroupSteps:
    """Cuts groups into steps, one group after another.

    Where a client has fewer samples in a step than another, its last one fills its places, with weight 0.

    Attributes:
        plan: (number of samples, the task's own number of steps or None) → :class:`Batches`; the same object for the
            same numbers.

    Args:
        local: the experiment's section of that name.
        device: device of the weights, and of the indices unless samples are on another.
        dtype: type of the weights.

    Example:
        >>> steps = GroupSteps(Local(batch_size=4, epochs=1), torch.device("cpu"), torch.float32)
        >>> orders = [lambda: np.random.default_rng(0)] * 2
        >>> (block,) = steps.blocks([steps.plan(6, None), steps.plan(3, None)], orders, [0, 1])
        >>> block.sizes_LK.tolist(), block.active
        ([[4.0, 3.0], [2.0, 0.0]], [2, 1])
    """

    def __init__(self, local: Local, device: "torch.device", dtype: "torch.dtype") -> None:
        self._local = local
        self._device = device
        self._dtype = dtype
        self.plan = cache(lambda samples, steps: Batches(local, samples, steps=steps))
        self._kept = lru_cache(_KEPT_GROUPS)(lambda plans, rows, of: list(self._blocks(_clients(plans, rows), of)))
        self._kept_sizes = lru_cache(_KEPT_GROUPS)(self._sizes)

    def blocks(
        self,
        plans: Sequence[Batches],
        orders: Sequence[_Order],
        rows: Sequence[int],
        index_device: "torch.device | None" = None,
    ) -> Iterable[Block]:
        """Blocks of a group's steps; those of earlier groups are used again if sizes agree and all keep their order.

        Args:
            plans: each client's ``plan``.
            orders: each client's stream that shuffles its samples, made when something is drawn.
            rows: the clients in descending order of steps, as they stand in the blocks.
            index_device: device on which samples are, and so their indices; None: that of the weights.
        """
        of = self._device if index_device is None else index_device
        samples = sum([plan.samples for plan in plans])
        if plans[rows[0]].steps * samples <= _KEPT_SAMPLES and all(plan.keeps_order for plan in plans):
            return self._kept(tuple(plans), tuple(rows), of)
        return self._blocks(_clients(plans, rows, orders), of)

    def _blocks(self, clients: Sequence[_Client], index_device: "torch.device") -> Iterator[Block]:
        """Blocks of at most 512 steps."""
        plans = tuple([client.plan for client in clients])
        largest = max(plan.sizes[0] for plan in plans)
        batch = min(self._local.batch_size, 1 << (largest - 1).bit_length())  # few shapes, for each of them is recorded
        width = -(-largest // batch) * batch
        places = [_places(client, width) for client in clients]
        begins_K1 = np.array([client.begin for client in clients])[:, None]
        is_small = plans[0].steps * len(plans) * width <= _KEPT_SAMPLES
        for first in range(0, plans[0].steps, _STEPS_AT_ONCE):
            sizes = (
                self._kept_sizes(plans, first, batch, width) if is_small else self._sizes(plans, first, batch, width)
            )
            index_LKW = np.zeros((len(sizes.active), len(plans), width), dtype=np.int64)
            for row, its_places in enumerate(places):
                if plans[row].steps > first:
                    places_LW = next(its_places)
                    index_LKW[: len(places_LW), row] = places_LW
            index_LKW += begins_K1
            index_UKB = _in_batches(index_LKW, batch)
            yield Block(uploaded(torch.from_numpy(index_UKB), index_device).flatten(1).unbind(), *sizes)

    def _sizes(self, plans: tuple[Batches, ...], first: int, batch: int, width: int) -> "_Sizes":
        """Part of a block that follows from the plans of its clients.

        Args:
            plans: the clients' plans, in descending order of steps.
            first: number of the block's first step.
            batch: largest number of samples in a batch.
            width: number of places in a step, a multiple of ``batch``.
        """
        steps_L = np.arange(first, min(first + _STEPS_AT_ONCE, plans[0].steps))
        sizes_LK = np.zeros((len(steps_L), len(plans)), dtype=np.int64)
        for row, plan in enumerate(plans):
            own_L = steps_L[steps_L < plan.steps]
            # Every epoch has the sizes of the first.
            sizes_LK[: len(own_L), row] = np.take(plan.sizes, own_L, mode="wrap")
        # A finished client has size 0.
        weights_LKW = (np.arange(width) < sizes_LK[..., None]) / np.maximum(sizes_LK, 1)[..., None]
        weights_UKB = _in_batches(weights_LKW, batch)
        return _Sizes(
            weights_KB=uploaded(torch.from_numpy(weights_UKB).to(self._dtype), self._device).unbind(),
            samples_UK=(weights_UKB > 0).sum(2).tolist(),
            sizes_LK=uploaded(torch.from_numpy(sizes_LK).to(torch.float64), self._device),
            active=(sizes_LK > 0).sum(1).tolist(),
        )


def _clients(plans: Sequence[Batches], rows: Sequence[int], orders: Sequence[_Order] = ()) -> list[_Client]:
    """Clients of a group as they stand in its blocks; without ``orders`` all keep their samples' order."""
    begins = [0, *itertools.accumulate([plan.samples for plan in plans])]
    return [_Client(plans[row], None if plans[row].keeps_order else orders[row], begins[row]) for row in rows]


class _Sizes(NamedTuple):
    """Part of a :class:`Block` that does not depend on the order of samples."""

    weights_KB: tuple[Tensor, ...]
    samples_UK: list[list[int]]
    sizes_LK: Tensor
    active: list[int]


class _Window(NamedTuple):
    """Steps of a plan that lie in one block.

    Args:
        places_LW: place of each sample in the orders of the window's epochs, one behind the other; empty places hold
            the step's last sample.
        epochs: number of epochs that it has a part of.
        goes_on: True if the first of these epochs has begun in the block before.
    """

    places_LW: NDArray[np.int64]
    epochs: int
    goes_on: bool


def _window(plan: Batches, first: int, width: int) -> _Window:
    """Steps from ``first`` on, of which each has ``width`` places."""
    epochs_L, steps_L = np.divmod(np.arange(first, min(first + _STEPS_AT_ONCE, plan.steps)), len(plan.sizes))
    epochs_L -= epochs_L[0]
    last_L1 = np.take(plan.sizes, steps_L)[:, None] - 1
    begins_L = plan.samples * epochs_L + plan.sizes[0] * steps_L
    places_LW = np.minimum(np.arange(width), last_L1) + begins_L[:, None]
    return _Window(places_LW, epochs=int(epochs_L[-1]) + 1, goes_on=bool(steps_L[0]))


_kept_window = lru_cache(_KEPT_GROUPS)(_window)


def _places(client: _Client, width: int) -> Iterator[NDArray[np.int64]]:
    """Samples in a client's places [L, W], a block at a time, among those of the client."""
    plan = client.plan
    orders = itertools.repeat(np.arange(plan.samples)) if client.order is None else plan.orders(client.order())
    window_of = _kept_window if plan.steps * width <= _KEPT_SAMPLES else _window
    taken: list[NDArray[np.int64]] = []
    for first in range(0, plan.steps, _STEPS_AT_ONCE):
        window = window_of(plan, first, width)
        taken = taken[-1:] if window.goes_on else []
        taken += itertools.islice(orders, window.epochs - len(taken))
        order = taken[0] if len(taken) == 1 else np.concatenate(taken)
        yield order.take(window.places_LW)


def _in_batches(values_LKW: NDArray[Any], batch: int) -> NDArray[Any]:
    """Values of each step's places [L, K, W] as those of its batches [L · W / B, K, B], one after another."""
    steps, clients, _ = values_LKW.shape
    return values_LKW.reshape(steps, clients, -1, batch).swapaxes(1, 2).reshape(-1, clients, batch)
