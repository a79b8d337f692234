"""Lean loop: FedAvg by somebody who counts microseconds, for any model and each optimizer of the framework.

One client after another with one module: gradients by ``torch.autograd.grad``, steps in place for all parameters at
once, the weighted mean of models. Nothing is checked, nothing is kept, and no result depends on a stream of its own.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fed.config.experiment import Local

__all__ = ["LeanLoop"]

Pair = tuple[Tensor, Tensor]


class LeanLoop:
    """Rounds of FedAvg, one thread.

    Args:
        module: model, which the loop takes over.
        clients: (inputs, targets) of each client.
        local: local training, in epochs.
        cohort: number of clients in a round.
        channels_last: True if it lays images and convolutions out with channels last, where there are convolutions.
    """

    def __init__(
        self, module: nn.Module, clients: Sequence[Pair], local: Local, cohort: int, *, channels_last: bool = True
    ) -> None:
        self._module = module.train()
        self._clients = clients
        if channels_last and any(isinstance(part, nn.Conv2d) for part in module.modules()):
            module.to(memory_format=torch.channels_last)
            self._clients = [(inputs.to(memory_format=torch.channels_last), targets) for inputs, targets in clients]
        self._local = local
        self._cohort = cohort
        self._parameters = list(module.parameters())
        # In-place updates of these leave no trace in the graph.
        self._values = [parameter.data for parameter in self._parameters]
        floats = [part for part in module.buffers() if part.is_floating_point()]
        self._integers = [part for part in module.buffers() if not part.is_floating_point()]
        self._state = [*self._values, *floats]
        self._model = [part.clone() for part in self._state]
        self._counts = [part.clone() for part in self._integers]

    def round(self) -> None:
        """Train a cohort, and take the mean of its models."""
        cohort = [self._clients[client] for client in torch.randperm(len(self._clients))[: self._cohort].tolist()]
        total = sum(len(targets) for _, targets in cohort)
        mean = [torch.zeros_like(part) for part in self._state]
        for inputs, targets in cohort:
            torch._foreach_copy_(self._state, self._model)
            for part, count in zip(self._integers, self._counts, strict=True):
                part.copy_(count)
            self._train(inputs, targets)
            torch._foreach_add_(mean, self._state, alpha=len(targets) / total)
        self._model = mean
        self._counts = [part.clone() for part in self._integers]

    def model(self) -> nn.Module:
        """The module with the global model."""
        torch._foreach_copy_(self._state, self._model)
        return self._module

    def _train(self, inputs: Tensor, targets: Tensor) -> None:
        local = self._local
        step = _Adam(local) if local.optimizer != "sgd" else _Momentum(local)
        for _ in range(local.epochs or 1):
            for batch in torch.randperm(len(targets)).split(local.batch_size):
                loss = cross_entropy(self._module(inputs[batch]), targets[batch])
                step(self._values, torch.autograd.grad(loss, self._parameters))


class _Momentum:
    """Steps of SGD, as ``torch.optim.SGD`` takes them for all parameters at once."""

    def __init__(self, local: Local) -> None:
        self._local = local
        self._momentum: Sequence[Tensor] = ()

    def __call__(self, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        local = self._local
        if local.weight_decay:
            gradients = torch._foreach_add(gradients, values, alpha=local.weight_decay)
        if local.momentum:
            if self._momentum:
                torch._foreach_mul_(self._momentum, local.momentum)
                torch._foreach_add_(self._momentum, gradients)
            else:
                self._momentum = [gradient.clone() for gradient in gradients]
            if local.nesterov:
                gradients = torch._foreach_add(gradients, self._momentum, alpha=local.momentum)
            else:
                gradients = self._momentum
        torch._foreach_add_(values, gradients, alpha=-local.lr)


class _Adam:
    """Steps of Adam and AdamW, as ``torch.optim`` takes them for all parameters at once."""

    def __init__(self, local: Local) -> None:
        self._local = local
        self._first: Sequence[Tensor] = ()
        self._second: Sequence[Tensor] = ()
        self._steps = 0

    def __call__(self, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        local = self._local
        if local.weight_decay and local.optimizer == "adamw":
            torch._foreach_mul_(values, 1 - local.lr * local.weight_decay)
        elif local.weight_decay:
            gradients = torch._foreach_add(gradients, values, alpha=local.weight_decay)
        if not self._first:
            self._first = [torch.zeros_like(value) for value in values]
            self._second = [torch.zeros_like(value) for value in values]
        self._steps += 1
        beta1, beta2 = local.betas
        torch._foreach_lerp_(self._first, gradients, 1 - beta1)
        torch._foreach_mul_(self._second, beta2)
        torch._foreach_addcmul_(self._second, gradients, gradients, value=1 - beta2)
        roots = torch._foreach_sqrt(self._second)
        torch._foreach_div_(roots, math.sqrt(1 - beta2**self._steps))
        torch._foreach_add_(roots, local.eps)
        torch._foreach_addcdiv_(values, self._first, roots, value=-local.lr / (1 - beta1**self._steps))
