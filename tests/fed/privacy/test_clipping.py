"""Clipping: no row is longer than the clip, whatever it was, and every number is on the grid."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fed.privacy.clipping import clipped, grid_step, is_within

CLIPS = [1e-3, 0.7, 1.0, 1.5, 4.0, 300.0]
NUMBERS = st.floats(width=64, allow_nan=True, allow_infinity=True)


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


@given(st.lists(NUMBERS, min_size=1, max_size=8), st.sampled_from(CLIPS))
def test_no_message_is_longer_than_the_clip(numbers: list[float], clip: float) -> None:
    units_M = clipped(row(*numbers), clip)[0] / grid_step(clip)
    assert torch.equal(units_M, units_M.round())
    # In whole numbers, which hide no rounding.
    assert sum(int(unit) ** 2 for unit in units_M.tolist()) <= (clip / grid_step(clip)) ** 2


@pytest.mark.parametrize("clip", CLIPS)
def test_a_short_message_stays_but_for_the_grid(clip: float) -> None:
    message_1M = torch.randn(1, 50, dtype=torch.float64)
    message_1M *= 0.99 * clip / message_1M.norm()
    kept_1M = clipped(message_1M, clip)
    assert (kept_1M - message_1M).abs().max() < grid_step(clip)
    assert (kept_1M.abs() <= message_1M.abs()).all()


def test_a_long_message_keeps_its_direction() -> None:
    message_1M = 100 * torch.randn(1, 1000, dtype=torch.float64)
    kept_1M = clipped(message_1M, 2.0)
    assert torch.allclose(kept_1M / 2.0, message_1M / message_1M.norm(), atol=1e-6)


@pytest.mark.parametrize("clip", CLIPS)
def test_numbers_are_exact_in_float32(clip: float) -> None:
    kept = clipped(torch.randn(5, 3, dtype=torch.float64) * clip, clip)
    assert torch.equal(kept.float().double(), kept)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e308])
def test_a_row_beyond_numbers_becomes_0_alone(bad: float) -> None:
    kept = clipped(torch.tensor([[bad, 1e308], [0.5, 0.5]], dtype=torch.float64), 1.0)
    assert kept.tolist() == [[0, 0], [0.5, 0.5]]


@pytest.mark.parametrize("clip", CLIPS)
def test_a_server_knows_a_clipped_message(clip: float) -> None:
    (message_M,) = clipped(torch.randn(1, 20, dtype=torch.float64) * 9 * clip, clip)
    assert is_within(message_M.float(), clip)
    assert not is_within(message_M * 1.0001, clip)
    assert not is_within(message_M * 2, clip)
    assert not is_within(message_M + grid_step(clip) / 2, clip)
