"""Attackers among peers: what their neighbours receive, what stays as it was, and who is measured."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fed
from fed.errors import Diverged, InvalidExperiment
from fed.simulations.attacks import ALIE, IPM, Attack, Attackers, Gaussian, Knowledge, Mimic, SignFlip
from fed.topology import mixing_matrix
from fed.topology.graphs import ring
from fed.vectors.randomness import Streams
from tests.thinned import thinned

from .conftest import Point, mean_output
from .test_peers import CENTRES, LR, PEERS, SAMPLES, data, model

pytestmark = pytest.mark.usefixtures("device")

ROUNDS = 5
MATRIX = mixing_matrix(ring(PEERS)).to_dense().numpy()
FRACTION = 2 / 7


def experiment(kind: str, algorithm: str = "dpsgd", **keys: Any) -> fed.Experiment:
    return fed.Experiment(
        algorithm=algorithm,
        rounds={"count": ROUNDS},
        local={"lr": LR, "batch_size": 1},
        adversaries={"kind": kind, "fraction": FRACTION},
        **keys,
    )


def points(run: fed.Run) -> np.ndarray:
    modules = [module for module in run.models.values() if isinstance(module, Point)]
    return np.stack([module.x_D.detach().numpy() for module in modules])


@pytest.mark.parametrize(
    "attack", [SignFlip(), Gaussian(), ALIE(z=1.0), IPM(), Mimic()], ids=lambda one: type(one).__name__
)
@pytest.mark.parametrize("algorithm", thinned(["dpsgd", "choco"], quick=1))
def test_neighbours_receive_forged_vectors_and_nothing_else_changes(attack: Attack, algorithm: str) -> None:
    """D-PSGD by hand, an attacker's own row too; CHOCO without codecs is the same."""
    kinds = {SignFlip: "sign_flip", Gaussian: "gaussian", ALIE: "alie", IPM: "ipm", Mimic: "mimic"}
    adversaries = {"kind": kinds[type(attack)], "fraction": FRACTION} | ({"z": 1.0} if isinstance(attack, ALIE) else {})
    chosen = {"kind": "choco", "consensus_step": 1.0} if algorithm == "choco" else algorithm
    keys: dict[str, Any] = {"algorithm": chosen, "uplink": []} if algorithm == "choco" else {}
    one = experiment("sign_flip").override({**keys, "adversaries": adversaries})
    run = fed.simulate(one, data=data(), model=model, loss=mean_output)
    attackers = run.summary["adversaries"]
    honest = [i for i in range(PEERS) if i not in attackers]
    assert len(attackers) == 2
    streams, x = Streams(0), np.zeros((PEERS, 2))
    first = min(range(len(honest)), key=lambda row: streams.torch_seed("mimic", honest[row]))
    for number in range(1, ROUNDS + 1):
        trained = np.stack(
            [CENTRES[i].numpy() + (1 - LR) ** SAMPLES[i] * (x[i] - CENTRES[i].numpy()) for i in range(PEERS)]
        )
        draws = tuple(streams.generator("attack", i, number, 0) for i in attackers)
        known = Knowledge(torch.from_numpy(trained[attackers]), torch.from_numpy(trained[honest]), first, draws)
        sent = trained.copy()
        sent[attackers] = attack.forge(known)
        x = np.diag(np.diag(MATRIX)) @ trained + (MATRIX - np.diag(np.diag(MATRIX))) @ sent
    np.testing.assert_allclose(points(run), x, rtol=1e-12, atol=1e-12)
    assert isinstance(run.model, Point)
    np.testing.assert_allclose(run.model.x_D.detach().numpy(), x[honest].mean(0), rtol=1e-12, atol=1e-12)
    apart = np.sqrt(((x[honest] - x[honest].mean(0)) ** 2).sum(1).mean())
    assert run.metrics[-1]["consensus_distance"] == pytest.approx(apart, rel=1e-10)


def test_an_attack_changes_neither_bytes_nor_time() -> None:
    runs = [
        fed.simulate(one, data=data(), model=model, loss=mean_output)
        for one in (experiment("ipm"), experiment("ipm").override({"adversaries": None}))
    ]
    for key in ("bytes_up", "bytes_down", "virtual_s", "replied", "selected"):
        assert [line[key] for line in runs[0].metrics] == [line[key] for line in runs[1].metrics]


def test_weights_of_push_sum_and_buffers_stay_honest() -> None:
    forged = Attackers(SignFlip(), frozenset({1}), Streams(0)).forged(torch.ones(3, 2), [0, 1, 2], 1, 0)
    assert forged.tolist() == [[1.0, 1.0], [-4.0, -4.0], [1.0, 1.0]]
    run = fed.simulate(
        experiment("sign_flip", "sgp", topology="directed_ring"), data=data(), model=model, loss=mean_output
    )
    assert run.metrics[-1]["replied"] == PEERS  # a weight of −4 would soon divide by 0
    inputs = torch.randn(PEERS, 8, 3, generator=torch.Generator().manual_seed(0))
    held = fed.FederatedData({i: (inputs[i], torch.arange(8) % 2) for i in range(PEERS)})

    def normalised() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    one = experiment("sign_flip").override({"rounds.count": 1, "local.batch_size": 4})
    buffers: list[list[Tensor]] = []
    for keys in ({}, {"adversaries": None}):
        run = fed.simulate(one.override(keys), data=held, model=normalised)
        buffers.append([part for module in run.models.values() for part in module.buffers()])
    assert all(map(torch.equal, *buffers))


def test_flipped_labels_are_learned_and_sent_as_they_are() -> None:
    keys: dict[str, Any] = {"data": {"clients": 10}, "model": "logistic", "evaluation": "coordinator"}
    one = experiment("label_flip", **keys).override({"rounds.count": 2, "local": {"lr": 0.1}})
    run = fed.simulate(one)
    attackers = run.summary["adversaries"]
    states = [torch.cat([*map(torch.flatten, run.models[i].parameters())]) for i in range(10) if i not in attackers]
    mean = torch.cat([*map(torch.flatten, run.model.parameters())])
    # float32: the mean is taken in float64
    torch.testing.assert_close(mean, torch.stack(states).double().mean(0).float(), rtol=0, atol=0)
    without = fed.simulate(one.override({"adversaries": None}))
    assert run.metrics[0]["client_accuracy_mean"] != without.metrics[0]["client_accuracy_mean"]


@pytest.mark.parametrize("evaluation", ["clients", "coordinator"])
def test_only_honest_peers_are_scored(evaluation: str) -> None:
    keys: dict[str, Any] = {"data": {"clients": 10}, "model": "logistic", "evaluation": evaluation}
    one = experiment("gaussian", **keys, topology={"kind": "edges", "pairs": [[i, (i + 1) % 10] for i in range(10)]})
    run = fed.simulate(one.override({"rounds.count": 1, "local": {"lr": 0.1}, "algorithm": "clipped_gossip"}))
    assert run.metrics[-1]["client_accuracy_mean"] > 0.0
    assert len(run.models) == 10


@pytest.mark.parametrize("kind", thinned(["sign_flip", "gaussian"], quick=1))
def test_clipped_gossip_learns_where_dpsgd_does_not(kind: str) -> None:
    """A tenth of 20 peers attack on a complete graph; 10 classes, so that a model that has learned nothing has 0.1."""
    keys: dict[str, Any] = {
        "data": {"clients": 20},
        "model": "logistic",
        "local": {"lr": 0.1, "steps": 5},
        "rounds": {"count": 15},
        "evaluation": "coordinator",
        "topology": "complete",
        "adversaries": {"kind": kind, "fraction": 0.1},
    }
    survives = fed.simulate(fed.Experiment(algorithm={"kind": "clipped_gossip", "radius": 0.3}, **keys))
    assert survives.summary["final_test_accuracy"] > 0.8
    try:
        broken = fed.simulate(fed.Experiment(algorithm="dpsgd", **keys)).summary["final_test_accuracy"]
    except Diverged:
        broken = 0.0
    assert broken < 0.5


@pytest.mark.parametrize("algorithm", ["local", "centralized"])
def test_who_sends_nothing_cannot_attack(algorithm: str) -> None:
    with pytest.raises(InvalidExperiment, match="needs clients that send what they have learned"):
        experiment("ipm", algorithm)
