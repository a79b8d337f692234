"""One client's local training: a model, the client's samples, and so many steps of an optimizer on a flat vector.

Shapes: Q, trainable parameters as they are computed with (see :mod:`fed.clients.flat`); V, the whole floating-point
state; I, integers; N, a client's samples; B, those of an optimizer step; b, those of a batch, of which a step
accumulates one or more.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fed.aggregators.contracts import LocalRule
from fed.clients.batches import Batches, samples_of, steps_of
from fed.clients.data import Pair
from fed.clients.flat import FlatParameters
from fed.clients.optimizers import optimizer_for
from fed.experiment import Local
from fed.layout import Layout
from fed.randomness import seeded_torch

__all__ = ["Loss", "Trained", "Trainer", "samples_of", "steps_of"]

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(output, target) → a scalar, the mean over the batch."""

_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Trained:
    """What training leaves: the state, the mean loss over the samples trained on, and how many those were."""

    vector_V: Tensor
    integers_I: Tensor
    train_loss: float
    samples_seen: int


class Trainer:
    """Trains one client after another with one module, whose parameters are views of one flat vector.

    A parameter that the loss does not reach has a gradient of zero: weight decay and momentum move it all the same,
    where ``torch.optim`` passes it over.

    Args:
        module: the model; the trainer takes it over.
        loss: (output, target) → scalar.
        local: the experiment's section of that name.
        rule: a correction of the gradient, or None.
        device: where to compute.
    """

    def __init__(
        self, module: nn.Module, loss: Loss, local: Local, rule: LocalRule | None, device: torch.device
    ) -> None:
        self.module = module.to(device)
        self.layout = Layout.of(self.module)
        self.device = device
        self._loss = loss
        self._local = local
        self._rule = rule
        self._flat = FlatParameters(self.module, self.layout)
        saved = self.module.state_dict().keys()
        self._unsaved = {name: part.clone() for name, part in self.module.named_buffers() if name not in saved}
        self._normalises_batches = any(isinstance(part, _BatchNorm) for part in self.module.modules())

    def samples_of(self, samples: int) -> int:
        """How many samples a task of a client with so many sees, known before it is trained."""
        return samples_of(self._local, samples, self._normalises_batches)

    def load(self, vector_V: Tensor, integers_I: Tensor) -> nn.Module:
        """The module in a given state; buffers that are none, for they are not saved, are what they were at first."""
        self.layout.unpack(vector_V, integers_I, self.module)
        for name, part in self.module.named_buffers() if self._unsaved else ():
            if name in self._unsaved and part.shape == self._unsaved[name].shape:
                part.copy_(self._unsaved[name])
        self._flat.bind_again()
        return self.module

    def train(
        self,
        vector_V: Tensor,
        integers_I: Tensor,
        samples: Pair,
        *,
        order: np.random.Generator,
        seed: int,
        client_state: object = None,
        broadcast: tuple[Tensor, ...] = (),
    ) -> Trained:
        """Train from a state on a client's samples.

        Args:
            vector_V: where to start.
            integers_I: the integer buffers to start with.
            samples: the client's (inputs, targets).
            order: the stream that shuffles them.
            seed: for what the module itself draws, as dropout does.
            client_state: what the rule keeps on this client.
            broadcast: what the rule sent along.

        Returns:
            What training leaves, on the CPU.
        """
        self.load(vector_V, integers_I).train()
        x_Q = self._flat.x_Q
        anchor_Q = x_Q.clone() if self._rule else x_Q
        broadcast = tuple(self._flat.spread(part.to(self.device)) for part in broadcast)
        optimizer, scaler = optimizer_for(self._local), _LossScale()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        batches = Batches(self._local, len(samples[0]), self._normalises_batches)
        with seeded_torch(seed, self.device):
            for inputs_B, targets_B in self._steps(samples, batches, order):
                gradient_Q, loss = self._gradient(inputs_B, targets_B, batches.within(len(inputs_B)), scaler)
                self._flat.bind_again()
                if self._rule is not None:
                    gradient_Q = self._rule.correct(gradient_Q, x_Q, anchor_Q, client_state, broadcast)
                optimizer.step(x_Q, gradient_Q)
                loss_sum += loss * len(inputs_B)
        vector_V, integers_I = self.layout.pack(self.module)
        return Trained(vector_V.cpu(), integers_I.cpu(), float(loss_sum) / batches.seen, batches.seen)

    def _steps(self, samples: Pair, batches: Batches, order: np.random.Generator) -> Iterator[Pair]:
        """The samples of each optimizer step."""
        inputs_N, targets_N = (part.to(self.device, non_blocking=True) for part in samples)
        left = batches.steps
        for order_N in batches.orders(order):
            if batches.keeps_order:  # copies, for a model may change its inputs in place
                yield inputs_N.clone(), targets_N.clone()
                continue
            shuffled_N = torch.from_numpy(order_N).to(self.device)
            # Step by step, for a slice of all would begin anywhere, and what MKL computes depends on the alignment.
            for of_B in islice(shuffled_N.split_with_sizes(batches.sizes), left):
                yield inputs_N[of_B], targets_N[of_B]
            left -= len(batches.sizes)

    def _gradient(
        self, inputs_B: Tensor, targets_B: Tensor, sizes: list[int], scaler: "_LossScale"
    ) -> tuple[Tensor, Tensor]:
        """The gradient [Q] of the mean loss over a step's samples, batch by batch, and that loss."""
        if len(sizes) == 1:
            return self._gradient_of_batch(inputs_B, targets_B, scaler)
        gradient_Q, total = torch.zeros_like(self._flat.x_Q), torch.zeros((), dtype=torch.float64, device=self.device)
        for inputs_b, targets_b in zip(
            inputs_B.split_with_sizes(sizes), targets_B.split_with_sizes(sizes), strict=True
        ):
            part_Q, loss = self._gradient_of_batch(inputs_b, targets_b, scaler)
            share = len(inputs_b) / len(inputs_B)
            gradient_Q.add_(part_Q, alpha=share)
            total += loss * share
        return gradient_Q, total

    def _gradient_of_batch(self, inputs_b: Tensor, targets_b: Tensor, scaler: "_LossScale") -> tuple[Tensor, Tensor]:
        half = _HALF.get(self._local.precision)
        with torch.autocast(self.device.type, dtype=half) if half else nullcontext():
            loss = self._loss(self.module(inputs_b), targets_b)
        if half is torch.float16:
            return scaler.gradient(loss, self._flat), loss.detach()
        return self._flat.gradient(loss), loss.detach()


class _LossScale:
    """Scales a float16 loss so that small gradients do not vanish, and halves the scale where large ones overflow.

    No batch is skipped: an overflow repeats the backward pass. A gradient that is not finite at scale 1 is returned as
    it is.
    """

    def __init__(self) -> None:
        self._scale = 2.0**16

    def gradient(self, loss: Tensor, flat: FlatParameters) -> Tensor:
        while True:
            gradient_Q = flat.gradient(loss * self._scale, keep_graph=True).div_(self._scale)
            if self._scale <= 1 or not math.isfinite(float(loss.detach())) or bool(torch.isfinite(gradient_Q).all()):
                return gradient_Q
            self._scale /= 2
