"""Label skew and size skew, held to the moments and distributions that they are drawn from."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fed.clients.data.partitions import dirichlet, quantity, shards
from fed.clients.data.samples import Samples
from fed.errors import InvalidData

CLIENTS = 10


def of_labels(labels_N: NDArray[np.int64]) -> Samples:
    return Samples(torch.zeros(len(labels_N), 1), torch.from_numpy(labels_N))


def dirichlet_shares(alpha: float, draws: int, samples_of_a_class: int) -> NDArray[np.float64]:
    """Each client's share of each class, [draws, CLIENTS]: 20 classes a partition."""
    labels_N = np.repeat(np.arange(20), samples_of_a_class)
    generator = np.random.default_rng(5)
    shares = []
    for _ in range(draws // 20):
        holders_N = dirichlet(of_labels(labels_N), CLIENTS, generator, alpha, min_samples=1)
        counts_CK = np.zeros((20, CLIENTS))
        np.add.at(counts_CK, (labels_N, holders_N), 1)
        shares.append(counts_CK / samples_of_a_class)
    return np.concatenate(shares)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 5.0])
def test_dirichlet_shares_have_the_second_moment_of_their_distribution(alpha: float) -> None:
    n, draws = 1000, 2000
    squares = (dirichlet_shares(alpha, draws, n) ** 2).sum(axis=1)
    # E Σ p² = (α + 1)/(Kα + 1). Σ p² lies in [1/K, 1]: Hoeffding at 1e-9. Rounding moves each p by at most 1/n.
    expected = (alpha + 1) / (CLIENTS * alpha + 1)
    hoeffding = math.sqrt(math.log(2 / 1e-9) / (2 * draws))
    assert (
        abs(squares.mean() - expected) < min(hoeffding, 6 * squares.std() / math.sqrt(draws)) + 2 / n + CLIENTS / n**2
    )


def test_a_class_is_shared_at_random_not_in_order() -> None:
    labels_N = np.zeros(4000, dtype=np.int64)
    holders_N = dirichlet(of_labels(labels_N), 2, np.random.default_rng(0), 5.0)
    first, second = holders_N[:2000].mean(), holders_N[2000:].mean()
    # Two halves of a random permutation: the difference of means has σ < 1/sqrt(4000) = 0.016.
    assert abs(first - second) < 6 / math.sqrt(4000)


def test_dirichlet_draws_again_until_every_client_has_enough() -> None:
    dealt = of_labels(np.repeat(np.arange(3), 20))
    generator = np.random.default_rng(0)

    def smallest(min_samples: int) -> int:
        partitions = [dirichlet(dealt, 5, generator, 0.5, min_samples) for _ in range(200)]
        return min(int(np.bincount(holders_N, minlength=5).min()) for holders_N in partitions)

    assert (smallest(1), smallest(3)) == (1, 3)


@pytest.mark.parametrize(("alpha", "clients"), [(0.001, 8), (100.0, 40)])
def test_dirichlet_gives_up_with_the_remedy(alpha: float, clients: int) -> None:
    with pytest.raises(InvalidData, match=r"1000 draws at alpha=.* raise data.partition.alpha, or lower data.clients"):
        dirichlet(of_labels(np.repeat(np.arange(3), 20)), clients, np.random.default_rng(0), alpha)


@given(
    sizes=st.lists(st.integers(5, 60), min_size=2, max_size=8),
    clients=st.integers(1, 12),
    wanted=st.integers(1, 5),
    seed=st.integers(0, 50),
)
def test_shards_show_every_client_exactly_so_many_classes(
    sizes: list[int], clients: int, wanted: int, seed: int
) -> None:
    labels_N = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    possible = wanted <= len(sizes) <= clients * wanted <= sum(min(size, clients) for size in sizes)
    if not possible:
        with pytest.raises(InvalidData, match=r"data.partition.classes_per_client"):
            shards(of_labels(labels_N), clients, np.random.default_rng(seed), wanted)
        return
    holders_N = shards(of_labels(labels_N), clients, np.random.default_rng(seed), wanted)
    assert [len(set(labels_N[holders_N == client])) for client in range(clients)] == [wanted] * clients


def test_shards_of_equal_classes_give_equal_sizes() -> None:
    labels_N = np.repeat(np.arange(10), 100)
    sizes = np.bincount(shards(of_labels(labels_N), 50, np.random.default_rng(0), 2))
    np.testing.assert_array_equal(sizes, np.full(50, 20))


def test_shards_draw_which_classes_meet() -> None:
    labels_N = np.repeat(np.arange(10), 100)
    meetings = set()
    for seed in range(20):
        holders_N = shards(of_labels(labels_N), 50, np.random.default_rng(seed), 2)
        meetings |= {tuple(sorted(set(labels_N[holders_N == client]))) for client in range(50)}
    assert len(meetings) == 45  # every pair of ten classes


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 60), st.floats(0.01, 50))
def test_quantity_gives_everyone_the_least_and_nothing_over(clients: int, least: int, more: int, alpha: float) -> None:
    total = clients * least + more
    holders_N = quantity(of_labels(np.zeros(total, dtype=np.int64)), clients, np.random.default_rng(0), alpha, least)
    sizes = np.bincount(holders_N, minlength=clients)
    assert sizes.sum() == total
    assert sizes.min() >= least


def test_quantity_sizes_have_the_second_moment_of_their_distribution() -> None:
    total, draws, alpha = 2000, 1000, 0.4
    dealt = of_labels(np.zeros(total + CLIENTS, dtype=np.int64))
    generator = np.random.default_rng(3)
    sizes = np.array([np.bincount(quantity(dealt, CLIENTS, generator, alpha), minlength=CLIENTS) for _ in range(draws)])
    squares = (((sizes - 1) / total) ** 2).sum(axis=1)
    # As for dirichlet: E Σ q² = (α + 1)/(Kα + 1).
    expected = (alpha + 1) / (CLIENTS * alpha + 1)
    assert abs(squares.mean() - expected) < 6 * squares.std() / math.sqrt(draws) + 2 / total + CLIENTS / total**2


def test_quantity_differs_in_size_and_not_in_labels() -> None:
    labels_N = np.repeat(np.arange(2), 5000)
    holders_N = quantity(of_labels(labels_N), 3, np.random.default_rng(1), 1.0)
    for client in range(3):
        held = labels_N[holders_N == client]
        assert abs(held.mean() - 0.5) < 6 * 0.5 / math.sqrt(len(held))


def test_quantity_needs_enough_samples() -> None:
    with pytest.raises(InvalidData, match=r"min_samples=3 samples, got 10 samples and 4 clients: lower data.clients"):
        quantity(of_labels(np.zeros(10, dtype=np.int64)), 4, np.random.default_rng(0), 1.0, 3)
