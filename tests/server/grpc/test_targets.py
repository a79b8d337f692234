"""Deployments whose targets are no labels end with the bits of the simulation, and refuse nodes with other targets."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fed
from fed.clients.data import Names, Pair, load
from fed.clients.node.own_data import signature_of
from fed.protocol.protocol_pb2 import Joining
from fed.server.grpc.deploy import serve
from fed.server.grpc.deployment import Deployment
from fed.server.validation import refusal_of_signature
from fed.vectors.randomness import Streams
from tests.server.grpc.threaded import ThreadedNode, nodes_of

CLIENTS = 3


def pairs(loss: str) -> dict[Any, Pair]:
    generator = torch.Generator().manual_seed(0)

    def pair(count: int) -> Pair:
        inputs = torch.randn(count, 4, generator=generator)
        noise = torch.rand(count, 2, generator=generator)
        if loss == "cox":
            return inputs, torch.stack([(5 * noise[:, 0]).ceil(), (noise[:, 1] > 0.4).float()], 1)
        return inputs, (inputs[:, :2] > 0).float() if loss == "bce" else inputs[:, 0] + noise[:, 0]

    return {client: pair(12 + 3 * client) for client in range(CLIENTS)}


def experiment(loss: str, **keys: Any) -> fed.Experiment:
    return fed.Experiment(
        data=None,
        model={"kind": "mlp", "hidden": [5]},
        loss=loss,
        local={"lr": 0.05, "batch_size": 4},
        rounds={"count": 3},
        evaluation={"kind": "clients", "fraction": 0.3},
        simulation={"batching": "off", "workers": 0},
        **keys,
    )


def scores(run: fed.Run) -> dict[str, Any]:
    return {key: value for key, value in run.metrics[-1].items() if key.startswith(("test_", "client_"))}


@pytest.mark.parametrize("loss", ["cox", "bce", "mse"])
def test_deployment_ends_with_the_simulations_bits(loss: str, tmp_path: Path) -> None:
    """A server without data learns of the first node what targets are like."""
    keys, data, nodes = experiment(loss), fed.FederatedData(pairs(loss)), list[ThreadedNode]()
    begin = lambda port: nodes.extend(nodes_of(data, port, tmp_path))  # noqa: E731
    where: dict[str, Any] = {"listen": "127.0.0.1:0", "output": tmp_path / "run", "min_nodes": CLIENTS}
    deployed = serve(keys, **where, on_listen=begin)
    for node in nodes:
        node.end()
    simulated = fed.simulate(keys, data=data, output=tmp_path / "simulated")
    for ours, theirs in zip(deployed.model.parameters(), simulated.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert deployed.summary["metrics"] == simulated.summary["metrics"]
    rows = [(tmp_path / name / "clients.jsonl").read_text() for name in ("run", "simulated")]
    assert rows[0] == rows[1]
    assert len(rows[0].splitlines()) == 3 * CLIENTS
    assert scores(deployed) == scores(simulated)
    assert f"client_{next(iter(deployed.summary['metrics']))}_worst_decile" in scores(deployed)


def patients() -> fed.FederatedData:
    held = pairs("cox")
    inputs, targets = (torch.cat(parts) for parts in zip(*held.values(), strict=True))
    return fed.FederatedData(held, (inputs, targets))


def test_a_server_with_real_targets_scores_as_the_simulation(tmp_path: Path) -> None:
    keys = experiment("cox").override({"data": f"python:{__name__}:patients", "evaluation": "coordinator"})
    assert keys.data is not None
    nodes, data = list[ThreadedNode](), load(keys.data, Streams(0))
    begin = lambda port: nodes.extend(nodes_of(data, port, tmp_path))  # noqa: E731
    deployed = serve(keys, listen="127.0.0.1:0", output=tmp_path / "run", min_nodes=CLIENTS, on_listen=begin)
    for node in nodes:
        node.end()
    assert scores(deployed) == scores(fed.simulate(keys))
    assert deployed.summary["final_test_c_index"] > 0


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (torch.zeros(3), r"real numbers of shape \(2,\) a sample, got real numbers, one a sample"),
        (torch.zeros(3, 3).long(), r"of shape \(2,\) a sample, got integers of shape \(3,\) a sample"),
        (torch.zeros(3, 3), r"got real numbers of shape \(3,\) a sample: check the node's data file"),
    ],
)
def test_a_node_with_other_targets_is_refused_with_the_reason(targets: torch.Tensor, reason: str) -> None:
    deployment = Deployment(experiment("cox"))
    like, other = (signature_of((torch.zeros(3, 4), part), 0, Names()) for part in (torch.zeros(3, 2), targets))
    assert deployment.accepts(Joining(signature=like)) is None
    said = deployment.accepts(Joining(signature=other))
    assert said is not None
    assert re.search(f"the run is for targets that are .*{reason}", said)


def test_numbers_that_a_node_can_cast_fit_the_model() -> None:
    inputs = torch.zeros(3, 4)
    times = torch.zeros(3, 2)
    labels = torch.arange(3)
    survival = Deployment(experiment("cox"))
    assert survival.accepts(Joining(signature=signature_of((inputs, times), 0, Names()))) is None
    assert survival.accepts(Joining(signature=signature_of((inputs.double(), times.long()), 0, Names()))) is None
    asked = signature_of((inputs, labels), 3, Names())
    assert refusal_of_signature(signature_of((inputs.int(), labels.double()), 0, Names()), asked) is None
    looked_up = signature_of((inputs.long(), labels), 3, Names())
    assert "made for int64 inputs" in str(refusal_of_signature(asked, looked_up))


def test_counts_that_a_node_has_alone_fit_a_regression() -> None:
    """They are no classes, however large they are."""
    deployment = Deployment(experiment("mse"))
    small, large = (signature_of((torch.zeros(3, 4), torch.arange(3)), count, Names()) for count in (3, 99))
    assert deployment.accepts(Joining(signature=small)) is None
    assert deployment.accepts(Joining(signature=large)) is None
    asked = signature_of((torch.zeros(3, 4), torch.arange(3)), 3, Names())
    assert "made for 3 classes, got 99" in str(refusal_of_signature(large, asked))
