"""Optimizers as algebra on flat vectors, elementwise, so that one client [P] and many [K, P] use the same code.

Each step equals ``torch.optim``'s of the same name. A state lasts for one task. Of many clients the last may drop out
from one step to the next.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from dataclasses import dataclass, field
from typing import TypeAlias

from fed.config.experiment import Local
from fed.vectors.tensors import Tensor, torch

__all__ = ["SGD", "AdamOptimizer", "Optimizer", "optimizer_for"]


@dataclass
class SGD:
    r"""Stochastic gradient descent, with momentum and weight decay.

    .. math:: g ← g + λ x, \qquad m ← ρ m + g, \qquad x ← x - η m \quad (\text{Nesterov: } x ← x - η (g + ρ m))

    Args:
        lr: η > 0.
        momentum: ρ ≥ 0.
        nesterov: True to step by g + ρ m, the gradient one momentum step ahead.
        weight_decay: λ ≥ 0.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    _momentum_P: Tensor | None = field(default=None, repr=False)

    def step(self, x_P: Tensor, gradient_P: Tensor) -> None:
        """One step, in place."""
        if self.weight_decay:
            gradient_P = gradient_P.add(x_P, alpha=self.weight_decay)
        if self.momentum:
            if self._momentum_P is None:
                # As torch.optim begins; a copy, for the gradient's memory is used again.
                self._momentum_P = gradient_P.clone()
            else:
                self._momentum_P = self._momentum_P[: len(gradient_P)]
                self._momentum_P.mul_(self.momentum).add_(gradient_P)
            gradient_P = gradient_P.add(self._momentum_P, alpha=self.momentum) if self.nesterov else self._momentum_P
        x_P.add_(gradient_P, alpha=-self.lr)


@dataclass
class AdamOptimizer:
    r"""Adam (Kingma & Ba 2015, 1412.6980) and, ``decoupled``, AdamW (Loshchilov & Hutter 2019, 1711.05101).

    .. math::
        m ← β_1 m + (1 - β_1) g, \quad v ← β_2 v + (1 - β_2) g^2, \quad
        x ← x - η \frac{m / (1 - β_1^t)}{\sqrt{v / (1 - β_2^t)} + ε}

    Args:
        lr: η > 0.
        betas: β₁ and β₂, in [0, 1).
        eps: ε > 0.
        weight_decay: λ ≥ 0: g ← g + λ x before the moments, or ``decoupled``, x ← (1 − η λ) x.
        decoupled: True for AdamW.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    _moments: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _steps: int = 0

    def step(self, x_P: Tensor, gradient_P: Tensor) -> None:
        """One step, in place."""
        if self.weight_decay and self.decoupled:  # before the step, as torch.optim does: the last bits agree
            x_P.mul_(1 - self.lr * self.weight_decay)
        elif self.weight_decay:
            gradient_P = gradient_P.add(x_P, alpha=self.weight_decay)
        if self._moments is None:
            self._moments = torch.zeros_like(x_P), torch.zeros_like(x_P)
        first_P = self._moments[0][: len(x_P)]  # clients that are done have dropped out
        second_P = self._moments[1][: len(x_P)]
        self._moments = (first_P, second_P)
        self._steps += 1
        beta1, beta2 = self.betas
        first_P.lerp_(gradient_P, 1 - beta1)
        second_P.mul_(beta2).addcmul_(gradient_P, gradient_P, value=1 - beta2)
        # In torch.optim's order, so that the last bits agree.
        root_P = second_P.sqrt().div_(math.sqrt(1 - beta2**self._steps)).add_(self.eps)
        x_P.addcdiv_(first_P, root_P, value=-self.lr / (1 - beta1**self._steps))


Optimizer: TypeAlias = SGD | AdamOptimizer
"""A rule for one step, which moves x_P in place and may overwrite the gradient, with its state."""


def optimizer_for(local: Local, lr: float) -> Optimizer:
    """New optimizer for one task, with the task's step size."""
    if local.optimizer == "sgd":
        return SGD(lr, momentum=local.momentum, nesterov=local.nesterov, weight_decay=local.weight_decay)
    return AdamOptimizer(
        lr,
        betas=local.betas,
        eps=local.eps,
        weight_decay=local.weight_decay,
        decoupled=local.optimizer == "adamw",
    )
