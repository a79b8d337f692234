"""A fleet under secure aggregation waits for as many clients as a session needs, and gives one answer a round."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fed.errors import InvalidPayload
from fed.secure_aggregation.fixed_point import FixedPoint, SecureSum
from fed.secure_aggregation.settings import SecureAggregation
from fed.server.secure_fleet import SecureFleet, SessionResult
from fed.wire.messages import Answer, Failure, GlobalModel, Lanes, RevealedSum, Task
from tests.scripted_fleet import ScriptedFleet


class Opened:
    """Sessions that note with whom they were opened."""

    def __init__(self) -> None:
        self.tasks: Sequence[Task] = []

    def open(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks

    def take(self, answer: Answer) -> None:
        """Nothing."""

    def close(self) -> SessionResult:
        return SessionResult(SecureSum(32, 6), survivors=(0, 1, 2), bytes_up=10, bytes_down=20)


class Answering(ScriptedFleet):
    """Clients of whom the last has not answered, and the last but one has failed."""

    def __init__(self, clients: range) -> None:
        super().__init__(clients)
        self.cancelled: list[int] = []
        self.sent: list[weakref.ref[Tensor]] = []

    def collect(self, *_: Any) -> Iterator[Answer]:
        tasks = self._taken()
        for task in tasks[:-2]:
            message = torch.zeros(6, dtype=torch.int32)
            self.sent.append(weakref.ref(message))
            yield Answer((task.id,), 1, (task.client,), Lanes(message), size_bytes=100)
            del message
        yield from (Answer.failure(task, "out of memory") for task in tasks[-2:-1])

    def cancel(self, tasks: Iterable[int]) -> None:
        self.cancelled += tasks


def fleet(clients: int, sessions: Any, **settings: Any) -> SecureFleet:
    fixed = FixedPoint(32, (3,), (8.0,), most_clients=10)
    return SecureFleet(ScriptedFleet(range(clients)), sessions, SecureAggregation(**settings), fixed)


@pytest.mark.parametrize(
    ("settings", "least"),
    [({}, 5), ({"minimum_cohort": 3}, 3), ({"minimum_cohort": 3, "threshold": 6}, 6)],
)
def test_nobody_is_available_while_too_few_are_there(
    settings: dict[str, Any], least: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    enough, short = (fleet(clients, None, **settings) for clients in (least, least - 1))
    caplog.clear()  # of what follows from the settings
    assert list(enough.available()) == list(range(least))
    assert not caplog.messages
    assert [short.available(), short.available()] == [[], []]
    assert caplog.messages == [f"{least - 1} clients are there, and a secure round needs {least}: it waits"]
    assert fleet(0, None, **settings).available() == range(0)


@pytest.mark.parametrize("clients", [4, 5])
def test_rounds_of_those_left_are_begun(clients: int, caplog: pytest.LogCaptureFixture) -> None:
    """Five of six are enough, though they could not tolerate the loss of another."""
    sessions = Opened()
    secure = fleet(clients, sessions)
    model = GlobalModel(0, torch.zeros(3), torch.zeros(0, dtype=torch.int64))
    secure.dispatch([Task(number, 1, number, model) for number in range(clients)])
    assert len(sessions.tasks) == (clients if clients == 5 else 0)
    problems = [answer.problem for answer in secure.collect()]
    assert problems == ["too few clients for a secure round"] * (clients - len(sessions.tasks))


@pytest.mark.parametrize("is_readable", [True, False])
def test_round_ends_with_one_sum_or_a_failure_of_each(is_readable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven clients one has failed, one has not answered, and two of five have dropped out of the session."""
    answering = Answering(range(7))
    fixed = FixedPoint(32, (3,), (8.0,), most_clients=10)
    secure = SecureFleet(answering, Opened(), SecureAggregation(), fixed)

    def read(self: FixedPoint, total: SecureSum) -> str:
        if not is_readable:
            raise InvalidPayload("the sum has a weight of 0")
        return "a sum"

    monkeypatch.setattr(FixedPoint, "read", read)
    model = GlobalModel(0, torch.zeros(3), torch.zeros(0, dtype=torch.int64))
    secure.dispatch([Task(number, 1, number, model) for number in range(7)])
    assert [(answer.tasks, answer.problem) for answer in secure.collect()] == [((5,), "out of memory")]
    secure.cancel([0, 1, 2, 3, 4, 6])
    assert answering.cancelled == [6]  # the others have answered
    answers = [*secure.collect()]
    ended: list[tuple[tuple[int, ...], object]] = [(answer.tasks, answer.content) for answer in answers]
    assert (answers[0].size_bytes, answers[0].more_bytes_down) == (5 * 100 + 10, 20)  # of all clients and sessions
    assert {answer.size_bytes for answer in answers[1:]} == {0}
    if is_readable:
        dropped = Failure("it dropped out of the round's session")
        revealed = [(one.tasks, one.content.of_clients) for one in answers if isinstance(one.content, RevealedSum)]
        assert revealed == [((0, 1, 2), "a sum")]  # type: ignore[comparison-overlap]  # it stands for one
        assert ended[1:] == [((3,), dropped), ((4,), dropped)]
    else:
        assert ended == [((task,), Failure("the sum has a weight of 0")) for task in range(5)]
    assert not [*secure.collect()]
    secure.dispatch([Task(number, 2, number, model) for number in range(7, 12)])
    assert [answer.tasks for answer in secure.collect()] == [(10,)]  # the next round goes on


def test_no_masked_message_is_kept_beside_the_sum() -> None:
    """The coordinator's memory is that of one message, however many clients there are."""
    answering = Answering(range(7))
    fixed = FixedPoint(32, (3,), (8.0,), most_clients=10)
    secure = SecureFleet(answering, Opened(), SecureAggregation(), fixed)
    model = GlobalModel(0, torch.zeros(3), torch.zeros(0, dtype=torch.int64))
    secure.dispatch([Task(number, 1, number, model) for number in range(7)])
    assert [answer.tasks for answer in secure.collect()] == [(5,)]
    assert [kept() for kept in answering.sent] == [None] * 5
