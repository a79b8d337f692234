"""Real peers beside simulated ones: the same bits, through kills and resumptions; and the others go on."""

import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fed.config.experiment import Experiment
from fed.simulations.simulate import simulate
from tests.server.peer.processes import Processes, processes

KEYS: dict[str, Any] = {
    "name": "ring",
    "data": {"kind": "digits", "clients": 8, "partition": {"kind": "dirichlet", "alpha": 1.0}},
    "algorithm": "gradient_tracking",
    "topology": "ring",
    "local": {"lr": 0.1, "steps": 4, "batch_size": 16},
    "evaluation": "coordinator",
    "checkpoints": {"every": 2},
    "simulation": {"batching": "off"},
}


def keys(rounds: int, deadline_s: float, **others: Any) -> dict[str, Any]:
    return {**KEYS, "rounds": {"count": rounds, "deadline_s": deadline_s}, **others}


def models(peers: Processes) -> dict[int, dict[str, Tensor]]:
    return {peer: load_file(peers.output(peer) / "model.safetensors") for peer in peers.running}


def assert_simulated(peers: Processes) -> None:
    simulated = simulate(Experiment(**peers.keys)).models
    for peer, found in models(peers).items():
        for name, tensor in simulated[peer].state_dict().items():
            assert torch.equal(tensor, found[name]), (peer, name, peers.said())


@pytest.mark.parametrize(
    "others",
    [
        {"algorithm": "gradient_tracking"},
        pytest.param({"algorithm": "sgp"}, marks=pytest.mark.long),
        pytest.param({"algorithm": "deepsqueeze", "uplink": ["topk", "qsgd"]}, marks=pytest.mark.long),
        pytest.param({"algorithm": "noloco", "topology": None}, marks=pytest.mark.long),
    ],
    ids=lambda others: others["algorithm"],
)
def test_real_peers_end_with_the_simulations_bits(others: dict[str, Any], tmp_path: Path) -> None:
    with processes(tmp_path, keys(6, 60.0, **others), 8) as peers:
        peers.start(*range(8))
        peers.await_end()
        assert_simulated(peers)


def test_killed_peers_resume_with_the_same_bits(tmp_path: Path) -> None:
    with processes(tmp_path, keys(12, 60.0, local={"lr": 0.1, "steps": 40, "batch_size": 16}), 4) as peers:
        peers.keys["data"] = {**KEYS["data"], "clients": 4}
        peers.start(*range(4))
        peers.await_round(3, 2)
        peers.kill(2)
        peers.start(2, resume=True)
        peers.await_round(6)
        peers.kill(*range(4))
        peers.start(3, 1, 0, 2, resume=True)
        peers.await_end()
        assert_simulated(peers)


@pytest.mark.parametrize("is_frozen", [True, pytest.param(False, marks=pytest.mark.long)])
def test_others_go_on_without_half_of_the_peers(is_frozen: bool, tmp_path: Path) -> None:
    with processes(tmp_path, keys(30, 2.0), 6) as peers:
        peers.keys["data"] = {**KEYS["data"], "clients": 6}
        peers.start(*range(6))
        peers.await_round(4)
        if is_frozen:
            for peer in (1, 2, 4):
                peers.signal(peer, signal.SIGSTOP)
            peers.await_round(30, 0, 3, 5)
            for peer in (1, 2, 4):
                peers.signal(peer, signal.SIGCONT)
        else:
            peers.kill(1, 2, 4)
        peers.await_end()
        for peer in (0, 3, 5):
            waits_s = [line["wall_s"] for line in peers.lines(peer)]
            assert max(later - earlier for earlier, later in pairwise(waits_s)) < 2.0 + 1.0
