"""Group timing: processor time of a client's step alone and in groups of several sizes, on this machine.

Shapes: see :mod:`fed.vectors.layout`.
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fed.aggregators.client_side import each_part
from fed.clients.data import Held
from fed.clients.training.batched_trainer import BatchedTrainer
from fed.clients.training.local_context import LocalContext
from fed.clients.training.trainer import Trainer
from fed.clients.training.work_items import Recipe
from fed.clients.training.worker import on_device
from fed.vectors.layout import Layout
from fed.vectors.tensors import torch
from fed.vectors.torch_settings import one_thread

__all__ = ["step_seconds"]

_TURN_S = 0.01
"""Seconds that a client trains alone in a turn, if that is no fewer than the fewest and no more than the most steps."""
_FEWEST_STEPS = 2
_MOST_STEPS = 12
_TURNS = 3
_SLOWER = 1.05
"""Factor by which a size is slower than the best of the smaller ones, and larger ones are not tried."""


def step_seconds(
    recipe: Recipe,
    context: LocalContext,
    samples: Held,
    sizes: Sequence[int],
    clock: Callable[[], float] = time.thread_time,
) -> dict[int, float]:
    """Median seconds of a client's step by the size of its group, of turns that follow one another; 1: alone.

    All clients have the same samples, and take the run's first steps with its optimizer. The models that they train
    are dropped. Sizes behind one that is slower than a smaller one are not tried.

    Args:
        recipe: local training of the run.
        context: tensors that come with a client's first task beside the model, and the client's state before that.
        samples: samples of one client.
        sizes: sizes of groups, from 2, in ascending order.
        clock: function that reads the seconds of processor time of this thread.
    """
    training = partial(_Training, recipe, context, samples, clock=clock)
    with one_thread():
        tried = {1: training(size=1)}
        tried[1].step_s(_MOST_STEPS)  # the first steps are slower, and of an epoch's last, smaller batch, too
        alone_s = max(tried[1].step_s(_FEWEST_STEPS), 1e-9)
        steps = round(_TURN_S / alone_s)
        steps = min(max(steps, _FEWEST_STEPS), _MOST_STEPS)
        best_s = tried[1].step_s(steps)
        for size in sizes:
            tried[size] = training(size=size)
            tried[size].step_s(steps)  # a group's first steps are recorded, which takes longer
            size_s = tried[size].step_s(steps)
            if size_s > _SLOWER * best_s:
                break
            best_s = min(best_s, size_s)
        turns = [{size: one.step_s(steps) for size, one in tried.items()} for _ in range(_TURNS)]
    return {size: statistics.median([turn[size] for turn in turns]) for size in tried}


class _Training:
    """Training of clients with the same samples, in one group or alone.

    Args:
        recipe: local training of the run.
        context: tensors that come with a client's first task beside the model, and the client's state before that.
        samples: samples of each client.
        size: number of clients; 1: one alone.
        clock: function that reads the seconds of processor time of this thread.
    """

    def __init__(
        self, recipe: Recipe, context: LocalContext, samples: Held, *, size: int, clock: Callable[[], float]
    ) -> None:
        device = torch.device("cpu")
        parts: dict[str, Any] = {
            "module": copy.deepcopy(recipe.module),
            "loss": on_device(recipe.loss, device),
            "local": recipe.local,
            "phase": replace(recipe.phases[0], epochs=None),
            "device": device,
            "private": recipe.private,
            "moved": recipe.moved,
            "collate": recipe.collate,
            "may_ignore": recipe.may_ignore,
        }
        kept = each_part(context.client_state, lambda part: part.expand(size, -1))
        self._trainer = Trainer(**parts) if size == 1 else BatchedTrainer(**parts)
        if isinstance(self._trainer, Trainer):
            self._trainer.record_at_once()
        self._start = Layout.of(recipe.module, recipe.private, recipe.moved).pack(recipe.module)
        self._context = context if size == 1 else context._replace(client_state=kept)
        self._samples = samples
        self._size = size
        self._clock = clock

    def step_s(self, steps: int) -> float:
        """Seconds of a client's step, from the start of its task to its end.

        Args:
            steps: number of steps that each client takes.
        """
        size = self._size
        context = self._context._replace(steps=(steps,) * size)
        began_s = self._clock()
        if isinstance(self._trainer, Trainer):
            self._trainer.train(*self._start, self._samples, order=np.random.default_rng(0), seed=0, context=context)
        else:
            orders = [partial(np.random.default_rng, 0)] * size
            self._trainer.train(*self._start, [self._samples] * size, orders, context, [int] * size)
        return (self._clock() - began_s) / (size * steps)
