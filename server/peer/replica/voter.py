"""Voter: the part of a member that promises, joins rings and votes."""

import math
import random
from collections.abc import Collection
from dataclasses import dataclass, field

from fed.server.peer.replica.ballots import (
    NO_BALLOT,
    Ballot,
    BallotTiming,
    Fetch,
    Kind,
    Message,
    Output,
    Persist,
    Record,
    RunRing,
    Send,
    Value,
    Vote,
)
from fed.server.peer.replica.proposal import Proposal

__all__ = ["RoundMemory", "Voter"]

_MOST_PROPOSALS = 2**53


@dataclass
class RoundMemory:
    """Memory of the round that is being decided; the record has all that must outlive the process.

    Args:
        began_s: time at which this member came to the round, in seconds.
        quiet_since_s: time at which a proposer was heard last, in seconds.
        asked_s: time at which others were asked last, in seconds.
        not_before_s: earliest time at which this member may propose again, in seconds.
        is_ready: True if this member has its update.
        proposal: proposal of this member under way; None: it does not propose.
        proposed: latest proposal that this member has heard, whose sum may be on its way.
        learned: decided value, whose sum may be on its way.
        holders: names of members to fetch that sum from.
        last_ring: ballot of the latest ring that this member joined.
        lost_ring: ballot of a ring that it may have joined before it was restarted.
        summed: message to the proposer after the latest ring that has ended.
        seen: latest ballot in favour of which this member was refused.
        excluded: names of members that a ring of this member's proposals has failed to reach.
    """

    began_s: float
    quiet_since_s: float
    asked_s: float = -math.inf
    not_before_s: float = -math.inf
    is_ready: bool = False
    proposal: Proposal | None = None
    proposed: Message | None = None
    learned: Value | None = None
    holders: tuple[str, ...] = ()
    last_ring: Ballot = NO_BALLOT
    lost_ring: Ballot = NO_BALLOT
    summed: Message | None = None
    seen: Ballot = NO_BALLOT
    excluded: set[str] = field(default_factory=set)


class Voter:
    """Member that keeps its promises in the round that is being decided.

    Attributes:
        record: round, members, promise and vote of this member, as it is to be on disk.

    Args:
        own: name of this member.
        record: the last record on disk; at first the round and its members, or an empty one at a peer that joins.
        timing: time limits after which messages are sent again and a proposer is replaced.
        draws: random numbers that keep proposers apart.
        now_s: seconds on the monotonic clock.
        held: hashes of the sums that are on disk.
    """

    def __init__(
        self,
        own: str,
        record: Record,
        timing: BallotTiming,
        draws: random.Random,
        *,
        now_s: float,
        held: Collection[str] = (),
    ) -> None:
        self.own = own
        self.record = record
        self._timing = timing
        self._draws = draws
        self._held = set(held)
        self._outputs: list[Output] = []
        self._to_own: list[Message] = []
        self._now_s = now_s
        self._present = frozenset([own])
        self._candidates: tuple[str, ...] = ()
        self._listening: frozenset[str] = frozenset()
        # A ring that ran when the process was killed has lost this member.
        self._round = RoundMemory(began_s=now_s, quiet_since_s=now_s, lost_ring=record.promised)

    @property
    def _quorum(self) -> int:
        return len(self.record.members) // 2 + 1

    def _present_members(self) -> list[str]:
        return [name for name in self.record.members if name in self._present]

    def _persist(self, record: Record) -> None:
        self.record = record
        self._outputs.append(Persist(record))

    def _send(self, receiver: str, message: Message) -> None:
        if receiver == self.own:
            self._to_own.append(message)
        else:
            self._outputs.append(Send(receiver, message))

    def _follow(self, proposer: str, message: Message) -> None:
        """Follow a proposer's request, unless a later ballot has been promised."""
        ballot = message.ballot
        promised = self.record.promised
        # Only its proposer may send the messages of a ballot.
        if ballot.proposer != proposer or not 0 < ballot.number <= _MOST_PROPOSALS:
            return
        if ballot < promised:
            self._send(proposer, Message(Kind.REFUSE, self.record.round, promised))
            return
        self._round.quiet_since_s = self._now_s
        if message.kind is Kind.PREPARE:
            # A repeated request is answered, and needs nothing more on disk.
            if ballot > promised:
                self._promise_no_less(ballot)
            self._promise()
        elif message.kind is Kind.RING:
            if ballot == promised and self.own in message.names:
                self._join_ring(ballot, message.names)
        elif message.vote is not None:
            self._round.proposed = message
            self._vote(message)

    def _join_ring(self, ballot: Ballot, names: tuple[str, ...]) -> None:
        if ballot == self._round.lost_ring:
            self._send(ballot.proposer, Message(Kind.BROKEN, self.record.round, ballot))
        elif self._round.last_ring < ballot:
            self._round.last_ring = ballot
            self._outputs.append(RunRing(self.record.round, ballot, names))
        elif self._round.summed is not None and self._round.summed.ballot == ballot:
            self._send(ballot.proposer, self._round.summed)  # the proposer asks again: the first one was lost

    def _promise_no_less(self, ballot: Ballot, vote: Vote | None = None) -> None:
        if self._round.proposal is not None and self._round.proposal.ballot < ballot:
            self._round.proposal = None
        self._persist(self.record._replace(promised=ballot, vote=vote or self.record.vote))

    def _promise(self) -> None:
        record = self.record
        message = Message(
            Kind.PROMISE,
            record.round,
            record.promised,
            vote=record.vote,
            is_ready=self._round.is_ready,
        )
        self._send(record.promised.proposer, message)

    def _vote(self, proposed: Message) -> None:
        """Vote for a proposed value, if no later ballot has been promised, and once its sum is held."""
        assert proposed.vote is not None
        ballot = proposed.ballot
        value = proposed.vote.value
        if ballot < self.record.promised:
            return
        # A vote says that the sum is held: without it a majority could decide on a sum that is lost.
        if value.sum_sha256 not in self._held:
            self._outputs.append(Fetch(value.sum_sha256, proposed.names))
            return
        vote = Vote(ballot, value)
        if self.record.vote != vote:
            self._promise_no_less(ballot, vote)
        self._send(ballot.proposer, Message(Kind.ACCEPTED, self.record.round, ballot))
