"""Agreement of peers on the sum of each round, so that all replicas apply the same one, whatever breaks.

Each round is one decree of Paxos (Lamport, "Paxos made simple", 2001; the decree of section 2) among the members that
the round before agreed on. A value names the round's sum by its hash, the members whose updates are in it, and the
members of the next round.

1. A proposer picks a ballot above all that it has seen. Members promise to refuse lower ones, and tell their last vote.
2. If one of a majority has voted, the proposer takes over the value of the latest such vote. Else it has the members
   that are ready reduce their updates in a ring, which belongs to this ballot, and whose sum makes the value.
3. It proposes that one value. A member votes for it only when it holds the sum; one that does not fetches it first.
4. A value for which a majority has voted in one ballot is decided. A majority then holds its sum.

- What a member has promised and voted outlives it: a :class:`Persist` among the outputs is done before what follows it.
- Half of the members or fewer decide nothing. They wait, and :attr:`Agreement.is_waiting` says so.
- A member that is behind asks, and learns the decisions that it missed; from far behind it copies another's state.

Members may be killed, frozen, cut off and restarted, and messages lost, doubled and reordered. The protocol does not
bear members that lie, nor members that lose what they have persisted and come back under the same name.
"""

from collections.abc import Iterable

from fed.server.peer.replica.ballots import (
    NO_BALLOT,
    Apply,
    Copy,
    Fetch,
    Kind,
    Message,
    Output,
    Record,
    RunRing,
    Value,
    Vote,
)
from fed.server.peer.replica.proposer import Proposer
from fed.server.peer.replica.voter import RoundMemory

__all__ = ["Agreement"]


class Agreement(Proposer):
    """One member's part in the agreements of all rounds, one after the other; it makes no calls and reads no clock.

    Most methods return outputs, to be done in their order. All times are of one monotonic clock.

    Attributes:
        record: round, members, promise and vote of this member, as it is to be on disk.

    Args:
        own: name of this member.
        record: the last record on disk; at first the round and its members, or an empty one at a peer that joins.
        timing: time limits after which messages are sent again and a proposer is replaced.
        draws: random numbers that keep proposers apart.
        now_s: seconds on the monotonic clock.
        held: hashes of the sums that are on disk.

    Example:
        >>> import random
        >>> from fed.server.peer.replica.ballots import BallotTiming
        >>> alone = Agreement("7", Record(1, ("7",)), BallotTiming(), random.Random(0), now_s=0.0)
        >>> alone.ready(0.0)
        []
        >>> *persisted, ring = alone.tick(0.0, ["7"])
        >>> ring.members
        ('7',)
        >>> alone.summed(ring, "hash", 1.0)[-1]
        Apply(round=1, value=Value(sum_sha256='hash', contributors=('7',), members=('7',)))
    """

    @property
    def is_waiting(self) -> bool:
        """True while half of the round's members or fewer are present, so that nothing can be decided."""
        return bool(self.record.members) and len(self._present_members()) < self._quorum

    @property
    def needed(self) -> frozenset[str]:
        """Hashes of the sums that are to stay on disk: of this round, and for members that are behind."""
        return frozenset(self._held)

    def receive(self, sender: str, message: Message, now_s: float) -> list[Output]:
        """Take a message.

        Args:
            sender: the name in the sender's certificate.
            message: the message as it was received.
            now_s: seconds on the monotonic clock.

        Returns:
            Outputs, to be done in their order.
        """
        self._now_s = now_s
        self._handle(sender, message)
        return self._flush()

    def tick(
        self, now_s: float, present: Iterable[str], candidates: Iterable[str] = (), listening: Iterable[str] = ()
    ) -> list[Output]:
        """Let time pass: send again, take over, ask.

        Args:
            now_s: seconds on the monotonic clock.
            present: the names of present peers.
            candidates: the names of peers that may become members with the next round; a new member votes for nothing
                before it has copied a state.
            listening: the names of members that listen; these propose before those that only dial.

        Returns:
            Outputs, to be done in their order.
        """
        self._listening = frozenset(listening)
        self._now_s = now_s
        self._present = frozenset(present) | {self.own}
        self._candidates = tuple(candidates)
        if self._round.learned is not None:
            self._move_on()
        elif self.own not in self.record.members or self.is_waiting:
            # This member cannot reach a majority now.
            self._round.proposal = None
            self._ask()
        elif self._round.proposal is not None:
            self._pursue(self._round.proposal)
        elif self._is_own_turn():
            self._prepare()
        return self._flush()

    def ready(self, now_s: float) -> list[Output]:
        """Say that this member has its update for the round."""
        self._now_s = now_s
        self._round.is_ready = True
        if self.record.promised.number:
            self._promise()
        return self._flush()

    def summed(self, ring: RunRing, sum_sha256: str, now_s: float) -> list[Output]:
        """Say that a ring has ended, and its sum is on disk.

        Args:
            ring: the output that asked for the ring.
            sum_sha256: hash of the sum, 64 hexadecimal digits.
            now_s: seconds on the monotonic clock.
        """
        self._now_s = now_s
        # The ring may have ended after another ballot decided the round.
        if ring.round == self.record.round:
            self._held.add(sum_sha256)
            self._round.summed = Message(Kind.SUMMED, ring.round, ring.ballot, sum_sha256=sum_sha256)
            self._send(ring.ballot.proposer, self._round.summed)
        return self._flush()

    def broken(self, ring: RunRing, now_s: float, unreachable: tuple[str, ...] = ()) -> list[Output]:
        """Say that a ring cannot end.

        Args:
            ring: the output that asked for the ring.
            now_s: seconds on the monotonic clock.
            unreachable: names of its members that this one could not exchange with; the round's next ring goes without
                them.
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

        A kill may come between the state and the record. Keep the round and its value with the state, and after a
        restart say this again if the state is ahead of the record.

        Args:
            round_number: the round of the :class:`fed.server.peer.replica.ballots.Copy`, from 1.
            value: the value of that round.
            now_s: seconds on the monotonic clock.
        """
        self._now_s = now_s
        # A copy of an earlier round, which came late, would take this member back.
        if round_number >= self.record.round:
            self._decide(round_number, value)
        return self._flush()

    def missed(self, after: int) -> list[Apply] | None:
        """Find the sums that bring a model up to date at a restart.

        Args:
            after: the last round that the model has been moved by; 0: none.

        Returns:
            Outputs to be done; None if a sum is no longer here: checkpoints must be less than ``kept`` rounds apart.
        """
        decided = {number: value for number, value in self.record.decided if value.sum_sha256 in self._held}
        rounds = range(after + 1, self.record.round)
        return [Apply(number, decided[number]) for number in rounds] if decided.keys() >= set(rounds) else None

    def _flush(self) -> list[Output]:
        while self._to_own:
            # A member is a voter, too: its messages to itself are handled like those of others.
            self._handle(self.own, self._to_own.pop(0))
        outputs = self._outputs
        self._outputs = []
        return outputs

    def _handle(self, sender: str, message: Message) -> None:
        record = self.record
        if message.kind is Kind.COPY:
            if message.vote is not None and message.round >= record.round:
                self._outputs.append(Copy(message.round, message.vote.value, sender))
        elif message.round > record.round:
            self._send(sender, Message(Kind.ASK, record.round))
        elif message.round < record.round:
            # A late decision needs no answer: its sender knows it.
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
                self._follow(sender, message)
            elif message.kind is Kind.REFUSE:
                self._yield_to(message.ballot)
            elif self._round.proposal is not None and message.ballot == self._round.proposal.ballot:
                self._count_answer(self._round.proposal, sender, message)

    def _learn(self, value: Value, holders: list[str]) -> None:
        self._round.learned = value
        self._round.holders = (*holders, *self.record.members)
        # The proposer alone tells the others: if each member did, the messages would grow by the square.
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
            number = self.record.round
            value = self._round.learned
            self._decide(number, value)
            self._outputs.append(Apply(number, value))
        elif is_new or self._now_s - self._round.asked_s >= self._timing.resend_s:
            self._round.asked_s = self._now_s
            others = [name for name in dict.fromkeys(self._round.holders) if name != self.own]
            self._outputs.append(Fetch(self._round.learned.sum_sha256, tuple(others)))
            # Holders may have removed the sum since; asked for the round, they give a copy of their state.
            if others:
                self._send(self._draws.choice(others), Message(Kind.ASK, self.record.round))

    def _decide(self, number: int, value: Value) -> None:
        decided = (*self.record.decided, (number, value))[-self._timing.kept :]
        self._persist(Record(round=number + 1, members=value.members, decided=decided))
        self._held &= {value.sum_sha256 for _, value in decided}
        self._round = RoundMemory(began_s=self._now_s, quiet_since_s=self._now_s)

    def _tell(self, receiver: str, number: int) -> None:
        """Tell a member that is behind the decision of its round, or that it must copy a state."""
        decided = dict(self.record.decided)
        if not decided:
            return
        if number in decided and decided[number].sum_sha256 in self._held:
            self._send(receiver, Message(Kind.DECIDED, number, vote=Vote(NO_BALLOT, decided[number])))
        else:  # without the round's sum the decision is of no use to the member
            latest = self.record.round - 1
            self._send(receiver, Message(Kind.COPY, latest, vote=Vote(NO_BALLOT, decided[latest])))

    def _ask(self) -> None:
        others = sorted(self._present - {self.own})
        if others and self._now_s - self._round.asked_s >= self._timing.resend_s:
            self._round.asked_s = self._now_s
            self._send(self._draws.choice(others), Message(Kind.ASK, self.record.round))
