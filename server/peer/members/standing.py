"""Standing: the members that one peer sees, and the rounds that they are in."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fed.server.peer.members.member import Member

__all__ = ["Standing", "round_of_most"]


class Standing(NamedTuple):
    """View that one peer has of the members and their rounds.

    Args:
        present: the present members that take part in rounds, in the order of their clients.
        view: hash of the members' names, and of which of them listen: all that neighbours are found from.
        rounds: the round that each of the others is in, by name, where it is known.
    """

    present: tuple[Member, ...]
    view: str
    rounds: Mapping[str, int]

    @property
    def furthest(self) -> int:
        """The round that the furthest of the others is in."""
        return max(self.rounds.values(), default=0)


def round_of_most(number: int, rounds: Sequence[int]) -> int:
    """The smallest round of the peers that are more than a round ahead, if these are more than half of all; else 0.

    Args:
        number: the round that this peer is in, from 1.
        rounds: the rounds of the other peers.

    Example:
        >>> round_of_most(3, [3, 9, 8]), round_of_most(3, [3, 9])
        (8, 0)
    """
    further = [its for its in rounds if its > number + 1]
    return min(further) if 2 * len(further) > len(rounds) else 0
