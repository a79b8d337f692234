"""What every partition keeps, and what each of them promises."""

import hashlib
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fed.clients.data.partitions import by_hash, by_range, iid, rank
from fed.clients.data.samples import Samples
from fed.config.registry import PARTITIONS
from fed.errors import InvalidData
from fed.vectors.randomness import Streams

NUMBERED: list[dict[str, Any]] = [
    {"kind": "iid"},
    {"kind": "dirichlet", "alpha": 1.0, "min_samples": 1},
    {"kind": "shards", "classes_per_client": 2},
    {"kind": "similarity", "percent": 30.0},
    {"kind": "quantity", "alpha": 0.3},
    {"kind": "range"},
    {"kind": "range", "by": "label"},
    {"kind": "hash", "by": "index"},
    {"kind": "hash"},
    {"kind": "rank"},
    {"kind": "rank", "by": "score"},
]


def samples(number: int, classes: int = 4, seed: int = 0) -> Samples:
    generator = np.random.default_rng(seed)
    return Samples(
        torch.from_numpy(generator.normal(size=(number, 3)).astype(np.float32)),
        torch.from_numpy(generator.integers(classes, size=number)),
        columns={
            "score": generator.normal(size=number),
            "town": generator.choice(["Ulm", "Gera", "Hof"], size=number),
            "client": generator.choice(["a", "b"], size=number),
            "file": generator.choice(["x", "y"], size=number),
        },
    )


def deal(keys: dict[str, Any], dealt: Samples, clients: int, seed: int = 0) -> NDArray[Any]:
    partition = PARTITIONS.validate(keys)
    return np.asarray(partition.make(samples=dealt, clients=clients, generator=Streams(seed).generator("partition")))


@given(keys=st.sampled_from(NUMBERED), number=st.integers(12, 200), clients=st.integers(1, 6), seed=st.integers(0, 99))
def test_every_sample_has_one_holder_who_exists(keys: dict[str, Any], number: int, clients: int, seed: int) -> None:
    try:
        holders = deal(keys, samples(number, seed=seed), clients, seed)
    except InvalidData:  # what cannot be dealt is refused, never dealt in part
        assert keys["kind"] in ("dirichlet", "shards")
        return
    assert holders.shape == (number,)
    assert holders.dtype.kind == "i"
    assert 0 <= holders.min() <= holders.max() < clients


@pytest.mark.parametrize("keys", NUMBERED, ids=str)
def test_a_stream_says_all_about_a_partition(keys: dict[str, Any]) -> None:
    dealt = samples(150)
    torch.manual_seed(1)
    first = deal(keys, dealt, 5)
    torch.manual_seed(2)
    np.testing.assert_array_equal(first, deal(keys, dealt, 5))
    draws = keys["kind"] in ("iid", "dirichlet", "shards", "similarity", "quantity")
    assert draws != np.array_equal(first, deal(keys, dealt, 5, seed=1))


@given(number=st.integers(1, 100), clients=st.integers(1, 20), by=st.sampled_from(["index", "score"]))
def test_iid_range_and_rank_give_nearly_equal_sizes(number: int, clients: int, by: str) -> None:
    dealt = samples(number)
    for holders in (
        iid(dealt, clients, np.random.default_rng(0)),
        by_range(dealt, clients, by),
        rank(dealt, clients, by),
    ):
        sizes = np.bincount(holders, minlength=clients)
        assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("percent", [0.0, 25.0, 60.0, 100.0])
def test_similarity_mixes_random_and_sorted_samples(percent: float) -> None:
    """Four classes, four clients: of the sorted part each holds one class, but for what the random part has taken."""
    dealt = samples(20_000)
    holders = deal({"kind": "similarity", "percent": percent}, dealt, 4)
    assert np.ptp(np.bincount(holders)) <= 2
    labels = dealt.targets.numpy()
    own = [float((labels[holders == client] == client).mean()) for client in range(4)]
    # 20,000 labels, drawn at random, leave a class up to 2 % larger or smaller than a client's range
    np.testing.assert_allclose(own, 1 - percent / 100 * 3 / 4, atol=0.03)


@given(number=st.integers(4, 120), clients=st.integers(1, 8))
def test_similarity_of_nothing_sorts_by_label(number: int, clients: int) -> None:
    dealt = samples(number)
    holders = deal({"kind": "similarity", "percent": 0.0}, dealt, clients)
    ends = [dealt.targets.numpy()[holders == client] for client in range(clients) if (holders == client).any()]
    assert all(before.max() <= after.min() for before, after in itertools.pairwise(ends))


def test_range_cuts_the_sorted_samples_into_runs() -> None:
    dealt = samples(103)
    holders = by_range(dealt, 7, "score")
    in_order = holders[np.argsort(dealt.columns["score"])]
    assert (np.diff(in_order) >= 0).all()
    assert (np.diff(by_range(dealt, 7)) >= 0).all()


@given(number=st.integers(1, 80), clients=st.integers(1, 12))
def test_rank_deals_the_top_of_every_length_evenly(number: int, clients: int) -> None:
    dealt = samples(number)
    in_order = rank(dealt, clients, "score")[np.argsort(-dealt.columns["score"].astype(float))]
    for top in range(1, number + 1):
        hands = np.bincount(in_order[:top], minlength=clients)
        assert hands.max() - hands.min() <= 1


def test_rank_deals_there_and_back_so_that_places_sum_alike() -> None:
    dealt = samples(40)
    place = np.argsort(np.argsort(-dealt.columns["score"].astype(float)))
    sums = np.bincount(rank(dealt, 4, "score"), weights=place)
    # Two turns, there and back, give every client the same sum of places: 10 turns here.
    np.testing.assert_array_equal(sums, np.full(4, sums[0]))


def test_rank_goes_by_the_mean_of_the_inputs() -> None:
    dealt = Samples(torch.tensor([[0.0, 1.0], [4.0, 4.0], [2.0, 1.0], [9.0, -3.0]]), torch.zeros(4, dtype=torch.long))
    assert rank(dealt, 4).tolist() == [3, 0, 2, 1]


def test_hash_is_blake2b_of_the_value_as_text() -> None:
    dealt = samples(50)
    expected = [
        int.from_bytes(hashlib.blake2b(town.encode(), digest_size=8).digest(), "little") % 7
        for town in dealt.columns["town"].tolist()
    ]
    assert by_hash(dealt, 7, "town").tolist() == expected


def test_hash_of_content_is_blake2b_of_inputs_and_target() -> None:
    dealt = samples(20)
    expected = []
    for x, y in zip(dealt.inputs.numpy(), dealt.targets.numpy(), strict=True):
        digest = hashlib.blake2b(x.astype("<f4").tobytes() + y.astype("<i8").tobytes(), digest_size=8).digest()
        expected.append(int.from_bytes(digest, "little") % 1000)
    assert by_hash(dealt, 1000).tolist() == expected


def test_hash_of_content_does_not_depend_on_the_other_samples() -> None:
    dealt = samples(60)
    some = np.arange(0, 60, 7)
    np.testing.assert_array_equal(by_hash(dealt, 5)[some], by_hash(dealt.take(some), 5))
    twice = by_hash(dealt.take(np.array([3, 3])), 1000)
    assert twice[0] == twice[1]


def test_hash_spreads_keys_evenly() -> None:
    sizes = np.bincount(by_hash(samples(20_000), 10, "index"), minlength=10)
    # Each size is binomial(20000, 0.1) with σ = 42.4; six of them over ten clients fail once in 5e7.
    assert abs(sizes - 2000).max() < 6 * 42.5


@pytest.mark.parametrize("kind", ["natural", "file"])
def test_named_partitions_follow_the_source(kind: str) -> None:
    dealt = samples(30)
    column = {"natural": "client", "file": "file"}[kind]
    assert Counter(deal({"kind": kind}, dealt, 3).tolist()) == Counter(dealt.columns[column].tolist())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"kind": "hash", "by": "tow"}, "must name a column of the source, got 'tow'; did you mean town"),
        ({"kind": "rank", "by": "town"}, "needs a column of numbers"),
        ({"kind": "range", "by": "nothing"}, "known: index, label, mean, score, town"),
    ],
)
def test_what_cannot_be_gone_by_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidData, match=said):
        deal(keys, samples(20), 3)


@pytest.mark.parametrize("kind", ["dirichlet", "shards"])
@pytest.mark.parametrize("targets", [torch.rand(20), torch.zeros(20, 3, dtype=torch.long)])
def test_label_skew_needs_one_label_a_sample(kind: str, targets: torch.Tensor) -> None:
    with pytest.raises(InvalidData, match="one integer label a sample"):
        deal({"kind": kind}, Samples(torch.zeros(20, 2), targets), 3)
