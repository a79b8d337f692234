"""What each client holds out for itself: some of its own samples, the same whoever asks and however data are read."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from fed.clients.data import ClientsOnDemand, FederatedData, Pair
from fed.clients.data.held_out import for_each, of_each, share
from fed.errors import InvalidData
from fed.vectors.randomness import Streams

SIZES = {"a": 10, "b": 1, "c": 37, "d": 2, "e": 5}


def numbered(client: str) -> Pair:
    """Samples that are told apart by their input, with their last digit as label."""
    numbers = 100 * ord(client) + torch.arange(SIZES[client])
    return numbers[:, None].double(), numbers % 10


def in_memory() -> FederatedData:
    return FederatedData({client: numbered(client) for client in SIZES})


def held_by(train: Mapping[str, Pair]) -> dict[str, set[float]]:
    found = {}
    for client in SIZES:
        inputs, targets = train[client] if client in train else (torch.zeros(0, 1), torch.zeros(0))
        assert torch.equal(inputs[:, 0] % 10, targets.double()), "an input keeps its label"
        found[client] = set(inputs[:, 0].tolist())
        assert len(found[client]) == len(inputs), "each once"
    return found


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.9])
def test_held_out_and_training_samples_partition_the_data(fraction: float) -> None:
    train, held_out = for_each(in_memory(), fraction, Streams(3))
    kept, out = held_by(train.train), held_by(held_out)
    for client, size in SIZES.items():
        assert not kept[client] & out[client]
        assert kept[client] | out[client] == set(numbered(client)[0][:, 0].tolist())
        assert len(out[client]) == share(size, fraction)
    assert train.clients == tuple(SIZES)
    assert "b" not in held_out, "its one sample is trained on"


def test_holding_out_on_demand_equals_in_memory() -> None:
    reads: list[str] = []

    def read(client: str) -> Pair:
        reads.append(client)
        return numbered(client)

    for size in (SIZES.__getitem__, None):
        data = FederatedData(ClientsOnDemand(tuple(SIZES), read, size), classes=10)
        reads.clear()
        train, held_out = for_each(data, 0.3, Streams(3))
        assert set(reads) <= {"a"}, "only the first, for a sample's shape"
        at_once, pairs = for_each(in_memory(), 0.3, Streams(3))
        assert train.is_on_demand
        assert dict(train.sizes) == dict(at_once.sizes)
        assert list(held_out) == list(SIZES)
        for client in SIZES:
            assert all(map(torch.equal, train.read(client), at_once.read(client)))
            if client in pairs:
                assert all(map(torch.equal, held_out[client], pairs[client]))
            else:
                assert len(held_out[client][1]) == 0


def test_each_seed_and_client_draws_its_own_held_out_samples() -> None:
    """Of 37 samples 18 are drawn: that two draws agree has a chance of 1 in 10¹⁰."""
    draws = [held_by(for_each(in_memory(), 0.5, Streams(seed))[1])["c"] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    _, test = of_each({"c": np.arange(37)}, 0.5, Streams(0))
    assert {number - 100 * ord("c") for number in draws[0]} != set(test.tolist())


def test_classes_stay_though_the_last_of_them_be_held_out() -> None:
    data = FederatedData(
        {"a": (torch.zeros(2, 1), torch.tensor([0, 1])), "b": (torch.zeros(2, 1), torch.tensor([1, 0]))}
    )
    kept = [for_each(data, 0.5, Streams(seed))[0] for seed in range(40)]
    assert any(int(max(labels.max() for _, labels in part.train.values())) == 0 for part in kept)
    assert {part.number_of_classes() for part in kept} == {2}


def test_where_nobody_can_hold_anything_out_that_is_said() -> None:
    data = FederatedData({client: (torch.zeros(1, 1), torch.zeros(1)) for client in range(3)})
    with pytest.raises(
        InvalidData, match=r"needs a client with samples enough .* got none among 3: raise evaluation\."
    ):
        for_each(data, 0.9, Streams(0))
