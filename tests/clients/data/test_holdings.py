"""Who holds which samples, once and more than once."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fed.clients.data.holdings import by_holder, largest, replicated
from fed.errors import InvalidData


@given(st.lists(st.sampled_from([3, 10, 2, "b", "a"]), min_size=1))
def test_holders_are_in_order_and_hold_what_is_theirs(holders: list[int | str]) -> None:
    holdings = by_holder(np.array(holders, dtype=object))
    assert list(holdings) == [client for client in (2, 3, 10, "a", "b") if client in holders]
    for client, indices in holdings.items():
        assert [index for index, holder in enumerate(holders) if holder == client] == indices.tolist()


def test_the_largest_stay_and_of_equal_ones_the_first() -> None:
    holdings = by_holder(np.array(list("aabbbccd")))
    assert list(largest(holdings, 2)) == ["a", "b"]
    assert list(largest(holdings, 3)) == ["a", "b", "c"]
    assert largest(holdings, None) is holdings
    with pytest.raises(InvalidData, match=r"clients=5 and 4 clients in the data: lower data.clients"):
        largest(holdings, 5)


@given(clients=st.integers(1, 6), samples=st.integers(6, 40), overlap=st.floats(0, 5), seed=st.integers(0, 20))
def test_overlap_adds_that_many_other_holders_on_average(clients: int, samples: int, overlap: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    holdings = by_holder(np.arange(samples) % clients)
    if overlap > clients - 1:
        with pytest.raises(InvalidData, match=r"data.partition.overlap must be at most the number of other clients"):
            replicated(holdings, overlap, generator)
        return
    more = replicated(holdings, overlap, generator)
    held = Counter(itertools.chain.from_iterable(indices.tolist() for indices in more.values()))
    assert sum(held.values()) - samples == int(overlap) * samples + round((overlap - int(overlap)) * samples)
    assert set(held.values()) <= {1 + math.floor(overlap), 2 + math.floor(overlap)}
    for client, indices in more.items():
        assert set(holdings[client]) <= set(indices)
        assert len(set(indices)) == len(indices)


def test_every_set_of_other_holders_is_as_likely() -> None:
    samples = 12_000
    nothing = np.arange(0)
    more = replicated({0: np.arange(samples), 1: nothing, 2: nothing, 3: nothing}, 2.0, np.random.default_rng(0))
    held_NK = np.stack([np.isin(np.arange(samples), more[client]) for client in (1, 2, 3)], axis=1)
    sets = Counter(tuple((np.flatnonzero(held_K) + 1).tolist()) for held_K in held_NK)
    assert set(sets) == {(1, 2), (1, 3), (2, 3)}
    # Binomial(12000, 1/3), σ = 51.6.
    assert max(abs(count - samples / 3) for count in sets.values()) < 6 * 51.7
