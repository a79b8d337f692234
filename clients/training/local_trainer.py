"""Local trainer: the contract of what trains one client, and what PyTorch's trainers have in common.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from fed.aggregators.base import Phase
from fed.clients.data import Pair
from fed.clients.scoring.measures import Loss
from fed.clients.training.local_context import LocalContext
from fed.config.experiment import Local
from fed.vectors.layout import Layout
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["LocalResult", "LocalTrainer", "MakeTrainer", "TorchTrainer"]

_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class LocalResult(NamedTuple):
    """Result of local training: the state, and the mean loss over the samples seen."""

    vector_V: Tensor
    integers_I: Tensor
    train_loss: float


class LocalTrainer(Protocol):
    """Trainer of single clients: from a state, samples and what comes with a task to the state after local training.

    :class:`fed.clients.training.trainer.Trainer` is the one for PyTorch; another framework's trains its own arrays, and
    gives and takes states as tensors on the CPU. It draws random numbers from what it is given alone, so that the same
    task has the same result wherever it is done.
    """

    @property
    def layout(self) -> Layout:
        """Layout of the model's state."""

    def steps(self, samples: int, steps: int | None) -> int:
        """Number of optimizer steps of a task.

        Args:
            samples: number of samples of the client.
            steps: the task's own number of steps; None: as many as the experiment says.
        """

    def train(
        self,
        vector_V: Tensor,
        integers_I: Tensor,
        samples: Pair,
        *,
        order: np.random.Generator,
        seed: int,
        context: LocalContext,
    ) -> LocalResult:
        """Train from a state on a client's samples.

        Args:
            vector_V: the floating-point state to start from, which is not changed.
            integers_I: the integer buffers to start with, which are not changed.
            samples: the client's (inputs, targets).
            order: stream that shuffles them.
            seed: seed of what the model itself draws, as dropout does.
            context: what comes with the task beside the model: step size, number of steps, state of the algorithm.
        """

    def measure(
        self, vector_V: Tensor, integers_I: Tensor, samples: Pair, seed: int, *, gradient: bool
    ) -> tuple[float, Tensor]:
        """Mean loss over a client's samples in a state, and if wanted its gradient [P].

        Args:
            vector_V: the floating-point state.
            integers_I: the integer buffers.
            samples: the client's (inputs, targets).
            seed: seed of what the model itself draws.
            gradient: True if the gradient is wanted; else it may be anything.
        """

    def load(self, vector_V: Tensor, integers_I: Tensor) -> "nn.Module":
        """A module that computes outputs in a state; around another framework's model one whose forward calls that.

        Args:
            vector_V: the floating-point state.
            integers_I: the integer buffers.
        """


class MakeTrainer(Protocol):
    """Function that makes the trainer of one phase of local training."""

    def __call__(self, phase: Phase, loss: Loss, device: "torch.device") -> LocalTrainer:
        """The trainer.

        Args:
            phase: what is trained, and by which rule.
            loss: (output, target) → scalar, on the device.
            device: the device to compute on.
        """


@dataclass(eq=False)
class TorchTrainer:
    """Base of PyTorch's trainers: a model, and one phase of its local training.

    Attributes:
        layout: the model's.
        half: the type of half precision, if it is wanted.
        precision: the context for forward passes in that precision.
        is_plain: a step is x ← x − η g and no more, so that it can be taken where the gradient is computed.

    Args:
        module: the model; the trainer takes it over.
        loss: (output, target) → scalar.
        local: the experiment's section of that name; the trainer's has the epochs of the phase.
        phase: what is trained, and by which rule.
        device: where to compute.
        private: the names of what the model does not share.
    """

    module: "nn.Module"
    loss: Loss
    local: Local
    phase: Phase
    device: "torch.device"
    private: Collection[str] = ()

    def __post_init__(self) -> None:
        self.module.to(self.device)
        self.layout = Layout.of(self.module, self.private)
        self.local = self.phase.local(self.local)
        self.half = _HALF.get(self.local.precision)
        self.precision: AbstractContextManager[object] = (
            torch.autocast(self.device.type, dtype=self.half) if self.half else nullcontext()
        )
        adds_nothing = self.local.optimizer == "sgd" and not self.local.momentum and not self.local.weight_decay
        self.is_plain = adds_nothing and self.phase.rule is None and self.phase.trains == "all"
