"""What is refused is counted always, and logged in few lines."""

import pytest

from fed.processes.clock import SYSTEM_CLOCK
from fed.wire.rate_limits import Refusals
from tests.clocks import HandClock


def test_one_sender_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(SYSTEM_CLOCK)
    for _ in range(10_000):
        refusals.note("eve", "no")
    for number in range(10_000):
        refusals.note(f"eve {number}", "no")
    assert refusals.count == 20_000
    assert len(caplog.messages) < 1200
    assert len(refusals._lines) <= 1001


def test_a_refused_sender_is_logged_again_as_time_passes(caplog: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    refusals = Refusals(clock)
    for _ in range(30):
        refusals.note("eve", "no")
    assert len(caplog.messages) == 20
    clock.move(9.0)
    refusals.note("eve", "no")
    assert len(caplog.messages) == 20
    clock.move(1.0)
    refusals.note("eve", "no")
    assert caplog.messages[20:] == ["refused 'eve': no (11 more were not logged)"]
