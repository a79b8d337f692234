"""Folds: every sample is tested exactly once, no client trains on what is tested, and each has samples."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fed
from fed.clients.data import ClientsOnDemand, FederatedData, load
from fed.clients.data.folds import fold_of, holding_out
from fed.clients.setup import Preparation
from fed.config.registry import DATA
from fed.config.sections import FoldSection
from fed.errors import InvalidData, InvalidExperiment
from fed.vectors.randomness import Streams


def numbered(sizes: dict[Any, int]) -> FederatedData:
    """Clients whose samples are distinct numbers over all of them."""
    ends = np.cumsum([0, *sizes.values()])
    numbers = {client: torch.arange(ends[at], ends[at + 1]) for at, client in enumerate(sizes)}
    return FederatedData({client: (one[:, None].float(), one % 2) for client, one in numbers.items()})


def inputs_of(pair: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    return [int(number) for number in pair[0].flatten()]


def fold(number: int, folds: int) -> FoldSection:
    return FoldSection(number=number, of=folds)


@given(st.lists(st.integers(2, 12), min_size=1, max_size=6), st.integers(2, 5), st.integers(0, 99))
def test_every_sample_is_tested_exactly_once(sizes: list[int], folds: int, seed: int) -> None:
    data, tested = numbered(dict(enumerate(sizes))), Counter[int]()
    for number in range(1, folds + 1):
        try:
            parted = holding_out(data, fold(number, folds), Streams(seed))
        except InvalidData:  # of so few samples that this fold has none
            continue
        assert parted.client_tests is not None
        for client in data.clients:
            kept = inputs_of(parted.read(client))
            held_out = inputs_of(parted.client_tests[client]) if client in parted.client_tests else []
            assert kept
            assert sorted(kept + held_out) == inputs_of(data.read(client))
            tested.update(held_out)
    assert tested == Counter(range(sum(sizes)))


@given(st.integers(1, 60), st.integers(2, 9), st.integers(0, 99))
def test_folds_of_a_client_differ_by_one_sample_at_most(samples: int, folds: int, seed: int) -> None:
    sizes = np.bincount(fold_of(samples, folds, np.random.default_rng(seed)), minlength=folds + 1)[1:]
    assert sizes.sum() == samples
    assert sizes.max() - sizes.min() <= 1


def test_folds_of_many_small_clients_are_of_about_one_size() -> None:
    sizes = np.zeros(5)
    for client in range(500):
        sizes += np.bincount(fold_of(3, 5, np.random.default_rng(client)), minlength=6)[1:]
    # A client has a sample in a fold with probability 0.6: five standard deviations of 500 such draws.
    assert np.abs(sizes - 300).max() < 5 * np.sqrt(500 * 0.6 * 0.4)


def test_client_with_one_sample_trains_on_it_in_every_fold() -> None:
    data = numbered({"one": 1, "many": 6})
    for number in (1, 2, 3):
        parted = holding_out(data, fold(number, 3), Streams(0))
        assert inputs_of(parted.read("one")) == [0]
        assert parted.client_tests is not None
        assert "one" not in parted.client_tests


def test_fold_without_any_sample_is_refused() -> None:
    used = set(fold_of(3, 4, Streams(0).generator("folds", "a")).tolist())
    (empty,) = {1, 2, 3, 4} - used
    with pytest.raises(InvalidData, match=f"must hold a sample out of some client, got fold {empty} of 4"):
        holding_out(numbered({"a": 3}), fold(empty, 4), Streams(0))


def test_folds_follow_the_seed_of_the_data() -> None:
    def held_out(seed: int) -> list[int]:
        tests = holding_out(numbered({0: 50}), fold(1, 5), Streams(seed)).client_tests
        assert tests is not None
        return inputs_of(tests[0])

    assert held_out(3) == held_out(3) != held_out(4)


@pytest.mark.parametrize("size", [None, lambda client: 4 + client])
def test_data_on_demand_have_the_folds_of_data_in_memory(size: Any) -> None:
    held = numbered({0: 4, 1: 5, 2: 6})
    on_demand = FederatedData(ClientsOnDemand(range(3), held.read, size), classes=2)
    ours, theirs = (holding_out(data, fold(2, 5), Streams(1)) for data in (on_demand, held))
    assert ours.client_tests is not None
    assert theirs.client_tests is not None
    assert list(ours.client_tests) == list(theirs.client_tests)
    for client in held.clients:
        assert inputs_of(ours.read(client)) == inputs_of(theirs.read(client))
        assert ours.size_of(client) == theirs.size_of(client)
    for client in theirs.client_tests:
        assert inputs_of(ours.client_tests[client]) == inputs_of(theirs.client_tests[client])


@pytest.mark.parametrize("kind", ["digits", "synthetic"])
def test_loaded_folds_partition_all_samples_of_the_source(kind: str) -> None:
    section = DATA.make(kind, clients=5, test_fraction=0.0)
    whole = load(section, Streams(0))
    tested = 0
    for number in (1, 2, 3):
        data = load(DATA.make(kind, clients=5, fold={"number": number, "of": 3}), Streams(0)).with_test_set()
        assert data.test is not None
        assert data.clients == whole.clients
        assert all(data.size_of(client) < whole.size_of(client) for client in data.clients)
        tested += len(data.test[1])
    assert tested == sum(map(whole.size_of, whole.clients))


def test_clients_that_evaluate_do_so_on_their_fold() -> None:
    keys = {"clients": 5, "fold": {"number": 2, "of": 3}}
    experiment = fed.Experiment(data=keys, evaluation={"kind": "clients"}, model={"kind": "logistic"})
    assert experiment.data is not None
    data = load(experiment.data, experiment.data_streams)
    prepared = Preparation(experiment, data)
    assert prepared.held_out is not None
    assert data.client_tests is not None
    assert prepared.held_out.keys() == data.client_tests.keys()
    assert all(torch.equal(prepared.held_out[client][0], data.client_tests[client][0]) for client in data.clients)
    assert all(prepared.data.size_of(client) == data.size_of(client) for client in data.clients)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fold": {"number": 4, "of": 3}}, "number must be at most the number of folds, got number=4 of 3"),
        ({"fold": {"number": 1, "of": 3}, "test_fraction": 0.2}, "test_fraction must be 0 with a fold"),
        (
            {"fold": {"number": 1, "of": 3}, "partition": {"kind": "iid", "overlap": 0.5}},
            "overlap must be 0 with a fold",
        ),
    ],
)
def test_fold_that_means_nothing_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidExperiment, match=message):
        fed.Experiment(data=keys)
