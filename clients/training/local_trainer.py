"""Local trainer: the contract of trainers of one client, and the common part of PyTorch's trainers.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np

from fed.aggregators.base import Phase
from fed.clients.data import ClientId, Held
from fed.clients.data.collate import Collating
from fed.clients.scoring.measures import Loss
from fed.clients.training.local_context import LocalContext
from fed.config.experiment import Local
from fed.vectors.layout import Layout
from fed.vectors.tensors import Tensor, nn, torch

if TYPE_CHECKING:
    from fed.clients.training.evaluation import Score

__all__ = ["HALF", "LocalResult", "LocalTrainer", "MakeTrainer", "ScoringTrainer", "TorchTrainer"]

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types of half precision, by the names of ``local.precision``."""


class LocalResult(NamedTuple):
    """Result of local training.

    Args:
        params_V: floating-point state.
        integers_I: integer buffers.
        train_loss: mean loss over the samples seen; 0 where the trainer finds none.
        samples: number of samples, where the trainer alone knows them; None: those that it was given.
        metrics: name → further numbers that an app tells of its training.
    """

    params_V: Tensor
    integers_I: Tensor
    train_loss: float
    samples: int | None = None
    metrics: Mapping[str, float] = MappingProxyType({})


class LocalTrainer(Protocol):
    """Trainer of single clients: from a state, samples and a task's context to the state after local training.

    :class:`fed.clients.training.trainer.Trainer` is the one for PyTorch; another framework's trains its own arrays, and
    gives and takes states as tensors on the CPU. All its random numbers come from the streams and seeds that it is
    given, so that the same task has the same result wherever it is done.
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
        samples: Held,
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
            seed: seed of the model's own draws, such as those of dropout, and of those that make batches.
            context: contents of the task beside the model: step size, number of steps, state of the algorithm.
        """

    def measure(
        self, vector_V: Tensor, integers_I: Tensor, samples: Held, seed: int, *, gradient: bool
    ) -> tuple[float, Tensor]:
        """Mean loss over a client's samples in a state, and if wanted its gradient [P].

        Args:
            vector_V: the floating-point state.
            integers_I: the integer buffers.
            samples: the client's (inputs, targets).
            seed: seed of the model's own draws.
            gradient: True if the gradient is wanted; otherwise any tensor may stand in its place.
        """

    def load(self, vector_V: Tensor, integers_I: Tensor) -> "nn.Module":
        """A module that computes outputs in a state; for another framework, a module whose forward calls its model.

        Args:
            vector_V: the floating-point state.
            integers_I: the integer buffers.
        """


@runtime_checkable
class ScoringTrainer(Protocol):
    """Trainer whose clients score models on samples of their own, which nothing else sees."""

    def evaluate(
        self, client: ClientId, vector_V: Tensor, integers_I: Tensor, *, seed: int, round_number: int
    ) -> "tuple[Score, int]":
        """Score of a state, and the number of samples that it was scored on.

        Args:
            client: id of the client.
            vector_V: the floating-point state.
            integers_I: the integer buffers.
            seed: seed of the client's own draws.
            round_number: number of the round that the state is of, from 1.
        """

    def take_notes(self) -> tuple[str, ...]:
        """Sentences on the scores for the log of the run, which have not been taken before."""


class MakeTrainer(Protocol):
    """Function that makes the trainer of one phase of local training."""

    def __call__(self, phase: Phase, loss: Loss, device: "torch.device") -> LocalTrainer:
        """The trainer.

        Args:
            phase: trained parameters, rule and length of this phase.
            loss: (output, target) → scalar, on the device.
            device: device that computes.
        """


@dataclass(eq=False)
class TorchTrainer:
    """Base of PyTorch's trainers: a model, and one phase of its local training.

    Attributes:
        layout: layout of the model.
        half: type of half precision; None without it.
        precision: context for forward passes in that precision.
        is_plain: True if a step is x ← x − η g and no more, so that it can be taken as the gradient is computed.

    Args:
        module: the model; the trainer takes it over.
        loss: (output, target) → scalar.
        local: the experiment's section of that name; the trainer's has the epochs of the phase.
        phase: trained parameters, rule and length of this phase.
        device: device that computes.
        private: names of the tensors that the model does not share.
        moved: names of the tensors that the coordinator alone moves.
        collate: function that makes batches of samples; None: they are stacked.
        may_ignore: True if targets may be labels that do not count, so that those of a task are looked at.
    """

    module: "nn.Module"
    loss: Loss
    local: Local
    phase: Phase
    device: "torch.device"
    private: Collection[str] = ()
    moved: Collection[str] = ()
    collate: Collating | None = None
    may_ignore: bool = True

    def __post_init__(self) -> None:
        self.module.to(self.device)
        self.layout = Layout.of(self.module, self.private, self.moved)
        self.local = self.phase.local(self.local)
        self.half = HALF.get(self.local.precision)
        self.precision: AbstractContextManager[object] = (
            torch.autocast(self.device.type, dtype=self.half) if self.half else nullcontext()
        )
        adds_nothing = self.local.optimizer == "sgd" and not self.local.momentum and not self.local.weight_decay
        self.is_plain = adds_nothing and self.phase.rule is None and self.phase.trains == "all"
