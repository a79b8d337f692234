import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fed.errors import InvalidExperiment, InvalidInput, InvalidPayload
from fed.secure_aggregation.fixed_point import ClientNumbers, FixedPoint, SecureSum

_BITS = [16, 32, 64]


def _generators(count: int, seed: int = 0) -> list[np.random.Generator]:
    return [np.random.default_rng((seed, number)) for number in range(count)]


def _summed(fixed: FixedPoint, lanes: torch.Tensor) -> SecureSum:
    total = SecureSum(fixed.bits, fixed.lanes)
    for row in lanes:
        total.add(row)
    return total


@given(st.data())
def test_mean_is_within_the_derived_bound_of_the_exact_one(data: st.DataObject) -> None:
    bits, clients = data.draw(st.sampled_from(_BITS)), data.draw(st.integers(1, 12))
    heaviest, seed = data.draw(st.integers(1, 50)), data.draw(st.integers(0, 1000))
    clips = data.draw(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)))
    fixed = FixedPoint(bits, (5, 3), clips, most_clients=clients, max_weight=heaviest)
    generator = np.random.default_rng(seed)
    bounds_M = np.repeat(clips, (5, 3))
    message_KM = torch.from_numpy(generator.uniform(-bounds_M, bounds_M, (clients, 8)))
    weights = generator.integers(1, heaviest + 1, clients).tolist()
    samples, losses = generator.integers(1, 2**40, clients).tolist(), generator.normal(size=clients).tolist()
    quantised = fixed.quantise(message_KM, ClientNumbers(weights, samples, losses), _generators(clients, seed))
    found = fixed.read(_summed(fixed, quantised.lanes))
    exact_M = (torch.tensor(weights, dtype=torch.float64) @ message_KM) / sum(weights)
    # each client's rounding moves a number by less than C/L, and a weighted mean by no more
    steps_M = torch.from_numpy(np.repeat(fixed.error_bounds, (5, 3)))
    assert ((found.mean_M - exact_M).abs() <= steps_M * (1 + 1e-6) + 1e-12 * torch.from_numpy(bounds_M)).all()
    assert (found.weight, found.samples, found.clients) == (sum(weights), sum(samples), clients)
    assert (found.clipped, found.capped) == (0, 0)
    mean_loss = math.fsum(loss * held for loss, held in zip(losses, samples, strict=True)) / sum(samples)
    assert abs(found.train_loss - mean_loss) <= 2**-17 * clients / sum(samples) + 1e-15


@pytest.mark.parametrize("bits", _BITS)
@pytest.mark.parametrize(("clients", "weight"), [(1, 1), (7, 1), (10, 90), (1000, 3)])
def test_most_clients_at_the_clip_do_not_wrap(bits: int, clients: int, weight: int) -> None:
    fixed = FixedPoint(bits, (2,), (3.0,), most_clients=clients, max_weight=weight)
    message_KM = torch.tensor([[3.0, -3.0]]).expand(clients, 2)
    beside = ClientNumbers([weight] * clients, [2**53] * clients, [2.0**-8] * clients)
    found = fixed.read(_summed(fixed, fixed.quantise(message_KM, beside, _generators(clients)).lanes))
    assert found.mean_M.tolist() == pytest.approx([3.0, -3.0], rel=1e-15)
    assert (found.weight, found.samples) == (clients * weight, clients * 2**53)
    assert found.train_loss == pytest.approx(2.0**-8, rel=1e-12)
    # one client more of the same would wrap, where every level is used
    if fixed.levels < 2**40 and (clients + 1) * weight * fixed.levels > 2 ** (bits - 1) - 1:
        more = _summed(
            fixed,
            fixed.quantise(
                message_KM[:1].expand(clients + 1, 2),
                ClientNumbers([weight] * (clients + 1), [1] * (clients + 1), [0.0] * (clients + 1)),
                _generators(clients + 1),
            ).lanes,
        )
        assert more.lanes.view(f"i{bits // 8}")[0] < 0


def test_rounding_is_unbiased() -> None:
    fixed = FixedPoint(16, (1,), (1.0,), most_clients=2000, max_weight=1)
    value, times = 5.4 / fixed.levels, 4000  # of 16 levels: neither floor nor the nearest has its mean
    message_KM = torch.full((times, 1), value)
    numbers = ClientNumbers([1] * times, [1] * times, [0.0] * times)
    found = fixed.quantise(message_KM, numbers, _generators(times)).values_KM.mean().item()
    step = fixed.error_bounds[0]
    assert abs(found - value) < 5 * step / 2 / math.sqrt(times)  # a coin's deviation is half a step at most


def test_clipped_coordinates_and_capped_weights_are_counted() -> None:
    fixed = FixedPoint(16, (2, 2), (1.0, 10.0), most_clients=4, max_weight=3)
    message_KM = torch.tensor([[2.0, 0.5, 2.0, 11.0], [1.0, -1.0, 10.0, -10.0], [0.0, 0.0, 0.0, -20.0]])
    quantised = fixed.quantise(message_KM, ClientNumbers([3, 4, 100], [1, 1, 1], [1.0, -2.0, 0.0]), _generators(3))
    found = fixed.read(_summed(fixed, quantised.lanes))
    assert (found.clipped, found.capped, found.weight) == (3, 2, 9)
    assert found.train_loss == pytest.approx(-1 / 3)
    assert quantised.values_KM[0, 0] == 1.0
    assert quantised.values_KM[2, 3] == -10.0


def test_values_are_those_of_the_lanes() -> None:
    fixed = FixedPoint(32, (50,), (8.0,), most_clients=1, max_weight=1)
    message_1M = torch.randn(1, 50)
    quantised = fixed.quantise(message_1M, ClientNumbers([1], [1], [0.0]), _generators(1))
    assert torch.equal(fixed.read(_summed(fixed, quantised.lanes)).mean_M, quantised.values_KM[0])


@pytest.mark.parametrize("bits", _BITS)
def test_sums_are_the_same_in_any_grouping(bits: int) -> None:
    fixed = FixedPoint(bits, (9,), (8.0,), most_clients=20)
    lanes = fixed.quantise(torch.randn(20, 9), ClientNumbers([1] * 20, [5] * 20, [0.5] * 20), _generators(20)).lanes
    whole, halves = _summed(fixed, lanes), [_summed(fixed, lanes[1::2]), _summed(fixed, lanes[::2])]
    halves[0].merge(halves[1])
    grouped = SecureSum(bits, fixed.lanes)
    grouped.add(lanes[:13].sum(0, dtype=fixed.dtype), 13)
    grouped.add(lanes[13:].sum(0, dtype=fixed.dtype), 7)
    for other in (halves[0], grouped):
        assert np.array_equal(whole.lanes, other.lanes)
        assert other.clients == 20


def test_row_is_the_same_alone_as_in_a_group() -> None:
    fixed = FixedPoint(32, (9,), (8.0,), most_clients=5)
    message_KM, beside = torch.randn(5, 9), ClientNumbers([1] * 5, [*range(1, 6)], [0.5] * 5)
    group = fixed.quantise(message_KM, beside, _generators(5)).lanes
    for row in range(5):
        alone = ClientNumbers([1], [row + 1], [0.5])
        assert torch.equal(
            fixed.quantise(message_KM[row : row + 1], alone, _generators(5)[row:][:1]).lanes[0], group[row]
        )


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", _BITS)
def test_a_number_that_is_not_finite_is_refused(bits: int, number: float) -> None:
    """In one sentence, which names no number of the client's."""
    fixed = FixedPoint(bits, (3,), (1.0,), most_clients=5)
    message_KM = torch.tensor([[0.0, 0.5, -0.5], [0.25, number, 1.0]])
    with pytest.raises(InvalidInput, match=r"^all numbers of a message must be finite, got NaN or infinity$"):
        fixed.quantise(message_KM, ClientNumbers([1, 1], [3, 4], [0.1, 0.2]), _generators(2))


def test_too_many_clients_for_the_bits_are_refused() -> None:
    FixedPoint(16, (1,), (1.0,), most_clients=327, max_weight=100)
    with pytest.raises(InvalidExperiment, match="do not fit into 16 bits"):
        FixedPoint(16, (1,), (1.0,), most_clients=328, max_weight=100)


def test_numbers_that_cannot_travel_are_refused() -> None:
    fixed, message = FixedPoint(32, (1,), (1.0,), most_clients=2), torch.zeros(1, 1)
    for weight in (0.5, -1.0, math.nan):
        with pytest.raises(InvalidExperiment, match="whole number"):
            fixed.quantise(message, ClientNumbers([weight], [1], [0.0]), _generators(1))
    for loss in (1e14, math.inf, math.nan):
        with pytest.raises(InvalidExperiment, match="scale the loss"):
            fixed.quantise(message, ClientNumbers([1], [1], [loss]), _generators(1))
    for samples in (-1, 2**53 + 1):
        with pytest.raises(InvalidExperiment, match="at most 9007199254740992 samples"):
            fixed.quantise(message, ClientNumbers([1], [samples], [0.0]), _generators(1))


@pytest.mark.parametrize(("weight", "samples"), [(0, 5), (1, 0)])
def test_sum_without_weight_or_samples_is_refused(weight: int, samples: int) -> None:
    fixed = FixedPoint(32, (1,), (1.0,), most_clients=2)
    quantised = fixed.quantise(torch.zeros(1, 1), ClientNumbers([weight], [samples], [0.0]), _generators(1))
    with pytest.raises(InvalidPayload, match=f"got {weight} and {samples}: a client"):
        fixed.read(_summed(fixed, quantised.lanes))


def test_sum_of_nothing_says_that_all_trainings_failed() -> None:
    fixed = FixedPoint(32, (1,), (1.0,), most_clients=2)
    with pytest.raises(InvalidPayload, match="none of the 2 clients has added anything"):
        fixed.read(_summed(fixed, fixed.nothing(np.random.default_rng(0)).repeat(2, 1)))


class _Highest:
    """Draws the largest number below 1, which a large level's last bit cannot tell from 1."""

    def random(self, count: int) -> np.ndarray:
        return np.full(count, np.nextafter(1.0, 0.0))


def test_no_draw_goes_beyond_the_last_level() -> None:
    fixed = FixedPoint(32, (1,), (3.0,), most_clients=1)
    generators: Any = [_Highest()]
    lanes = fixed.quantise(torch.tensor([[3.0]]), ClientNumbers([1], [1], [0.0]), generators).lanes[0]
    assert lanes[0] == 2**31 - 1  # one more would be the least number


def test_levels_leave_bits_to_round_by_chance() -> None:
    fixed = FixedPoint(64, (4000,), (1.0,), most_clients=1)
    message = torch.full((1, 4000), 1 - 2.0**-42, dtype=torch.float64)  # a quarter of the last level's step below it
    lanes = fixed.quantise(message, ClientNumbers([1], [1], [0.0]), _generators(1)).lanes[0, :4000]
    share = (lanes == fixed.levels).double().mean().item()
    assert abs(share - 0.75) < 5 * math.sqrt(0.75 * 0.25 / 4000)


def test_sums_of_nonsense_are_refused() -> None:
    fixed = FixedPoint(32, (1,), (1.0,), most_clients=2)
    with pytest.raises(InvalidPayload, match="weight from 1 to 1"):
        fixed.read(_summed(fixed, torch.randint(2**31 - 1, (1, fixed.lanes), dtype=torch.int32)))
