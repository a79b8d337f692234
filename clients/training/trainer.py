"""Trainer: one client's local training, optimizer steps on its samples and the model as a flat vector.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from functools import cache

import numpy as np

from fed.clients.data import Held
from fed.clients.data.held import is_read, size_of
from fed.clients.training.batches import Batches, normalises_batches
from fed.clients.training.contrast import Contrast
from fed.clients.training.devices import read_back
from fed.clients.training.draws import RandomDraw, draws_of
from fed.clients.training.flat import FlatParameters
from fed.clients.training.local_context import LocalContext
from fed.clients.training.local_trainer import LocalResult, TorchTrainer
from fed.clients.training.module_state import ModuleState
from fed.clients.training.optimizers import optimizer_for
from fed.clients.training.reading import Batch, called, reading
from fed.clients.training.recorded_gradients import RecordedGradients, is_recordable
from fed.clients.training.steps import MeanLoss, loss_for, parts_of_measurement, steps_of
from fed.vectors import trees
from fed.vectors.fixed_part import TrainingModes, Untouched
from fed.vectors.randomness import seeded_torch
from fed.vectors.tensors import Tensor, nn, torch
from fed.vectors.trees import Tree

__all__ = ["Trainer"]

_NOTHING = LocalContext()
_CANNOT_VIEW = "view size is not compatible"  # PyTorch's words for a .view() that meets channels last


class Trainer(TorchTrainer):
    """Trains one client after another with one module, whose parameters are views of one flat vector.

    A parameter that the loss does not reach has a gradient of zero. Weight decay and momentum still move it, whereas
    ``torch.optim`` passes it over.

    On the CPU, modules with 2-D convolutions are trained with channels last, which takes a tenth to a fifth off their
    time, unless they view tensors in ways that need the usual order.

    Attributes:
        plan: (number of samples, the task's own number of steps or None) → :class:`Batches`.

    Raises:
        InvalidModel: if a term of the loss compares representations, and the model has no linear layer.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = self.phase.rule
        self._flat = FlatParameters(self.module, self.layout)
        self._state = ModuleState(self.module, self.layout, self._flat)
        self._modes = TrainingModes(self.module)
        self._untouched = Untouched(self.module, self.moved)
        self._moves = self.phase.moves(self._flat.shared)
        never_single = normalises_batches(self.module)
        self.plan = cache(
            lambda samples, steps: Batches(self.local, samples, never_single, steps=self.phase.steps(steps))
        )
        self._loss = self.loss
        self._contrast = Contrast(self.module, rule) if rule is not None and rule.contrasts else None
        self._is_scaled = self.half is torch.float16
        is_recorded = self.device.type == "cpu" and self.half is None and self._contrast is None
        self._recorded: RecordedGradients | None = None
        if is_recorded and is_recordable(self.module):
            self._recorded = RecordedGradients(self.module, self._flat)
        # In half precision normalising by groups becomes much slower with channels last.
        self._tries_channels_last = (
            (self.device.type, self.half) == ("cpu", None)
            and self.layout.dtype.itemsize >= 4
            and self._flat.has_convolutions
            and not _normalises_channels(self.module)
        )
        self._in_usual_order: set[Hashable] = set()  # shapes of clients' inputs with which channels last has failed

    def record_at_once(self) -> None:
        """Record operations with the first batch of each shape: steps that are timed are then those of a long run."""
        if self._recorded is not None:
            self._recorded.after = 0

    def steps(self, samples: int, steps: int | None) -> int:
        """Number of optimizer steps of a task.

        Args:
            samples: number of samples of the client.
            steps: the task's own number of steps; None: as many as the experiment says.
        """
        return self.plan(samples, steps).steps

    def load(self, vector_V: Tensor, integers_I: Tensor, *, channels_last: bool = False) -> "nn.Module":
        """Module in a given state; buffers that are not saved are reset to their first values.

        Args:
            vector_V: the floating-point state.
            integers_I: the integer buffers.
            channels_last: True to lay convolutions out with channels last.
        """
        self._flat.arrange(channels_last=channels_last)
        self._state.write(vector_V, integers_I)
        return self.module

    def train(
        self,
        vector_V: Tensor,
        integers_I: Tensor,
        samples: Held,
        *,
        order: np.random.Generator,
        seed: int,
        context: LocalContext = _NOTHING,
    ) -> LocalResult:
        """Train from a state on a client's samples.

        Args:
            vector_V: the floating-point state to start with.
            integers_I: the integer buffers to start with.
            samples: the client's (inputs, targets).
            order: the stream that shuffles them.
            seed: seed of the module's own draws, such as those of dropout, and of those that make batches.
            context: contents of the task beside the model.

        Returns:
            The trained state, on the CPU.
        """
        # With the number of samples: whether a view fails depends on it.
        shape = _shape(samples) if self._tries_channels_last else None
        if self._tries_channels_last and shape not in self._in_usual_order:
            began = order.bit_generator.state  # a second attempt must shuffle as the first did
            try:
                self.load(vector_V, integers_I, channels_last=True)
                return self._train(samples, order, seed, context)
            except RuntimeError as error:
                if _CANNOT_VIEW not in str(error):
                    raise
            self._in_usual_order.add(shape)
            order.bit_generator.state = began
        self.load(vector_V, integers_I)
        return self._train(samples, order, seed, context)

    def draws(self, inputs: Tree) -> list[RandomDraw]:
        """All that the module draws for a batch, in its order, with images laid out as in training.

        Args:
            inputs: inputs of the batch, which the module may overwrite.

        Raises:
            UnlikeDraws: if clients in a group cannot draw it.
        """
        self._begin()
        with self.precision, torch.enable_grad():
            if self._tries_channels_last:
                self._flat.arrange(channels_last=True)
                try:
                    return draws_of(lambda: called(self.module, trees.mapped(torch.clone, inputs)))
                except RuntimeError as error:
                    if _CANNOT_VIEW not in str(error):
                        raise
            self._flat.arrange(channels_last=False)
            return draws_of(lambda: called(self.module, inputs))

    def _begin(self) -> None:
        """Note the fixed part, and set the training mode as :func:`fed.vectors.fixed_part.in_training` does."""
        self._untouched.begin()
        self._modes.set()

    def _train(self, samples: Held, order: np.random.Generator, seed: int, context: LocalContext) -> LocalResult:
        """Train from the state that is loaded."""
        self._begin()
        x_Q = self._flat.x_Q
        shared = self._flat.shared
        if self.phase.rule is not None:
            context = context.spread(self._flat.spread, x_Q[:shared])
        if self._contrast is not None:
            assert context.anchor_P is not None
            self._contrast.hold(self._flat.named(context.anchor_P), self._flat.named(context.client_state.previous_P))
        lr = self.local.lr if context.lr is None else context.lr
        optimizer = optimizer_for(self.local, lr)
        scaler = _LossScale()
        losses = MeanLoss()
        self._choose_loss(samples)
        batches = self.plan(size_of(samples), context.steps[0] if context.steps else None)
        descends = self.is_plain and not self._is_scaled
        corrects = self.phase.rule is not None and self.phase.rule.corrects
        moved_Q = x_Q[self._moves]  # a view, so that steps move x_Q
        with seeded_torch(seed, self.device):
            for step in self._steps(samples, batches, order, seed):
                if descends and len(step) == 1:
                    self._descend(step[0], losses, lr)
                    continue
                gradient_Q = self._gradient(step, losses, scaler)
                if corrects:
                    assert self.phase.rule is not None
                    gradient_Q = context.corrected(self.phase.rule, gradient_Q, x_Q, shared)
                optimizer.step(moved_Q, gradient_Q[self._moves])
        self._untouched.check()
        params_V, integers_I = self._state.read()
        integers_I, params_V = read_back([integers_I, params_V])
        return LocalResult(params_V, integers_I, losses.mean())

    def measure(
        self, vector_V: Tensor, integers_I: Tensor, samples: Held, seed: int, *, gradient: bool
    ) -> tuple[float, Tensor]:
        """Mean loss over a client's samples in a state, and if wanted its gradient [P], both on the CPU.

        Args:
            vector_V: the floating-point state.
            integers_I: the integers.
            samples: (inputs, targets) of the client.
            seed: seed of the module's own draws.
            gradient: True if the gradient is wanted; otherwise zeros stand in its place.
        """
        self.load(vector_V, integers_I)
        self._begin()
        gradient_Q = torch.zeros_like(self._flat.x_Q)
        losses = MeanLoss()
        self._choose_loss(samples)
        step = parts_of_measurement(samples, reading(samples, self.collate, self.device, seed))
        with seeded_torch(seed, self.device), torch.set_grad_enabled(gradient):
            if gradient:
                gradient_Q = self._gradient(step, losses, _LossScale())
            else:
                for batch in step:
                    self._loss_of(batch, losses)
        self._flat.bind_again()
        return losses.mean(), self._flat.gathered(gradient_Q).cpu()

    def _choose_loss(self, samples: Held) -> None:
        self._loss = loss_for(self.loss, samples, collate=self.collate, may_ignore=self.may_ignore)

    def _steps(self, samples: Held, batches: Batches, order: np.random.Generator, seed: int) -> Iterator[list[Batch]]:
        """The batches of each optimizer step."""
        its = reading(samples, self.collate, self.device, seed)
        return steps_of(its, batches, order, self.local.accumulate)

    def _gradient(self, step: list[Batch], losses: MeanLoss, scaler: "_LossScale") -> Tensor:
        """The gradient [Q] of the mean loss over a step's samples, batch by batch."""
        if len(step) == 1:
            return self._gradient_of_batch(step[0], losses, scaler)
        gradient_Q = torch.zeros_like(self._flat.x_Q)
        samples = sum(batch.samples for batch in step)
        for batch in step:
            part_Q = self._gradient_of_batch(batch, losses, scaler)
            gradient_Q.add_(part_Q, alpha=batch.samples / samples)
        return gradient_Q

    def _gradient_of_batch(self, batch: Batch, losses: MeanLoss, scaler: "_LossScale") -> Tensor:
        if self._is_scaled:
            return scaler.gradient(self._loss_of(batch, losses), self._flat)
        return self._flat.joined(self._gradients(batch, losses))

    def _descend(self, batch: Batch, losses: MeanLoss, lr: float) -> None:
        """Take a step of plain gradient descent."""
        if self._recorded is not None and (loss := self._recorded.descend(self._loss, batch, lr)) is not None:
            losses.add(loss, batch.samples)
            return
        self._flat.descend(self._flat.gradients(self._loss_of(batch, losses)), lr)

    def _gradients(self, batch: Batch, losses: MeanLoss) -> Sequence[Tensor | None]:
        """Gradients of all parameters in their shapes; None for one that the loss does not depend on."""
        if self._recorded is not None and (found := self._recorded.of(self._loss, batch)) is not None:
            *gradients, loss = found
            losses.add(loss, batch.samples)
            return gradients
        return self._flat.gradients(self._loss_of(batch, losses))

    def _loss_of(self, batch: Batch, losses: MeanLoss) -> Tensor:
        if self.half is None:
            return self._found_loss(batch, losses)
        with self.precision:
            return self._found_loss(batch, losses)

    def _found_loss(self, batch: Batch, losses: MeanLoss) -> Tensor:
        loss = self._loss(called(self.module, batch.inputs), batch.targets)
        losses.add(loss.detach(), batch.samples)  # else the graph of every batch stays in memory
        return loss if self._contrast is None else loss + self._contrast.penalty(batch.inputs)


def _normalises_channels(module: "nn.Module") -> bool:
    """True if each channel is normalised by itself, which takes up to twice as long with channels last."""
    return any(
        isinstance(part, nn.InstanceNorm2d) or (isinstance(part, nn.GroupNorm) and part.num_groups == part.num_channels)
        for part in module.modules()
    )


def _shape(samples: Held) -> Hashable:
    """Shapes of the inputs, with the number of samples; of those on demand the number alone."""
    if is_read(samples):
        return len(samples)
    return trees.shapes(samples[0])


class _LossScale:
    """Scale of a float16 loss, so that small gradients do not vanish; it halves where large ones overflow.

    No batch is skipped: an overflow repeats the backward pass. A gradient that is not finite at scale 1 is returned as
    it is.
    """

    def __init__(self) -> None:
        self._scale = 2.0**16  # a power of two scales without rounding

    def gradient(self, loss: Tensor, flat: FlatParameters) -> Tensor:
        while True:
            gradients = flat.gradients(loss * self._scale, keep_graph=True)
            gradient_Q = flat.joined(gradients).div_(self._scale)
            if self._scale <= 1 or not math.isfinite(float(loss.detach())) or bool(torch.isfinite(gradient_Q).all()):
                return gradient_Q
            self._scale /= 2
