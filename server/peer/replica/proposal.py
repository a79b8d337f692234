"""Proposal of a member to decide a round, from its first message to a majority's votes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fed.server.peer.replica.ballots import Ballot, Kind, Message, Value, Vote

__all__ = ["Proposal", "ring_order"]


@dataclass
class Proposal:
    """Proposal of a member to decide a round. It ends with the process, and its ballot is never used again.

    Args:
        ballot: ballot of this proposal alone.
        since_s: time at which its present stage began: promises, ring or votes.
        sent_s: time at which the members were sent its message last.
        promises: promises of members, by name.
        ring: names of the members that reduce their updates, in the order of the ring; empty until they are told to.
        value: value that is proposed; None until it is known.
        accepted: names of the members that have voted for the value.
        holders: names of the members that hold the value's sum, in the order in which they said so.
    """

    ballot: Ballot
    since_s: float
    sent_s: float
    promises: dict[str, Message] = field(default_factory=dict)
    ring: tuple[str, ...] = ()
    value: Value | None = None
    accepted: set[str] = field(default_factory=set)
    holders: dict[str, None] = field(default_factory=dict)

    @property
    def awaits_promises(self) -> bool:
        """True while it waits for promises."""
        return not self.ring and self.value is None

    def message(self, round_number: int) -> Message:
        """Message of its present stage, to all members; members that have answered see that the proposer is alive."""
        if self.value is not None:
            vote = Vote(self.ballot, self.value)
            return Message(Kind.PROPOSE, round_number, self.ballot, vote=vote, names=tuple(self.holders))
        if self.ring:
            return Message(Kind.RING, round_number, self.ballot, names=self.ring)
        return Message(Kind.PREPARE, round_number, self.ballot)

    def voted_value(self) -> tuple[Value, list[str]] | None:
        """Value of the latest vote among the promises, which must be proposed again, and the holders of its sum."""
        votes = {name: message.vote for name, message in self.promises.items() if message.vote is not None}
        if not votes:
            return None
        # Only the value of the latest vote may have been decided: its proposer had to take over that of an earlier one.
        value = max(votes.values(), key=lambda vote: vote.ballot).value
        return value, [name for name, vote in votes.items() if vote.value == value]

    def ready(self, names: list[str]) -> tuple[str, ...]:
        """Members among these that have promised, and have their update."""
        return tuple([name for name in names if name in self.promises and self.promises[name].is_ready])


def ring_order(names: Sequence[str], listening: Collection[str]) -> tuple[str, ...]:
    """Members in an order in which two that only dial are not next to each other, where there is such an order.

    Args:
        names: names of the ring's members.
        listening: names of members that others can dial.
    """
    listeners = [one for one in names if one in listening]
    diallers = [one for one in names if one not in listening]
    ordered: list[str] = []
    for place, listener in enumerate(listeners):
        ordered.append(listener)
        # Those that only dial are spread evenly among the listeners.
        begin = len(diallers) * place // len(listeners)
        end = len(diallers) * (place + 1) // len(listeners)
        ordered += diallers[begin:end]
    return tuple(ordered or diallers)
