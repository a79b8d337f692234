"""Generations: groups of members that have begun anew together, so that a sum holds over their states.

Some rules rely on a sum over the members' states (:attr:`fed.aggregators.peer_rule.PeerRule.conserves_sum`). Two
members that mix keep it. A member that goes for good takes its share along, and a message that counts at one of its two
ends alone breaks it. Then a new generation begins. Each member begins anew by itself, with a state whose share is
right, and mixes with members of its own generation alone.

A member enters a generation once. So the sum holds over all that have ever entered one. If a member goes from the
newest generation, one of those that it mixed with begins the next. Thus the sum holds over the members of the newest
one as soon as it is known who has gone. Two members may begin a generation at the same time, for different reasons. It
is one generation if it has one number.
"""

from collections.abc import Collection, Mapping

from fed.server.peer.gossip.exchange import ExchangeKey
from fed.storage.checkpoints import Tree

__all__ = ["MOST_GENERATIONS", "Generations"]

MOST_GENERATIONS = 2**53
"""The largest number of a generation that a member may name."""


class Generations:
    """Generations that one peer knows of; it makes no calls and reads no clock.

    Attributes:
        own: the number of the generation that the peer's state belongs to, from 0.
        latest: the number of the newest generation, which the peer enters with its next round.

    Args:
        are_kept: True if the rule relies on a sum; otherwise there is one generation for ever.
    """

    def __init__(self, *, are_kept: bool) -> None:
        self.own = self.latest = 0
        self._are_kept = are_kept
        self._said: dict[str, int] = {}
        self._counts: dict[ExchangeKey, Mapping[str, bool]] = {}

    def heard(self, name: str, number: int) -> bool:
        """Take note of the newest generation that a member knows of; true if it is news."""
        if not self._are_kept:
            return False
        self._said[name] = number
        is_news = number > self.latest
        self.latest = max(self.latest, number)
        return is_news

    def ended(self, key: ExchangeKey, counts: Mapping[str, bool]) -> None:
        """Take note of an exchange's outcome.

        Args:
            key: the exchange.
            counts: True for each neighbour at which this peer assumes its own vectors to count, by name.
        """
        if self._are_kept:
            self._counts[key] = counts

    def verdict(self, key: ExchangeKey, name: str, *, counts: bool) -> bool:
        """Compare a neighbour's word on an exchange that is over with this peer's assumption.

        Args:
            key: the exchange.
            name: the name of the neighbour.
            counts: True if this peer's vectors count at the neighbour.

        Returns:
            True if a new generation begins.
        """
        if self._counts.get(key, {}).get(name, counts) == counts or self.latest > self.own:
            return False
        self.begin()
        return True

    def begin(self) -> None:
        """Begin a new generation, unless this one has the largest number, which others would refuse to go beyond."""
        if self._are_kept:
            self.latest = min(self.latest + 1, MOST_GENERATIONS)

    def look(self, present: Collection[str], number: int) -> None:
        """Begin a new generation where a member of this one has gone, and forget old exchanges.

        Args:
            present: names of the present members.
            number: the first round whose exchanges neighbours may still contradict.
        """
        self._counts = {key: counts for key, counts in self._counts.items() if key.round >= number}
        gone = [name for name, said in self._said.items() if name not in present]
        if self.latest == self.own and any(self._said[name] == self.own for name in gone):
            self.begin()
        for name in gone:
            del self._said[name]

    def enter(self, *, is_replay: bool) -> bool:
        """Enter the newest generation with a round; true if the peer's state must begin anew for it.

        Args:
            is_replay: True if the peer may have taken part in this round before it was killed. It may have been in
                the newest generation then, and enters one in which nobody has been.
        """
        if self.latest == self.own:
            return False
        if is_replay:
            self.begin()
        self.own = self.latest
        # What is said of exchanges before it does not matter any more.
        self._counts.clear()
        return True

    def state(self) -> Tree:
        """State for a checkpoint."""
        counts = [[*key, dict(counts)] for key, counts in self._counts.items()]
        return {"own": self.own, "said": dict(self._said), "counts": counts}

    def restore(self, state: Tree) -> None:
        """Resume from a state that :meth:`state` gave."""
        self.own = self.latest = state["own"]
        self._said = dict(state["said"])
        self._counts = {ExchangeKey(number, place): dict(counts) for number, place, counts in state["counts"]}
