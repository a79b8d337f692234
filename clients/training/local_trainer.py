"""Local trainer: the common part of the trainers of one client and of a group.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from fed.aggregators.base import Phase
from fed.clients.scoring.measures import Loss
from fed.config.experiment import Local
from fed.vectors.layout import Layout
from fed.vectors.tensors import nn, torch

__all__ = ["LocalTrainer"]

_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(eq=False)
class LocalTrainer:
    """Base of trainers: a model, and one phase of its local training.

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
