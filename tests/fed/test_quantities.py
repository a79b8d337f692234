"""Bytes and durations say what they stand for, to their precision."""

import re

from hypothesis import given
from hypothesis import strategies as st

from fed.quantities import bytes_text, duration_text

BYTES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
SECONDS: dict[str, float] = {"s": 1, "min": 60, "h": 3_600, "d": 86_400}


def value_of(text: str, units: dict[str, float]) -> float:
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+) ([a-zA-Z]+)", text))


@given(st.integers(0, 10**18))
def test_bytes_are_right_to_three_digits(size: int) -> None:
    assert abs(value_of(bytes_text(size), BYTES) - size) <= 0.005 * size


@given(st.integers(0, 10**17))
def test_bytes_have_at_most_three_digits(size: int) -> None:
    assert len(re.sub(r"\D", "", bytes_text(size)).lstrip("0")) <= 3


@given(st.floats(0, 1e7))
def test_durations_are_right_to_half_their_smaller_unit(time_s: float) -> None:
    text = duration_text(time_s)
    smaller = 0.1 if time_s < 9.95 else 1 if time_s < 3_600 else 60 if time_s < 86_400 else 3_600
    assert abs(value_of(text, SECONDS) - time_s) <= smaller / 2 + 1e-6


def test_the_next_unit_begins_where_the_one_before_is_full() -> None:
    assert [bytes_text(size) for size in (999, 1_000, 999_499, 999_500)] == ["999 B", "1 kB", "999 kB", "1 MB"]
    assert [duration_text(time_s) for time_s in (9.94, 9.96, 59.6, 3_599)] == ["9.9 s", "10 s", "1 min", "59 min 59 s"]
