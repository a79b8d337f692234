"""Simulated members that go for good: under every rule the others end where they would have without them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fed
from fed.aggregators.peer_rule import PeerRule
from fed.clients.data import load
from fed.clients.training.devices import devices_of
from fed.clients.training.executor import InProcess
from fed.clients.training.worker import Work
from fed.config.registry import ALGORITHMS
from fed.server.mixing.peers import Peers
from fed.simulations.simulation import Simulation
from tests.thinned import thinned

from .conftest import Quadratics, mean_output

pytestmark = pytest.mark.usefixtures("device")

PEERS, GONE, GOES_AT_S, ROUND_S = 6, 2, 205, 10
RULES = sorted(kind for kind in ALGORITHMS.builtin if isinstance(ALGORITHMS.make(kind).make(), PeerRule))


def devices(folder: Path, peers: int, samples: int, *spells: Sequence[float]) -> dict[str, Any]:
    """Equal devices whose rounds take 10 s; all peers stay but those with spells of their own."""
    named = {int(client) for client, _, _ in spells}
    rows = [*spells, *((client, 0, 1e9) for client in range(peers) if client not in named)]
    path = folder / "presence.csv"
    path.write_text("client,begins_s,ends_s\n" + "".join(f"{client},{a},{b}\n" for client, a, b in rows))
    return {
        "kind": "uniform",
        "samples_per_s": samples / ROUND_S,
        "latency_s": 0,
        "down_bytes_per_s": 1e300,
        "up_bytes_per_s": 1e300,
        "availability": {"kind": "trace", "path": str(path)},
    }


def problem() -> Quadratics:
    generator = np.random.default_rng(0)
    curvature_N33 = np.stack([np.diag(generator.uniform(0.5, 4.0, 3)) for _ in range(PEERS)])
    return Quadratics(curvature_N33, generator.normal(size=(PEERS, 3)), np.ones(PEERS, int), generator.normal(size=3))


@pytest.mark.parametrize("resumes", thinned([True, False], quick=1))
@pytest.mark.parametrize("algorithm", ["gradient_tracking", "d2"])
def test_the_others_reach_the_optimum_of_their_own_mean(algorithm: str, resumes: bool, tmp_path: Path) -> None:
    """One goes in round 21 while another is away, which begins anew when it is back.

    On a complete graph the slowest mode is that of the mean, 1 − 0.05 a with a above 2: 270 rounds leave 4e-13 of it.
    """
    quadratics = problem()
    there = devices(tmp_path, PEERS, 1, (GONE, 0, GOES_AT_S), (4, 0, 165), (4, 285, 1e9))
    experiment = fed.Experiment(
        algorithm=algorithm,
        topology="complete",
        rounds={"count": 300},
        local={"lr": 0.05, "batch_size": 1, "steps": 1},
        devices=there,
    )
    simulation = Simulation(experiment, quadratics.data(), quadratics.model, mean_output)
    peers = simulation.federation(InProcess(partial(Work, simulation.recipe), devices_of(1)))
    assert isinstance(peers, Peers)
    replied = []
    for number in range(1, 301):
        replied.append(peers.round(number).replied)
        if resumes:
            peers.restore(peers.state())
    assert replied == [6] * 16 + [5] * 4 + [4] * 9 + [5] * 271
    stay = [peer for peer in range(PEERS) if peer != GONE]
    pulls_NDD, centres_ND = quadratics.curvature_NDD[stay], quadratics.centre_ND[stay]
    optimum_D = np.linalg.solve(pulls_NDD.sum(0), np.einsum("nij,nj->i", pulls_NDD, centres_ND))
    assert peers.measures()["consensus_distance"] < 1e-9
    np.testing.assert_allclose(peers.model()[0].numpy(), optimum_D, rtol=0, atol=1e-9)
    for peer in stay:
        np.testing.assert_allclose(peers.models()[peer][0].numpy(), optimum_D, rtol=0, atol=1e-9)


FEW, DATA = 4, {"kind": "digits", "clients": 4, "partition": {"kind": "dirichlet", "alpha": 1.0}}
TOP = {"uplink": [{"kind": "topk", "fraction": 0.3}]}
OTHERS: dict[str, dict[str, Any]] = {
    "choco": {"algorithm": {"kind": "choco", "consensus_step": 0.3}, **TOP},
    "deepsqueeze": {"algorithm": {"kind": "deepsqueeze", "consensus_step": 0.1}, **TOP},
    "matcha": {"topology": {"kind": "matcha", "base": "complete"}},
    "sgp": {"topology": "directed_exponential"},
    **{kind: {"topology": None} for kind in ("local", "adpsgd", "moshpit", "noloco")},
}


def scores(models: Mapping[int | str, nn.Module], test: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    """Mean accuracy and loss over the peers that stay."""
    inputs, targets = test
    outputs = [model(inputs).detach() for peer, model in models.items() if peer != GONE]
    accuracies = [float((output.argmax(1) == targets).double().mean()) for output in outputs]
    losses = [float(nn.functional.cross_entropy(output, targets)) for output in outputs]
    return float(np.mean(accuracies)), float(np.mean(losses))


@pytest.mark.long
@pytest.mark.parametrize("algorithm", RULES)
def test_the_others_score_as_if_they_had_never_met_it(algorithm: str, tmp_path: Path) -> None:
    """After 30 of 400 rounds with a fourth peer: long enough to forget it, and for a lost sum to show."""
    keys: dict[str, Any] = {
        "algorithm": algorithm,
        "topology": "complete",  # without one of them it is complete, too
        "rounds": {"count": 400},
        "local": {"lr": 0.3, "steps": 4, "batch_size": 16},
        "evaluation": "coordinator",
        **OTHERS.get(algorithm, {}),
    }
    there = devices(tmp_path, FEW, 64, (GONE, 0, 30 * ROUND_S + 5))
    drawn = fed.Experiment(data=DATA)
    assert drawn.data is not None
    data = load(drawn.data, drawn.data_streams).with_test_set()
    unscored = replace(data, test=None)
    without = replace(unscored, train={peer: samples for peer, samples in data.train.items() if peer != GONE})
    run = fed.simulate(fed.Experiment(**keys, devices=there), data=unscored)
    assert [line["replied"] for line in run.metrics] == [4] * 30 + [3] * 370
    assert data.test is not None
    accuracy, loss = scores(run.models, data.test)
    expected_accuracy, expected_loss = scores(fed.simulate(fed.Experiment(**keys), data=without).models, data.test)
    assert accuracy > expected_accuracy - 0.01
    assert loss < expected_loss + 0.01
