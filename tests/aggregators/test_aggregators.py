"""The equations of FedAvg and its kin against NumPy, and hyper-parameters held to their ranges."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fed.aggregators.base import Aggregator, ClientWork, Reduced, Report
from fed.aggregators.bmuf import BMUF
from fed.aggregators.client_side import format_of
from fed.aggregators.fedavg import FedAvg
from fed.aggregators.fedavgm import FedAvgM
from fed.aggregators.fedopt import FedAdagrad, FedAdam, FedYogi
from fed.aggregators.fedprox import FedProx
from fed.aggregators.local_sgd import LocalSGD
from fed.aggregators.robust.algorithms import FedMedian
from fed.errors import ValueRange
from fed.vectors.layout import Layout

PARAMETERS = 11


def updates(seed: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(PARAMETERS, generator=generator, dtype=torch.float64) for _ in range(count)]


def reduced(mean_P: Tensor) -> Reduced:
    return Reduced((mean_P,), clients=1, population=1)


def after(rule: Aggregator, means: list[Tensor]) -> Any:
    state = rule.init(torch.linspace(-1, 1, PARAMETERS, dtype=torch.float64))
    for mean in means:
        state = rule.apply(state, reduced(mean))
    return state


@pytest.mark.parametrize(
    ("rule", "keys", "message"),
    [
        (FedProx, {"mu": -0.1}, "mu must be greater than or equal to 0, got -0.1"),
        (FedProx, {"mu": "0.1"}, "mu must be a number, got '0.1'"),
        (FedProx, {"mu": True}, "mu must be a number, got True"),
        (FedAvgM, {"momentum": 1.0}, "momentum must be less than 1, got 1.0"),
        (FedAvgM, {"server_lr": 0.0}, "server_lr must be greater than 0, got 0.0"),
        (BMUF, {"block_momentum": float("nan")}, "block_momentum must be"),
        (BMUF, {"block_lr": -1}, "block_lr must be greater than 0, got -1"),
        (FedAdam, {"beta1": 1.0}, "beta1 must be less than 1, got 1.0"),
        (FedAdam, {"server_lr": 0.0}, "server_lr must be greater than 0, got 0.0"),
        (FedYogi, {"beta2": -0.1}, "beta2 must be greater than or equal to 0, got -0.1"),
        (FedAdagrad, {"tau": 0.0}, "tau must be greater than 0, got 0.0"),
        (BMUF, {"nesterov": 1}, "nesterov must be a boolean, got 1"),
    ],
)
def test_hyper_parameter_out_of_range_is_named_with_its_range(rule: Any, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueRange) as caught:
        rule(**keys)
    assert message in str(caught.value)


def test_fedavgm_is_its_recursion_in_numpy() -> None:
    means, beta, server_lr = updates(3, 6), 0.6, 0.3
    state = after(FedAvgM(momentum=beta, server_lr=server_lr), means)
    x, v = np.linspace(-1, 1, PARAMETERS), np.zeros(PARAMETERS)
    for mean in means:
        v = beta * v + mean.numpy()
        x = x + server_lr * v
    np.testing.assert_allclose(state.model_P.numpy(), x, rtol=0, atol=1e-14)


@pytest.mark.parametrize("nesterov", [False, True])
def test_bmuf_is_its_recursion_in_numpy(nesterov: bool) -> None:
    # With G(t) = W̄(t) − W_g(t−1) given, W does not depend on where blocks start; the start itself does.
    means, eta, zeta = updates(4, 6), 0.7, 1.3
    rule = BMUF(block_momentum=eta, block_lr=zeta, nesterov=nesterov)
    state = after(rule, means)
    model, update = np.linspace(-1, 1, PARAMETERS), np.zeros(PARAMETERS)
    for mean in means:
        update = eta * update + zeta * mean.numpy()
        model = model + update
    np.testing.assert_allclose(state.model_P.numpy(), model, rtol=0, atol=1e-14)
    start = model + eta * update if nesterov else model
    np.testing.assert_allclose(rule.model_to_send(state).numpy(), start, rtol=0, atol=1e-14)


def test_fedavg_adds_the_mean_update() -> None:
    mean = updates(5, 1)[0]
    start = torch.linspace(-1, 1, PARAMETERS, dtype=torch.float64)
    assert torch.equal(after(FedAvg(), [mean]).model_P, start + mean)


def test_fedprox_pulls_one_or_many_clients_to_the_anchor() -> None:
    gradient, x, anchor = (torch.stack(updates(seed, 3)) for seed in (6, 7, 8))
    rule = FedProx(mu=0.25)
    corrected = rule.correct(gradient, x, anchor, None, ())
    np.testing.assert_allclose(corrected.numpy(), (gradient + 0.25 * (x - anchor)).numpy(), rtol=0, atol=1e-15)
    single = torch.stack([rule.correct(*rows, None, ()) for rows in zip(gradient, x, anchor, strict=True)])
    assert torch.equal(single, corrected)


def _weighs_by(weigh: Callable[[ClientWork], Tensor]) -> FedAvg:
    class Weighs(FedAvg):
        def report(self, work: ClientWork) -> Report:
            return super().report(work)._replace(weight_K1=weigh(work))

    return Weighs()


@pytest.mark.parametrize(
    ("rule", "by_samples", "alike"),
    [
        (FedAvg(), True, False),
        (LocalSGD(), False, True),
        (FedMedian(), False, True),
        (FedMedian(weights="samples"), True, False),
        (_weighs_by(lambda work: work.samples_K1.clamp(max=100.0)), False, False),
        (_weighs_by(lambda work: 1 / work.train_loss_K1.clamp(min=1.0)), False, False),
        (_weighs_by(lambda work: 1 / work.train_loss_K1.clamp(max=1.0)), False, False),
        (_weighs_by(lambda work: 1 / (1 + work.update_KP.abs().sum(1, keepdim=True))), False, False),
    ],
)
def test_weights_are_known_by_samples_or_alike_alone(rule: Aggregator, by_samples: bool, alike: bool) -> None:
    layout = Layout(parameters=2, size=2, dtype=torch.float32, trained=(), averaged=(), integers=())
    message = format_of(rule, layout, 5)
    assert (message.weighs_samples, message.weighs_alike) == (by_samples, alike)
