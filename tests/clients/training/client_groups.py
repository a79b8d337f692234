"""Groups of clients: modules under ``vmap`` against each client alone, and devices with little room."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fed.clients.training.batched_trainer import BatchedTrainer
from tests.devices import Current

__all__ = ["CLIENTS", "assert_computed_alike", "of_a_small_device"]

CLIENTS = 3


def assert_computed_alike(
    module: nn.Module, shape: tuple[int, ...], mode: AbstractContextManager[Any], *, is_common: bool
) -> None:
    """Outputs and gradients of clients, each with parameters of its own, on the test's device.

    Args:
        module: in float64.
        shape: of one sample.
        mode: under which ``vmap`` computes them together.
        is_common: all clients read the same samples.
    """
    torch.manual_seed(0)
    device = Current.device
    parameters = {
        name: (part + 0.3 * torch.randn(CLIENTS, *part.shape)).detach().to(device).requires_grad_(part.requires_grad)
        for name, part in module.named_parameters()
    }
    inputs = torch.randn(CLIENTS, 5, *shape, dtype=torch.float64).to(device)
    module = module.to(device)

    def forward(own: dict[str, Tensor], x: Tensor) -> Any:
        return functional_call(module, own, (x.clone(),))

    with mode:
        together = vmap(forward, in_dims=(0, None if is_common else 0))(parameters, inputs[0] if is_common else inputs)
    alone = torch.stack(
        [
            forward({name: part[client] for name, part in parameters.items()}, inputs[0 if is_common else client])
            for client in range(CLIENTS)
        ]
    )
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(_gradients(together, parameters), _gradients(alone, parameters), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def _gradients(outputs: Tensor, parameters: dict[str, Tensor]) -> list[Tensor]:
    trained = [part for part in parameters.values() if part.requires_grad]
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=torch.float64).to(outputs.device)
    weighed = outputs * weights.view_as(outputs)
    return [*torch.autograd.grad(weighed.sum(), trained, materialize_grads=True, allow_unused=True)]


def of_a_small_device(monkeypatch: pytest.MonkeyPatch, room: int) -> list[int]:
    """Numbers of clients that were tried together, on a device with room for ``room`` of them."""
    together = BatchedTrainer._together
    tried: list[int] = []

    def on_the_device(self: BatchedTrainer, group: Any, dtype: torch.dtype | None) -> Any:
        count = len(group.samples)
        tried.append(count)
        if count > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return together(self, group, dtype)

    monkeypatch.setattr(BatchedTrainer, "_together", on_the_device)
    return tried
