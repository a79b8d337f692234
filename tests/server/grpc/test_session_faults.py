"""Sessions with nodes that fall silent, fail, or say something at the wrong time: the rules of each attempt."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fed.protocol import protocol_pb2 as pb
from fed.secure_aggregation.agreement import model_digest
from fed.secure_aggregation.fixed_point import SecureSum
from fed.server.secure_fleet import SessionResult
from fed.wire.messages import Answer
from tests.server.grpc.conversing import PATIENCE_S, Conversation

ALL = range(9)
"""Clients, of whom seven must stay; of the six that are left without three, five; of the four without two, three."""


def hold(result: SessionResult, made: Conversation, number: int, clients: Sequence[int]) -> None:
    """The sum is that of these clients' messages."""
    assert [*result.survivors] == [100 * number + client for client in clients], result.problem
    expected = SecureSum(32, made.fixed.lanes)
    for client in clients:
        expected.add(made.lanes(client))
    assert result.total is not None
    assert (result.total.lanes == expected.lanes).all()
    assert not result.problem  # not even that of an earlier attempt


def without(attempt: int, kind: str, *clients: int) -> set[tuple[int, int, str]]:
    return {(client, attempt, kind) for client in clients}


def test_masked_messages_become_their_sum(tmp_path: Path) -> None:
    made = Conversation(tmp_path, len(ALL))
    hold(made.rounds(1, ALL), made, 1, ALL)
    assert len(made.sent) == 1
    assert not made.given_up


def test_those_left_try_again_once_with_fresh_keys(tmp_path: Path) -> None:
    made = Conversation(tmp_path, len(ALL))
    made.silent = without(0, "masked", 0, 1, 2)
    hold(made.rounds(1, ALL), made, 1, ALL[3:])
    assert [[task.client for task in tasks] for tasks in made.sent] == [[*ALL], [*ALL[3:]]]
    keys = [{bytes(made.said[client, attempt, "keys"].keys.masking) for client in ALL[3:]} for attempt in (0, 1)]
    assert not keys[0] & keys[1]


def test_masked_messages_of_another_attempt_are_counted(tmp_path: Path) -> None:
    """Beside what is counted of a session: those of the first attempt are the fleet's to count."""
    said = "keys", "shares", "consent", "unmasking"
    made = Conversation(tmp_path, len(ALL))
    made.silent = without(0, "masked", 0, 1, 2)
    result = made.rounds(1, ALL)
    messages = [message for (_, _, kind), message in made.said.items() if kind in said]
    sessions_bytes = sum(getattr(one, one.WhichOneof("what") or "").ByteSize() for one in messages)
    assert result.bytes_up == sessions_bytes + 6 * 1000


def test_third_attempt_is_not_made(tmp_path: Path) -> None:
    made = Conversation(tmp_path, len(ALL))
    made.silent = without(0, "masked", 0, 1, 2) | without(1, "masked", 3, 4)
    result = made.rounds(1, ALL)
    assert len(made.sent) == 2
    assert result.total is None
    assert "4 of 6 clients have sent their masked messages" in result.problem


def test_next_round_has_all_its_attempts_again(tmp_path: Path) -> None:
    made = Conversation(tmp_path, len(ALL))
    made.silent = without(0, "masked", 0, 1, 2)
    for number in (1, 2):
        hold(made.rounds(number, ALL), made, number, ALL[3:])
        assert made.sessions.attempt == 1
    assert len(made.sent) == 4


def test_message_of_an_earlier_attempt_changes_nothing(tmp_path: Path) -> None:
    """Keys of another attempt would take their client out: they are signed for that one."""
    made = Conversation(tmp_path, len(ALL))
    made.silent = without(0, "masked", 0, 1, 2)
    made.begin(1, ALL)
    made.take_masked()
    for client, kind in ((5, "keys"), (6, "shares")):
        made.arrive(client, made.said[client, 0, kind])
    hold(made.sessions.close(), made, 1, ALL[3:])
    assert not made.given_up


def test_message_of_an_earlier_round_changes_nothing(tmp_path: Path) -> None:
    made = Conversation(tmp_path, len(ALL))
    made.rounds(1, ALL)
    late = [message for (client, _, _), message in made.said.items() if client == 5]
    made.begin(2, ALL)
    for message in late:
        made.sessions.take_message(5, message)
    made.take_masked()
    hold(made.sessions.close(), made, 2, ALL)
    assert not made.given_up


def test_clients_that_have_revealed_shares_join_no_other_attempt(tmp_path: Path) -> None:
    """Nor do those whose shares were refused: they were revealed all the same."""
    made = Conversation(tmp_path, len(ALL))
    for client in ALL[3:]:
        said = pb.FromSession(task=pb.TaskId(start=1, number=100 + client), unmasking=pb.Unmasking())
        made.replaced[client, 0, "unmasking"] = said
    made.begin(1, ALL)
    made.take_masked()
    result = made.sessions.close()
    assert "3 of 9 clients have revealed shares" in result.problem
    assert (result.total, [*result.survivors], len(made.sent)) == (None, [], 1)
    assert not made.given_up  # a round's failure is the fleet's to tell


def test_clients_that_fall_silent_are_not_asked_again(tmp_path: Path) -> None:
    made = Conversation(tmp_path, len(ALL))
    made.silent = without(0, "consent", 0, 1, 2)
    hold(made.rounds(1, ALL), made, 1, ALL[3:])
    assert [task.client for task in made.sent[1]] == [*ALL[3:]]


def test_tasks_left_by_another_attempt_are_withdrawn(tmp_path: Path) -> None:
    made = Conversation(tmp_path, len(ALL))
    made.silent = without(0, "masked", 0, 1, 2) | without(1, "masked", 8)
    hold(made.rounds(1, ALL), made, 1, ALL[3:8])
    assert {108} <= {*made.cancelled} <= {100 + client for client in ALL[3:]}


@pytest.mark.parametrize(("deadline_s", "left_s"), [(25.0, 25.0 - 3.0 - PATIENCE_S), (5.0, 0.0), (None, None)])
def test_another_attempt_has_what_is_left_of_the_deadline(
    deadline_s: float | None, left_s: float | None, tmp_path: Path
) -> None:
    made = Conversation(tmp_path, len(ALL))
    made.silent = without(0, "consent", 0, 1, 2)
    made.clock = 100.0
    made.begin(1, ALL, deadline_s=deadline_s)
    made.take_masked()
    made.clock = 103.0
    made.sessions.close()
    assert {task.deadline_s for task in made.sent[1]} == {left_s}


@pytest.mark.parametrize("kind", ["keys", "shares"])
def test_overdue_clients_drop_out_and_no_sooner(kind: str, tmp_path: Path) -> None:
    made = Conversation(tmp_path, len(ALL))
    made.silent = without(0, kind, 4)
    made.begin(1, ALL)
    if kind == "shares":
        made.clock = PATIENCE_S - 1.0  # when the keys come: their phase is no part of the next one's patience
    made.arrive_all()
    due = made.clock + PATIENCE_S
    for early in (made.clock, PATIENCE_S + 1.0 if kind == "shares" else PATIENCE_S - 1.0, due - 0.1):
        made.clock = early
        made.sessions.tick()
        assert not made.given_up
    made.clock = due
    made.sessions.tick()
    assert made.given_up == {104: f"it has not sent its {kind} within {PATIENCE_S:g} s"}
    made.take_masked()
    hold(made.sessions.close(), made, 1, [client for client in ALL if client != 4])


def test_client_of_an_earlier_sum_may_drop_out_later(tmp_path: Path) -> None:
    made = Conversation(tmp_path, len(ALL))
    made.rounds(1, ALL)
    made.silent = without(0, "keys", 4)
    made.begin(2, ALL)
    made.arrive_all()
    made.clock += PATIENCE_S
    made.sessions.tick()
    assert [*made.given_up] == [204]
    made.take_masked()
    hold(made.sessions.close(), made, 2, [client for client in ALL if client != 4])


def test_masked_message_of_a_failed_task_is_not_added(tmp_path: Path) -> None:
    made = Conversation(tmp_path, len(ALL))
    made.begin(1, ALL)
    made.arrive_all()
    made.sessions.take_failure(4)
    made.take_masked()
    hold(made.sessions.close(), made, 1, [client for client in ALL if client != 4])


def test_message_after_a_rounds_end_changes_nothing(tmp_path: Path) -> None:
    made = Conversation(tmp_path, len(ALL))
    made.silent = without(0, "masked", 4)
    made.rounds(1, ALL)
    made.sessions.take_message(4, pb.FromSession(task=pb.TaskId(start=1, number=104), aborted="tired"))
    assert not made.given_up


@pytest.mark.parametrize("ends", ["fails", "aborts"])
def test_message_in_the_sum_outlives_its_task(ends: str, tmp_path: Path) -> None:
    """Its masks are in the sum: it is among the survivors, whatever its task comes to."""
    made = Conversation(tmp_path, len(ALL))
    made.begin(1, ALL)
    made.take_masked()
    if ends == "fails":
        made.sessions.take_failure(4)
    else:
        made.sessions.take_message(4, pb.FromSession(task=pb.TaskId(start=1, number=104), aborted="tired"))
    result = made.sessions.close()
    assert 104 in result.survivors
    hold(result, made, 1, ALL)
    assert not made.given_up


def test_failure_in_another_attempt_is_no_masked_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = Conversation(tmp_path, len(ALL))
    made.silent = without(0, "masked", 0, 1, 2) | without(1, "masked", 8)
    collect = made.collect

    def failing(until: float = math.inf, enough: int | None = None) -> Iterator[Answer]:
        yield from collect(until, enough)
        if until < math.inf:
            yield Answer.failure(made.sent[1][-1], "out of memory")

    monkeypatch.setattr(made, "collect", failing)
    hold(made.rounds(1, ALL), made, 1, ALL[3:8])
    assert "is not in the sum" not in caplog.text


def test_task_sent_again_leaves_its_session_as_it_is(tmp_path: Path) -> None:
    """As to a node that lacks the model that its task names."""
    made = Conversation(tmp_path, len(ALL))
    made.begin(1, ALL)
    made.arrive_all()
    again, model = pb.Assignment(task=pb.TaskId(start=1, number=104), round=1), made.sent[0][4].model
    made.sessions.begin({4: again}, model)
    assert (again.attempt, again.model_sha256) == (0, model_digest(model.tensors))  # as it was sent before
    made.take_masked()
    hold(made.sessions.close(), made, 1, ALL)


def test_task_sent_again_begins_no_session_after_the_last(tmp_path: Path) -> None:
    """Two of nine have sent keys: all tasks fail, and a node that lacks its model may have asked for it before."""
    made = Conversation(tmp_path, len(ALL))
    made.silent = without(0, "keys", *ALL[:7])
    made.begin(1, ALL)
    made.arrive_all()
    made.clock = PATIENCE_S
    made.sessions.tick()
    assert sorted(made.given_up) == [100 + client for client in ALL]
    again = pb.Assignment(task=pb.TaskId(start=1, number=108), round=1)
    made.sessions.begin({8: again}, made.sent[0][8].model)
    result = made.sessions.close()
    assert (result.total, [*result.survivors], len(made.sent)) == (None, [], 1)


@pytest.mark.parametrize("kind", ["keys", "shares"])
def test_phase_ends_once_the_last_missing_task_fails(kind: str, tmp_path: Path) -> None:
    made = Conversation(tmp_path, len(ALL))
    made.silent = without(0, kind, 4)
    made.begin(1, ALL)
    made.arrive_all()
    following = "key_list" if kind == "keys" else "delivery"
    assert not any(following in made.asked[client] for client in ALL)
    made.sessions.take_failure(4)
    assert {client for client in ALL if following in made.asked[client]} == {*ALL} - {4}
    made.take_masked()
    hold(made.sessions.close(), made, 1, [client for client in ALL if client != 4])


def test_client_whose_task_has_failed_is_sent_nothing_again(tmp_path: Path) -> None:
    made = Conversation(tmp_path, len(ALL))
    made.silent = without(0, "shares", 4, 5)
    made.begin(1, ALL)
    made.arrive_all()
    made.sessions.take_failure(4)
    before = {client: len(kinds) for client, kinds in made.asked.items()}
    made.sessions.resend()
    assert {client for client in ALL if len(made.asked[client]) > before[client]} == {5}


def test_unanswered_messages_are_sent_again(tmp_path: Path) -> None:
    made = Conversation(tmp_path, len(ALL))
    made.silent = without(0, "shares", 4)
    made.begin(1, ALL)
    made.arrive_all()
    before = {client: len(kinds) for client, kinds in made.asked.items()}
    made.silent.clear()
    made.sessions.resend()
    assert {client for client in ALL if len(made.asked[client]) > before[client]} == {4}
    made.take_masked()
    hold(made.sessions.close(), made, 1, ALL)
