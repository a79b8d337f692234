"""Noise: its distribution, and that no draw is repeated where nobody may know it."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fed.privacy.clipping import grid_step
from fed.privacy.noise import NoiseSource, SeededNoise, SystemNoise, gaussian_units
from fed.privacy.noisy_sum import NoisySum
from fed.privacy.protection import Protection
from fed.vectors.randomness import Streams

SOURCES = [SystemNoise(), SeededNoise.of(Streams(1), {"seed": 1})]
NUMBERS = 20_000


def hold_to_normal(noise_M: Tensor, deviation: float) -> None:
    """Fail for noise that is not N(0, σ²), with a chance of a false alarm of 1e-6.

    The largest distance of n draws' distribution from the true one exceeds t with a probability of at most
    2 exp(−2nt²) (Massart 1990), and a deviation that is wrong by 1 % shows in the second moment of 20,000 draws.
    """
    count = len(noise_M)
    distance = stats.kstest(noise_M.numpy() / deviation, "norm").statistic
    assert distance < math.sqrt(math.log(2 / 1e-6) / (2 * count))
    # The sum of squares is χ² of n degrees.
    share = stats.chi2.cdf(float((noise_M / deviation).square().sum()), count)
    assert 1e-6 < share < 1 - 1e-6


@pytest.mark.parametrize("source", SOURCES)
def test_noise_is_normal_and_whole(source: NoiseSource) -> None:
    noise_M = gaussian_units(source.generator("trial"), NUMBERS, 3.0 * 2**20)
    assert torch.equal(noise_M, noise_M.round())
    hold_to_normal(noise_M, 3.0 * 2**20)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("clip", [0.3, 2.0])
def test_a_sum_gets_noise_of_the_clip_times_the_multiplier(source: NoiseSource, clip: float) -> None:
    noisy = NoisySum(clip=clip, noise_multiplier=1.7, source=source)
    units_M = torch.arange(NUMBERS, dtype=torch.float64)
    total_M = units_M * grid_step(clip)
    released_M = noisy(total_M / 7, clients=7, expected=10.0, number=1) * 10
    hold_to_normal(released_M - total_M, 1.7 * clip)
    on_grid = released_M / grid_step(clip)
    assert torch.allclose(on_grid, on_grid.round(), atol=1e-6, rtol=0)


def test_nobody_replied_and_noise_is_released() -> None:
    noisy = NoisySum(clip=1.0, noise_multiplier=1.0, source=SystemNoise())
    hold_to_normal(5 * noisy(torch.zeros(NUMBERS, dtype=torch.float64), clients=0, expected=5.0, number=1), 1.0)


@pytest.mark.parametrize("source", SOURCES)
def test_a_client_adds_noise_of_its_own(source: NoiseSource) -> None:
    protection = Protection(clip=0.5, noise_multiplier=2.0, source=source)
    zeros_KM = torch.zeros(2, NUMBERS, dtype=torch.float64)
    first_M, second_M = protection(zeros_KM, [1, 1], ["a", "b"])
    hold_to_normal(first_M, 1.0)
    hold_to_normal(second_M, 1.0)
    hold_to_normal((first_M - second_M) / math.sqrt(2), 1.0)


@pytest.mark.parametrize("clients", [0, 1, 10, 30])
def test_a_message_counts_once_however_many_answer(clients: int) -> None:
    """Divided by the number that was expected, it counts as much in a sum of few; and sums are whole steps."""
    noisy = NoisySum(clip=1.0, noise_multiplier=1e-9, source=SystemNoise())
    mean_M = torch.full((3,), 1 / 7 if clients else 0.0, dtype=torch.float64)
    released_M = noisy(mean_M, clients, expected=10.0, number=1)
    torch.testing.assert_close(released_M, mean_M * clients / 10, rtol=0, atol=1e-7)
    steps_M = released_M * 10 / grid_step(1.0)
    torch.testing.assert_close(steps_M, steps_M.round(), rtol=0, atol=1e-4)


def test_the_system_repeats_nothing() -> None:
    draws = [SystemNoise().generator("of the sum", 1).standard_normal() for _ in range(20)]
    assert len(set(draws)) == 20


def drawn(experiment: dict[str, object]) -> float:
    return float(SeededNoise.of(Streams(0), experiment).generator("of the sum", 1).standard_normal())


@pytest.mark.parametrize("source", SOURCES)
def test_no_two_releases_share_noise(source: NoiseSource) -> None:
    """Of rounds, clients and attempts: from two sums with one noise it could be taken off."""
    noisy = NoisySum(clip=1.0, noise_multiplier=1.0, source=source)
    protection = Protection(clip=1.0, noise_multiplier=1.0, source=source)
    rows = protection(torch.zeros(4, 3, dtype=torch.float64), [1, 1, 2, 1], ["a", "b", "a", "a"], repeats=[0, 0, 0, 1])
    draws = [*rows, *(noisy.noise_units(3, number, attempt) for number, attempt in [(1, 0), (1, 1), (1, 2), (2, 0)])]
    assert len({tuple(draw_M.tolist()) for draw_M in draws}) == len(draws)


def test_another_experiment_has_other_noise() -> None:
    first = drawn({"seed": 0, "local": {"lr": 0.1}, "name": "a"})
    assert drawn({"seed": 0, "local": {"lr": 0.1}, "name": "b"}) == first
    assert drawn({"seed": 0, "local": {"lr": 0.2}, "name": "a"}) != first


@pytest.mark.parametrize(("keys", "is_same"), [({}, True), ({"unit": "client"}, True), ({"unit": "sample"}, False)])
def test_a_budget_that_ends_a_run_changes_no_noise(keys: dict[str, object], is_same: bool) -> None:
    tight, wide = (drawn({"seed": 0, "privacy": {**keys, "budget_epsilon": budget}}) for budget in (1.0, 2.0))
    assert (tight == wide) == is_same
    assert drawn({"seed": 0, "privacy": {**keys, "delta": 1e-6}}) != drawn({"seed": 0, "privacy": keys})


def test_rounds_have_noise_of_their_own() -> None:
    source = SeededNoise.of(Streams(0), {})
    first, second = (source.generator("of the sum", number).standard_normal(1000) for number in (1, 2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.2
