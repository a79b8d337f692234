"""A fleet under secure aggregation waits for as many clients as a session needs."""

from typing import Any

import pytest
import torch

from fed.secure_aggregation.fixed_point import FixedPoint
from fed.secure_aggregation.settings import SecureAggregation
from fed.server.secure_fleet import SecureFleet
from fed.wire.messages import GlobalModel, Task
from tests.scripted_fleet import ScriptedFleet


class Opened:
    """Sessions that note with whom they were opened."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def open(self, tasks: list[Task]) -> None:
        self.tasks = tasks


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
