"""Adaptive optimisers on the server, against an independent version in NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fed.aggregators.base import Aggregator, Reduced
from fed.aggregators.fedopt import FedAdagrad, FedAdam, FedYogi

Floats = NDArray[np.float64]
STEPS, PARAMETERS = 50, 9
UPDATES = np.random.default_rng(0).standard_normal((STEPS, PARAMETERS)) * np.logspace(-5, 1, PARAMETERS)
"""From well below τ to well above it."""

SECOND: dict[type[Aggregator], Callable[[Floats, Floats, float], Floats]] = {
    FedAdagrad: lambda v, square, _: v + square,
    FedAdam: lambda v, square, beta2: beta2 * v + (1 - beta2) * square,
    FedYogi: lambda v, square, beta2: v - (1 - beta2) * square * np.sign(v - square),
}


def after(rule: Aggregator, updates: Floats) -> list[Floats]:
    state, models = rule.init(torch.linspace(-1, 1, PARAMETERS, dtype=torch.float64)), []
    for update in updates:
        state = rule.apply(state, Reduced((torch.from_numpy(update),), clients=3, population=7))
        models.append(state.model_P.numpy())
    return models


@pytest.mark.parametrize("rule", list(SECOND), ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("given", [{}, {"server_lr": 0.3, "beta1": 0.5, "tau": 0.02}], ids=["defaults", "others"])
def test_adaptive_optimiser_is_its_recursion_in_numpy(rule: Any, given: dict[str, float]) -> None:
    defaults = {"server_lr": 0.1, "beta1": 0.0} if rule is FedAdagrad else {"server_lr": 0.03, "beta1": 0.9}
    keys = {**defaults, "tau": 1e-3, **given}
    x, m, v = np.linspace(-1, 1, PARAMETERS), np.zeros(PARAMETERS), np.full(PARAMETERS, keys["tau"] ** 2)
    for update, model in zip(UPDATES, after(rule(**given), UPDATES), strict=True):
        m = keys["beta1"] * m + (1 - keys["beta1"]) * update
        v = SECOND[rule](v, update**2, 0.99)
        x = x + keys["server_lr"] * m / (np.sqrt(v) + keys["tau"])
        np.testing.assert_allclose(model, x, rtol=0, atol=1e-13)  # of numbers below 10, summed 50 times


@pytest.mark.parametrize("rule", [FedAdam, FedYogi])
def test_the_decay_of_the_second_moment_is_a_hyper_parameter(rule: Any) -> None:
    slow, fast = (after(rule(beta2=beta2), UPDATES)[-1] for beta2 in (0.999, 0.5))
    assert np.abs(slow - fast).max() > 1e-3
