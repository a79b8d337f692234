"""Rounds that a real peer skips: it follows most of the others, and no single one."""

from fed.server.peer.real_neighbourhood import round_of_most


def test_one_that_is_far_ahead_makes_no_peer_skip() -> None:
    assert round_of_most(3, [2**40, 3, 4]) == 0
    assert round_of_most(3, [2**40, 7, 3]) == 7  # and two of three not further than the nearer
    assert round_of_most(3, [4, 4]) == 0
    assert round_of_most(3, []) == 0
