"""Optimizers on flat vectors against ``torch.optim``.

Shapes: P parameters; K clients.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fed.clients.training.optimizers import SGD, AdamOptimizer, Optimizer, optimizer_for
from fed.config.experiment import Local

STEPS = 50
Reference = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def made(keys: dict[str, Any]) -> Optimizer:
    local = Local(**keys)
    return optimizer_for(local, local.lr)


# The experiment's keys beside torch's own spelling of them.
SGDS: dict[str, tuple[dict[str, Any], Reference]] = {
    "plain": ({"lr": 0.1}, lambda p: torch.optim.SGD(p, 0.1)),
    "decay": ({"lr": 0.1, "weight_decay": 0.3}, lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.3)),
    "momentum": ({"lr": 0.1, "momentum": 0.9}, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "all": (
        {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.8, nesterov=True, weight_decay=0.1),
    ),
}
ADAMS: dict[str, tuple[dict[str, Any], Reference]] = {
    "adam": ({"optimizer": "adam", "lr": 0.01}, lambda p: torch.optim.Adam(p, 0.01)),
    "adam, decay": (
        {"optimizer": "adam", "lr": 0.1, "betas": [0.8, 0.95], "eps": 1e-3, "weight_decay": 0.2},
        lambda p: torch.optim.Adam(p, 0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.2),
    ),
    "adamw": (
        {"optimizer": "adamw", "lr": 0.1, "betas": [0.7, 0.9], "weight_decay": 0.2},
        lambda p: torch.optim.AdamW(p, 0.1, betas=(0.7, 0.9), weight_decay=0.2),
    ),
    "adamw, no decay": (
        {"optimizer": "adamw", "lr": 0.01},
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.0),
    ),
}
RULES = {**SGDS, **ADAMS}
each_rule = pytest.mark.parametrize("name", RULES)


def problem(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    """Where to start, and the gradients of the 50 steps; sizes that no vector register divides."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(*shape, 37, dtype=dtype, generator=generator)
    gradients = torch.randn(STEPS, *shape, 37, dtype=dtype, generator=generator)
    return start, gradients * 10.0 ** torch.linspace(-3, 1, 37, dtype=dtype)


def ours(keys: dict[str, Any], start: Tensor, gradients: Tensor) -> Tensor:
    x, buffer, optimizer = start.clone(), torch.empty_like(start), made(keys)
    for gradient in gradients:
        optimizer.step(x, buffer.copy_(gradient))  # which it may overwrite, as the trainer does before the next step
    return x


def theirs(reference: Reference, start: Tensor, gradients: Tensor) -> Tensor:
    parameter = nn.Parameter(start.clone())
    optimizer = reference([parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@each_rule
def test_fifty_steps_are_torchs(name: str) -> None:
    """The same operations in the same order, up to the rounding of scalars; in float64."""
    keys, reference = RULES[name]
    problem_64 = problem(torch.float64)
    torch.testing.assert_close(ours(keys, *problem_64), theirs(reference, *problem_64), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", SGDS)
def test_sgd_is_torchs_to_the_bit_in_float32(name: str) -> None:
    keys, reference = SGDS[name]
    assert torch.equal(ours(keys, *problem(torch.float32)), theirs(reference, *problem(torch.float32)))


@each_rule
def test_many_clients_in_one_batch_move_as_each_alone(name: str) -> None:
    keys, _ = RULES[name]
    start_KP, gradients_SKP = problem(torch.float32, 3)
    together_KP = ours(keys, start_KP, gradients_SKP)
    for client in range(3):
        assert torch.equal(together_KP[client], ours(keys, start_KP[client], gradients_SKP[:, client]))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, SGD(0.1)),
        (
            {"lr": 0.5, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            SGD(0.5, momentum=0.9, nesterov=True, weight_decay=0.1),
        ),
        (
            {"optimizer": "adam", "betas": [0.1, 0.2], "eps": 1e-4, "weight_decay": 0.1},
            AdamOptimizer(0.1, betas=(0.1, 0.2), eps=1e-4, weight_decay=0.1),
        ),
        ({"optimizer": "adamw", "lr": 0.01}, AdamOptimizer(0.01, decoupled=True)),
    ],
)
def test_keys_of_the_experiment_reach_the_optimizer(keys: dict[str, Any], expected: Optimizer) -> None:
    assert made(keys) == expected
