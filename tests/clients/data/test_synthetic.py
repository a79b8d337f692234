"""Synthetic(α, β) against the moments that its definition states, and against itself when drawn at once."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fed.clients.data import FederatedData
from fed.clients.data.held_out import share
from fed.clients.data.sources.synthetic import synthetic
from fed.vectors.randomness import Streams


def test_alpha_moves_all_logits_alike() -> None:
    near, far = (synthetic(Streams(0), alpha=alpha, clients=5) for alpha in (0.0, 1.0))
    for client in near.clients:
        assert all(map(torch.equal, near.read(client), far.read(client)))


def test_a_device_does_not_depend_on_how_many_there_are(loaded: Callable[..., FederatedData]) -> None:
    few, more = loaded(kind="synthetic", clients=2), loaded(kind="synthetic", clients=4)
    assert all(torch.equal(few.train[client][0], more.train[client][0]) for client in few.train)
    assert not torch.equal(few.train[0][0], loaded(kind="synthetic", clients=2, seed=1).train[0][0])


def test_every_device_holds_out_a_tenth(loaded: Callable[..., FederatedData]) -> None:
    data = loaded(kind="synthetic")
    whole = synthetic(Streams(0), test_fraction=0.0)
    assert data.clients == range(30)
    assert data.sizes == {client: n - int(n * 0.1 + 0.5) for client, n in whole.sizes.items()}
    assert data.test is not None
    assert len(data.test[1]) == sum(whole.sizes.values()) - sum(data.sizes.values())
    assert data.number_of_classes() == 10


def at_once(streams: Streams, alpha: float, beta: float, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A device by the definition, number by number in the order of the authors' program."""
    draw = streams.generator("synthetic", client)
    size = int(np.exp(draw.normal(4, 2))) + 50
    u, B = alpha * draw.normal(), beta * draw.normal()
    W = np.array([[draw.normal(u, 1) for _ in range(10)] for _ in range(60)])
    b = np.array([draw.normal(u, 1) for _ in range(10)])
    v = [draw.normal(B, 1) for _ in range(60)]
    x = np.array([[draw.normal(v[j], (j + 1) ** -0.6) for j in range(60)] for _ in range(size)])
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy((x @ W + b).argmax(axis=1))


def test_devices_on_demand_are_those_drawn_at_once() -> None:
    streams = Streams(7)
    data = synthetic(streams, alpha=0.5, beta=2.0, clients=4)
    whole = [at_once(streams, 0.5, 2.0, client) for client in range(4)]
    held_out = [share(len(labels), 0.1) for _, labels in whole]
    assert data.test is not None
    for part in (0, 1):
        for client in (3, 0, 2, 1):
            assert torch.equal(data.read(client)[part], whole[client][part][: -held_out[client]])
        tested = [pair[part][-last:] for pair, last in zip(whole, held_out, strict=True)]
        assert torch.equal(data.test[part], torch.cat(tested))


@pytest.mark.long
def test_a_million_devices_are_read_when_they_are_needed(
    loaded: Callable[..., FederatedData], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    generator = Streams.generator

    def counted(streams: Streams, purpose: str, *key: object) -> np.random.Generator:
        drawn.append(int(str(key[0])))
        return generator(streams, purpose, *key)

    monkeypatch.setattr(Streams, "generator", counted)
    data = loaded(kind="synthetic", clients=10**6)
    assert (data.clients, data.is_on_demand) == (range(10**6), True)
    assert set(drawn) == set(range(1000))  # whose held-out samples are the test set
    del drawn[:]
    assert data.size_of(999_999) == len(data.read(999_999)[1])
    assert set(drawn) == {999_999}
    few = loaded(kind="synthetic", clients=1000)
    assert few.test is not None
    assert data.test is not None
    assert torch.equal(few.test[0], data.test[0])


def test_devices_can_be_dealt_anew(loaded: Callable[..., FederatedData]) -> None:
    data = loaded(kind="synthetic", clients=3)
    dealt = loaded(kind="synthetic", clients=3, partition={"kind": "iid"})
    assert not dealt.is_on_demand
    assert sum(dealt.sizes.values()) == sum(data.sizes.values())
    assert dealt.test is not None
    assert data.test is not None
    assert torch.equal(dealt.test[0], data.test[0])
    shared = loaded(kind="synthetic", clients=3, partition={"kind": "natural", "overlap": 2.0})
    assert set(shared.sizes.values()) == {sum(data.sizes.values())}
