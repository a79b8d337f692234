"""Noise in lanes: its distribution, the bound on what one client adds, and the clients that must add it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fed.errors import InvalidExperiment
from fed.secure_aggregation.fixed_point import ClientNumbers, FixedPoint, SecureSum
from fed.secure_aggregation.lane_noise import LaneNoise
from fed.secure_aggregation.settings import SecureAggregation

QUIET = 1e-9  # a noise multiplier of which no unit is seen


def fixed_point(numbers: int, clip: float, noise_multiplier: float, honest: int = 4, bits: int = 32) -> FixedPoint:
    noise = LaneNoise(clip=clip, noise_multiplier=noise_multiplier, least_honest=honest)
    return FixedPoint(bits, (numbers,), (8.0,), most_clients=10, noise=noise)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=6), st.sampled_from([0.01, 1.0, 7.0]))
def test_no_client_adds_more_than_the_clip(numbers: list[float], clip: float) -> None:
    fixed = fixed_point(len(numbers), clip, QUIET)
    assert fixed.noise is not None
    units = fixed.noise.units(np.array(numbers), fixed.l2_units, np.random.default_rng(0))
    assert sum(int(unit) ** 2 for unit in units) <= fixed.l2_units**2
    assert sum(abs(int(unit)) for unit in units) <= fixed.l1_units


def hold_to_skellam(draws: np.ndarray, variance: float) -> None:
    """Fail for draws that are not Skellam's, with a chance of a false alarm of 1e-6, as Massart bounds it (1990)."""
    cuts = np.arange(draws.min(), draws.max() + 1)
    empirical = np.searchsorted(np.sort(draws), cuts, side="right") / len(draws)
    exact = stats.skellam.cdf(cuts, variance / 2, variance / 2)
    assert np.abs(empirical - exact).max() < math.sqrt(math.log(2 / 1e-6) / (2 * len(draws)))


@pytest.mark.parametrize("honest", [1, 4])
def test_the_fewest_honest_clients_add_all_the_noise(honest: int) -> None:
    noise = LaneNoise(clip=1.0, noise_multiplier=1.5, least_honest=honest)
    generator = np.random.default_rng(1)
    draws = sum(noise.units(np.zeros(50_000), 8.0, generator) for _ in range(honest))
    assert isinstance(draws, np.ndarray)
    hold_to_skellam(draws, (1.5 * 8.0) ** 2)
    share = stats.chi2.cdf(float((draws / 12.0) ** 2 @ np.ones(len(draws))), len(draws))
    assert 1e-6 < share < 1 - 1e-6


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_a_sum_with_noise_does_not_wrap(bits: int) -> None:
    """Messages that all point one way, whose noise is many times a clip."""
    fixed = fixed_point(200, 1.0, 3.0, bits=bits)
    message_KM = torch.zeros(10, 200, dtype=torch.float64)
    message_KM[:, 0] = 5.0
    total = SecureSum(bits, fixed.lanes)
    beside = ClientNumbers([1.0] * 10, [1] * 10, [0.0] * 10)
    generators = [np.random.default_rng(client) for client in range(10)]
    for lanes in fixed.quantise(message_KM, beside, generators).lanes:
        total.add(lanes)
    mean_M = fixed.read(total).mean_M
    deviation = 3.0 * math.sqrt(10 / 4) / 10
    assert abs(mean_M[0] - 1.0) < 6 * deviation
    assert 0.7 * deviation < mean_M[1:].std() < 1.3 * deviation


def test_a_client_without_a_message_adds_noise_and_weighs_1() -> None:
    fixed = fixed_point(500, 1.0, 1.0)
    total = SecureSum(32, fixed.lanes)
    total.add(fixed.nothing(np.random.default_rng(0)))
    found = fixed.read(total)
    assert (found.weight, found.samples, found.train_loss) == (1, 1, 0.0)
    assert 0.4 < found.mean_M.std() < 0.6


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("place", ["message", "bound", "fold", "wrap", "odd"])
@pytest.mark.parametrize("weight", [1, -8])
@pytest.mark.parametrize("drops_out", [False, True])
def test_no_forged_lanes_make_a_message_longer(bits: int, place: str, weight: int, *, drops_out: bool) -> None:
    """Before the coordinator's noise: one client may say any weight, and bring sums close to where they wrap."""
    fixed = fixed_point(10_000, 1.0, 0.0, bits=bits)
    most = 10 * int(fixed.l2_units)
    near = {"message": 0, "bound": most, "fold": 2 * most, "wrap": (1 << (bits - 1)) - 1, "odd": most // 3 + 1}[place]
    beside = ClientNumbers([1.0] * 2, [1] * 2, [0.0] * 2)
    messages_2M = torch.stack([torch.full((10_000,), 0.01), torch.zeros(10_000)])
    generators = [np.random.default_rng(0)] * 2
    found = []
    for row, lanes in enumerate(fixed.quantise(messages_2M, beside, generators).lanes):
        total = SecureSum(bits, fixed.lanes)
        if not (drops_out and row == 1):
            total.add(lanes)
        for _ in range(8):
            total.add(fixed.nothing(generators[0]))
        forged = fixed.nothing(generators[0])
        forged[:10_000] = near
        forged[10_000] = weight
        total.add(forged)
        read = fixed.read(total)
        found.append(read.mean_M * read.clients)
    with_it_M, without_it_M = found
    assert 0.1 * (bits > 16 and place == "message") <= (with_it_M - without_it_M).norm() <= 1.0


def test_honest_sums_are_read_as_they_are() -> None:
    fixed = fixed_point(3, 1.0, 0.0)
    total = SecureSum(32, fixed.lanes)
    beside = ClientNumbers([1.0], [1], [0.0])
    for _ in range(10):
        message_KM = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
        total.add(fixed.quantise(message_KM, beside, [np.random.default_rng(0)]).lanes[0])
    torch.testing.assert_close(fixed.read(total).mean_M, message_KM[0], atol=2 / fixed.l2_units, rtol=0)


@pytest.mark.parametrize(("bits", "noise_multiplier"), [(16, 1e4), (32, 1e9), (64, 1e6)])
def test_noise_beyond_the_bits_is_refused(bits: int, noise_multiplier: float) -> None:
    with pytest.raises(InvalidExperiment, match=r"raise bits, or lower privacy\.noise_multiplier"):
        fixed_point(10, 1.0, noise_multiplier, bits=bits)


@pytest.mark.parametrize("minimum", [2, 5, 20])
@pytest.mark.parametrize("corrupt", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("threshold", ["auto", 15])
def test_no_session_has_fewer_honest_survivors(minimum: int, corrupt: float, threshold: int | str) -> None:
    settings = SecureAggregation(minimum_cohort=minimum, corrupt=corrupt, threshold=threshold, max_drop_out=0.3)  # type: ignore[arg-type]
    least = settings.least_honest()
    possible = 0
    for clients in [*range(minimum, 130), 200, 350, 500]:
        try:
            survivors = settings.least_survivors(clients)
        except InvalidExperiment:
            continue  # no client takes part in it
        possible += 1
        assert survivors - settings.colluders(clients) >= least
    assert possible > 2
    assert least >= 1
