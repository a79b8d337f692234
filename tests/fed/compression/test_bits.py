"""Packed numbers and Golomb–Rice codes against their definitions, and against bytes that nobody wrote."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fed.compression.bits import (
    pack,
    packed_bytes,
    positions_bytes,
    read_positions,
    rice_bits,
    unpack,
    write_positions,
)
from fed.errors import InvalidPayload


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("numbers", [0, 1, 7, 8, 9, 1000])
def test_packed_numbers_come_back(bits: int, numbers: int) -> None:
    drawn = np.random.default_rng(bits).integers(0, 1 << bits, (3, numbers))
    codes = drawn.astype(np.uint16).astype(np.uint8) if bits <= 8 else drawn.astype(np.uint16)
    packed = pack(codes, bits)
    assert packed.dtype == np.uint8
    assert packed.shape == (3, packed_bytes(numbers, bits))
    assert np.array_equal(unpack(packed, bits, numbers), codes)


@given(st.data())
def test_positions_come_back_in_the_bytes_said(data: st.DataObject) -> None:
    numbers = data.draw(st.integers(1, 400))
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, numbers - 1)))), np.int64)
    code = write_positions(positions, numbers)
    assert len(code) <= positions_bytes(len(positions), numbers)
    assert np.array_equal(read_positions(code, len(positions), numbers), positions)


@pytest.mark.parametrize(("fraction", "expected_bits"), [(0.1, 4.8), (0.01, 8.108), (0.001, 11.43)])
def test_bits_of_a_random_position_follow_the_paper(fraction: float, expected_bits: float) -> None:
    """b* + 1/(1 − (1−p)^(2^b*)) bits, within 1 %: the standard error over 10⁵ gaps is below a thousandth of it."""
    numbers = round(1e5 / fraction)
    count = round(numbers * fraction)
    positions = np.sort(np.random.default_rng(0).choice(numbers, count, replace=False))
    bits = rice_bits(count, numbers)
    formula = bits + 1 / (1 - (1 - fraction) ** (2**bits))
    assert formula == pytest.approx(expected_bits, rel=0.02)
    assert 8 * len(write_positions(positions, numbers)) / count == pytest.approx(formula, rel=0.01)


def test_the_remainder_is_the_best_for_random_positions() -> None:
    """No other number of bits makes the expected code shorter by more than a hundredth."""
    for fraction in (0.4, 0.1, 1 / 64, 0.001, 1e-5):
        lengths = [bits + 1 / (1 - math.exp(math.log1p(-fraction) * 2**bits)) for bits in range(32)]
        chosen = rice_bits(round(1e9 * fraction), 10**9)
        assert lengths[chosen] <= min(lengths) * 1.01


@given(st.binary(max_size=60), st.integers(0, 70), st.integers(1, 300))
def test_any_bytes_are_positions_or_refused(code: bytes, count: int, numbers: int) -> None:
    count = min(count, numbers)
    try:
        positions = read_positions(np.frombuffer(code, np.uint8), count, numbers)
    except InvalidPayload:
        return
    assert len(positions) == count
    assert (np.diff(positions) > 0).all()
    assert count == 0 or (positions[0] >= 0 and positions[-1] < numbers)


def test_a_short_message_cannot_ask_for_much_memory() -> None:
    with pytest.raises(InvalidPayload, match="must take"):
        read_positions(np.zeros(40, np.uint8), 10**9, 10**10)
