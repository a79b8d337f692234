"""Founding of a group: one group whatever the order of starts, and whatever messages are lost."""

import random

import pytest

from fed.protocol import protocol_pb2 as pb
from fed.server.peer.replica.founding import Founding

NAMES = "ann", "bob", "cy", "dan", "eve"


def founded(draws: random.Random, least: int, loss: float) -> list[Founding]:
    """Peers that come one after the other, over a network that loses messages, until each is in the group or late."""
    order = draws.sample(NAMES, len(NAMES))
    peers: dict[str, Founding] = {}
    began = {name: draws.uniform(0, 3) for name in order}
    now_s, mail = 0.0, list[tuple[str, str, pb.Founding]]()
    while len(peers) < len(NAMES) or any(one.members is None and not one.is_late for one in peers.values()):
        now_s += 0.05
        assert now_s < 120
        for name in order:
            if name not in peers and began[name] <= now_s:
                peers[name] = Founding(name, least)
        rounds = {name: int(one.members is not None) for name, one in peers.items()}
        for name, one in peers.items():
            others = {other: number for other, number in rounds.items() if other != name}
            mail += [(name, receiver, message) for receiver, message in one.tick(now_s, [*peers], others)]
        draws.shuffle(mail)
        for _ in range(len(mail) // 2 + 1 if mail else 0):
            sender, receiver, message = mail.pop()
            if receiver in peers and draws.random() >= loss:
                one = peers[receiver]
                mail += [
                    (receiver, to, said) for to, said in one.receive(sender, message, int(one.members is not None))
                ]
    return [*peers.values()]


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_one_group_is_founded_by_more_than_half(loss: float) -> None:
    for seed in range(60):
        draws = random.Random(seed)
        peers = founded(draws, draws.randint(3, 5), loss)
        groups = {one.members for one in peers if one.members is not None}
        (group,) = groups
        assert {one.own for one in peers if one.members is not None} == {*group}
        assert len(group) >= 3


def test_a_peer_agrees_to_what_it_sees_alone() -> None:
    bob = Founding("bob", 2)
    bob.tick(0.0, ["ann", "bob"], {})
    assert bob.receive("ann", pb.Founding(members=["ann", "bob", "cy"]), 0) == []
    assert bob.receive("ann", pb.Founding(members=["bob"]), 0) == []
    ((_, agreed),) = bob.receive("ann", pb.Founding(members=["ann", "bob"]), 0)
    assert agreed.is_agreed
    assert Founding("bob", 3).receive("ann", pb.Founding(), 0) == []


@pytest.mark.parametrize("names", ["ann,ann,bob", "bob,ann", "ann,b b,bob", "bob,cy", "ann,bob,zoe"])
def test_a_group_without_agreement_is_not_joined(names: str) -> None:
    bob = Founding("bob", 2)
    bob.tick(0.0, ["ann", "bob"], {})
    bob.receive("ann", pb.Founding(members=["ann", "bob"]), 0)
    assert bob.receive("ann", pb.Founding(members=names.split(","), is_founded=True, round=1), 0) == []
    assert bob.members is None
    assert bob.receive("ann", pb.Founding(members=["ann", "bob"], is_founded=True, round=1), 0) == []
    assert bob.members == ("ann", "bob")


def test_a_claimed_round_is_believed_for_a_while() -> None:
    ann = Founding("ann", 2)
    for now_s in (1.0, 2.0, 20.0):
        assert ann.tick(now_s, ["ann", "bob"], {"bob": 7})[0][1] == pb.Founding()
    assert ann.tick(40.0, ["ann", "bob"], {"bob": 7})[0][1].members == ["ann", "bob"]


def test_a_late_one_tells_a_later_one() -> None:
    late, later = Founding("cy", 2), Founding("dan", 2)
    late.receive("ann", pb.Founding(members=["ann", "bob"], is_founded=True, round=3), 0)
    assert late.is_late
    assert late.receive("dan", pb.Founding(), 0) == []  # it has copied nothing yet
    ((_, answer),) = late.receive("dan", pb.Founding(), 5)
    later.receive("cy", answer, 0)
    assert later.is_late
