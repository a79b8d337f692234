"""Peers that come and go while the others mix, and starts of eight real processes."""

import random
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import networkx as nx
import pytest
import torch

from fed.server.peer.gossip.meeting import await_members, is_late
from fed.server.peer.gossip.real_neighbourhood import RealNeighbourhood
from fed.server.peer.members.member import Member
from fed.topology import Topology
from fed.vectors.randomness import Streams
from tests.server.peer.processes import processes
from tests.server.peer.services import made, port_of
from tests.server.peer.test_real_peers import keys

EVENTS, FEWEST, MOST = 200, 4, 10
DEADLINE_S = 3.0


def ring(members: Sequence[Member]) -> Topology:
    def graph(peers: int) -> "nx.Graph[int]":
        made: nx.Graph[int] = nx.cycle_graph(peers)
        return made

    return Topology(lambda **given: graph(given["peers"]), graph, len(members), Streams(0))


class Mixer(threading.Thread):
    """Peer that mixes a vector, round after round, until it is told to leave."""

    def __init__(self, folder: Path, number: int, introducers: Sequence[str]) -> None:
        super().__init__(daemon=True)
        self.x_NP = torch.full((1, 3), float(number))
        self.service = made(
            folder,
            f"peer-{number}",
            introducers,
            gone_after_s=DEADLINE_S,
            is_ready=False,
            snapshot=self._snapshot,
            rounds=1_000_000,
        )
        self.neighbourhood = RealNeighbourhood(
            self.service, ring, pushes=False, deadline_s=DEADLINE_S, waits_alone=True
        )
        self.thread = self.neighbourhood.thread
        self.neighbourhood.resume(0, None, keeps_checkpoints=False)
        self.thread.wait_for(self.thread.service.start("127.0.0.1:0", None))
        self.address = f"127.0.0.1:{port_of(self.service)}"
        self.leaves = threading.Event()
        self.round = 0

    def _snapshot(self) -> tuple[int, list[torch.Tensor]] | None:
        return (self.round, [self.x_NP[0]]) if self.round else None

    def run(self) -> None:
        if is_late(self.thread) and (copied := self.thread.wait_for(self.service.copy(60.0))) is not None:
            number, (x_P,) = copied
            self.x_NP, self.round, self.neighbourhood.skips_to = x_P.unsqueeze(0), number, number + 1
        self.thread.call(self.service.members.make_ready)
        await_members(self.thread, 2, (), DEADLINE_S)
        while not self.leaves.is_set():
            number = max(self.round + 1, self.neighbourhood.skips_to)
            if len(self.neighbourhood.begin(number).rows_S):
                weights, (sent_SP,) = self.neighbourhood.exchange(self.x_NP)
                self.x_NP = weights.mixed(self.x_NP, sent_SP).float()
                self.neighbourhood.end()
                self.round = number
        self.thread.close("it leaves")


@pytest.mark.long
def test_two_hundred_joins_and_leaves_end_in_consensus(tmp_path: Path) -> None:
    draws = random.Random(0)
    mixers: list[Mixer] = []

    def join(number: int) -> None:
        introducers = [mixer.address for mixer in draws.sample(mixers, min(2, len(mixers)))]
        mixers.append(Mixer(tmp_path, number, introducers))
        mixers[-1].start()

    for number in range(FEWEST):
        join(number)
    for number in range(FEWEST, FEWEST + EVENTS):
        if len(mixers) == FEWEST or (len(mixers) < MOST and draws.random() < 0.5):
            join(number)
        else:
            leaver = mixers.pop(draws.randrange(len(mixers)))
            leaver.leaves.set()
            leaver.join(60)
            assert not leaver.is_alive()
    rounds = [mixer.round for mixer in mixers]
    for mixer, before in zip(mixers, rounds, strict=True):
        while mixer.round < before + 200:
            assert mixer.is_alive()
            mixer.join(0.05)
    found = torch.cat([mixer.x_NP for mixer in mixers])
    for mixer in mixers:
        mixer.leaves.set()
    for mixer in mixers:
        mixer.join(60)
    torch.testing.assert_close(found, found[:1].expand_as(found), rtol=1e-3, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("start", range(10))
def test_eight_processes_form_one_group_soon(start: int, tmp_path: Path) -> None:
    with processes(tmp_path, keys(1, 60.0), 8) as peers:
        peers.start(*random.Random(start).sample(range(8), 8))
        peers.await_end()
        logs = [peers.log(peer) for peer in range(8)]
    listens_s = [float(found) for log in logs for found in re.findall(r"([\d.]+) listening", log)]
    formed_s = [float(found) for log in logs for found in re.findall(r"([\d.]+) 8 peers are there", log)]
    assert len(listens_s) == len(formed_s) == 8
    assert max(formed_s) < max(listens_s) + 2.0
