"""The way out of clients: fused steps give what the steps give one by one.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fed
from fed.clients.training.work_items import Train, Trained, TrainedClients
from fed.clients.way_out import Rows, WayOut
from fed.secure_aggregation.fixed_point import ClientNumbers
from fed.simulations.simulation import Simulation
from tests.simulations import users_parts as parts
from tests.trial_stages import Halves

CLIENTS = ("c0", "c1", "c2", "c3")


def way_out(algorithm: str = "fedavg", **keys: Any) -> WayOut:
    found = Simulation(fed.Experiment(algorithm=algorithm, **keys), parts.unequal(), parts.small).way_out
    assert found is not None
    return found


def result(
    way: WayOut, wants: Any, start_V: Tensor, params_KV: Tensor, samples: Sequence[int] = (1, 1, 2, 4)
) -> TrainedClients:
    """What clients have trained, in groups of up to four."""
    clients = len(params_KV)
    return TrainedClients(
        task=Train(CLIENTS[:clients], 1, wants),
        start=start_V,
        integers_I=torch.zeros(0, dtype=torch.int64),
        begin=start_V,
        params_KV=params_KV,
        integers_KI=torch.zeros(clients, 0, dtype=torch.int64),
        samples=tuple(samples[:clients]),
        train_losses=(0.5,) * clients,
        own=None,
        client_state=None,
        kept={},
        facts=dict,
    )


def drawn(way: WayOut, clients: int, *, is_dyadic: bool) -> tuple[Tensor, Tensor]:
    """Models in float32; small whole numbers of eighths, where float64 must add without rounding."""
    generator = torch.Generator().manual_seed(0)
    models_KV = torch.randn(clients + 1, way.layout.size, generator=generator)
    models_KV = (8 * models_KV).round() / 8 if is_dyadic else models_KV
    return models_KV[0], models_KV[1:]


def tensors_of(way: WayOut, wants: Any, start_V: Tensor, params_KV: Tensor) -> Sequence[Tensor]:
    return way(result(way, wants, start_V, params_KV))[1]


@pytest.mark.parametrize("clients", [1, 4])
def test_a_mean_of_models_is_that_of_updates(clients: int) -> None:
    """To the bit where sums are exact, or of one client; else but for the rounding of four terms."""
    way = way_out()
    assert way.message.sends_models
    for is_dyadic in (True, False):
        start_V, params_KV = drawn(way, clients, is_dyadic=is_dyadic)
        mean_V, updates_KV = (tensors_of(way, wants, start_V, params_KV)[0] for wants in ("mean", "updates"))
        weights_K = torch.tensor([1.0, 1.0, 2.0, 4.0][:clients], dtype=torch.float64)
        expected_V = weights_K @ updates_KV / weights_K.sum()
        if is_dyadic or clients == 1:
            assert torch.equal(mean_V, expected_V)
        else:
            torch.testing.assert_close(mean_V, expected_V, rtol=0, atol=8 * 2**-52)


@pytest.mark.parametrize("uplink", [[], ["int8"], ["qsgd"]], ids=str)
def test_reports_leave_later_as_they_leave_at_once(uplink: list[str]) -> None:
    """A fleet with attackers takes reports, and goes on with them."""
    way = way_out(uplink=uplink)
    start_V, params_KV = drawn(way, 4, is_dyadic=False)
    updates_KM, _ = tensors_of(way, "updates", start_V, params_KV)
    reported, (reported_KM, _) = way(result(way, "reported", start_V, params_KV))
    for row, client in enumerate(CLIENTS):
        numbers = ClientNumbers([reported.weights[row]], [1], [0.5])
        later = way.leave(Rows(reported_KM[row : row + 1], numbers, start=start_V), {}, [1], [client])
        assert torch.equal(later.update_KM[0], updates_KM[row])


def test_known_reports_are_those_of_the_algorithm() -> None:
    way = way_out(uplink=["int8"])
    facts = {"samples_K1": torch.tensor([[1.0], [1], [2], [4]], dtype=torch.float64)}
    beside = dict.fromkeys(("steps_K1", "lr", "momentum", "train_loss_K1"), 0.0)

    def left(way: WayOut, wants: str) -> tuple[Trained, Sequence[Tensor]]:
        start_V, params_KV = drawn(way, 4, is_dyadic=False)
        return way(result(way, wants, start_V, params_KV)._replace(facts=lambda: {**facts, **beside}))

    for wants in ("reported", "updates", "mean"):
        known, asked = left(way, wants), left(replace(way, is_fused=False), wants)
        assert known[0].weights == asked[0].weights == (1.0, 1.0, 2.0, 4.0)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(known[1], asked[1], strict=True))


def test_a_trained_model_leaves_as_it_is() -> None:
    """Whoever makes the report: the coordinator finds the update."""
    way = way_out()
    facts = {"samples_K1": torch.ones(1, 1, dtype=torch.float64)}
    beside = dict.fromkeys(("steps_K1", "lr", "momentum", "train_loss_K1"), 0.0)
    start_V, params_KV = drawn(way, 1, is_dyadic=False)
    for one in (way, replace(way, is_fused=False)):
        trained = result(one, "payload", start_V, params_KV)._replace(facts=lambda: {**facts, **beside})
        answer, (sent_1V, integers_1I) = one(trained)
        assert answer.weights == (1.0,)
        assert torch.equal(sent_1V, params_KV)
        assert integers_1I.shape == (1, 0)


@pytest.mark.parametrize("wants", ["mean", "updates"])
def test_stages_change_models_that_are_sent_too(wants: str) -> None:
    """Half of an eighth is exact, in float32 too."""
    way = way_out()
    halving = replace(way, stages=replace(way.stages, stages=(Halves(),)))
    assert halving.message.sends_models
    start_V, params_KV = drawn(way, 4, is_dyadic=True)
    whole, half = (tensors_of(one, wants, start_V, params_KV)[0] for one in (way, halving))
    assert torch.equal(2 * half, whole)
