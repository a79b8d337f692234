"""Generations of members: their transcripts, and a sum that holds whoever dies, whatever is lost, in any order."""

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fed.protocol import protocol_pb2 as pb
from fed.server.peer.gossip.exchange import ExchangeKey, GossipExchange
from fed.server.peer.gossip.generations import MOST_GENERATIONS, Generations
from fed.server.peer.gossip.gossip_service import GossipService
from tests.server.deployed import free_port
from tests.server.peer.services import Stranger, await_that, exchanged, has_come_to_nothing, listening, made, port_of
from tests.thinned import thinned

KEY = ExchangeKey(3, 0)


def kept() -> Generations:
    return Generations(are_kept=True)


def test_a_generation_begins_when_a_member_of_the_newest_goes() -> None:
    one = kept()
    assert not one.heard("ben", 0)
    one.look({"ann", "ben"}, 1)
    assert (one.own, one.latest) == (0, 0)
    one.look({"ann"}, 2)
    assert (one.own, one.latest) == (0, 1)
    assert one.enter(is_replay=False)
    assert (one.own, one.latest) == (1, 1)
    assert not one.enter(is_replay=False)
    one.look({"ann"}, 3)  # it has gone once
    assert one.latest == 1


def test_one_death_that_all_see_begins_one_generation() -> None:
    """The dead one has never said the new number: who hears of that before the death does not count it again."""
    ann = kept()
    ann.heard("ben", 0)
    ann.heard("cy", 0)
    assert ann.heard("cy", 1)  # who has missed ben
    ann.look({"ann", "ben", "cy"}, 1)
    assert ann.enter(is_replay=False)
    ann.look({"ann", "cy"}, 2)
    assert (ann.own, ann.latest) == (1, 1)


def test_a_peer_that_comes_back_begins_anew_with_the_others() -> None:
    ben = kept()
    assert ben.heard("ann", 2)
    assert ben.enter(is_replay=False)
    assert (ben.own, ben.latest) == (2, 2)


def test_a_message_that_counts_at_one_end_begins_the_next() -> None:
    for counted, said, begins in ((True, True, False), (True, False, True), (False, True, True), (False, False, False)):
        one = kept()
        one.ended(KEY, {"ben": counted})
        assert one.verdict(KEY, "ben", counts=said) == begins
        assert one.latest == begins
        assert not one.verdict(KEY, "ben", counts=said)  # once
    assert not one.verdict(KEY, "cy", counts=False)


def test_exchanges_of_earlier_generations_are_not_held_against_the_newest() -> None:
    one = kept()
    one.ended(KEY, {"ben": True})
    one.begin()
    assert one.enter(is_replay=False)
    assert not one.verdict(KEY, "ben", counts=False)


def test_a_generation_of_the_largest_number_is_the_last() -> None:
    """Others refuse a larger one, and would mix with this peer no more."""
    generations = Generations(are_kept=True)
    assert generations.heard("mallory", MOST_GENERATIONS)
    assert generations.enter(is_replay=True)
    generations.look([], 1)
    generations.begin()
    assert generations.own == generations.latest == MOST_GENERATIONS
    assert not generations.enter(is_replay=False)


def test_a_replay_enters_a_generation_in_which_nobody_has_been() -> None:
    one = kept()
    one.heard("ben", 4)
    assert one.enter(is_replay=True)
    assert (one.own, one.latest) == (5, 5)


def test_a_checkpoint_keeps_members_and_outcomes() -> None:
    one, again = kept(), kept()
    one.begin()
    one.enter(is_replay=False)
    one.heard("ben", 1)
    one.ended(KEY, {"ben": True})
    for damage in (lambda: again.look({"ann"}, 1), lambda: again.verdict(KEY, "ben", counts=False)):
        again.restore(one.state())
        assert (again.own, again.latest) == (1, 1)
        damage()
        assert again.latest == 2


def test_rules_without_a_sum_have_one_generation() -> None:
    one = Generations(are_kept=False)
    assert not one.heard("ben", 7)
    one.look({"ann"}, 1)
    one.begin()
    one.ended(KEY, {"ben": True})
    assert not one.verdict(KEY, "ben", counts=False)
    assert not one.enter(is_replay=True)


@dataclass
class Peer:
    """Peer with its share of a sum, which is 0 over all that mix as equals."""

    name: str
    generations: Generations = field(default_factory=kept)
    share: int = 0
    present: set[str] = field(default_factory=set)
    checkpoint: Any = None


class Network:
    """Peers in any order of events: rounds, mixing, deaths, returns, and messages that are late or lost at one end.

    What one says to another arrives in order, and before the vectors that it sends afterwards, as over a stream.
    """

    def __init__(self, seed: int, peers: int = 6) -> None:
        self.draws = random.Random(seed)
        self.peers = {str(number): Peer(str(number)) for number in range(peers)}
        self.said: dict[tuple[str, str], deque[Any]] = {}
        self.mixed = 0
        self.begun = 0
        for one in self.peers.values():
            one.present = set(self.peers)
            one.checkpoint = one.share, one.generations.state()
            self.tell(one)

    def tell(self, one: Peer) -> None:
        for other in self.peers:
            if other != one.name:
                self.said.setdefault((one.name, other), deque()).append(one.generations.latest)

    def deliver(self, sender: str, receiver: str) -> None:
        waiting = self.said.get((sender, receiver), deque())
        while waiting and receiver in self.peers:
            said, one = waiting.popleft(), self.peers[receiver]
            if isinstance(said, ExchangeKey):
                news = one.generations.verdict(said, sender, counts=False)
            else:
                news = one.generations.heard(sender, said)
                one.present.add(sender)
            if news:
                self.tell(one)

    def round(self, one: Peer) -> None:
        before = one.generations.latest
        one.generations.look(one.present, 0)
        if one.generations.enter(is_replay=False):
            one.share = 0
            self.begun += 1
        if one.generations.latest > before:
            self.tell(one)

    def mix(self, one: Peer, other: Peer) -> None:
        self.deliver(one.name, other.name)
        self.deliver(other.name, one.name)
        if one.generations.own != other.generations.own:
            return
        self.mixed += 1
        key = ExchangeKey(self.mixed, 0)
        passed = self.draws.randrange(-9, 10)
        one.share += passed
        one.generations.ended(key, {other.name: True})
        if self.draws.random() < 0.05:  # at one end alone, of which the other says so in time
            self.said[other.name, one.name].append(key)
            return
        other.share -= passed
        other.generations.ended(key, {one.name: True})

    def kill(self, one: Peer) -> None:
        del self.peers[one.name]
        for pair in [pair for pair in self.said if one.name in pair]:
            if pair[1] == one.name or self.draws.random() < 0.5:
                self.said[pair].clear()

    def come_back(self, one: Peer, *, resumes: bool) -> None:
        """Start again: from a checkpoint, with rounds that are skipped, or with a copy of another's model."""
        again = Peer(one.name, present=set(self.peers) | {one.name})
        if resumes:
            again.share, state = one.checkpoint
            again.generations.restore(state)
        again.checkpoint = again.share, again.generations.state()
        for other in self.peers.values():
            self.said.setdefault((other.name, one.name), deque()).append(other.generations.latest)
        self.peers[one.name] = again
        for name in list(self.peers):
            self.deliver(name, one.name)
        again.generations.begin()
        self.tell(again)

    def step(self, dead: list[Peer]) -> None:
        alive = list(self.peers.values())
        one = self.draws.choice(alive)
        event = self.draws.random()
        if event < 0.3:
            self.round(one)
        elif event < 0.75:
            self.mix(one, self.draws.choice([other for other in alive if other is not one]))
        elif event < 0.85:
            self.deliver(self.draws.choice(alive).name, one.name)
        elif event < 0.9:
            one.checkpoint = one.share, one.generations.state()
        elif event < 0.93 and len(alive) > 3:
            self.kill(one)
            dead.append(one)
        elif event < 0.96:
            one.present -= {gone.name for gone in dead}  # of whom it has no sign of life any more
        elif dead:
            self.come_back(dead.pop(), resumes=self.draws.random() < 0.5)

    def settle(self, dead: list[Peer]) -> None:
        """Let all know who has gone, and all be said that is to be said."""
        for _ in range(10):
            for pair in list(self.said):
                self.deliver(*pair)
            for one in self.peers.values():
                one.present -= {gone.name for gone in dead}
                self.round(one)


@pytest.mark.parametrize("seed", thinned(range(200), quick=60))
def test_the_sum_holds_over_whoever_is_left(seed: int) -> None:
    network = Network(seed)
    dead: list[Peer] = []
    for _ in range(400):
        network.step(dead)
    network.settle(dead)
    assert len({one.generations.own for one in network.peers.values()}) == 1
    assert sum(one.share for one in network.peers.values()) == 0
    assert network.mixed > 50
    assert network.begun > 5


# Over real connections.


async def two(folder: Path) -> tuple[GossipService, GossipService]:
    """Two peers of a rule that relies on a sum, in round 1."""
    address = f"127.0.0.1:{free_port()}"
    one, other = (made(folder, name, [address], gone_after_s=1.5, conserves_sum=True) for name in ("0", "1"))
    await one.start(address, None)
    await other.start("127.0.0.1:0", None)
    await await_that(lambda: all(len(service.standing().present) == 2 for service in (one, other)))
    await await_that(lambda: all(service.links.all() for service in (one, other)))
    for service in (one, other):
        service.begin(1, 0)
    return one, other


async def mixed(one: GossipService, other: GossipService, number: int, limit_s: float = 5.0) -> list[GossipExchange]:
    """An exchange of two peers, each of which ties its vectors to its generation."""
    x_P, (ones, others) = torch.ones(3), (frozenset(["0"]), frozenset(["1"]))
    views = [f"same.{service.generations.own}" for service in (one, other)]
    both = await asyncio.gather(
        exchanged(one, ExchangeKey(number, 0), [x_P], views[0], others, others, limit_s),
        exchanged(other, ExchangeKey(number, 0), [x_P], views[1], ones, ones, limit_s),
    )
    return [*both]


def test_a_member_that_leaves_begins_the_next_generation(tmp_path: Path) -> None:
    async def run() -> None:
        one, other = await two(tmp_path)
        assert not one.enter_generation()
        await mixed(one, other, 1)
        await await_that(lambda: "1" in one.reached)
        await other.stop("it leaves")
        await await_that(lambda: len(one.standing().present) == 1)
        one.begin(2, 1)
        assert one.enter_generation()
        assert not one.enter_generation()
        await one.stop("the test is over")

    asyncio.run(run())


def test_others_hear_of_a_generation_and_enter_it(tmp_path: Path) -> None:
    async def run() -> None:
        one, other = await two(tmp_path)
        one.begin_generation()
        await await_that(lambda: other.generations.latest == 1)
        for service in (one, other):
            service.begin(2, 1)
            assert service.enter_generation()
        assert all(outcome.received for outcome in await mixed(one, other, 2))
        await asyncio.gather(one.stop("the test is over"), other.stop("the test is over"))

    asyncio.run(run())


def test_a_message_counted_at_one_end_begins_the_next_generation(tmp_path: Path) -> None:
    """The first hears that its vectors are taken and closes; its own word is lost, so that the other waits in vain."""

    async def run() -> None:
        one, other = await two(tmp_path)
        tell = one._tell_verdict
        one._tell_verdict = lambda name, key, reason: None  # type: ignore[method-assign]
        first, second = await mixed(one, other, 1, 0.5)
        one._tell_verdict = tell  # type: ignore[method-assign]
        assert first.received
        assert not second.received
        await await_that(lambda: one.generations.latest == other.generations.latest == 1)
        await asyncio.gather(one.stop("the test is over"), other.stop("the test is over"))

    asyncio.run(run())


def test_late_vectors_that_neither_end_counts_begin_none(tmp_path: Path) -> None:
    async def run() -> None:
        one, other = await two(tmp_path)
        view = "same.0"
        alone = await exchanged(one, ExchangeKey(1, 0), [torch.ones(3)], view, frozenset("1"), frozenset("1"), 0.3)
        late = await exchanged(other, ExchangeKey(1, 0), [torch.ones(3)], view, frozenset("0"), frozenset("0"), 5.0)
        assert has_come_to_nothing(alone)
        assert has_come_to_nothing(late)
        for service in (one, other):
            service.begin(2, 1)
        assert all(outcome.received for outcome in await mixed(one, other, 2))
        assert one.generations.latest == other.generations.latest == 0
        await asyncio.gather(one.stop("the test is over"), other.stop("the test is over"))

    asyncio.run(run())


def test_a_number_beyond_all_generations_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        service = made(tmp_path, "0", conserves_sum=True)
        async with listening(service), Stranger(port_of(service)) as stranger:
            await stranger.say(pb.PeerMessage(progress=pb.Progress(round=1, generation=MOST_GENERATIONS + 1)))
            await await_that(lambda: service.refusals.count == 1)
            assert service.generations.latest == 0

    asyncio.run(run())
