"""What a run is expected to take, against what it took."""

from typing import Any

import pytest
import torch
from torch import nn

import fed
from fed.families import ALGORITHMS, TOPOLOGIES
from fed.simulations.expectation import expect
from fed.simulations.simulate import simulate
from fed.simulations.simulation import Simulation

CLIENTS = 9


def data() -> fed.FederatedData:
    inputs = torch.randn(CLIENTS, 4, 3, generator=torch.Generator().manual_seed(0))
    return fed.FederatedData({client: (part, (part.sum(1) > 0).long()) for client, part in enumerate(inputs)})


def with_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def assert_as_expected(**keys: Any) -> None:
    experiment = fed.Experiment(local={"batch_size": 4}, **keys)
    expected = expect(Simulation(experiment, data(), with_buffers))
    took = simulate(experiment, data=data(), model=with_buffers).summary
    assert (expected.bytes_up, expected.bytes_down) == (took["bytes_up"], took["bytes_down"])


@pytest.mark.parametrize("rounds", [{"count": 1}, {"count": 3}, {"count": 3, "cohort": 7}], ids=str)
@pytest.mark.parametrize("kind", ALGORITHMS.builtin)
def test_as_many_bytes_travel_as_expected(kind: str, rounds: dict[str, Any]) -> None:
    assert_as_expected(algorithm={"kind": kind}, rounds=rounds)


@pytest.mark.parametrize("topology", TOPOLOGIES.builtin)
def test_as_many_bytes_travel_among_peers_as_expected(topology: str) -> None:
    assert_as_expected(algorithm={"kind": "dpsgd"}, topology={"kind": topology}, rounds={"count": 2})
