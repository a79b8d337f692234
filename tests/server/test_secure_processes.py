"""Secure aggregation among real processes, of which one is killed in each phase."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fed
from fed.clients.data import load
from fed.vectors.randomness import Streams
from tests.server.deployed import Deployment

CLIENTS = 5
KEYS = {
    "seed": 2,
    "data": {"kind": "digits", "clients": CLIENTS},
    "model": {"kind": "logistic"},
    "rounds": {"count": 1, "deadline_s": 12.0, "partial_work": "drop"},
    "secure_aggregation": {
        "minimum_cohort": 3,
        "max_weight": 400,
        "bits": 64,  # with as many levels for four clients as for five
        "max_drop_out": 0.0,
    },
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("phase", "counts"),
    [("keys", False), ("shares", False), ("masked", False), ("consent", True), ("unmasking", True)],
)
def test_killed_node_leaves_the_exact_sum(phase: str, counts: bool, tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, KEYS, clients=CLIENTS, insecure=False, secure=True)
    try:
        server = deployment.server()
        nodes = [deployment.client(client, dies_at=phase if client == 2 else "") for client in range(CLIENTS)]
        assert server.end() == 0, server.said
        assert nodes[2].end() == -9
    finally:
        deployment.close()
    experiment = deployment.experiment.override({"simulation.batching": "off", "simulation.workers": 0})
    assert experiment.data is not None
    data = load(experiment.data, Streams(experiment.seed))
    if not counts:
        data = replace(data, train={client: data.read(client) for client in data.clients if client != 2})
    expected = fed.simulate(experiment.override({"data": None}), data=data)
    found = load_file(deployment.output / "model.safetensors")
    assert all(torch.equal(found[name], part) for name, part in expected.model.state_dict().items())
    assert deployment.metrics()[0]["replied"] == (5 if counts else 4)


@pytest.mark.long
def test_masked_sums_are_of_what_is_trained_alone(tmp_path: Path) -> None:
    head = {"model": {"kind": "mlp", "hidden": [7], "train": ["3.*"]}, "data": {"kind": "digits", "clients": 3}}
    deployment = Deployment(tmp_path, {**KEYS, **head}, clients=3, insecure=False, secure=True)
    try:
        server = deployment.server()
        deployment.all_clients()
        assert server.end() == 0, server.said
    finally:
        deployment.close()
    expected = fed.simulate(deployment.experiment.override({"simulation.batching": "off", "simulation.workers": 0}))
    found = load_file(deployment.output / "model.safetensors")
    assert all(torch.equal(found[name], part) for name, part in expected.model.state_dict().items())
    (line,) = deployment.metrics()
    trained = 7 * 10 + 10
    whole = 64 * 7 + 7 + trained
    assert 3 * 8 * trained < line["bytes_up"] < 3 * 8 * whole
    assert line["bytes_up"] == expected.metrics[0]["bytes_up"]


def test_node_without_secure_is_told_how_to_start(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, KEYS, clients=3, insecure=False)
    try:
        deployment.server()
        node = deployment.client(0)
        node.end()
        assert "start fed client with --secure" in node.said
    finally:
        deployment.close()


def test_server_without_credentials_refuses_secure_aggregation(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, KEYS, clients=1)
    try:
        server = deployment.server(min_nodes=1)
        assert server.end() == 2
        assert "fed server --credentials" in server.said
    finally:
        deployment.close()
