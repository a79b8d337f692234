"""What the log says while a round waits for clients."""

from types import SimpleNamespace
from typing import Any

import pytest

from fed.server.rounds.synchronous import _wait_a_day


@pytest.mark.parametrize(("count", "words"), [(1, "1 client"), (3, "3 clients")])
def test_a_round_says_once_how_many_clients_it_waits_for(
    count: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    waits = iter([True, True, False])
    fleet: Any = SimpleNamespace(clock=0.0, available=list, wait=lambda limit_s: next(waits))
    coordinator: Any = SimpleNamespace(fleet=fleet)
    _wait_a_day(coordinator, 2, count)
    assert caplog.messages == [f"round 2 waits for {words}, of whom 0 can take a task"]
