"""Proposer: the part of a member that leads the others to a decision."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

from fed.server.peer.replica.ballots import Ballot, Kind, Message, Value
from fed.server.peer.replica.proposal import Proposal, ring_order
from fed.server.peer.replica.voter import Voter
from fed.wire.messages import client_order

__all__ = ["Proposer"]


class Proposer(Voter, ABC):
    """Voter that also proposes when its turn comes."""

    @abstractmethod
    def _learn(self, value: Value, holders: list[str]) -> None:
        """Take the decided value, whose sum these members hold."""

    def _is_own_turn(self) -> bool:
        """True at the first present member; at the next one after a proposer's silence, and so on.

        Members that listen come before those that only dial.
        """
        here = sorted(self._present_members(), key=lambda name: name not in self._listening)
        led_by = self.record.promised.proposer
        place = here.index(self.own)
        # A first member that has come back waits until the proposal that another began meanwhile has ended.
        is_led_by_later = led_by not in ("", *here[: place + 1])
        silence_s = (place + is_led_by_later) * self._timing.takeover_s
        return self._now_s >= max(self._round.quiet_since_s + silence_s, self._round.not_before_s)

    def _prepare(self) -> None:
        ballot = Ballot(max(self.record.promised.number, self._round.seen.number) + 1, self.own)
        self._promise_no_less(ballot)  # on disk before it is sent: a ballot is not used again after a restart
        self._round.proposal = Proposal(ballot, since_s=self._now_s, sent_s=self._now_s)
        self._resend(self._round.proposal)

    def _yield_to(self, ballot: Ballot) -> None:
        # The next attempt must have a larger ballot, or it would be refused, too.
        self._round.seen = max(self._round.seen, ballot)
        if self._round.proposal is not None and self._round.proposal.ballot < ballot:
            self._give_up(self._timing.takeover_s)

    def _give_up(self, pause_s: float) -> None:
        """End the proposal; the pause is random, so that two proposers do not overtake each other for ever."""
        self._round.proposal = None
        self._round.not_before_s = self._now_s + pause_s * (1 + self._draws.random())

    def _pursue(self, proposal: Proposal) -> None:
        if proposal.awaits_promises:
            self._choose(proposal)
        elif self._now_s - proposal.since_s > self._timing.ballot_s or (
            proposal.value is None and not self._present.issuperset(proposal.ring)
        ):
            self._give_up(0.0)
            return
        if self._now_s - proposal.sent_s >= self._timing.resend_s:
            self._resend(proposal)

    def _resend(self, proposal: Proposal) -> None:
        proposal.sent_s = self._now_s
        for name in self.record.members:
            self._send(name, proposal.message(self.record.round))

    def _count_answer(self, proposal: Proposal, sender: str, message: Message) -> None:
        """Take an answer to this member's own ballot."""
        if message.kind is Kind.PROMISE:
            proposal.promises[sender] = message
            if proposal.awaits_promises:
                self._choose(proposal)
        elif message.kind is Kind.SUMMED and sender in proposal.ring:
            if proposal.value is None:
                contributors = tuple(sorted(proposal.ring, key=client_order))
                value = Value(message.sum_sha256, contributors, self._next_members(proposal))
                self._propose(proposal, value, [sender])
            elif proposal.value.sum_sha256 == message.sum_sha256:
                proposal.holders[sender] = None
            else:  # one of the two sums is wrong
                self._give_up(self._timing.resend_s)
        elif message.kind is Kind.BROKEN and sender in proposal.ring:
            if proposal.value is None:
                # Without this the next ring would break at the same place.
                self._round.excluded.update(message.names)
                self._give_up(self._timing.resend_s)
        elif message.kind is Kind.ACCEPTED and proposal.value is not None:
            proposal.accepted.add(sender)
            proposal.holders[sender] = None
            if len(proposal.accepted) >= self._quorum:
                self._learn(proposal.value, list(proposal.holders))

    def _choose(self, proposal: Proposal) -> None:
        """Propose the latest vote of a majority that has promised; without a vote let a ring run."""
        if len(proposal.promises) < self._quorum:
            return
        if (voted := proposal.voted_value()) is not None:
            value, holders = voted
            self._propose(proposal, value, holders)
            return
        here = [name for name in self._present_members() if name not in self._round.excluded] or self._present_members()
        ready = proposal.ready(here)
        deadline_s = math.inf if self._timing.deadline_s is None else self._timing.deadline_s
        # Even in a late round, members that are present are given time to answer.
        is_late = self._now_s >= max(self._round.began_s + deadline_s, proposal.since_s + self._timing.resend_s)
        if ready and (is_late or len(ready) == len(here)):
            proposal.ring = ring_order(ready, self._listening)
            proposal.since_s = self._now_s
            self._resend(proposal)

    def _next_members(self, proposal: Proposal) -> tuple[str, ...]:
        """Present members and new ones; members stay more than half where there is more than one."""
        stay = [name for name in self.record.members if name in proposal.promises or name in self._present]
        new = [name for name in self._candidates if name not in self.record.members]
        return tuple(sorted(stay + new[: max(1, len(stay) - 1)], key=client_order))

    def _propose(self, proposal: Proposal, value: Value, holders: Iterable[str]) -> None:
        """Propose the one value of this ballot."""
        proposal.value = value
        proposal.holders = dict.fromkeys(holders)
        proposal.since_s = self._now_s
        self._resend(proposal)
