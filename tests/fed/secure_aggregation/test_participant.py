"""Sessions of one client after another, as transcripts of events and commands."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fed.protocol.protocol_pb2 import Assignment, FromSession, Plan, SessionKeys, Survivors, TaskId, ToSession
from fed.secure_aggregation.agreement import digests_of, plan_digest
from fed.secure_aggregation.commands import Command, Deliver, Ended, Remember, Say
from fed.secure_aggregation.coordinator import SessionCoordinator
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.secure_aggregation.lane_noise import LaneNoise
from fed.secure_aggregation.participant import AgreedPlan, Participant
from fed.secure_aggregation.reasons import Reason
from fed.secure_aggregation.revealed_rounds import RevealedRounds
from fed.secure_aggregation.settings import SecureAggregation
from fed.secure_aggregation.terms import Identities, Terms
from tests.fed.secure_aggregation.sessions import entropy_of, names_of, signer_of

NAMES = names_of(4)
FIRST = NAMES[0]
IDENTITIES = Identities({name: signer_of(name).public_key() for name in NAMES}, b"identities")
SETTINGS = SecureAggregation(minimum_cohort=2, max_drop_out=0.0)
FIXED = FixedPoint(32, (3,), (8.0,), most_clients=4)
PLAN = AgreedPlan(Plan(run="run", experiment="experiment"), SETTINGS, FIXED, IDENTITIES)
LANES = torch.arange(FIXED.lanes, dtype=torch.int32)


def assignment_of(number: int = 1, attempt: int = 0, **fields: Any) -> Assignment:
    return Assignment(task=TaskId(start=1, number=number), round=number, attempt=attempt, **fields)


def own_of(assignment: Assignment, plan: AgreedPlan = PLAN) -> bytes:
    return digests_of(plan.plan, assignment).own


def said(commands: list[Command]) -> FromSession:
    (message,) = (one.message for one in commands if isinstance(one, Say))
    return message


@dataclass
class Table:
    """Four clients at one coordinator, driven up to a phase.

    Args:
        plan: the run's plan.
        assignment: the same for all clients.
        clients: the clients, by name; those of an earlier table know what they have revealed.
    """

    plan: AgreedPlan = PLAN
    assignment: Assignment = field(default_factory=assignment_of)
    clients: dict[str, Participant] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for seed, name in enumerate(NAMES):
            revealed = RevealedRounds(b"salt")
            self.clients.setdefault(name, Participant(name, signer_of(name), entropy_of(seed), revealed))
        digests = digests_of(self.plan.plan, self.assignment)
        terms = Terms(
            settings=self.plan.settings,
            fixed=self.plan.fixed,
            run=self.plan.plan.run,
            round=self.assignment.round,
            attempt=self.assignment.attempt,
            plan_sha256=plan_digest(self.plan.plan),
            task_sha256=digests.agreed,
            identities_sha256=self.plan.identities.sha256,
        )
        self.coordinator = SessionCoordinator(terms, self.plan.identities)
        self.own_sha256 = digests.own

    def tell(self, name: str, **content: Any) -> list[Command]:
        message = ToSession(task=self.assignment.task, attempt=self.assignment.attempt, **content)
        return self.clients[name].told(message)

    def join(self) -> dict[str, SessionKeys]:
        for client in self.clients.values():
            client.begin(self.plan)
        return {name: said(client.assigned(self.assignment)).keys for name, client in self.clients.items()}

    def deliver(self) -> dict[str, list[Command]]:
        """Keys and shares; returns what each client does with its boxes."""
        for name, keys in self.join().items():
            self.coordinator.take_keys(name, keys)
        for name, listed in self.coordinator.close_keys():
            self.coordinator.take_shares(name, said(self.tell(name, key_list=listed)).shares)
        return {name: self.tell(name, delivery=one) for name, one in self.coordinator.close_shares().items()}

    def ask_for_shares(self, lanes: Tensor = LANES) -> dict[str, ToSession]:
        """All up to the consents of messages that are alike; returns what asks each client for its shares."""
        found = self.deliver()
        for name, client in self.clients.items():
            (command,) = found[name] or client.trained(self.own_sha256, lanes)
            assert isinstance(command, Deliver)
            self.coordinator.take_masked(name, command.lanes)
        survivors, names = self.coordinator.close_masked()
        for name in names:
            self.coordinator.take_consent(name, said(self.tell(name, survivors=survivors)).consent)
        return {
            name: ToSession(task=self.assignment.task, attempt=self.assignment.attempt, consents=one)
            for name, one in self.coordinator.close_consents().items()
        }

    def reveal(self, lanes: Tensor = LANES) -> None:
        """A whole session of messages that are alike."""
        for name, message in self.ask_for_shares(lanes).items():
            (command,) = self.clients[name].told(message)
            assert isinstance(command, Remember)
            self.coordinator.take_unmasking(name, said(self.clients[name].recorded(command.entries)).unmasking)
        assert torch.equal(torch.from_numpy(self.coordinator.finish().lanes.view("i4")), 4 * lanes)


def test_sum_is_exact_in_attempts_and_rounds_one_after_another() -> None:
    table = Table()
    table.reveal()
    Table(assignment=assignment_of(2), clients=table.clients).deliver()
    Table(assignment=assignment_of(2, attempt=1), clients=table.clients).reveal()


def test_message_that_is_early_is_masked_with_the_boxes() -> None:
    table = Table()
    table.clients[FIRST].begin(PLAN)
    assert table.clients[FIRST].trained(table.own_sha256, LANES) == []
    table.reveal()


OTHERS = {
    "round": (PLAN, assignment_of(2)),
    "model": (PLAN, assignment_of(model_sha256=b"another")),
    "step size": (PLAN, assignment_of(lr=0.0)),
    "state": (PLAN, assignment_of(kept_after=TaskId(start=1, number=7))),
    "run": (replace(PLAN, plan=Plan(run="another", experiment="experiment")), assignment_of()),
    "plan": (replace(PLAN, plan=Plan(run="run", experiment="more steps")), assignment_of()),
}


@pytest.mark.parametrize("other", OTHERS)
def test_message_of_another_task_is_never_masked(other: str) -> None:
    """The server gives two tasks one id."""
    plan, assignment = OTHERS[other]
    table = Table()
    table.deliver()
    assert table.clients[FIRST].trained(own_of(assignment, plan), LANES) == []
    assert table.clients[FIRST].trained(table.own_sha256, LANES)


def test_message_before_another_plan_is_forgotten() -> None:
    table = Table()
    client = table.clients[FIRST]
    client.begin(PLAN)
    client.trained(table.own_sha256, LANES)
    client.begin(replace(PLAN, identities=Identities(IDENTITIES.keys, b"newer")))  # the same plan, with newer keys
    assert client.holds(table.own_sha256, table.assignment)
    client.begin(replace(PLAN, plan=Plan(run="run", experiment="another")))
    assert not client.holds(table.own_sha256, table.assignment)


def test_task_that_is_told_twice_ends_its_session() -> None:
    table = Table()
    table.deliver()
    commands = table.clients[FIRST].assigned(assignment_of(lr=0.5))
    assert said(commands).aborted == Reason.TOLD_TWICE
    assert table.clients[FIRST].trained(own_of(assignment_of(lr=0.5)), LANES) == []
    assert table.clients[FIRST].trained(table.own_sha256, LANES) == []


def test_whole_model_in_place_of_differences_keeps_the_session() -> None:
    table = Table()
    table.deliver()
    again = assignment_of(since="a model that is lost")
    client = table.clients[FIRST]
    assert said(client.assigned(again)).HasField("keys")
    assert client.trained(table.own_sha256, LANES) == []  # it was made for the task as it was told before
    assert client.trained(own_of(again), LANES)
    assert said(client.assigned(assignment_of())).aborted == Reason.TOLD_TWICE


@pytest.mark.parametrize(
    "again",
    [
        Table(assignment=assignment_of(attempt=1)),
        Table(assignment=assignment_of(attempt=1, lr=0.5)),
        Table(plan=replace(PLAN, plan=Plan(run="another", experiment="experiment"))),
    ],
    ids=["attempt", "other task", "other run"],
)
def test_revealed_round_is_joined_no_more(again: Table) -> None:
    table = Table()
    table.reveal()
    before = table.clients[FIRST]
    assert not before.holds(table.own_sha256, table.assignment)
    restarted = Participant(FIRST, signer_of(FIRST), entropy_of(9), RevealedRounds(b"salt", list(before._revealed)))
    for client in (before, restarted):
        client.begin(again.plan)
        assert said(client.assigned(again.assignment)).aborted == Reason.REVEALED


def test_message_of_a_revealed_round_is_masked_no_more() -> None:
    """In a run whose plan differs in what shapes no update, such as its name."""
    table = Table()
    table.reveal()
    renamed = replace(PLAN, plan=Plan(run="another", experiment="experiment with another name"))
    again = Table(plan=renamed, clients=table.clients)
    again.deliver()
    ended, told = again.clients[FIRST].trained(again.own_sha256, LANES)
    assert isinstance(ended, Ended)
    assert isinstance(told, Say)
    assert told.message.aborted == Reason.REVEALED
    assert again.clients[NAMES[1]].trained(again.own_sha256, LANES + 1)


@pytest.mark.parametrize("noise", [None, LaneNoise(1.0, 0.0, 2)], ids=["plain", "private"])
def test_message_that_adds_nothing_is_masked_again(noise: LaneNoise | None) -> None:
    """A refusal would tell which client had nothing to add in the first sum, where models are made for that."""
    plan = replace(PLAN, fixed=replace(FIXED, noise=noise))
    nothing = plan.fixed.nothing(np.random.default_rng(0))
    table = Table(plan=plan)
    table.reveal(nothing)
    other = replace(plan, plan=Plan(run="another", experiment="another model"))
    again = Table(plan=other, clients=table.clients)
    again.deliver()
    (command,) = again.clients[FIRST].trained(again.own_sha256, nothing)
    assert isinstance(command, Deliver)


@pytest.mark.parametrize(
    ("noise", "is_bounded"),
    [(None, False), (LaneNoise(1.0, 0.0, 2), False), (LaneNoise(1.0, 1.0, 2), True)],
    ids=["plain", "of the coordinator", "own"],
)
def test_noise_of_a_message_is_in_two_sums_at_most(noise: LaneNoise | None, is_bounded: bool) -> None:
    """An honest server makes two attempts; one that is started again gets a message with fresh noise."""
    plan = replace(PLAN, fixed=replace(FIXED, noise=noise))
    table = Table(plan=plan)
    for attempt in range(4):
        table = Table(plan=plan, assignment=assignment_of(attempt=attempt), clients=table.clients)
        client = table.clients[FIRST]
        is_fresh = attempt == 0 or (is_bounded and attempt == 2)
        assert client.holds(table.own_sha256, table.assignment) != is_fresh
        commands = table.deliver()[FIRST]
        if is_fresh:
            assert commands == []
            commands = client.trained(table.own_sha256, LANES)
        (command,) = commands
        assert isinstance(command, Deliver)
        assert client.holds(table.own_sha256, table.assignment)


@pytest.mark.parametrize("whole", [False, True])
def test_end_of_a_session_is_said_again_when_asked(whole: bool) -> None:
    """By its task, which may come with the whole model, and by the message that has no answer."""
    table = Table()
    table.reveal()
    again = Table(plan=replace(PLAN, plan=Plan(run="another", experiment="another")), clients=table.clients)
    client = again.clients[FIRST]
    for name, keys in again.join().items():
        again.coordinator.take_keys(name, keys)
    for name, listed in again.coordinator.close_keys():
        again.coordinator.take_shares(name, said(again.tell(name, key_list=listed)).shares)
    boxes = again.coordinator.close_shares()[FIRST]
    again.tell(FIRST, delivery=boxes)
    assert said(client.trained(again.own_sha256, LANES)).aborted == Reason.REVEALED
    assignment = assignment_of(reference="whole") if whole else again.assignment
    ended, told = client.assigned(assignment)
    assert isinstance(ended, Ended)
    assert ended.own_sha256 == own_of(assignment, again.plan)
    assert said([told]).aborted == Reason.REVEALED
    assert said(again.tell(FIRST, delivery=boxes)).aborted == Reason.REVEALED


def test_shares_leave_after_the_record_alone() -> None:
    table = Table()
    asked = table.ask_for_shares()[FIRST]
    client = table.clients[FIRST]
    assert client.recorded((b"entry",)) == []  # nothing is asked for yet
    (command,) = client.told(asked)
    assert isinstance(command, Remember)
    assert len(command.entries) == 3
    assert client.recorded(command.entries[:2]) == []  # another record than the one that is asked for
    assert client.told(asked) == []  # again, before it is on the disk
    revealed = client.recorded(command.entries)
    assert said(revealed).HasField("unmasking")
    assert client.recorded(command.entries) == []
    assert client.told(asked) == revealed  # again, after a connection was lost


def test_disk_that_fails_reveals_nothing() -> None:
    table = Table()
    asked = table.ask_for_shares()[FIRST]
    client = table.clients[FIRST]
    (command,) = client.told(asked)
    assert isinstance(command, Remember)
    assert said(client.failed(Reason.NODE_FAILED, "the disk is full")).aborted == Reason.NODE_FAILED
    assert client.recorded(command.entries) == []
    assert not any(one.message.HasField("unmasking") for one in client.told(asked) if isinstance(one, Say))


def test_withdrawn_task_is_forgotten() -> None:
    table = Table()
    table.deliver()
    client = table.clients[FIRST]
    client.withdrawn(TaskId(start=1, number=99))
    assert client.trained(table.own_sha256, LANES)
    client.withdrawn(table.assignment.task)
    assert not client.holds(table.own_sha256, table.assignment)


def test_fewer_steps_than_agreed_are_refused() -> None:
    client = Table().clients[FIRST]
    client.begin(PLAN)
    assert said(client.assigned(assignment_of(takes_parts=True))).aborted == Reason.TAKES_PARTS


def test_threshold_below_the_clients_own_floor_ends_the_session() -> None:
    floors = {3: True, 4: False}  # of four clients three shares recover a secret
    for floor, is_joined in floors.items():
        client = Participant(FIRST, signer_of(FIRST), entropy_of(0), RevealedRounds(b"salt"), least_threshold=floor)
        table = Table(clients={FIRST: client})
        for name, keys in table.join().items():
            table.coordinator.take_keys(name, keys)
        listed = dict(table.coordinator.close_keys())
        assert said(table.tell(FIRST, key_list=listed[FIRST])).HasField("shares") == is_joined


def test_client_without_a_plan_says_so() -> None:
    client = Table().clients[FIRST]
    assert said(client.assigned(assignment_of())).aborted == Reason.NOT_READY
    assert client.told(ToSession()) == []


def test_messages_after_the_end_of_a_session_are_not_kept() -> None:
    table = Table()
    table.deliver()
    table.tell(FIRST, survivors=Survivors(places=b"\0"))
    joined = table.clients[FIRST]._joined
    assert joined is not None
    before = len(joined.answered)
    for number in range(1, 50):
        (command,) = table.tell(FIRST, survivors=Survivors(places=bytes([number])))
        assert said([command]).aborted == Reason.BROKEN_RULE
    assert len(joined.answered) == before
