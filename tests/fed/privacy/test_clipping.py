"""Clipping: no client changes a sum by more than the clip, whatever it has, all rounding included."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fed.errors import InvalidExperiment
from fed.privacy.central import CentralPrivacy
from fed.privacy.clipping import clipped, grid_step, is_within, largest_norm, mean_of_clipped
from fed.privacy.distributed import DistributedPrivacy
from fed.privacy.kinds import Privacy
from fed.privacy.local import LocalPrivacy

CLIPS = [1e-12, 1e-3, 0.7, 1.0, 1.5, 4.0, 300.0, 1e12]
NUMBERS = st.floats(width=64, allow_nan=True, allow_infinity=True)


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


@pytest.mark.parametrize("clip", [1e-200, 1e38])
@pytest.mark.parametrize("kind", [CentralPrivacy, LocalPrivacy, DistributedPrivacy])
def test_clips_whose_squares_are_no_numbers_are_refused(kind: type[Privacy], clip: float) -> None:
    """Of a longer message the norm may be 0, and of a sum of gradients infinite: the noise would hide neither."""
    with pytest.raises(InvalidExperiment, match="clip must be"):
        kind(clip=clip, noise_multiplier=1.0)


@given(st.lists(NUMBERS, min_size=1, max_size=8), st.sampled_from(CLIPS))
def test_no_message_is_longer_than_the_clip(numbers: list[float], clip: float) -> None:
    (message_M,) = clipped(row(*numbers), clip).float()
    # In fractions, which hide no rounding.
    squares = sum(Fraction(number) ** 2 for number in message_M.tolist())
    assert squares <= Fraction(largest_norm(clip, len(numbers))) ** 2


@given(
    st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), min_size=1, max_size=5),
    st.lists(NUMBERS, min_size=3, max_size=3),
    st.sampled_from(CLIPS),
)
def test_no_client_moves_the_rounded_sum_beyond_the_clip(
    others: list[list[float]], numbers: list[float], clip: float
) -> None:
    """In units of the grid, with the mean as it is found and with each message as it travels."""
    one = row(*numbers) if all(map(math.isfinite, numbers)) else row(0, 0, 0)
    without_KM = torch.tensor(others, dtype=torch.float64)
    with_KM = torch.cat([without_KM, one])
    for mean in (mean_of_clipped, lambda update_KM, clip: clipped(update_KM, clip).float().double().mean(0)):
        sums = [
            (mean(update_KM, clip) * (len(update_KM) / grid_step(clip))).round() for update_KM in (with_KM, without_KM)
        ]
        moved = (sums[0] - sums[1]).tolist()
        assert sum(int(unit) ** 2 for unit in moved) <= (clip / grid_step(clip)) ** 2


@pytest.mark.parametrize("clip", CLIPS)
def test_a_short_message_stays(clip: float) -> None:
    message_1M = torch.randn(1, 50, dtype=torch.float64)
    message_1M *= 0.99 * clip / message_1M.norm()
    assert torch.equal(clipped(message_1M, clip), message_1M)


def test_a_long_message_keeps_its_direction_and_the_clip() -> None:
    message_1M = 100 * torch.randn(1, 1000, dtype=torch.float64)
    assert torch.allclose(clipped(message_1M, 2.0) / 2.0, message_1M / message_1M.norm(), atol=1e-6)


def test_the_mean_is_that_of_the_clipped_messages() -> None:
    update_KM = torch.randn(7, 40, dtype=torch.float64) * torch.logspace(-2, 2, 7)[:, None]
    torch.testing.assert_close(mean_of_clipped(update_KM, 1.0), clipped(update_KM, 1.0).mean(0), rtol=1e-12, atol=1e-15)


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


def test_numbers_that_all_round_up_stay_within_the_clip() -> None:
    """Of a client whose every number lifts the sum over the next half step, a whole step each."""
    count = 1_000_000
    step = grid_step(1.0)
    most = largest_norm(1.0, count) / (step * math.sqrt(count))
    units = math.floor(most - 0.01) + 0.01
    with_client = torch.full((count,), 0.495 + units, dtype=torch.float64).round()
    without = torch.full((count,), 0.495, dtype=torch.float64).round()
    moved = float((with_client - without)[0])
    assert moved == math.floor(units) + 1
    assert is_within(torch.full((count,), units * step, dtype=torch.float64), 1.0)
    assert moved * math.sqrt(count) <= 1.0 / step


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("numbers", [1, 10**6, 2**30])
def test_lanes_leave_room_for_the_rounding_of_their_sum(clip: float, numbers: int) -> None:
    """Their units are none of the grid's, so that each number of a sum moves by half a step, with the client or not."""
    lanes = CentralPrivacy(clip=clip, noise_multiplier=1.0).lane_noise(1)
    assert 0.999 * clip < lanes.clip + math.sqrt(numbers) * grid_step(clip) < clip
