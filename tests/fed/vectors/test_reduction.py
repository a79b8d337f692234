"""The weighted mean against exact fractions, in every order and every grouping.

Shapes: K vectors of P numbers.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from fed.errors import FedError
from fed.vectors.reduction import MOST_LANES, WeightedMean

PIECE = 1 << 16  # numbers that are cut into lanes together
TOGETHER = 1 << 14  # numbers of small vectors that are cut together
LONGEST = 1 << 21  # numbers of the longest vector that is kept as it is until there is another
HALF_UNITS = [2.0**power for power in (-97, -96, -45, -44, 7, 8, 59, 60, 111, 112)]  # where lanes meet
WORDS = [2.0**power for power in (-65, -64, -33, -32, -1, 0, 31, 32, 63, 95, 96)]  # where those of packed sums meet

magnitudes = st.floats(2.0**-60, 2.0**60, exclude_max=True) | st.sampled_from(HALF_UNITS + WORDS)
numbers = st.builds(math.copysign, magnitudes, st.sampled_from([1.0, -1.0])) | st.just(0.0)
weights = st.integers(1, 10**6) | st.floats(2.0**-10, 2.0**20)


def mean_of(vectors: Sequence[Tensor], weighs: Sequence[float]) -> WeightedMean:
    mean = WeightedMean(len(vectors[0]))
    for vector_P, weight in zip(vectors, weighs, strict=True):
        mean.add(vector_P, weight)
    return mean


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int64), other.view(torch.int64))


def exact_mean(column: Sequence[float], weighs: Sequence[float]) -> Fraction:
    """The mean of the products as float64 holds them."""
    return sum((Fraction(v * w) for v, w in zip(column, weighs, strict=True)), Fraction()) / sum(map(Fraction, weighs))


def hold_to_fractions(vectors_KP: Sequence[Sequence[float]], weighs: Sequence[float]) -> None:
    """Hold a mean to the exact one.

    The grid rounds each product by 2^-97 at most; the sum is rounded by 2^-52 of itself, the total weight and the
    quotient by 2^-53 each: less than 2^-50.9 together.
    """
    result_P = mean_of([torch.tensor(vector, dtype=torch.float64) for vector in vectors_KP], weighs).finish()
    off_grid = len(vectors_KP) * Fraction(1, 2**97) / sum(map(Fraction, weighs))
    for got, column in zip(result_P.tolist(), zip(*vectors_KP, strict=True), strict=True):
        exact = exact_mean(column, weighs)
        assert abs(Fraction(got) - exact) <= off_grid * Fraction(9, 8) + abs(exact) / Fraction(2**50.9)


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[list[list[float]], list[float]]:
    """K vectors of P numbers and their weights."""
    size, count = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    vectors_KP = draw(st.lists(st.lists(numbers, min_size=size, max_size=size), min_size=count, max_size=count))
    return vectors_KP, draw(st.lists(weights, min_size=count, max_size=count))


@given(cohorts())
def test_the_mean_is_the_exact_one_within_the_stated_rounding(cohort: tuple[list[list[float]], list[float]]) -> None:
    hold_to_fractions(*cohort)


@given(
    st.lists(st.builds(math.copysign, st.sampled_from(HALF_UNITS + WORDS), st.sampled_from([1.0, -1.0])), min_size=1)
)
@example([2.0**60, -(2.0**59), -(2.0**59), 2.0**-44])
@example([2.0**60, -(2.0**59), -(2.0**59), 2.0**-96, 1.0])
@example([2.0**32, -(2.0**31), -(2.0**31), 2.0**-32])  # two lanes cancel, and a third remains
@example([2.0**32, -(2.0**31), -(2.0**31), 2.0**-64, 1.0])
def test_sums_that_cancel_lose_nothing(column: list[float]) -> None:
    hold_to_fractions([[number] for number in column], [1] * len(column))


@given(cohorts(), st.randoms(use_true_random=False))
def test_every_order_and_every_tree_gives_the_same_bits(
    cohort: tuple[list[list[float]], list[float]], random: Random
) -> None:
    vectors = [torch.tensor(vector, dtype=torch.float64) for vector in cohort[0]]
    expected_P = mean_of(vectors, cohort[1]).finish()
    atoms = list(zip(vectors, cohort[1], strict=True))
    random.shuffle(atoms)
    forest = [mean_of([vector_P], [weight]) for vector_P, weight in atoms]
    forest.append(WeightedMean(len(vectors[0])))  # the monoid's zero
    while len(forest) > 1:
        random.shuffle(forest)
        other, mean = forest.pop(), forest.pop()
        if mean.atoms and random.random() < 0.5:
            mean.finish()  # looking at a sum does not change it
        if random.random() < 0.5:
            mean = WeightedMean.unpacked(mean.packed(), mean.size, mean.atoms, mean.weight)
        mean.merge(other)
        forest.append(mean)
    assert same_bits(forest[0].finish(), expected_P)
    assert (forest[0].atoms, forest[0].weight) == (len(atoms), sum(Fraction(weight) for weight in cohort[1]))
    assert torch.equal(forest[0].packed(), mean_of(vectors, cohort[1]).packed())


edges = st.builds(math.ldexp, st.sampled_from([0.5, 0.75, 1 - 2.0**-53]), st.integers(-97, 790))


@given(st.lists(st.builds(math.copysign, edges, st.sampled_from([1.0, -1.0])), min_size=1, max_size=6))
@example([2.0**31])
@example([-(2.0**31)])
@example([2.0**31, -(2.0**-96)])
@example([2.0**790] * 6)
def test_packed_lanes_are_the_digits_of_the_exact_sum(column: list[float]) -> None:
    packed = mean_of([torch.tensor([number], dtype=torch.float64) for number in column], [1] * len(column)).packed()
    units = sum(round(Fraction(number) * 2**96) for number in column)
    assert sum(lane << (32 * place) for place, lane in enumerate(packed.tolist())) == units
    assert len(packed) == 4 or packed[-1] != 0
    assert len(packed) <= MOST_LANES
    back = WeightedMean.unpacked(packed, 1, len(column), len(column))
    assert torch.equal(back.packed(), packed)
    assert abs(Fraction(back.finish().item()) * len(column) - Fraction(units, 2**96)) <= abs(units) * Fraction(
        1, 2**147
    )


def test_lanes_of_another_length_are_no_packed_sum() -> None:
    for numbers_given in (7, 2 * (MOST_LANES + 1)):
        with pytest.raises(FedError, match=f"up to {MOST_LANES} lanes of 2, got {numbers_given}"):
            WeightedMean.unpacked(torch.zeros(numbers_given, dtype=torch.int32), 2, 1, 1)


def test_long_vectors_are_cut_alike_whatever_stands_beside_a_number() -> None:
    """Three pieces and a bit: tiny numbers, none, huge ones, all kinds; each result is that of its number alone."""
    generator = np.random.default_rng(0)
    exponents = np.concatenate([np.full(PIECE, -50), np.full(PIECE, 0), np.full(PIECE, 50), generator.integers(-60, 60)
                                * np.ones(1), generator.integers(-60, 61, 99)])  # fmt: skip
    exponents[17] = 60  # a huge number among tiny ones
    columns_KP = generator.normal(size=(5, len(exponents))) * 2.0**exponents
    columns_KP[:, PIECE : 2 * PIECE] = 0
    weighs = [3, 1, 20, 7, 100]
    result_P = mean_of([torch.from_numpy(vector) for vector in columns_KP], weighs).finish()
    assert not result_P[PIECE : 2 * PIECE].any()
    for index in [0, 16, 17, 18, PIECE - 1, 2 * PIECE, 3 * PIECE - 1, *range(3 * PIECE, len(exponents))]:
        alone = mean_of([torch.from_numpy(vector[index : index + 1]) for vector in columns_KP], weighs).finish()
        assert same_bits(alone, result_P[index : index + 1])
        assert float(alone) == pytest.approx(float(exact_mean(columns_KP[:, index].tolist(), weighs)), rel=2**-50)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_vectors_of_every_type_are_summed_in_float64(dtype: torch.dtype) -> None:
    vectors = [torch.tensor([0.1, -3.0], dtype=dtype), torch.tensor([7.7, 1e-5], dtype=dtype)]
    result_P = mean_of(vectors, [1, 3]).finish()
    expected_P = (vectors[0].double() + 3 * vectors[1].double()) / 4
    assert result_P.dtype == torch.float64
    torch.testing.assert_close(result_P, expected_P, rtol=2**-51, atol=0)


@pytest.mark.parametrize("number", [*HALF_UNITS, *WORDS, 2.0**799, 1e240, 5e-324, 2.0**-98, 0.0, -0.0])
def test_a_number_at_the_edge_of_a_lane_is_kept(number: float) -> None:
    """Below half the lowest unit, 2^-97, nothing remains (2^-97 itself is a tie that goes to zero)."""
    for signed in (number, -number, math.nextafter(number, math.inf), -math.nextafter(number, math.inf)):
        got = float(mean_of([torch.tensor([signed], dtype=torch.float64)], [1]).finish())
        assert abs(got - signed) <= 2.0**-97
        assert got == signed or abs(signed) < 2.0**-43


LARGEST = [sign * number for number in (math.nextafter(2.0**59, 0), math.nextafter(2.0**7, 0), 2.0**-45 - 2.0**-96)
           for sign in (1, -1)]  # fmt: skip
"""The largest numbers of three lanes: 2⁵¹ units, less one in the lowest."""


def test_as_many_vectors_as_are_counted_are_summed_exactly() -> None:
    """2^20 atoms of the largest number of every lane."""
    mean = mean_of([torch.tensor(LARGEST, dtype=torch.float64)], [1])
    for _ in range(20):
        mean.merge(mean)
    assert mean.atoms == 2**20
    assert mean.finish().tolist() == LARGEST


@pytest.mark.parametrize("size", [len(LARGEST), pytest.param(TOGETHER + 1, marks=pytest.mark.long)])
def test_vectors_that_are_added_leave_room_for_others(size: int) -> None:
    """Single and stacked vectors, so many that sums of 64 bits would overflow more than once."""
    vector_P = torch.tensor(LARGEST, dtype=torch.float64).repeat(size // len(LARGEST) + 1)[:size]
    mean, count = WeightedMean(size), 3 << 12
    for _ in range(count):
        mean.add(vector_P, 1)
    mean.merge(mean)
    assert torch.equal(mean.finish(), vector_P)


def test_packed_sums_leave_room_for_others() -> None:
    """Minus one unit has all the bits of a lane, when it is read from digits of 32."""
    least = mean_of([torch.tensor([-(2.0**-96)], dtype=torch.float64)], [1])
    packed, total, count = least.packed(), WeightedMean(1), 1 << 13
    for _ in range(count):
        total.merge(WeightedMean.unpacked(packed, 1, 1, 1))
    assert total.finish().item() == -(2.0**-96)


def test_more_vectors_than_lanes_have_room_for_are_refused() -> None:
    mean = mean_of([torch.ones(2)], [1])
    mean.atoms = 2**20 - 1  # as if so many had been added
    mean.add(torch.ones(2), 1)
    with pytest.raises(FedError, match="at most 1048576 vectors, got 1048577: reduce them in groups first"):
        mean.add(torch.full((2,), 9.0), 1)
    with pytest.raises(FedError, match="got 1048577"):
        mean.merge(mean_of([torch.full((2,), 9.0)], [1]))
    assert (mean.atoms, mean.weight) == (2**20, Fraction(2))
    assert mean.finish().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("number", "weight"),
    [(math.nan, 1), (math.inf, 1), (-math.inf, 1), (1e300, 1), (-1e300, 1), (1e200, 1e200), (2.0**800, 1)],
)
def test_infinite_or_huge_vectors_are_refused_without_a_trace(number: float, weight: float) -> None:
    mean = mean_of([torch.ones(3 * PIECE)], [2])
    bad_P = torch.ones(3 * PIECE, dtype=torch.float64)
    bad_P[2 * PIECE + 5] = number
    with pytest.raises(FedError, match=r"must be finite and below 7e\+240"):
        mean.add(bad_P, weight)
    assert (mean.atoms, mean.weight) == (1, Fraction(2))
    assert torch.equal(mean.finish(), torch.ones(3 * PIECE, dtype=torch.float64))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e300, 2.0**800])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_small_vectors_are_held_to_that_before_they_are_cut(before: int, number: float) -> None:
    mean = WeightedMean(3)
    for _ in range(before):
        mean.add(torch.ones(3), 2)
    with pytest.raises(FedError, match=r"must be finite and below 7e\+240"):
        mean.add(torch.tensor([1.0, number, 1.0], dtype=torch.float64), 1)
    mean.add(torch.ones(3), 1)
    assert (mean.atoms, mean.weight) == (before + 1, 2 * before + 1)
    assert mean.finish().tolist() == [1, 1, 1]


@pytest.mark.parametrize("size", [1, PIECE, 3 * PIECE + 5])
def test_a_factor_lessens_a_vector_and_no_weight(size: int) -> None:
    mean = WeightedMean(size)
    for value, weight, factor in ((1.0, 1, 1.0), (2.0, 3, 0.5), (4.0, 4, 0.25)):
        mean.add(torch.full((size,), value), weight, factor)
    assert mean.weight == 8
    assert torch.equal(mean.finish(), torch.ones(size, dtype=torch.float64))


def test_who_is_merged_goes_on_by_itself() -> None:
    one, other = WeightedMean(2), mean_of([torch.ones(2)], [1])
    one.merge(other)
    other.add(torch.full((2,), 5.0), 1)
    assert (one.finish().tolist(), other.finish().tolist()) == ([1, 1], [3, 3])
    one.add(torch.full((2,), 9.0), 1)
    assert (one.finish().tolist(), other.finish().tolist()) == ([5, 5], [3, 3])


def test_vectors_without_numbers_have_a_mean_without_numbers() -> None:
    assert mean_of([torch.ones(0)] * 3, [1, 2, 3]).finish().tolist() == []


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf])
def test_a_weight_must_be_positive_and_finite(weight: float) -> None:
    with pytest.raises(FedError, match="weight must be positive and finite"):
        WeightedMean(1).add(torch.ones(1), weight)


@pytest.mark.parametrize("shape", [(2,), (4,), (1, 3), (3, 1), ()])
def test_a_vector_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(FedError, match=r"must have the shape \(3,\)"):
        WeightedMean(3).add(torch.ones(shape), 1)


def test_means_of_other_lengths_are_not_merged() -> None:
    mean = mean_of([torch.ones(3)], [1])
    with pytest.raises(FedError, match="of one length can be merged, got 3 and 1"):
        mean.merge(mean_of([torch.ones(1)], [1]))
    assert mean.atoms == 1


def test_the_mean_of_nothing_is_refused() -> None:
    with pytest.raises(FedError, match="mean of no vectors"):
        WeightedMean(3).finish()


def test_a_sum_keeps_its_vectors_and_continues_after_finish() -> None:
    vector_P = torch.tensor([1.0, 2.0], dtype=torch.float64)
    mean = mean_of([vector_P], [3])
    first_P = mean.finish()
    mean.add(torch.tensor([5.0, 6.0]), 1)
    assert vector_P.tolist() == first_P.tolist() == [1, 2]
    assert mean.finish().tolist() == [2, 3]


def test_memory_does_not_grow_with_the_number_of_vectors() -> None:
    generator = torch.Generator().manual_seed(0)
    mean = mean_of([torch.randn(100, generator=generator) for _ in range(1000)], [1] * 1000)
    assert 1 <= len(mean._lanes) <= 4


@given(
    st.lists(st.floats(-1e30, 1e30) | st.floats(-1e-27, 1e-27) | st.just(-0.0), min_size=1, max_size=6),
    st.integers(1, 2**40),
)
def test_a_vector_alone_is_what_its_lanes_would_leave(numbers: list[float], weight: int) -> None:
    alone, cut = WeightedMean(len(numbers)), WeightedMean(len(numbers))
    alone.add(torch.tensor(numbers, dtype=torch.float64), weight)
    cut.merge(alone)  # which adds to lanes
    assert alone.finish().numpy().tobytes() == cut.finish().numpy().tobytes()


@pytest.mark.parametrize("size", [1, PIECE // 2, PIECE, PIECE + 1, 3 * PIECE + 5])
@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_difference_is_added_as_if_computed_before(size: int, factor: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    start_P, *vectors = (torch.randn(size, generator=generator, dtype=dtype) for _ in range(4))
    taken, made = WeightedMean(size), WeightedMean(size)
    for weight, vector_P in enumerate(vectors, 1):
        taken.add(vector_P, weight, factor, less_P=start_P)
        made.add(vector_P.double() - start_P.double(), weight, factor)
    assert same_bits(taken.finish(), made.finish())


def test_a_difference_that_is_not_finite_leaves_no_trace() -> None:
    size = 3 * PIECE
    mean, huge_P = mean_of([torch.ones(size)], [2]), torch.zeros(size, dtype=torch.float64)
    huge_P[2 * PIECE + 5] = -1e300
    with pytest.raises(FedError, match=r"must be finite and below 7e\+240"):
        mean.add(torch.ones(size), 1, less_P=huge_P)
    assert (mean.atoms, mean.weight) == (1, 2)
    assert torch.equal(mean.finish(), torch.ones(size, dtype=torch.float64))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 3])
def test_last_finish_equals_an_earlier_one(size: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    vectors = [torch.randn(size, generator=generator) * 2.0 ** (30 * place - 60) for place in range(count)]
    means = [mean_of(vectors, range(1, count + 1)) for _ in range(2)]
    assert same_bits(means[0].finish(is_last=True), means[1].finish())


def test_the_last_mean_takes_the_place_of_the_sum() -> None:
    mean = mean_of([torch.full((3 * PIECE,), value) for value in (1.0, 2.0**-40)], [1, 1])
    lowest_P = mean._lanes[min(mean._lanes)]
    assert mean.finish(is_last=True).data_ptr() == lowest_P.data_ptr()


BOUNDS = [
    *(TOGETHER // 3, TOGETHER // 2, TOGETHER // 2 + 1, TOGETHER, TOGETHER + 1),
    *(PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, LONGEST, LONGEST + 1),
]
"""Where a vector's way changes: how many products are cut together, pieces, and what is cut at once."""


@pytest.mark.parametrize("size", BOUNDS)
def test_order_and_grouping_do_not_matter_around_length_bounds(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    powers = (0, 40, -30, 3)
    vectors = [torch.randn(size, generator=generator).mul_(2.0**power) for power in powers]
    weighs, orders = [1, 2.5, 3, 7], ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0])
    expected_P = mean_of(vectors, weighs).finish()
    for order in orders:
        results = mean_of([vectors[place] for place in order], [weighs[place] for place in order])
        assert same_bits(results.finish(is_last=True), expected_P)
    one, others = (mean_of([vectors[place] for place in half], [weighs[place] for place in half])
                   for half in ([2], [3, 0, 1]))  # fmt: skip
    one.merge(others)
    assert same_bits(one.finish(), expected_P)
    for place in (0, size // 2, size - 1):
        alone = mean_of([vector_P[place : place + 1] for vector_P in vectors], weighs).finish()
        assert same_bits(alone, expected_P[place : place + 1])


def test_cut_and_uncut_sums_merge_alike() -> None:
    """A long first vector is kept whole or cut at once by its length; a merged one is cut in any case."""
    for size in (PIECE + 1, LONGEST + 1):
        vector_P = torch.randn(size, generator=torch.Generator().manual_seed(1))
        whole, cut = mean_of([vector_P], [3]), WeightedMean(size)
        cut.merge(mean_of([vector_P], [3]))
        cut.merge(WeightedMean(size))
        sums = [WeightedMean(size) for _ in range(2)]
        for total, part in zip(sums, (whole, cut), strict=True):
            total.merge(part)
            total.merge(mean_of([-0.5 * vector_P], [1]))
        assert same_bits(sums[0].finish(), sums[1].finish())
        assert same_bits(whole.finish(), cut.finish())
