"""Adaptive clip: it settles at the quantile, its noise is what both releases together may cost."""

import math

import numpy as np
import pytest
import torch

from fed.privacy.accounting import epsilon
from fed.privacy.adaptive_clip import AdaptiveClip
from fed.privacy.noise import SeededNoise
from fed.privacy.protection import Protection
from fed.privacy.releases import Release
from fed.vectors.randomness import Streams
from tests.fed.privacy.test_noise import hold_to_normal

COHORT = 200


def source(seed: int) -> SeededNoise:
    return SeededNoise.of(Streams(seed), {})


def settled(quantile: float, first: float, seed: int, rounds: int = 150) -> float:
    """Geometric mean of the last clips, where clients' norms are log-normal with a median of 2."""
    adaptive = AdaptiveClip(first, quantile, 0.5, source(seed))
    generator = np.random.default_rng(seed)
    protection = Protection(clip=None)
    clips = []
    for number in range(1, rounds + 1):
        norms_K = 2.0 * np.exp(generator.standard_normal(COHORT))
        update_KM = torch.from_numpy(norms_K).unsqueeze(1)
        sent_KM = protection(update_KM, [number] * COHORT, range(COHORT), clip=adaptive.clip)
        adaptive(sent_KM.mean(0), COHORT, expected=COHORT, number=number)
        clips.append(adaptive.clip)
    return math.exp(np.log(clips[-60:]).mean())


@pytest.mark.parametrize("first", [0.1, 30.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_clip_settles_at_the_median_norm(first: float, seed: int) -> None:
    assert settled(0.5, first, seed) == pytest.approx(2.0, rel=0.05)


def test_the_clip_settles_at_any_quantile() -> None:
    assert settled(0.8, 2.0, 3) == pytest.approx(2.0 * math.exp(0.8416), rel=0.06)  # Φ(0.8416) = 0.8


def test_the_sum_has_the_noise_that_the_bits_leave() -> None:
    """By 1/z² = 1/z_Δ² + 1/(2 σ_b)²: as two releases at once, of sensitivities C and ½."""
    adaptive = AdaptiveClip(0.5, 0.5, 3.0, source(0))
    zeros_M = torch.zeros(20_001, dtype=torch.float64)
    released_M = adaptive(zeros_M, 0, expected=100.0, number=1) * 100.0 / 0.5
    of_sum = (3.0**-2 - (2 * 5.0) ** -2) ** -0.5
    hold_to_normal(released_M, of_sum)
    both = {Release(noise_multiplier=of_sum): 1, Release(noise_multiplier=5.0 / 0.5): 1}
    assert epsilon(both, 1e-5) == pytest.approx(epsilon({Release(noise_multiplier=3.0): 1}, 1e-5), rel=1e-9)


def test_the_share_has_noise_of_a_twentieth_of_the_cohort() -> None:
    logs = []
    for number in range(4000):
        adaptive = AdaptiveClip(1.0, 0.5, 0.5, source(0))
        adaptive(torch.tensor([0.0, 0.25], dtype=torch.float64), 4, expected=40.0, number=number)
        logs.append(-math.log(adaptive.clip) / 0.2)
    # Σ (b − ½) is 1, over m = 40.
    hold_to_normal(torch.tensor(logs, dtype=torch.float64) - 1 / 40, 1 / 20)


def test_the_noise_of_the_share_lies_on_a_grid() -> None:
    """Of floats of any size the low bits would tell how many messages were clipped."""
    adaptive = AdaptiveClip(1.0, 0.5, 0.5, source(0))
    adaptive(torch.tensor([0.0, 0.25], dtype=torch.float64), 4, expected=40.0, number=1)
    steps = (-math.log(adaptive.clip) / 0.2 * 40.0 - 1.0) * 2**24
    assert abs(steps) > 2**20
    assert steps == pytest.approx(round(steps), abs=1e-3)


def test_bits_tell_whether_a_message_was_clipped() -> None:
    sent = Protection(clip=None)(torch.tensor([[0.5], [1.0], [1.1], [math.nan]]).double(), [1] * 4, range(4), clip=1.0)
    assert sent[:, 1].tolist() == [0.5, 0.5, -0.5, -0.5]
