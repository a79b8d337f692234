"""Tests of the draws of DP-SGD."""

import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from fed.privacy import normals as normals_module
from fed.privacy.clipping import grid_step
from fed.privacy.dp_sgd import Inclusion, SamplePrivacy, noised_means, sampling_rate, task_releases
from fed.privacy.normals import Normals
from fed.privacy.releases import Release
from fed.vectors.tensors import torch


def test_each_sample_is_in_a_batch_with_the_rate() -> None:
    """Frequencies of 40 samples over 5,000 steps are within 6 deviations: probability 40 · 2e-9 of a false alarm.

    Batches vary as those of independent draws: their variance n q (1 − q) is within 6 √(2 / 5000) of it.
    """
    rate = 0.15
    inclusion = Inclusion(np.random.default_rng(5), samples=40, rate=rate, steps=5000)
    batches = [inclusion.next() for _ in range(5000)]
    counts = np.bincount(np.concatenate(batches), minlength=40)
    assert np.abs(counts - 5000 * rate).max() < 6 * math.sqrt(5000 * rate * (1 - rate))
    sizes = np.array([len(batch) for batch in batches])
    assert abs(sizes.var() / (40 * rate * (1 - rate)) - 1) < 6 * math.sqrt(2 / 5000)


@pytest.mark.parametrize("steps", [1, 3, 100_000])
def test_draws_are_the_same_however_many_at_once(steps: int) -> None:
    inclusion = Inclusion(np.random.default_rng(5), samples=40, rate=0.5, steps=steps)
    singly = Inclusion(np.random.default_rng(5), samples=40, rate=0.5, steps=1)
    normals = Normals([np.random.default_rng(1)], numbers=7, steps=steps)
    alone = Normals([np.random.default_rng(0), np.random.default_rng(1)], numbers=7, steps=1)
    for _ in range(3):
        assert np.array_equal(inclusion.next(), singly.next())
        assert torch.equal(normals.next(1)[0], alone.next(2)[1])


@pytest.mark.parametrize("is_numpy_faster", [True, False])
def test_normals_are_those_of_box_and_muller(monkeypatch: pytest.MonkeyPatch, *, is_numpy_faster: bool) -> None:
    """Cosine and sine of the angle itself; the tangent of its half may be large, which costs no more than rounding."""
    monkeypatch.setattr(normals_module, "_IS_NUMPY_FASTER", is_numpy_faster)
    key = np.random.default_rng(2).bytes(32)
    keystream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(2 * 5000 * 8))
    fractions = (np.frombuffer(keystream, dtype="<u8").reshape(2, 5000) & np.uint64(2**52 - 1)) / 2.0**52
    length = np.sqrt(-2 * np.log1p(-fractions[0]))
    angle = 2 * math.pi * (fractions[1] - 0.5)
    expected = np.concatenate([length * np.cos(angle), length * np.sin(angle)])
    drawn = Normals([np.random.default_rng(2)], numbers=10_000, steps=1).next(1)[0]
    np.testing.assert_allclose(drawn.numpy(), expected, rtol=0, atol=1e-14)


def test_normals_are_independent_of_each_other() -> None:
    """Correlations of 2,000 draws of each pair of numbers are below 6 / √2000; so are those of their squares."""
    normals = Normals([np.random.default_rng(3), np.random.default_rng(4)], numbers=5, steps=2000)
    drawn = torch.stack([normals.next(2).flatten() for _ in range(2000)], 1)
    for numbers in (drawn, drawn.square()):
        apart = torch.corrcoef(numbers) - torch.eye(10, dtype=torch.float64)
        assert float(apart.abs().max()) < 6 / math.sqrt(2000)


def test_noised_means_lie_on_the_grid() -> None:
    sums = torch.rand(2, 1000, dtype=torch.float64)
    normals = Normals([np.random.default_rng(0), np.random.default_rng(1)], numbers=1000, steps=1).next(2)
    expected = torch.tensor([[4.0], [4.0]], dtype=torch.float64)
    noise = torch.tensor([[2.0], [3.0]], dtype=torch.float64)
    exact = (sums + noise * 0.9 * normals) / 4
    means = noised_means(sums, normals, expected, clip=0.9, noise_K1=noise)
    units = means * 4 / grid_step(0.9)
    assert torch.equal(units, units.round())
    assert torch.allclose(means, exact, rtol=0, atol=grid_step(0.9) / 4)


def test_task_costs_one_release_a_step() -> None:
    privacy = SamplePrivacy(clip=1.0, noise_multiplier=0.8)
    assert task_releases(64, 16, 5, privacy) == {Release(noise_multiplier=0.8, sampling=0.25): 5}
    assert task_releases(8, 16, 5, privacy) == {Release(noise_multiplier=0.8): 5}
    assert task_releases(8, 16, 0, privacy) == {}
    assert sampling_rate(16, 16) == 1.0


@pytest.mark.parametrize("keys", [(0.0, 1.0), (math.inf, 1.0), (1.0, -1.0), (1.0, math.nan)])
def test_clip_and_noise_are_numbers(keys: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="clip must be above 0"):
        SamplePrivacy(clip=keys[0], noise_multiplier=keys[1])
