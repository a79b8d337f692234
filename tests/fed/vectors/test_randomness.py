"""Named streams: a name says all about a stream, and two names share nothing."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from fed.vectors.randomness import Streams, seeded_torch

CPU = torch.device("cpu")
names = st.tuples(st.text(max_size=3), st.integers() | st.text(max_size=3))
# Pairs of names that a careless hash would take for one.
LOOKALIKES: list[tuple[str, tuple[object, ...]]] = [
    ("a", ()),
    ("a", (1,)),
    ("a", ("1",)),
    ("a", (1, 2)),
    ("a", (12,)),
    ("a", (2, 1)),
    ("a", ((1, 2),)),
    ("a", ("1, 2",)),
    ("a1", ()),
    ("a', 1", ()),
    ("", ("a", 1)),
    ("a", (True,)),
    ("a", (1.0,)),
    ("a", (None,)),
    ("a", ("None",)),
    ("a", (-1,)),
    ("b", (1,)),
]


def draws(streams: Streams, purpose: str, *key: object, count: int = 4) -> list[int]:
    return [int(number) for number in streams.generator(purpose, *key).integers(2**62, size=count)]


@given(names, names, st.integers(0, 2**40))
def test_a_name_gives_its_stream_again_after_other_draws(
    one: tuple[str, object], other: tuple[str, object], seed: int
) -> None:
    streams = Streams(seed)
    first = draws(streams, *one), streams.torch_seed(*one)
    draws(streams, *other)
    np.random.default_rng(0).random()
    torch.rand(1)
    assert (draws(Streams(seed), *one), streams.torch_seed(*one)) == first
    assert (draws(streams, *other) == first[0]) == (one == other)
    assert (streams.torch_seed(*other) == first[1]) == (one == other)


def test_names_that_look_alike_are_different_streams() -> None:
    for seed in (0, 1, 10, 2**63, 2**200):
        streams = Streams(seed)
        assert len({tuple(draws(streams, purpose, *key)) for purpose, key in LOOKALIKES}) == len(LOOKALIKES)
        assert len({streams.torch_seed(purpose, *key) for purpose, key in LOOKALIKES}) == len(LOOKALIKES)


def test_seeds_are_different_streams() -> None:
    assert len({tuple(draws(Streams(seed), "order", 1)) for seed in range(1000)}) == 1000


@pytest.mark.parametrize(
    ("key", "same"),
    [(np.int8(7), 7), (np.int64(7), 7), (np.uint64(7), 7), (np.str_("ann"), "ann"), (np.float64(0.5), 0.5)],
)
def test_numpy_and_plain_values_name_the_same_stream(key: object, same: object) -> None:
    assert draws(Streams(3), "order", key, 2) == draws(Streams(3), "order", same, 2)
    assert Streams(3).torch_seed("module", 2, key) == Streams(3).torch_seed("module", 2, same)


def test_streams_are_the_same_in_every_version() -> None:
    """Written down, so that a run of old can be repeated. A hash of Python's own would differ in every process."""
    assert Streams(0).torch_seed("model") == 1689353482259370465
    assert Streams(0).generator("order", 7, "ann").bit_generator.random_raw() == 7705720427498206217


def test_streams_of_two_names_are_independent() -> None:
    """Correlations of 50 streams' 2,000 numbers, pair by pair.

    Each of 1,225 correlations is N(0, 1/2000): beyond 5 standard deviations with a probability of 6e-7, any of them
    of 7e-4. Their sum of squares over the variance is χ² of 1,225 degrees of freedom, N(1225, 2450) to a good
    approximation.
    """
    for streams in (
        [Streams(0).generator("order", client, 1).normal(size=2000) for client in range(50)],
        [Streams(0).generator("order", 1, number).normal(size=2000) for number in range(50)],
        [Streams(seed).generator("order", 1, 1).normal(size=2000) for seed in range(50)],
    ):
        correlations = np.asarray(np.corrcoef(streams))[np.triu_indices(50, 1)] * math.sqrt(2000)
        assert abs(correlations).max() < 5
        assert abs((correlations**2).sum() - 1225) < 5 * math.sqrt(2450)


def test_first_draws_of_neighbouring_names_are_uniform() -> None:
    """Each of 20 bins gets 2,500 of 50,000 draws ± 49; χ² of 19 degrees of freedom stays below 60 (p = 4e-6)."""
    first = [Streams(0).generator("cohort", *key).integers(20) for key in itertools.product(range(100), range(500))]
    assert ((np.bincount(first, minlength=20) - 2500) ** 2 / 2500).sum() < 60


def test_torch_seeds_are_valid_and_spread_over_all_bits() -> None:
    """Each bit of 4,096 seeds is set in half of them, ± 5 standard deviations of 32."""
    seeds = [Streams(0).torch_seed("module", client) for client in range(4096)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.Generator().manual_seed(max(seeds))
    for bit in range(63):
        assert abs(sum(seed >> bit & 1 for seed in seeds) - 2048) < 160


def test_seeded_code_neither_reads_nor_moves_the_global_generator() -> None:
    inside = []
    for state in (0, 1, 2):
        torch.manual_seed(state)
        expected = torch.rand(3)
        torch.manual_seed(state)
        with seeded_torch(99, CPU):
            inside.append(torch.rand(5))
        assert torch.equal(torch.rand(3), expected)
    assert torch.equal(inside[0], inside[1])
    assert torch.equal(inside[1], inside[2])
    with seeded_torch(98, CPU):
        assert not torch.equal(torch.rand(5), inside[0])


def test_global_generator_is_restored_after_errors_and_nesting() -> None:
    drawn = []

    def draw_and_fail() -> None:
        with seeded_torch(99, CPU):
            drawn.append(torch.rand(2))
            with seeded_torch(5, CPU):
                torch.rand(7)
            drawn.append(torch.rand(2))
            raise KeyError

    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        draw_and_fail()
    assert torch.equal(torch.get_rng_state(), before)
    with seeded_torch(99, CPU):
        assert torch.equal(torch.rand(4), torch.cat(drawn))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpus_generator_is_isolated_too() -> None:
    cuda = torch.device("cuda")
    torch.manual_seed(1)
    expected = torch.rand(3, device=cuda)
    torch.manual_seed(1)
    with seeded_torch(99, cuda):
        inside = torch.rand(5, device=cuda)
    assert torch.equal(torch.rand(3, device=cuda), expected)
    with seeded_torch(99, cuda):
        assert torch.equal(torch.rand(5, device=cuda), inside)


def test_named_numbers_have_their_distributions_and_are_independent() -> None:
    streams = Streams(5)
    uniforms_N4 = np.array([streams.uniforms("a", number) for number in range(20_000)])
    normals_N2 = np.array([streams.normals("b", number) for number in range(20_000)])
    assert all(kstest(column, "uniform").pvalue > 0.001 for column in uniforms_N4.T)
    assert all(kstest(column, "norm").pvalue > 0.001 for column in normals_N2.T)
    for columns in (uniforms_N4.T, normals_N2.T, normals_N2.T**2):
        correlations = np.corrcoef(columns) - np.eye(len(columns))
        assert np.abs(correlations).max() < 4 / math.sqrt(20_000)
    assert uniforms_N4.min() >= 0
    assert uniforms_N4.max() < 1
    assert len({streams.uniforms(purpose, *key) for purpose, key in LOOKALIKES}) == len(LOOKALIKES)


@given(st.sampled_from([1, 2, 7, 40, 20_000, 3 * 10**9, 2**32, 2**33]), st.integers(0, 40), st.integers(0, 2**40))
def test_places_are_those_that_numpy_chooses(population: int, count: int, key: int) -> None:
    count = min(count, population)
    expected = Streams(0).generator("cohort", key).choice(population, size=count, replace=False)
    assert sorted(Streams(0).places(population, count, "cohort", key)) == sorted(expected)
