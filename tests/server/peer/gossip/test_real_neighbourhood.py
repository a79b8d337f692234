"""Rounds that a real peer skips: it follows most of the others, and no single one, and ends where all have."""

from pathlib import Path

import pytest

from fed.errors import RunFailed
from fed.server.observer import Essential, NodeCame, NodeWent
from fed.server.peer.gossip.real_neighbourhood import RealNeighbourhood
from fed.server.peer.members.member import Member
from fed.server.peer.members.standing import Standing, round_of_most
from fed.server.telling import Observers
from tests.observing import Trial
from tests.server.peer.services import made
from tests.server.peer.test_churn import ring


def test_one_that_is_far_ahead_makes_no_peer_skip() -> None:
    assert round_of_most(3, [2**40, 3, 4]) == 0
    assert round_of_most(3, [2**40, 7, 3]) == 7  # and two of three not further than the nearer
    assert round_of_most(3, [4, 4]) == 0
    assert round_of_most(3, []) == 0


@pytest.mark.parametrize("ended", [["bob", "cy"], ["bob"]])
def test_a_peer_ends_once_all_others_have(ended: list[str], tmp_path: Path) -> None:
    """One that has only stopped is waited for, until this peer's patience is exhausted."""
    service = made(tmp_path, "ann", patience_s=1.0, gone_after_s=0.3)
    neighbourhood = RealNeighbourhood(service, ring, pushes=False, deadline_s=1.0, waits_alone=True)
    state = {**neighbourhood.state(), "members": ["ann", "bob", "cy"]}
    neighbourhood.resume(5, state, keeps_checkpoints=False)
    members = [Member(name, "", 1, 1, is_ready=True, has_ended=True) for name in ended]
    neighbourhood.thread.call(service.members.remember, members)
    if len(ended) == 2:
        assert not len(neighbourhood.begin(6).rows_S)
        assert neighbourhood.skips_to == service.rounds + 1
    else:
        with pytest.raises(RunFailed, match=r"round 6 needs another peer, .* no more came for 1 s"):
            neighbourhood.begin(6)
    neighbourhood.thread.wait_for(service.links.close("the test is over"))


def test_observers_hear_of_members_between_rounds(tmp_path: Path) -> None:
    service, trial = made(tmp_path, "ann"), Trial()
    told = Observers([Essential(trial)])
    neighbourhood = RealNeighbourhood(service, ring, pushes=False, deadline_s=1.0, waits_alone=False, observers=told)
    for names in (["ann", "bob", "7"], ["ann", "bob", "7"], ["ann", "bob"]):
        present = tuple(Member(name, "", 1, 1, is_ready=True) for name in names)
        neighbourhood._tell_presence(Standing(present, "", {}))
    assert trial.events == [NodeCame(7), NodeCame("bob"), NodeWent(7)]
    neighbourhood.thread.wait_for(service.links.close("the test is over"))
