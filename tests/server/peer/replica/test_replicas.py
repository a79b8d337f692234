"""Real replicas of a coordinator: its bits at every peer, through kills, resumptions and partitions."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fed.config.experiment import Experiment
from fed.simulations.simulate import simulate
from tests.server.peer.processes import PATIENCE_S, Processes, processes

LOCAL = {"lr": 0.1, "steps": 4, "batch_size": 16}


def keys(rounds: int, deadline_s: float, peers: int, rule: str = "fedavg", **others: Any) -> dict[str, Any]:
    data = {"kind": "digits", "clients": peers, "partition": {"kind": "dirichlet", "alpha": 1.0}}
    return {
        "name": "replicas",
        "algorithm": {"kind": "allreduce", "rule": rule},
        "data": data,
        "local": LOCAL,
        "rounds": {"count": rounds, "deadline_s": deadline_s},
        "evaluation": "coordinator",
        "checkpoints": {"every": 2},
        "simulation": {"batching": "off"},
        **others,
    }


def assert_coordinated(peers: Processes) -> None:
    """Each peer has the bits of the rule under a coordinator."""
    given = {
        **peers.keys,
        "algorithm": peers.keys["algorithm"]["rule"],
        "rounds": {"count": peers.keys["rounds"]["count"]},
    }
    coordinated = simulate(Experiment(**given)).model.state_dict()
    for peer, found in peers.models().items():
        for name, tensor in coordinated.items():
            assert torch.equal(tensor, found[name]), (peer, name, peers.said())


LONG = [pytest.param(rule, marks=pytest.mark.long) for rule in ("fedavg", "bmuf", "diloco", "easgd", "feddyn")]


@pytest.mark.parametrize("rule", ["scaffold", *LONG])
def test_replicas_end_with_the_coordinators_bits(rule: str, tmp_path: Path) -> None:
    with processes(tmp_path, keys(6, 60.0, 8, rule), 8) as peers:
        peers.start(*range(8))
        peers.await_end()
        assert_coordinated(peers)


@pytest.mark.long
@pytest.mark.parametrize("away_s", [0, 10])
def test_killed_replicas_resume_with_the_same_bits(away_s: float, tmp_path: Path) -> None:
    with processes(tmp_path, keys(12, 60.0, 4, "scaffold", local={**LOCAL, "steps": 40}), 4) as peers:
        peers.start(*range(4))
        peers.await_round(3, 2)
        peers.kill(2)
        time.sleep(away_s)
        peers.start(2, resume=True)
        peers.await_round(6)
        peers.kill(*range(4))
        peers.start(3, 1, 0, resume=True)
        time.sleep(away_s)
        peers.start(2, resume=True)
        peers.await_end()
        assert_coordinated(peers)


@pytest.mark.long
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_majority_goes_on_and_the_others_catch_up(is_frozen: bool, tmp_path: Path) -> None:
    with processes(tmp_path, keys(40, 2.0, 5, "bmuf"), 5) as peers:
        peers.start(*range(5))
        peers.await_round(4)
        if is_frozen:
            for peer in (1, 3):
                peers.signal(peer, signal.SIGSTOP)
            peers.await_round(20, 0, 2, 4)
            for peer in (1, 3):
                peers.signal(peer, signal.SIGCONT)
        else:
            peers.kill(1, 3)
            peers.await_round(20, 0, 2, 4)
            peers.start(1, 3, resume=True)
        peers.await_end()
        for peer in (0, 2, 4):
            assert peers.longest_round_s(peer) < 2.0 + 1.0, peers.said()
        peers.assert_equal_models()


@pytest.mark.long
def test_half_of_the_replicas_wait_and_say_so(tmp_path: Path) -> None:
    with processes(tmp_path, keys(30, 2.0, 4), 4) as peers:
        peers.start(*range(4))
        peers.await_round(3)
        peers.kill(1, 2)
        peers.await_that(lambda: "waits: 2 of its 4 members are there" in peers.log(0))
        reached = len(peers.lines(0))
        peers.start(1, resume=True)
        peers.await_end()
        assert reached < 30
        peers.assert_equal_models()


@pytest.mark.long
@pytest.mark.parametrize("is_frozen", [True, False])
def test_replicas_that_come_late_get_the_end(is_frozen: bool, tmp_path: Path) -> None:
    """Replicas that have ended stay for a member that was away, and leave once it has ended."""
    with processes(tmp_path, keys(10, 2.0, 4), 4, serves_end_s=PATIENCE_S) as peers:
        peers.start(*range(4))
        peers.await_round(6)
        if is_frozen:
            peers.signal(2, signal.SIGSTOP)
        else:
            peers.kill(2)
        peers.await_that(lambda: all(peers.has_ended(peer) for peer in (0, 1, 3)))
        peers.await_that(lambda: all("this peer stays for '2'" in peers.log(peer) for peer in (0, 1, 3)))
        if is_frozen:
            peers.signal(2, signal.SIGCONT)
        else:
            peers.start(2, resume=True)
        peers.await_end()
        peers.assert_equal_models()
        assert not [*tmp_path.glob(".*.messages")]


@pytest.mark.long
def test_the_end_is_served_again_by_one_that_has_it(tmp_path: Path) -> None:
    with processes(tmp_path, keys(10, 2.0, 4), 4, serves_end_s=2.0, patience_s=3.0) as peers:
        peers.start(*range(4))
        peers.await_round(6)
        peers.kill(2)
        peers.await_end()
        peers.start(2, resume=True)
        peers.await_failure(2)
        assert "no more came for 3 s: if the run has ended at others, let one of them serve its end" in peers.log(2)
        peers.setup = {"serves_end_s": PATIENCE_S}
        peers.serve_end(1)
        peers.start(2, resume=True)
        peers.await_end()
        peers.assert_equal_models()
        assert not (tmp_path / ".peer-1.messages").exists()


@pytest.mark.long
def test_a_replica_joins_with_a_copy_and_contributes(tmp_path: Path) -> None:
    with processes(tmp_path, keys(40, 20.0, 5, "bmuf", local={**LOCAL, "steps": 40}), 5, min_peers=4) as peers:
        peers.start(*range(4))
        peers.await_round(5)
        peers.start(4)
        peers.await_end()
        replied, of_joined = ([line["replied"] for line in peers.lines(peer)] for peer in (0, 4))
        joined = replied.index(5)
        assert replied == [4] * joined + [5] * (40 - joined)
        # rounds that were decided after the copy, and before it was a member, it follows
        copied = next(place for place, count in enumerate(of_joined) if count)
        assert 3 < copied <= joined
        assert of_joined == [0] * copied + replied[copied:]
        peers.assert_equal_models()


def test_replicas_that_only_dial_are_no_neighbours_in_the_ring(tmp_path: Path) -> None:
    with processes(tmp_path, keys(6, 60.0, 4), 4) as peers:
        peers.start(1, 2)
        peers.start(0, 3, listens=False)
        peers.await_end()
        assert_coordinated(peers)
