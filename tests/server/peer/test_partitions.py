"""Partitions of peers: each side goes on, and the sides are one group once the cut is healed."""

import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch

from fed.identity.authority import Authority
from tests.server.peer.namespaces import ip, skip_without_namespaces
from tests.server.peer.processes import Home, processes

SIDES = ("fed-a", "fed-b")
HOSTS = ("10.77.0.1", "10.77.0.2")


def cut(*, is_cut: bool) -> None:
    ip("netns", "exec", SIDES[0], "ip", "link", "set", "side0", "down" if is_cut else "up")


@pytest.fixture
def sides() -> Iterator[None]:
    """Two network namespaces with a cable between them."""
    skip_without_namespaces()
    try:
        for side in SIDES:
            ip("netns", "add", side)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"cannot make network namespaces: {error.stderr.decode()}")
    try:
        ip("link", "add", "side0", "netns", SIDES[0], "type", "veth", "peer", "name", "side1", "netns", SIDES[1])
        for number, (side, host) in enumerate(zip(SIDES, HOSTS, strict=True)):
            ip("-n", side, "addr", "add", f"{host}/24", "dev", f"side{number}")
            for device in ("lo", f"side{number}"):
                ip("-n", side, "link", "set", device, "up")
        yield
    finally:
        for side in SIDES:
            ip("netns", "del", side)


@pytest.mark.long
@pytest.mark.usefixtures("sides")
def test_sides_of_a_cut_go_on_and_merge(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "keys")
    for peer in range(4):
        authority.issue(str(peer), is_peer=True)
    homes = [Home(HOSTS[peer // 2], SIDES[peer // 2], tmp_path / "keys") for peer in range(4)]
    keys = {
        "name": "cut",
        "data": {"kind": "digits", "clients": 4, "partition": {"kind": "dirichlet", "alpha": 1.0}},
        "algorithm": "dpsgd",
        "topology": "ring",
        # the steps become small, so that what is left between the models is what mixing has not levelled
        "local": {"lr": 0.1, "steps": 100, "batch_size": 16, "schedule": "cosine"},
        "rounds": {"count": 120, "deadline_s": 3.0},
        "evaluation": "coordinator",
    }
    with processes(tmp_path, keys, homes) as peers:
        peers.start(*range(4))
        peers.await_round(10)
        cut(is_cut=True)
        gone = [(0, 2), (0, 3), (1, 2), (1, 3), (2, 0), (2, 1), (3, 0), (3, 1)]
        peers.await_that(lambda: all(f"peer '{other}' is gone" in peers.log(peer) for peer, other in gone))
        rounds = [len(peers.lines(peer)) for peer in range(4)]
        peers.await_that(lambda: all(len(peers.lines(peer)) > before + 5 for peer, before in enumerate(rounds)))
        cut(is_cut=False)
        peers.await_that(lambda: all(f"peer '{other}' is back" in peers.log(peer) for peer, other in gone))
        peers.await_end()
        flat = [torch.cat([part.flatten() for part in model.values()]) for model in peers.models().values()]
    assert max(float((one - other).norm()) for one, other in combinations(flat, 2)) < 0.01 * float(flat[0].norm())


@pytest.mark.long
@pytest.mark.usefixtures("sides")
def test_replicas_go_on_where_more_than_half_of_them_are(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "keys")
    for peer in range(5):
        authority.issue(str(peer), is_peer=True)
    side_of = (0, 0, 0, 1, 1)
    homes = [Home(HOSTS[side], SIDES[side], tmp_path / "keys") for side in side_of]
    keys = {
        "name": "cut",
        "data": {"kind": "digits", "clients": 5},
        "algorithm": {"kind": "allreduce", "rule": "bmuf"},
        "local": {"lr": 0.1, "steps": 100, "batch_size": 16},
        "rounds": {"count": 80, "deadline_s": 3.0},
        "evaluation": "coordinator",
    }
    with processes(tmp_path, keys, homes) as peers:
        peers.start(*range(5))
        peers.await_round(5)
        cut(is_cut=True)
        peers.await_that(lambda: all("waits: 2 of its 5 members are there" in peers.log(peer) for peer in (3, 4)))
        before = len(peers.lines(0)), len(peers.lines(3))
        peers.await_that(lambda: len(peers.lines(0)) > before[0] + 15)
        assert len(peers.lines(3)) == before[1]
        cut(is_cut=False)
        peers.await_end()
        assert peers.lines(0)[-1]["replied"] == 5
        peers.assert_equal_models()
