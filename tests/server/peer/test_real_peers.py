"""Real peers beside simulated ones: the same bits, through kills and resumptions; and the others go on."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fed.config.experiment import Experiment
from fed.reports.html import write_run_report
from fed.simulations.simulate import simulate
from tests.server.peer.processes import PATIENCE_S, Processes, processes

DROPS = "python:tests.simulations.users_parts:digits_with_dropout"
LOCAL = {"lr": 0.1, "steps": 4, "batch_size": 16}
KEYS: dict[str, Any] = {
    "name": "ring",
    "algorithm": "gradient_tracking",
    "topology": "ring",
    "local": LOCAL,
    "evaluation": "coordinator",
    "checkpoints": {"every": 2},
    "simulation": {"batching": "off"},
}


def keys(rounds: int, deadline_s: float, peers: int = 8, **others: Any) -> dict[str, Any]:
    data = {"kind": "digits", "clients": peers, "partition": {"kind": "dirichlet", "alpha": 1.0}}
    return {**KEYS, "data": data, "rounds": {"count": rounds, "deadline_s": deadline_s}, **others}


def assert_simulated(peers: Processes, **others: Any) -> None:
    simulated = simulate(Experiment(**{**peers.keys, **others})).models
    for peer, found in peers.models().items():
        for name, tensor in simulated[peer].state_dict().items():
            assert torch.equal(tensor, found[name]), (peer, name, peers.said())


@pytest.mark.parametrize(
    "others",
    [
        {"algorithm": "gradient_tracking"},
        pytest.param({"algorithm": "sgp"}, marks=pytest.mark.long),
        pytest.param({"algorithm": "deepsqueeze", "uplink": ["topk", "qsgd"]}, marks=pytest.mark.long),
        pytest.param({"algorithm": "noloco", "topology": None}, marks=pytest.mark.long),
        pytest.param({"algorithm": "choco", "uplink": ["topk", "qsgd"]}, marks=pytest.mark.long),
        pytest.param({"algorithm": "dpsgd", "model": DROPS}, marks=pytest.mark.long),
    ],
    ids=lambda others: others["algorithm"],
)
def test_real_peers_end_with_the_simulations_bits(others: dict[str, Any], tmp_path: Path) -> None:
    with processes(tmp_path, keys(6, 60.0, **others), 8) as peers:
        peers.start(*range(8))
        peers.await_end()
        assert_simulated(peers)


@pytest.mark.parametrize(
    "others",
    [
        pytest.param({"algorithm": "gradient_tracking"}, marks=pytest.mark.long),
        {"algorithm": "choco", "uplink": ["topk"]},
    ],
    ids=lambda others: others["algorithm"],
)
def test_killed_peers_resume_with_the_same_bits(others: dict[str, Any], tmp_path: Path) -> None:
    with processes(tmp_path, keys(12, 60.0, 4, local={**LOCAL, "steps": 40}, **others), 4) as peers:
        peers.start(*range(4))
        peers.await_round(3, 2)
        peers.kill(2)
        peers.start(2, resume=True)
        peers.await_round(6)
        peers.kill(*range(4))
        peers.start(3, 1, 0, 2, resume=True)
        peers.await_end()
        assert_simulated(peers)


@pytest.mark.long
@pytest.mark.parametrize("is_frozen", [True, False])
def test_others_go_on_without_half_of_the_peers(is_frozen: bool, tmp_path: Path) -> None:
    with processes(tmp_path, keys(30, 2.0, 6), 6) as peers:
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
            assert peers.longest_round_s(peer) < 2.0 + 1.0


def test_a_peer_alone_waits_for_another(tmp_path: Path) -> None:
    with processes(tmp_path, keys(30, 2.0, 2), 2) as peers:
        peers.start(0, 1)
        peers.await_round(4)
        peers.kill(1)
        peers.await_that(lambda: "waits: all others are away" in peers.log(0))
        reached = len(peers.lines(0))
        assert reached < 30
        peers.start(1, resume=True)
        peers.await_end()
        # the round in which the other was killed, and one in which each sees other members
        assert peers.summary(0)["rounds_alone"] <= 2, peers.said()
        assert [line["alone"] for line in peers.lines(0)[reached + 2 :]] == [0] * (28 - reached)


@pytest.mark.long
def test_a_peer_goes_on_alone_where_it_may(tmp_path: Path) -> None:
    given = keys(30, 2.0, 2)
    with processes(tmp_path, {**given, "rounds": {**given["rounds"], "alone": "go_on"}}, 2) as peers:
        peers.start(0, 1)
        peers.await_round(4)
        peers.kill(1)
        peers.await_end()
        alone = [line["alone"] for line in peers.lines(0)]
        assert len(alone) == 30
        assert peers.summary(0)["rounds_alone"] == sum(alone) >= 20


def test_an_experiment_of_one_peer_runs(tmp_path: Path) -> None:
    with processes(tmp_path, keys(3, 2.0, 1, topology={"kind": "complete"}), 1) as peers:
        peers.start(0)
        peers.await_end()
        assert peers.summary(0)["rounds_alone"] == 3


def test_a_late_peer_ends_where_all_others_have(tmp_path: Path) -> None:
    with processes(tmp_path, keys(12, 2.0, 3), 3, serves_end_s=PATIENCE_S) as peers:
        peers.start(*range(3))
        peers.await_round(6)
        peers.signal(1, signal.SIGSTOP)
        peers.await_that(lambda: all("this peer stays for '1'" in peers.log(peer) for peer in (0, 2)))
        peers.signal(1, signal.SIGCONT)
        peers.await_end()
        assert len(peers.lines(1)) == 12
        assert peers.lines(1)[-1]["replied"] == 0


@pytest.mark.long
def test_copies_of_neighbours_are_renewed_after_missed_messages(tmp_path: Path) -> None:
    """A frozen peer has missed differences; whole vectors then take their place, and no peer is left out any more."""
    algorithm = {"kind": "choco", "consensus_step": 0.3}
    given = keys(40, 2.0, 4, algorithm=algorithm, uplink=[{"kind": "topk", "fraction": 0.1}])
    with processes(tmp_path, given, 4) as peers:
        peers.start(*range(4))
        peers.await_round(4)
        peers.signal(1, signal.SIGSTOP)
        peers.await_round(12, 0, 2, 3)
        peers.signal(1, signal.SIGCONT)
        peers.await_end()
        for peer in range(4):
            assert [line["late"] for line in peers.lines(peer)[-3:]] == [0] * 3, peers.said()
            assert peers.lines(peer)[-1]["replied"] == 1


@pytest.mark.long
def test_peers_go_on_where_their_topology_cannot_be_made(tmp_path: Path) -> None:
    """A cube has a power of two as its number of peers."""
    with processes(tmp_path, keys(20, 2.0, 4, topology={"kind": "hypercube"}), 4) as peers:
        peers.start(*range(4))
        peers.await_round(4)
        peers.kill(2)
        peers.await_end()
        assert [len(peers.lines(peer)) for peer in (0, 1, 3)] == [20] * 3
        for peer in (0, 1, 3):
            assert "3 peers mix over a ring until others come or go" in peers.log(peer)


@pytest.mark.long
def test_a_peer_joins_with_a_copy_and_mixes(tmp_path: Path) -> None:
    with processes(tmp_path, keys(60, 20.0, 5, local={**LOCAL, "steps": 40}), 5, min_peers=4) as peers:
        peers.start(*range(4))
        peers.await_round(5)
        peers.start(4)
        peers.await_end()
        of_joined = [line["replied"] for line in peers.lines(4)]
        assert of_joined.index(1) > 4
        # until the others wait for it, it may fall behind once more, and goes on where most of them are
        assert of_joined[-40:] == [1] * 40
        assert "with a copy of another peer's model" in peers.log(4)
        # once it is with the others, both its neighbours' vectors reach it: in their round or a round before
        size_bytes = min(line["bytes_up"] for line in peers.lines(0)[-20:]) // 2
        received = sum(line["bytes_down"] for line in peers.lines(4)[-20:]) / size_bytes
        assert received == pytest.approx(40, abs=2)


@pytest.mark.long
@pytest.mark.parametrize("diallers", [(3,), (2, 3)])
def test_peers_that_only_dial_mix_over_their_own_streams(diallers: tuple[int, ...], tmp_path: Path) -> None:
    with processes(tmp_path, keys(6, 60.0, 4), 4) as peers:
        peers.start(*{0, 1, 2, 3}.difference(diallers))
        peers.start(*diallers, listens=False)
        peers.await_end()
        # two such peers are not neighbours: of the ring there is left a path
        path = {"kind": "edges", "pairs": [[0, 1], [1, 2], [0, 3]]}
        assert_simulated(peers, **({} if len(diallers) == 1 else {"topology": path}))
        degrees = [2, 2, 2, 2] if len(diallers) == 1 else [2, 2, 1, 1]
        for peer, degree in enumerate(degrees):
            seen = [(line["members"], line["neighbours"], line["late"]) for line in peers.lines(peer)]
            assert seen == [(4, degree, 0)] * 6
            page = write_run_report(peers.output(peer)).read_text()
            drawn = page.partition('aria-label="This peer and its neighbours"')[2].partition("</figure>")[0]
            assert sorted(re.findall(r">(\d)</text>", drawn)) == [*"0123"]
            assert len(re.findall(r"<path [^>]*clip-path", drawn)) == degree
