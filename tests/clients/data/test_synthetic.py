"""Synthetic(α, β) against the moments that its definition states."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fed.clients.data import FederatedData, Samples
from fed.clients.data.synthetic import synthetic
from fed.randomness import Streams

DEVICES = 400


def devices(samples: Samples) -> list[torch.Tensor]:
    sizes = np.bincount(samples.columns["client"].astype(int)).tolist()
    return list(torch.split(samples.inputs.double(), sizes))


@pytest.fixture(scope="module")
def many() -> Samples:
    """β = 2, whole: nothing is held out."""
    return synthetic(Streams(0), alpha=0.0, beta=2.0, clients=DEVICES, test_fraction=0.0)


def test_sizes_are_lognormal_above_fifty(many: Samples) -> None:
    sizes = np.bincount(many.columns["client"].astype(int))
    assert sizes.min() >= 50
    # n - 50 is a floor: below 54 = ⌊exp 4⌋ half of the time, below 403 = ⌊exp 6⌋ at one σ. Hoeffding at 1e-6.
    bound = math.sqrt(math.log(2e6) / (2 * DEVICES))
    assert abs((sizes - 50 < math.exp(4)).mean() - 0.5) < bound
    assert abs((sizes - 50 < math.exp(6)).mean() - 0.8413) < bound


def test_inputs_vary_as_sigma_says(many: Samples) -> None:
    parts = devices(many)
    freedom = sum(len(x_nD) - 1 for x_nD in parts)
    within_D = sum(((x_nD - x_nD.mean(dim=0)) ** 2).sum(dim=0) for x_nD in parts) / freedom
    expected_D = torch.arange(1, 61, dtype=torch.float64) ** -1.2
    # χ² with that many degrees of freedom: relative σ = sqrt(2/freedom); six of them over 60 features.
    assert float((within_D / expected_D - 1).abs().max()) < 6 * math.sqrt(2 / freedom)


def test_centres_of_devices_vary_as_beta_says(many: Samples) -> None:
    centres_KD = torch.stack([x_nD.mean(dim=0) for x_nD in devices(many)])
    # The mean over 60 features is N(0, β² + 1/60 + Σ's share, below 0.01): β is a standard deviation.
    variance = float(centres_KD.mean(dim=1).var())
    assert abs(variance / (2.0**2 + 1 / 60) - 1) < 6 * math.sqrt(2 / (DEVICES - 1)) + 0.01
    about_it = float(centres_KD.var(dim=1).mean())
    # Within a device features scatter about B with variance 1, and the mean of n ≥ 50 adds Σjj/n: 0.0015 at most.
    assert abs(about_it - 1) < 6 * math.sqrt(2 / (DEVICES * 59)) + 0.002


def test_a_device_learns_a_linear_model_of_its_own() -> None:
    samples = synthetic(Streams(1), beta=0.0, clients=60, test_fraction=0.0)
    holders = samples.columns["client"].astype(int)
    largest, second = np.argsort(-np.bincount(holders))[:2]
    x, y = samples.inputs.numpy(), samples.targets.numpy()
    own, other = (np.flatnonzero(holders == device) for device in (largest, second))
    fit, unseen = own[:2000], own[2000:]
    model = LogisticRegression(C=100.0, max_iter=2000).fit(x[fit], y[fit])
    assert model.score(x[unseen], y[unseen]) > 0.9  # 0.976: the boundary is linear, 2,000 samples are not all
    assert model.score(x[other], y[other]) < 0.5


def test_alpha_moves_all_logits_alike() -> None:
    near, far = (synthetic(Streams(0), alpha=alpha, clients=5) for alpha in (0.0, 1.0))
    assert torch.equal(near.inputs, far.inputs)
    assert torch.equal(near.targets, far.targets)


def test_a_device_does_not_depend_on_how_many_there_are(loaded: Callable[..., FederatedData]) -> None:
    few, more = loaded(kind="synthetic", clients=2), loaded(kind="synthetic", clients=4)
    assert all(torch.equal(few.train[client][0], more.train[client][0]) for client in few.train)
    assert not torch.equal(few.train[0][0], loaded(kind="synthetic", clients=2, seed=1).train[0][0])


def test_every_device_holds_out_a_tenth(loaded: Callable[..., FederatedData]) -> None:
    data = loaded(kind="synthetic")
    whole = np.bincount(synthetic(Streams(0), test_fraction=0.0).columns["client"].astype(int))
    assert list(data.train) == list(range(30))
    assert data.sizes == {client: n - int(n * 0.1 + 0.5) for client, n in enumerate(whole.tolist())}
    assert data.test is not None
    assert len(data.test[1]) == whole.sum() - sum(data.sizes.values())
    assert data.number_of_classes() == 10
