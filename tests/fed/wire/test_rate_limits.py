"""What is refused is counted always, and logged in few lines."""

import pytest

from fed.processes.clock import SYSTEM_CLOCK
from fed.wire.rate_limits import Refusals


def test_one_sender_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(SYSTEM_CLOCK)
    for _ in range(10_000):
        refusals.note("eve", "no")
    for number in range(10_000):
        refusals.note(f"eve {number}", "no")
    assert refusals.count == 20_000
    assert len(caplog.messages) < 1200
    assert len(refusals._lines) <= 1001
