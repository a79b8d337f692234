"""Synthetic(α, β) against the moments that its definition states, and against itself when drawn at once."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fed.clients.data import FederatedData
from fed.clients.data.held_out import share
from fed.clients.data.sources.synthetic import synthetic
from fed.randomness import Streams

DEVICES = 400


@pytest.fixture(scope="module")
def many() -> FederatedData:
    """β = 2, whole: nothing is held out."""
    return synthetic(Streams(0), alpha=0.0, beta=2.0, clients=DEVICES, test_fraction=0.0)


@pytest.fixture(scope="module")
def devices(many: FederatedData) -> list[torch.Tensor]:
    return [many.read(client)[0].double() for client in many.clients]


def test_sizes_are_lognormal_above_fifty(many: FederatedData) -> None:
    sizes = np.array(list(many.sizes.values()))
    assert sizes.min() >= 50
    # n - 50 is a floor: below 54 = ⌊exp 4⌋ half of the time, below 403 = ⌊exp 6⌋ at one σ. Hoeffding at 1e-6.
    bound = math.sqrt(math.log(2e6) / (2 * DEVICES))
    assert abs((sizes - 50 < math.exp(4)).mean() - 0.5) < bound
    assert abs((sizes - 50 < math.exp(6)).mean() - 0.8413) < bound


def test_inputs_vary_as_sigma_says(devices: list[torch.Tensor]) -> None:
    freedom = sum(len(x_nD) - 1 for x_nD in devices)
    within_D = sum(((x_nD - x_nD.mean(dim=0)) ** 2).sum(dim=0) for x_nD in devices) / freedom
    expected_D = torch.arange(1, 61, dtype=torch.float64) ** -1.2
    # χ² with that many degrees of freedom: relative σ = sqrt(2/freedom); six of them over 60 features.
    assert float((within_D / expected_D - 1).abs().max()) < 6 * math.sqrt(2 / freedom)


def test_centres_of_devices_vary_as_beta_says(devices: list[torch.Tensor]) -> None:
    centres_KD = torch.stack([x_nD.mean(dim=0) for x_nD in devices])
    # The mean over 60 features is N(0, β² + 1/60 + Σ's share, below 0.01): β is a standard deviation.
    variance = float(centres_KD.mean(dim=1).var())
    assert abs(variance / (2.0**2 + 1 / 60) - 1) < 6 * math.sqrt(2 / (DEVICES - 1)) + 0.01
    about_it = float(centres_KD.var(dim=1).mean())
    # Within a device features scatter about B with variance 1, and the mean of n ≥ 50 adds Σjj/n: 0.0015 at most.
    assert abs(about_it - 1) < 6 * math.sqrt(2 / (DEVICES * 59)) + 0.002


def test_a_device_learns_a_linear_model_of_its_own() -> None:
    data = synthetic(Streams(1), beta=0.0, clients=60, test_fraction=0.0)
    largest, second = sorted(data.clients, key=data.size_of)[:-3:-1]
    x, y = data.read(largest)
    model = LogisticRegression(C=100.0, max_iter=2000).fit(x[:2000], y[:2000])
    assert model.score(x[2000:], y[2000:]) > 0.9  # 0.976: the boundary is linear, 2,000 samples are not all
    assert model.score(*data.read(second)) < 0.5


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
