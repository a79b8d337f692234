"""Agreement of peers on the sum of each round, so that all replicas apply the same one, whatever breaks.

Each round is one decree of Paxos (Lamport, "Paxos made simple", 2001; the decree of section 2) among the members that
the round before agreed on. A value names the round's sum by its hash, the members whose updates are in it, and the
members of the next round.

1. A proposer picks a ballot above all that it has seen. Members promise to heed none below and tell their last vote.
2. If one of a majority has voted, the proposer takes over the value of the latest such vote. Else it has the members
   that are ready reduce their updates in a ring, which belongs to this ballot, and whose sum makes the value.
3. It proposes that one value. A member votes for it only when it holds the sum; one that does not fetches it first.
4. A value for which a majority has voted in one ballot is decided. A majority then holds its sum.

- What a member has promised and voted outlives it: a :class:`Persist` among the outputs is done before what follows it.
- Half of the members or fewer decide nothing. They wait, and :attr:`Agreement.is_waiting` says so.
- A member that is behind asks, and learns the decisions that it missed; from far behind it copies another's state.

Members may be killed, frozen, cut off and restarted, and messages lost, doubled and reordered. Members that lie are
beyond this protocol, and so are those that lose what they have persisted and come back under the same name.
"""

import math
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from fed.server.peer.ballots import (
    NO_BALLOT,
    Apply,
    Ballot,
    BallotTiming,
    Copy,
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
from fed.server.peer.proposal import Proposal
from fed.wire.messages import client_id_of

__all__ = ["Agreement"]

_MOST_ATTEMPTS = 2**53


@dataclass
class _Round:
    """Memory of the round that is being decided; what must outlive the process is in the record.

    Args:
        began_s: when this member came to it.
        quiet_since_s: when a proposer was heard last.
        asked_s: when others were asked last.
        not_before_s: when this member may propose again.
        is_ready: it has its update.
        proposal: its own one.
        proposed: the latest proposal of another, whose sum may be on its way.
        learned: the decision, whose sum may be on its way.
        holders: members to fetch that from.
        last_ring: the ballot of the latest ring that it joined.
        lost_ring: the ballot of a ring that it may have joined before it was restarted.
        summed: what it said of the latest ring that has ended.
        seen: the latest ballot that it was refused for.
        excluded: members that a ring of its proposals has failed to reach.
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


class Agreement:
    """One member's part in the agreements of all rounds, one after the other; it makes no calls and reads no clock.

    Most methods return outputs, to be done in their order. All times are of one monotonic clock.

    Attributes:
        record: what is persisted.

    Args:
        own: this member's name.
        record: what it persisted last; at first the round and its members, or none of them at a peer that joins.
        timing: when to send again and when to take over.
        draws: random numbers that keep proposers apart.
        now_s: of the monotonic clock.
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
        # a ring that ran when the process was killed has lost this member
        self._round = _Round(now_s, now_s, lost_ring=record.promised)

    @property
    def is_waiting(self) -> bool:
        """True while half of the round's members or fewer are present, so that nothing can be decided."""
        return bool(self.record.members) and len(self._here()) < self._quorum

    @property
    def needed(self) -> frozenset[str]:
        """Hashes of the sums that are to stay on disk: of this round, and for members that are behind."""
        return frozenset(self._held)

    def receive(self, sender: str, message: Message, now_s: float) -> list[Output]:
        """Take a message.

        Args:
            sender: the name in its certificate.
            message: as it was received.
            now_s: of the monotonic clock.
        """
        self._now_s = now_s
        self._handle(sender, message)
        return self._flush()

    def tick(self, now_s: float, present: Iterable[str], candidates: Iterable[str] = ()) -> list[Output]:
        """Let time pass: send again, take over, ask.

        Args:
            now_s: of the monotonic clock.
            present: the names of the peers that are there.
            candidates: of those that may become members with the next round; until such a one has copied a state it
                has no part in a majority.
        """
        self._now_s, self._present, self._candidates = now_s, frozenset(present) | {self.own}, tuple(candidates)
        if self._round.learned is not None:
            self._move_on()
        elif self.own not in self.record.members or self.is_waiting:
            self._round.proposal = None
            self._ask()
        elif self._round.proposal is not None:
            self._pursue(self._round.proposal)
        elif self._is_own_turn():
            self._prepare()
        return self._flush()

    def ready(self, now_s: float) -> list[Output]:
        """Say that this member has its update for the round."""
        self._now_s, self._round.is_ready = now_s, True
        if self.record.promised.attempt:
            self._promise()
        return self._flush()

    def summed(self, ring: RunRing, sum_sha256: str, now_s: float) -> list[Output]:
        """Say that a ring has ended, and its sum is on disk.

        Args:
            ring: as it was to be run.
            sum_sha256: the hash of the sum.
            now_s: of the monotonic clock.
        """
        self._now_s = now_s
        if ring.round == self.record.round:
            self._held.add(sum_sha256)
            self._round.summed = Message(Kind.SUMMED, ring.round, ring.ballot, sum_sha256=sum_sha256)
            self._send(ring.ballot.proposer, self._round.summed)
        return self._flush()

    def broken(self, ring: RunRing, now_s: float, unreachable: tuple[str, ...] = ()) -> list[Output]:
        """Say that a ring cannot end.

        Args:
            ring: as it was to be run.
            now_s: of the monotonic clock.
            unreachable: its members that this one could not exchange with; the round's next ring goes without them.
        """
        self._now_s = now_s
        if ring.round == self.record.round:
            self._send(ring.ballot.proposer, Message(Kind.BROKEN, ring.round, ring.ballot, names=unreachable))
        return self._flush()

    def holds(self, sum_sha256: str, now_s: float) -> list[Output]:
        """Say that a sum is on disk."""
        self._now_s = now_s
        self._held.add(sum_sha256)
        if self._round.learned is not None:
            self._move_on()
        elif self._round.proposed is not None:
            self._vote(self._round.proposed)
        return self._flush()

    def copied(self, round_number: int, value: Value, now_s: float) -> list[Output]:
        """Say that this member's state is now, on disk too, as it is after a round.

        Args:
            round_number: the round of the :class:`fed.server.peer.ballots.Copy`.
            value: its value.
            now_s: of the monotonic clock.
        """
        self._now_s = now_s
        if round_number >= self.record.round:
            self._decide(round_number, value)
        return self._flush()

    def missed(self, after: int) -> list[Apply] | None:
        """Outputs that bring a model as it was after a round up to date; None if a sum is no longer here."""
        decided = {number: value for number, value in self.record.decided if value.sum_sha256 in self._held}
        rounds = range(after + 1, self.record.round)
        return [Apply(number, decided[number]) for number in rounds] if decided.keys() >= set(rounds) else None

    @property
    def _quorum(self) -> int:
        return len(self.record.members) // 2 + 1

    def _here(self) -> list[str]:
        return [name for name in self.record.members if name in self._present]

    def _flush(self) -> list[Output]:
        while self._to_own:
            self._handle(self.own, self._to_own.pop(0))
        outputs, self._outputs = self._outputs, []
        return outputs

    def _persist(self, record: Record) -> None:
        self.record = record
        self._outputs.append(Persist(record))

    def _send(self, receiver: str, message: Message) -> None:
        if receiver == self.own:
            self._to_own.append(message)
        else:
            self._outputs.append(Send(receiver, message))

    def _handle(self, sender: str, message: Message) -> None:
        record = self.record
        if message.kind is Kind.COPY:
            if message.vote is not None and message.round >= record.round:
                self._outputs.append(Copy(message.round, message.vote.value, sender))
        elif message.round > record.round:
            self._send(sender, Message(Kind.ASK, record.round))
        elif message.round < record.round:
            if message.kind is not Kind.DECIDED:
                self._tell(sender, message.round)
        elif message.kind is Kind.DECIDED:
            if message.vote is not None:
                self._learn(message.vote.value, [sender])
        elif self._round.learned is not None:
            if message.kind in (Kind.PREPARE, Kind.ASK):
                self._send(sender, Message(Kind.DECIDED, record.round, vote=Vote(NO_BALLOT, self._round.learned)))
        elif self.own in record.members and sender in record.members:
            if message.kind in (Kind.PREPARE, Kind.RING, Kind.PROPOSE):
                self._heed(sender, message)
            elif message.kind is Kind.REFUSE:
                self._yield_to(message.ballot)
            elif self._round.proposal is not None and message.ballot == self._round.proposal.ballot:
                self._count(self._round.proposal, sender, message)

    # A member that votes

    def _heed(self, proposer: str, message: Message) -> None:
        """Take what a proposer says, unless a later ballot has been promised."""
        ballot, promised = message.ballot, self.record.promised
        if ballot.proposer != proposer or not 0 < ballot.attempt <= _MOST_ATTEMPTS:
            return
        if ballot < promised:
            self._send(proposer, Message(Kind.REFUSE, self.record.round, promised))
            return
        self._round.quiet_since_s = self._now_s
        if message.kind is Kind.PREPARE:
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
            self._send(ballot.proposer, self._round.summed)  # the proposer asks again: it was lost

    def _promise_no_less(self, ballot: Ballot, vote: Vote | None = None) -> None:
        if self._round.proposal is not None and self._round.proposal.ballot < ballot:
            self._round.proposal = None
        self._persist(self.record._replace(promised=ballot, vote=vote or self.record.vote))

    def _promise(self) -> None:
        record = self.record
        message = Message(Kind.PROMISE, record.round, record.promised, record.vote, is_ready=self._round.is_ready)
        self._send(record.promised.proposer, message)

    def _vote(self, proposed: Message) -> None:
        """Vote for what is proposed, if no later ballot has been promised, and once its sum is held."""
        assert proposed.vote is not None
        ballot, value = proposed.ballot, proposed.vote.value
        if ballot < self.record.promised:
            return
        if value.sum_sha256 not in self._held:
            self._outputs.append(Fetch(value.sum_sha256, proposed.names))
            return
        vote = Vote(ballot, value)
        if self.record.vote != vote:
            self._promise_no_less(ballot, vote)
        self._send(ballot.proposer, Message(Kind.ACCEPTED, self.record.round, ballot))

    # A member that proposes

    def _is_own_turn(self) -> bool:
        """True at the first present member, at the next after a proposer's silence, and so on."""
        place = self._here().index(self.own)
        is_led = self.record.promised.proposer not in ("", self.own)
        return self._now_s >= max(
            self._round.quiet_since_s + (place + is_led) * self._timing.takeover_s, self._round.not_before_s
        )

    def _prepare(self) -> None:
        ballot = Ballot(max(self.record.promised.attempt, self._round.seen.attempt) + 1, self.own)
        self._promise_no_less(ballot)  # on disk before anyone hears of it: a ballot is not used again after a restart
        self._round.proposal = Proposal(ballot, self._now_s, self._now_s)
        self._say_again(self._round.proposal)

    def _yield_to(self, ballot: Ballot) -> None:
        self._round.seen = max(self._round.seen, ballot)
        if self._round.proposal is not None and self._round.proposal.ballot < ballot:
            self._give_up(self._timing.takeover_s)

    def _give_up(self, pause_s: float) -> None:
        """End the attempt; the pause is random, so that two proposers do not go on overtaking each other."""
        self._round.proposal = None
        self._round.not_before_s = self._now_s + pause_s * (1 + self._draws.random())

    def _pursue(self, proposal: Proposal) -> None:
        if proposal.gathers:
            self._choose(proposal)
        elif self._now_s - proposal.since_s > self._timing.ballot_s or (
            proposal.value is None and not self._present.issuperset(proposal.ring)
        ):
            self._give_up(0.0)
            return
        if self._now_s - proposal.sent_s >= self._timing.resend_s:
            self._say_again(proposal)

    def _say_again(self, proposal: Proposal) -> None:
        proposal.sent_s = self._now_s
        for name in self.record.members:
            self._send(name, proposal.message(self.record.round))

    def _count(self, proposal: Proposal, sender: str, message: Message) -> None:
        """Take an answer to this member's own ballot."""
        if message.kind is Kind.PROMISE:
            proposal.promises[sender] = message
            if proposal.gathers:
                self._choose(proposal)
        elif message.kind is Kind.SUMMED and sender in proposal.ring:
            if proposal.value is None:
                value = Value(message.sum_sha256, proposal.ring, self._next_members(proposal))
                self._propose(proposal, value, [sender])
            elif proposal.value.sum_sha256 == message.sum_sha256:
                proposal.holders[sender] = None
        elif message.kind is Kind.BROKEN and sender in proposal.ring:
            if proposal.value is None:
                self._round.excluded.update(message.names)
                self._give_up(self._timing.resend_s)
        elif message.kind is Kind.ACCEPTED and proposal.value is not None:
            proposal.accepted.add(sender)
            proposal.holders[sender] = None
            if len(proposal.accepted) >= self._quorum:
                self._learn(proposal.value, list(proposal.holders))

    def _choose(self, proposal: Proposal) -> None:
        """Take over the latest vote of those that promised, a majority; without one let a ring run."""
        if len(proposal.promises) < self._quorum:
            return
        if (taken_over := proposal.taken_over()) is not None:
            self._propose(proposal, *taken_over)
            return
        here = [name for name in self._here() if name not in self._round.excluded] or self._here()
        ready = proposal.ready(here)
        deadline_s = math.inf if self._timing.deadline_s is None else self._timing.deadline_s
        # late or not, all who are there are given the time to answer
        is_late = self._now_s >= max(self._round.began_s + deadline_s, proposal.since_s + self._timing.resend_s)
        if ready and (is_late or len(ready) == len(here)):
            proposal.ring, proposal.since_s = ready, self._now_s
            self._say_again(proposal)

    def _next_members(self, proposal: Proposal) -> tuple[str, ...]:
        stay = {name for name in self.record.members if name in proposal.promises or name in self._present}
        return tuple(sorted(stay.union(self._candidates), key=_place))

    def _propose(self, proposal: Proposal, value: Value, holders: Iterable[str]) -> None:
        """Propose the one value of this ballot."""
        proposal.value, proposal.holders, proposal.since_s = value, dict.fromkeys(holders), self._now_s
        self._say_again(proposal)

    # What was decided

    def _learn(self, value: Value, holders: list[str]) -> None:
        self._round.learned, self._round.holders = value, (*holders, *self.record.members)
        if self._round.proposal is not None and self._round.proposal.value == value:
            vote = Vote(self._round.proposal.ballot, value)
            for name in dict.fromkeys((*self.record.members, *value.members)):
                if name != self.own:
                    self._send(name, Message(Kind.DECIDED, self.record.round, vote=vote))
        self._round.proposal = None
        self._move_on(is_new=True)

    def _move_on(self, *, is_new: bool = False) -> None:
        """Go to the next round once the sum is held."""
        assert self._round.learned is not None
        if self._round.learned.sum_sha256 in self._held:
            number, value = self.record.round, self._round.learned
            self._decide(number, value)
            self._outputs.append(Apply(number, value))
        elif is_new or self._now_s - self._round.asked_s >= self._timing.resend_s:
            self._round.asked_s = self._now_s
            others = [name for name in dict.fromkeys(self._round.holders) if name != self.own]
            self._outputs.append(Fetch(self._round.learned.sum_sha256, tuple(others)))
            # they may hold it no longer, and then have a copy to give
            if others:
                self._send(self._draws.choice(others), Message(Kind.ASK, self.record.round))

    def _decide(self, number: int, value: Value) -> None:
        decided = (*self.record.decided, (number, value))[-self._timing.kept :]
        self._persist(Record(number + 1, value.members, decided=decided))
        self._held &= {value.sum_sha256 for _, value in decided}
        self._round = _Round(self._now_s, self._now_s)

    def _tell(self, receiver: str, number: int) -> None:
        """Tell one that is behind what was decided, or that it must copy a state."""
        decided = dict(self.record.decided)
        if not decided:
            return
        latest = self.record.round - 1
        is_here = number in decided and decided[number].sum_sha256 in self._held
        kind, number = (Kind.DECIDED, number) if is_here else (Kind.COPY, latest)
        self._send(receiver, Message(kind, number, vote=Vote(NO_BALLOT, decided[number])))

    def _ask(self) -> None:
        others = sorted(self._present - {self.own})
        if others and self._now_s - self._round.asked_s >= self._timing.resend_s:
            self._round.asked_s = self._now_s
            self._send(self._draws.choice(others), Message(Kind.ASK, self.record.round))


def _place(name: str) -> tuple[bool, int | str]:
    client = client_id_of(name)
    return isinstance(client, str), client
