"""Agreement among simulated replicas: never two decisions, and one as soon as a majority lets it be, all by seeds."""

import random
import re
from collections.abc import Sequence

import pytest

from fed.errors import ValueRange
from fed.server.peer.replica.agreement import Agreement
from fed.server.peer.replica.ballots import (
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
    refusal_of_message,
)
from fed.server.peer.replica.proposal import ring_order
from tests.server.peer.replica.replicas import TIMING, Replicas

EIGHT = tuple([str(number) for number in range(8)])


def run_with_faults(seed: int, machine: type[Agreement] = Agreement) -> bool:
    """Kill, freeze, cut and lose at random, then mend all; whether two more rounds are decided within a minute."""
    draws = random.Random(seed)
    names, joiners = EIGHT[: draws.choice([2, 3, 4, 5, 7])], ["j", "k"][: draws.choice([0, 0, 1, 2])]
    timing = BallotTiming(
        resend_s=0.3,
        takeover_s=1.0,
        ballot_s=3.0,
        deadline_s=draws.choice([None, 2.0]),
        kept=draws.choice([2, 8]),
    )
    loss = draws.choice([0.0, 0.1, 0.3])
    replicas = Replicas(names, seed, loss=loss, joiners=joiners, timing=timing, machine=machine)
    replicas.broken_rings, replicas.kill_chance = draws.choice([0.0, 0.3]), draws.choice([0.0, 0.01, 0.05])
    replicas.late, replicas.doubt = draws.choice([0.0, 0.1, 0.5]), draws.choice([0.0, 0.1, 0.5])
    everybody = [*names, *joiners]
    for _ in range(draws.randrange(12)):
        replicas.run(draws.expovariate(1.0))
        _break_something(replicas, everybody, draws)
    replicas.split()
    replicas.kill_chance = replicas.broken_rings = replicas.late = replicas.doubt = 0.0
    replicas.run(4)
    for name in everybody:
        replicas.resume(name)
        if replicas.all[name].agreement is None:
            replicas.start(name)
    goal = max(len(replica.model) for replica in replicas.all.values()) + 2
    return replicas.run(60, replicas.all_reached(goal))


def run_duels(seed: int, machine: type[Agreement] = Agreement) -> int:
    """Half a minute of members that all propose, since they take each other for absent, with messages of long ago.

    Returns:
        The number of rounds that were decided, each once.
    """
    draws = random.Random(seed)
    timing = BallotTiming(resend_s=0.2, takeover_s=0.25, ballot_s=3.0, deadline_s=draws.choice([None, 1.0]))
    replicas = Replicas(EIGHT[: draws.choice([3, 4, 5])], seed, timing=timing, machine=machine)
    replicas.late, replicas.doubt = draws.choice([0.5, 0.9]), draws.choice([0.1, 0.5])
    replicas.loss, replicas.kill_chance = draws.choice([0.0, 0.3]), draws.choice([0.0, 0.01])
    replicas.run(30)
    return len(replicas.checker.decided)


def _break_something(replicas: Replicas, everybody: Sequence[str], draws: random.Random) -> None:
    name = draws.choice(everybody)
    match draws.choice(["kill", "start", "freeze", "resume", "split", "heal"]):
        case "kill":
            replicas.kill(name)
        case "start" if replicas.all[name].agreement is None:
            replicas.start(name)
        case "freeze":
            replicas.freeze(name)
        case "resume":
            replicas.resume(name)
        case "split":
            half = draws.sample(everybody, len(everybody) // 2)
            replicas.split(half, [other for other in everybody if other not in half])
        case "heal":
            replicas.split()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_each_round_sums_the_updates_of_all_members(count: int) -> None:
    for seed in range(10):
        replicas = Replicas(EIGHT[:count], seed)
        assert replicas.run(60, replicas.all_reached(3))
        decided = replicas.checker.decided
        assert [decided[number].contributors for number in (1, 2, 3)] == [EIGHT[:count]] * 3


def test_any_faults_leave_one_decision_and_then_another() -> None:
    for seed in range(200):
        assert run_with_faults(seed), seed


def test_duels_of_proposers_end_in_one_decision() -> None:
    assert sum(run_duels(seed) for seed in range(100)) > 100


@pytest.mark.long
def test_any_of_many_faults_leave_one_decision() -> None:
    for seed in range(2_000):
        assert run_with_faults(seed), seed
        run_duels(seed)


@pytest.mark.parametrize("joiners", [[], ["j"]])
def test_a_kill_between_any_two_steps_changes_no_decision(joiners: list[str]) -> None:
    whole = Replicas(EIGHT[:3], 0, joiners=joiners)
    assert whole.run(60, whole.all_reached(2))
    for step in range(1, whole.outputs + 1):
        replicas = Replicas(EIGHT[:3], 0, joiners=joiners)
        replicas.kill_at = step
        assert replicas.run(60, replicas.all_reached(2)), step


@pytest.mark.parametrize("sides", [("01", "23"), ("0123", "4567")])
def test_half_of_the_members_waits_until_healed(sides: tuple[str, str]) -> None:
    names = [*sides[0], *sides[1]]
    replicas = Replicas(names, 3)
    replicas.run(60, replicas.all_reached(2))
    replicas.split(*sides)
    replicas.run(5)
    models = {name: len(replicas.all[name].model) for name in names}
    replicas.run(60)
    assert {name: len(replicas.all[name].model) for name in names} == models
    for name in names:
        agreement = replicas.all[name].agreement
        assert agreement is not None
        assert agreement.is_waiting
    replicas.split()
    assert replicas.run(20, replicas.all_reached(max(models.values()) + 3))


def test_the_larger_side_goes_on_and_takes_the_other_back() -> None:
    replicas = Replicas(EIGHT, 4)
    replicas.run(60, replicas.all_reached(2))
    replicas.split(EIGHT[:3], EIGHT[3:])
    assert replicas.run(60, replicas.all_reached(30, *EIGHT[3:]))
    assert all(len(replicas.all[name].model) < 10 for name in EIGHT[:3])
    assert replicas.checker.members[30] == EIGHT[3:]
    replicas.split()
    assert replicas.run(30, replicas.all_reached(35))
    replicas.run(5)
    assert replicas.checker.members[max(replicas.checker.members)] == EIGHT


@pytest.mark.parametrize("count", [3, 4, 8])
def test_the_rest_goes_on_without_a_minority_that_is_killed(count: int) -> None:
    for seed in range(10):
        replicas = Replicas(EIGHT[:count], seed)
        replicas.run(60, replicas.all_reached(1))
        killed = EIGHT[: (count - 1) // 2]  # the first proposers
        for name in killed:
            replicas.kill(name)
        rest = EIGHT[len(killed) : count]
        assert replicas.run(20, replicas.all_reached(4, *rest)), seed


def test_a_peer_that_joins_copies_a_state_and_contributes() -> None:
    replicas = Replicas(EIGHT[:3], 5, joiners=["j"])
    assert replicas.run(60, replicas.all_reached(8))
    replicas.run(10)
    last = replicas.checker.decided[max(replicas.checker.decided)]
    assert last.contributors == last.members == (*EIGHT[:3], "j")


def test_members_that_are_late_stay_members_without_contributing() -> None:
    timing = BallotTiming(resend_s=0.3, takeover_s=1.0, ballot_s=3.0, deadline_s=2.0)
    replicas = Replicas(EIGHT[:3], 6, timing=timing)
    replicas.slow = {"0"}
    replicas.run(2)  # its first update had begun already
    assert replicas.run(60, replicas.all_reached(5))
    assert replicas.checker.decided[5] == replicas.checker.decided[5]._replace(
        contributors=EIGHT[1:3], members=EIGHT[:3]
    )


def test_a_round_long_overdue_takes_all_who_are_ready() -> None:
    timing = BallotTiming(resend_s=0.3, takeover_s=1.0, ballot_s=3.0, deadline_s=2.0)
    replicas = Replicas(EIGHT[:4], 9, timing=timing)
    replicas.split("01", "23")
    replicas.run(60)
    assert replicas.checker.decided == {}
    replicas.split()
    replicas.run(20, replicas.all_reached(1))
    assert replicas.checker.decided[1].contributors == EIGHT[:4]


def test_sums_are_kept_for_some_rounds_alone() -> None:
    replicas = Replicas(EIGHT[:3], 10)
    assert replicas.run(60, replicas.all_reached(20))
    assert all(len(replica.sums) <= TIMING.kept + 1 for replica in replicas.all.values())


def test_without_a_deadline_a_present_member_is_waited_for() -> None:
    replicas = Replicas(EIGHT[:3], 7)
    replicas.slow = {"0"}
    replicas.run(2)
    models = max(len(replica.model) for replica in replicas.all.values())
    assert not replicas.run(60, replicas.all_reached(models + 2, "1"))
    replicas.kill("0")
    assert replicas.run(10, replicas.all_reached(models + 2, "1", "2"))


def test_members_that_cannot_reach_each_other_agree_through_others() -> None:
    replicas = Replicas(EIGHT[:5], 8)
    replicas.blocked = lambda one, other: {one, other} == {"1", "2"}
    replicas.are_seen_by_all = True
    assert replicas.run(60, replicas.all_reached(5))
    assert all(len(value.contributors) == 4 for value in replicas.checker.decided.values())
    assert replicas.checker.members[5] == EIGHT[:5]


# Machines that break one rule of the protocol each: the checker must find them out.


class FollowsOldBallots(Agreement):
    def _follow(self, proposer: str, message: Message) -> None:
        if message.kind is Kind.PROPOSE:
            self._round.proposed = message
            self._vote(message)
        else:
            super()._follow(proposer, message)

    def _vote(self, proposed: Message) -> None:
        assert proposed.vote is not None
        if proposed.ballot >= self.record.promised:
            super()._vote(proposed)
        elif proposed.vote.value.sum_sha256 in self._held:
            self._persist(self.record._replace(vote=proposed.vote))
            self._send(proposed.ballot.proposer, Message(Kind.ACCEPTED, self.record.round, proposed.ballot))
        else:
            self._outputs.append(Fetch(proposed.vote.value.sum_sha256, proposed.names))


class IgnoresVotes(Agreement):
    def _count_answer(self, proposal: object, sender: str, message: Message) -> None:
        told = message._replace(vote=None) if message.kind is Kind.PROMISE else message
        super()._count_answer(proposal, sender, told)  # type: ignore[arg-type]


class VotesWithoutTheSum(Agreement):
    def _vote(self, proposed: Message) -> None:
        assert proposed.vote is not None
        self._held.add(proposed.vote.value.sum_sha256)
        super()._vote(proposed)


class CountsHalf(Agreement):
    @property
    def _quorum(self) -> int:
        return (len(self.record.members) + 1) // 2


class ForgetsPromises(Agreement):
    def __init__(self, own: str, record: Record, *rest: object, **more: object) -> None:
        super().__init__(own, record._replace(promised=Ballot(), vote=None), *rest, **more)  # type: ignore[arg-type]


class SendsBeforePersisting(Agreement):
    def _flush(self) -> list[Output]:
        return sorted(super()._flush(), key=lambda output: isinstance(output, Persist))


@pytest.mark.parametrize(
    "machine", [FollowsOldBallots, IgnoresVotes, VotesWithoutTheSum, CountsHalf, ForgetsPromises, SendsBeforePersisting]
)
def test_a_machine_that_breaks_a_rule_is_found_out(machine: type[Agreement]) -> None:
    def run_them_all() -> None:
        for seed in range(1000):
            run_duels(seed, machine)

    with pytest.raises(AssertionError):
        run_them_all()


# One machine by itself.

VALUE = Value("ab", ("1", "2"), ("1", "2", "3"))


def machine(own: str = "1", record: Record | None = None, *held: str) -> Agreement:
    record = Record(1, ("1", "2", "3")) if record is None else record
    return Agreement(own, record, TIMING, random.Random(0), now_s=0.0, held=held)


def test_promises_and_votes_are_persisted_before_they_are_told() -> None:
    ballot = Ballot(1, "2")
    one = machine("1", None, "ab")
    promised = Record(1, ("1", "2", "3"), ballot)
    promise = Message(Kind.PROMISE, 1, ballot)
    assert one.receive("2", Message(Kind.PREPARE, 1, ballot), 0.0) == [Persist(promised), Send("2", promise)]
    voted = promised._replace(vote=Vote(ballot, VALUE))
    proposed = Message(Kind.PROPOSE, 1, ballot, Vote(ballot, VALUE), ("2",))
    accepted = Send("2", Message(Kind.ACCEPTED, 1, ballot))
    assert one.receive("2", proposed, 0.0) == [Persist(voted), accepted]
    assert one.receive("2", proposed, 0.0) == [accepted]
    assert machine("1", voted).receive("3", Message(Kind.PREPARE, 1, Ballot(1, "1")), 0.0) == []  # not its own ballot
    refusal = Message(Kind.REFUSE, 1, ballot)
    assert machine("1", voted).receive("1", Message(Kind.PREPARE, 1, Ballot(1, "1")), 0.0) == []
    assert machine("3", voted).receive("1", Message(Kind.PREPARE, 1, Ballot(1, "1")), 0.0) == [Send("1", refusal)]


def test_a_vote_waits_for_the_sum() -> None:
    ballot = Ballot(1, "2")
    one = machine()
    proposed = Message(Kind.PROPOSE, 1, ballot, Vote(ballot, VALUE), ("2", "3"))
    assert one.receive("2", proposed, 0.0) == [Fetch("ab", ("2", "3"))]
    later = Record(1, ("1", "2", "3"), Ballot(2, "3"))
    assert one.receive("3", Message(Kind.PREPARE, 1, Ballot(2, "3")), 0.0)[0] == Persist(later)
    assert one.holds("ab", 0.0) == []  # a later ballot was promised in the meantime
    again = proposed._replace(ballot=Ballot(3, "2"))
    assert one.receive("2", again, 0.0)[0] == Persist(Record(1, later.members, again.ballot, Vote(again.ballot, VALUE)))


def test_a_ring_is_joined_once_and_lost_by_a_restart() -> None:
    ballot = Ballot(1, "2")
    record = Record(1, ("1", "2", "3"), ballot)
    run = Message(Kind.RING, 1, ballot, names=("1", "2"))
    one = machine()
    one.receive("2", Message(Kind.PREPARE, 1, ballot), 0.0)
    assert one.receive("2", run, 0.0) == [RunRing(1, ballot, ("1", "2"))]
    assert one.receive("2", run, 0.0) == []
    summed = [Send("2", Message(Kind.SUMMED, 1, ballot, sum_sha256="ab"))]
    assert one.summed(RunRing(1, ballot, ("1", "2")), "ab", 0.0) == summed
    assert one.receive("2", run, 0.0) == summed  # asked again
    assert machine("1", record).receive("2", run, 0.0) == [Send("2", Message(Kind.BROKEN, 1, ballot))]
    assert machine("3", record).receive("2", run, 0.0) == []


def leading(names: str, listening: str = "", candidates: str = "") -> tuple[Agreement, Ballot, Message]:
    """A member whose ring has been told to run, all of whose members are ready."""
    one = machine("1", Record(1, tuple(names)))
    one.ready(0.0)
    one.tick(9.0, names, (), listening)
    ballot = one.record.promised
    for name in names[1:]:
        one.receive(name, Message(Kind.PROMISE, 1, ballot, is_ready=True), 9.0)
    sent = one.tick(9.5, names, candidates, listening)
    return one, ballot, next(output.message for output in sent if isinstance(output, Send))


def test_the_proposer_gives_the_order_of_the_ring() -> None:
    _, _, message = leading("12345", listening="125")
    assert message.kind is Kind.RING
    assert message.names == ("1", "2", "3", "5", "4")


@pytest.mark.parametrize(
    ("listening", "dialling"), [("abc", ""), ("abc", "de"), ("abc", "def"), ("a", "b"), ("", "ab")]
)
def test_two_that_only_dial_are_apart_ring_order(listening: Sequence[str], dialling: Sequence[str]) -> None:
    names = sorted([*listening, *dialling], key=lambda name: random.Random(name).random())
    order = ring_order(names, listening)
    assert sorted(order) == sorted(names)
    if len(dialling) <= len(listening):
        for one, after in zip(order, [*order[1:], order[0]], strict=True):
            assert one in listening or after in listening


def test_two_sums_of_one_ring_end_the_proposal() -> None:
    one, ballot, _ = leading("123")
    proposed = one.receive("2", Message(Kind.SUMMED, 1, ballot, sum_sha256="ab"), 9.6)
    assert any(isinstance(output, Send) and output.message.kind is Kind.PROPOSE for output in proposed)
    assert one.receive("3", Message(Kind.SUMMED, 1, ballot, sum_sha256="cd"), 9.6) == []
    assert one.receive("2", Message(Kind.ACCEPTED, 1, ballot), 9.6) == []
    later = one.tick(20.0, "123")
    assert any(isinstance(output, Send) and output.message.kind is Kind.PREPARE for output in later)


def test_new_members_stay_fewer_than_the_others() -> None:
    one, ballot, _ = leading("123", candidates="1456789")
    proposed = one.receive("2", Message(Kind.SUMMED, 1, ballot, sum_sha256="ab"), 9.6)
    votes = [output.message.vote for output in proposed if isinstance(output, Send) and output.message.vote]
    assert {vote.value.members for vote in votes} == {("1", "2", "3", "4", "5")}


def test_what_a_stranger_says_of_a_ballot_is_ignored() -> None:
    for kind in (Kind.PREPARE, Kind.PROPOSE, Kind.RING, Kind.PROMISE, Kind.REFUSE, Kind.SUMMED):
        ballot = Ballot(1, "stranger")
        assert machine().receive("stranger", Message(kind, 1, ballot, Vote(ballot, VALUE), ("1",)), 0.0) == []


@pytest.mark.parametrize("seed", range(3))
def test_messages_without_sense_do_no_harm(seed: int) -> None:
    draws = random.Random(seed)
    one, ballots = machine(), [Ballot(), Ballot(1, "1"), Ballot(2, "2"), Ballot(2**60, "3")]
    for _ in range(1000):
        vote = draws.choice([None, Vote(draws.choice(ballots), VALUE)])
        names = draws.choice([(), ("1", "2"), ("?",)])
        message = Message(draws.choice(list(Kind)), draws.randrange(3), draws.choice(ballots), vote, names)
        does = [*one.receive(draws.choice("1234"), message, 0.0), *one.tick(draws.uniform(0, 10), "1234")]
        assert all(action.receiver in "234" for action in does if isinstance(action, Send))


@pytest.mark.parametrize(
    ("message", "must"),
    [
        (Message(Kind.ASK, -1), "up to 2\\^53"),
        (Message(Kind.PREPARE, 1, Ballot(2**60, "1")), "up to 2\\^53"),
        (Message(Kind.PREPARE, 1, Ballot(1, "../1")), "a node's name"),
        (Message(Kind.RING, 1, Ballot(1, "1"), names=("",)), "a node's name"),
        (Message(Kind.RING, 1, Ballot(1, "1"), names=("1",) * 10_001), "10000 names at most"),
        (Message(Kind.SUMMED, 1, Ballot(1, "1"), sum_sha256="../etc"), "64 hexadecimal digits"),
        (Message(Kind.DECIDED, 1, vote=Vote(Ballot(), VALUE)), "64 hexadecimal digits"),
    ],
)
def test_messages_that_no_member_sends_are_refused(message: Message, must: str) -> None:
    assert re.search(must, refusal_of_message(message) or "")


def test_messages_of_members_are_in_order() -> None:
    vote = Vote(Ballot(1, "ann"), VALUE._replace(sum_sha256="0" * 64))
    assert refusal_of_message(Message(Kind.PROPOSE, 1, vote.ballot, vote, ("1",))) is None
    assert refusal_of_message(Message(Kind.ASK, 0)) is None


def test_times_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueRange, match="lengthen takeover_s"):
        BallotTiming(resend_s=5.0)
