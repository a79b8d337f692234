"""Simulated replicas that agree on rounds, and a checker of what must hold whatever goes wrong between them."""

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from fed.server.peer.replica.agreement import Agreement
from fed.server.peer.replica.ballots import (
    Apply,
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
)

TIMING = BallotTiming(resend_s=0.3, takeover_s=1.0, ballot_s=3.0)
TICK_S = 0.2


class Killed(Exception):
    pass


class Replica:
    """A process with its disk: the record, the sums and the model's last checkpoint."""

    def __init__(self, name: str, record: Record) -> None:
        self.name = name
        self.record = record
        self.sums: set[str] = set()
        self.checkpoint: list[Value] = []  # of the rounds that the model on disk has been moved by
        self.model: list[Value] = []
        self.agreement: Agreement | None = None
        self.life = 0
        self.is_frozen = False
        self.waiting: list[Callable[[], None]] = []


class Checker:
    """Observer of all disks.

    A round has one decision, for which a majority of its members has voted in one ballot, all of which hold its sum.
    """

    def __init__(self, first_members: tuple[str, ...], first_round: int) -> None:
        self.decided: dict[int, Value] = {}
        self.members = {first_round: first_members}
        self._votes: dict[tuple[int, object], dict[str, Value]] = defaultdict(dict)

    def persisted(self, replica: Replica, before: Record, after: Record) -> None:
        assert after.round >= before.round
        if after.round == before.round:
            assert after.promised >= before.promised
            assert after.vote is not None or before.vote is None
        for number, value in after.decided:
            assert self.decided.get(number) == value
        if after.vote is None or after.vote == before.vote:
            return
        assert after.vote.value.sum_sha256 in replica.sums
        votes = self._votes[after.round, after.vote.ballot]
        votes[replica.name] = after.vote.value
        assert len(set(votes.values())) == 1
        members = self.members[after.round]
        if len(votes.keys() & set(members)) > len(members) / 2:
            assert self.decided.setdefault(after.round, after.vote.value) == after.vote.value
            self.members[after.round + 1] = after.vote.value.members

    def sent(self, replica: Replica, message: Message) -> None:
        on_disk = replica.record
        match message.kind:
            case Kind.PREPARE:
                assert on_disk.promised >= message.ballot
            case Kind.PROMISE:
                assert (on_disk.promised, on_disk.vote) == (message.ballot, message.vote)
            case Kind.ACCEPTED:
                assert on_disk.vote is not None
                assert on_disk.vote.ballot == message.ballot
            case Kind.DECIDED:
                assert message.vote is not None
                assert self.decided.get(message.round) == message.vote.value

    def applied(self, replica: Replica, output: Apply) -> None:
        assert self.decided.get(output.round) == output.value
        assert output.value.sum_sha256 in replica.sums
        assert len(replica.model) == output.round - 1


class Replicas:
    """Replicas over a network, with rings that end or break, and kills between any two outputs."""

    def __init__(
        self,
        names: Sequence[str],
        seed: int,
        *,
        loss: float = 0.0,
        joiners: Sequence[str] = (),
        timing: BallotTiming = TIMING,
        machine: type[Agreement] = Agreement,
    ) -> None:
        self.draws = random.Random(seed)
        self.loss, self.timing, self.machine = loss, timing, machine
        self.kill_chance = 0.0
        self.kill_at = -1
        self.are_seen_by_all = False  # through others, if they are blocked
        self.slow: Collection[str] = ()
        self.broken_rings = 0.0
        self.late = 0.0  # the share of messages that are overtaken by many
        self.doubt = 0.0  # the probability that one who is there is taken for absent
        self.now_s = 0.0
        self.outputs = 0
        self.blocked: Callable[[str, str], bool] = lambda one, other: False
        first = Record(round=1, members=tuple(names))
        self.all = {name: Replica(name, first) for name in names} | {name: Replica(name, Record()) for name in joiners}
        self.checker = Checker(tuple(names), 1)
        self._rings: dict[RunRing, dict[str, int]] = defaultdict(dict)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        for name in self.all:
            self.start(name)

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._number, event))

    def run(self, seconds: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Go on for so long, or until it is done; whether it is."""
        until_s = self.now_s + seconds
        while not done():
            if not self._events or self._events[0][0] > until_s:
                self.now_s = until_s
                return False
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        return True

    def all_reached(self, round_number: int, *names: str) -> Callable[[], bool]:
        """Whether all of these, or all there are, have models moved by so many rounds."""
        replicas = [self.all[name] for name in names or self.all]
        return lambda: all(len(replica.model) >= round_number for replica in replicas)

    def start(self, name: str) -> None:
        replica = self.all[name]
        replica.life, replica.is_frozen, replica.waiting = replica.life + 1, False, []
        draws = random.Random(self.draws.random())
        replica.agreement = self.machine(
            name, replica.record, self.timing, draws, now_s=self.now_s, held=set(replica.sums)
        )
        replica.model = list(replica.checkpoint)
        # it may have been killed before its record said that it had copied a state
        if replica.model and len(replica.model) >= replica.record.round:
            number, value = len(replica.model), replica.model[-1]
            self._own(replica, lambda agreement: agreement.copied(number, value, self.now_s))
            if replica.agreement is None:
                return
        missed = replica.agreement.missed(len(replica.model))
        assert missed is not None
        self._own(replica, lambda agreement: [*missed])
        self._train(replica)
        self._repeat(replica, replica.life)

    def kill(self, name: str) -> None:
        self.all[name].agreement = None

    def freeze(self, name: str) -> None:
        self.all[name].is_frozen = True

    def resume(self, name: str) -> None:
        replica = self.all[name]
        replica.is_frozen = False
        waiting, replica.waiting = replica.waiting, []
        for event in waiting:
            event()

    def split(self, *sides: Sequence[str]) -> None:
        side_of = {name: number for number, side in enumerate(sides) for name in side}
        self.blocked = lambda one, other: side_of.get(one) != side_of.get(other)

    def present(self, name: str) -> set[str]:
        awake = {one.name for one in self.all.values() if one.agreement is not None and not one.is_frozen}
        return {other for other in awake if self.are_seen_by_all or not self.blocked(name, other)}

    def _repeat(self, replica: Replica, life: int) -> None:
        def tick() -> None:
            if replica.life == life and replica.agreement is not None:
                present = {name for name in sorted(self.present(replica.name)) if self.draws.random() >= self.doubt}
                self._own(replica, lambda agreement: agreement.tick(self.now_s, present, present))
                self.at(TICK_S * self.draws.uniform(0.9, 1.1), lambda: self._live(replica, life, tick))

        self.at(self.draws.uniform(0, TICK_S), lambda: self._live(replica, life, tick))

    def _live(self, replica: Replica, life: int, event: Callable[[], None]) -> None:
        """Let something happen at a process that is still the same; at a frozen one when it resumes."""
        if replica.agreement is None or replica.life != life:
            return
        if replica.is_frozen:
            replica.waiting.append(lambda: self._live(replica, life, event))
        else:
            event()

    def _later(self, replica: Replica, delay_s: float, call: Callable[[Agreement], list[Output]]) -> None:
        life = replica.life
        self.at(delay_s, lambda: self._live(replica, life, lambda: self._own(replica, call)))

    def _own(self, replica: Replica, call: Callable[[Agreement], list[Output]]) -> None:
        assert replica.agreement is not None
        try:
            for output in call(replica.agreement):
                self._perform(replica, output)
        except Killed:
            self.kill(replica.name)
            self.at(self.draws.uniform(0, 3), lambda: self.start(replica.name))

    def _perform(self, replica: Replica, output: Output) -> None:
        self.outputs += 1
        if self.outputs == self.kill_at or self.draws.random() < self.kill_chance:
            raise Killed
        match output:
            case Persist(record):
                before, replica.record = replica.record, record
                self.checker.persisted(replica, before, record)
            case Send(receiver, message):
                self.checker.sent(replica, message)
                for _ in range(2 if self.draws.random() < self.loss / 2 else 1):  # some arrive twice
                    self._deliver(replica.name, receiver, message)
            case RunRing():
                self._join(replica, output)
            case Fetch(sum_sha256, holders):
                self._fetch(replica, sum_sha256, holders)
            case Apply(_, value):
                self.checker.applied(replica, output)
                replica.model.append(value)
                assert replica.agreement is not None
                replica.sums &= replica.agreement.needed
                if self.draws.random() < 0.5 or len(replica.model) - len(replica.checkpoint) >= self.timing.kept:
                    replica.checkpoint = list(replica.model)
                self._train(replica)
            case Copy():
                self._copy(replica, output)

    def _deliver(self, sender: str, receiver: str, message: Message) -> None:
        if self.draws.random() < self.loss:
            return

        def arrive(agreement: Agreement) -> list[Output]:
            return agreement.receive(sender, message, self.now_s)

        if not self.blocked(sender, receiver):
            delay_s = self.draws.uniform(0, 4.0 if self.draws.random() < self.late else 0.05)
            self._later(self.all[receiver], delay_s, arrive)

    def _train(self, replica: Replica) -> None:
        number = len(replica.model) + 1
        takes_s = 1e9 if replica.name in self.slow else self.draws.uniform(0, 1)

        def ready(agreement: Agreement) -> list[Output]:
            return agreement.ready(self.now_s) if len(replica.model) + 1 == number == agreement.record.round else []

        self._later(replica, takes_s, ready)

    def _join(self, replica: Replica, ring: RunRing) -> None:
        joined = self._rings[ring]
        assert replica.name not in joined or joined[replica.name] == replica.life
        joined[replica.name] = replica.life
        self._later(replica, 2.0, lambda agreement: agreement.broken(ring, self.now_s) if ring in self._rings else [])
        if joined.keys() != set(ring.members) or self.draws.random() < self.broken_rings:
            return
        for one, other in itertools.permutations(ring.members, 2):
            if self.blocked(one, other):
                self._later(self.all[one], 1.0, self._unreachable(ring, other))
                return
        common = f"{ring.round}:{ring.ballot.number}:{ring.ballot.proposer}:{self._number}"
        for name, life in self._rings.pop(ring).items():
            if self.all[name].life == life:
                # a broken ring may end with another sum at one member: votes must not depend on it
                got = f"{common}:{name}" if self.draws.random() < self.broken_rings / 4 else common
                self._later(self.all[name], self.draws.uniform(0, 0.5), self._ended(self.all[name], ring, got))

    def _unreachable(self, ring: RunRing, other: str) -> Callable[[Agreement], list[Output]]:
        return lambda agreement: agreement.broken(ring, self.now_s, (other,))

    def _ended(self, replica: Replica, ring: RunRing, got: str) -> Callable[[Agreement], list[Output]]:
        def summed(agreement: Agreement) -> list[Output]:
            replica.sums.add(got)
            return agreement.summed(ring, got, self.now_s)

        return summed

    def _fetch(self, replica: Replica, sum_sha256: str, holders: Sequence[str]) -> None:
        able = [name for name in holders if sum_sha256 in self.all[name].sums and name in self.present(replica.name)]
        if not able or self.draws.random() < self.loss:
            return

        def holds(agreement: Agreement) -> list[Output]:
            replica.sums.add(sum_sha256)
            return agreement.holds(sum_sha256, self.now_s)

        self._later(replica, self.draws.uniform(0, 0.2), holds)

    def _copy(self, replica: Replica, output: Copy) -> None:
        holder = self.all[output.holder]

        def copied(agreement: Agreement) -> list[Output]:
            if output.holder not in self.present(replica.name) or len(holder.model) < output.round:
                return []
            number = len(holder.model)
            if number < agreement.record.round:
                return []
            replica.model, replica.checkpoint = list(holder.model), list(holder.model)
            self._train(replica)
            return agreement.copied(number, holder.model[-1], self.now_s)

        self._later(replica, self.draws.uniform(0, 0.2), copied)
