"""Adaptive clip: it settles at the quantile, its noise is what both releases together may cost."""

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from fed.errors import InvalidExperiment, InvalidPayload
from fed.privacy.accounting import epsilon
from fed.privacy.adaptive_clip import AdaptiveClip, bit_weight_for, check_share
from fed.privacy.central import CentralPrivacy
from fed.privacy.clipping import grid_step, joint_norm
from fed.privacy.distributed import DistributedPrivacy
from fed.privacy.kinds import Privacy
from fed.privacy.local import LocalPrivacy
from fed.privacy.noise import SeededNoise
from fed.privacy.noisy_sum import NoisySum
from fed.privacy.protection import Protection, told_clip
from fed.privacy.releases import Release
from fed.secure_aggregation.fixed_point import ClientNumbers, FixedPoint, SecureSum
from fed.vectors.randomness import Streams
from tests.fed.privacy.test_noise import hold_to_normal

if TYPE_CHECKING:
    from collections.abc import Callable

COHORT = 200
KINDS: dict[str, type[Privacy]] = {
    "central": CentralPrivacy,
    "masked": CentralPrivacy,
    "distributed": DistributedPrivacy,
    "local": LocalPrivacy,
}


def source(seed: int) -> SeededNoise:
    return SeededNoise.of(Streams(seed), {})


def privacy(kind: str, *, noise_multiplier: float = 0.5, first_clip: float = 1.0, quantile: float = 0.5) -> Privacy:
    """Settings of a kind, with the weight of the bit that a cohort needs."""
    made = KINDS[kind](
        clip="adaptive", noise_multiplier=noise_multiplier, first_clip=first_clip, quantile=quantile, bit_weight=1.0
    )
    weight = bit_weight_for(made.multiplier_of_sum(COHORT), COHORT)
    return KINDS[kind](
        clip="adaptive", noise_multiplier=noise_multiplier, first_clip=first_clip, quantile=quantile, bit_weight=weight
    )


def fixed_point(settings: Privacy, numbers: int, bits: int = 32) -> FixedPoint:
    """Lanes of messages of so many numbers, with their bit."""
    noise = settings.lane_noise(COHORT)
    return FixedPoint(bits, (numbers, 1), (8.0, 8.0), most_clients=COHORT, noise=noise)


def masked(settings: Privacy, sent_KM: Tensor, number: int, seed: int = 0) -> Tensor:
    """Mean of messages that are added as lanes."""
    fixed = fixed_point(settings, sent_KM.shape[1] - 1)
    total = SecureSum(32, fixed.lanes)
    count = len(sent_KM)
    beside = ClientNumbers([1.0] * count, [1] * count, [0.0] * count)
    generators = [source(seed).generator("in lanes", client, number) for client in range(count)]
    total.add(fixed.quantise(sent_KM, beside, generators).lanes.sum(0, dtype=torch.int32), count)
    return fixed.read(total).mean_M


def settled(kind: str, first_clip: float, seed: int, quantile: float = 0.5, rounds: int = 200) -> float:
    """Geometric mean of the last 80 clips, where clients' norms are log-normal with a median of 2.

    The clip's logarithm moves by −0.2 times an error whose slope is the density at the median, 0.4, and whose noise is
    1/20. The mean of 80 then has a standard deviation of about 1/20 / 0.4 / √80, that is 1.4 %.
    """
    settings = privacy(kind, first_clip=first_clip, quantile=quantile)
    adaptive = settings.adaptive_clip()
    protection = settings.protection(source(seed))
    noisy = settings.noisy_sum(source(seed), rounds)
    assert adaptive is not None
    assert protection is not None
    norms_K = 2.0 * np.exp(stats.norm.ppf((np.arange(COHORT) + 0.5) / COHORT))
    update_KM = torch.from_numpy(norms_K).unsqueeze(1)
    clips = []
    for number in range(1, rounds + 1):
        sent_KM = protection(update_KM, [number] * COHORT, range(COHORT), clip=adaptive.clip)
        mean_M = masked(settings, sent_KM, number, seed) if kind in ("masked", "distributed") else sent_KM.mean(0)
        if noisy is not None:
            mean_M = noisy(mean_M, COHORT, expected=COHORT, number=number)
        adaptive(mean_M)
        clips.append(adaptive.clip)
    return math.exp(np.log(clips[-80:]).mean())


@pytest.mark.parametrize(
    ("kind", "first_clip", "rounds"),
    [
        ("central", 0.1, 200),
        ("central", 30.0, 200),
        ("masked", 1.5, 120),
        ("distributed", 1.5, 120),
        ("local", 3.0, 120),
    ],
)
def test_the_clip_settles_at_the_median_norm(kind: str, first_clip: float, rounds: int) -> None:
    assert settled(kind, first_clip, seed=1, rounds=rounds) == pytest.approx(2.0, rel=0.05)


def test_the_clip_settles_at_any_quantile() -> None:
    expected = 2.0 * math.exp(0.8416)  # Φ(0.8416) = 0.8
    assert settled("central", 2.0, 3, quantile=0.8) == pytest.approx(expected, rel=0.06)


def test_message_and_bit_cost_together_what_z_says() -> None:
    """By 1/z² = 1/z_Δ² + 1/(2 σ_b)²: as two releases at once, of sensitivities C and ½."""
    weight = bit_weight_for(3.0, 100)
    noisy = NoisySum(clip=1.0, noise_multiplier=3.0, source=source(0), bit_weight=weight)
    zeros_M = torch.zeros(20_001, dtype=torch.float64)
    released_M = noisy(zeros_M, 0, expected=100.0, number=1) * 100.0
    of_sum = (3.0**-2 - (2 * 5.0) ** -2) ** -0.5
    hold_to_normal(released_M[:-1], of_sum)
    both = {Release(noise_multiplier=of_sum): 1, Release(noise_multiplier=5.0 / 0.5): 1}
    claimed = CentralPrivacy(clip="adaptive", noise_multiplier=3.0, bit_weight=weight).release(1.0)
    assert claimed == Release(noise_multiplier=3.0)
    assert epsilon(both, 1e-5) == pytest.approx(epsilon({claimed: 1}, 1e-5), rel=1e-9)


def test_the_share_has_noise_of_a_twentieth_of_the_cohort() -> None:
    noisy = NoisySum(clip=1.0, noise_multiplier=0.5, source=source(0), bit_weight=bit_weight_for(0.5, 40))
    logs = []
    for number in range(4000):
        adaptive = AdaptiveClip(1.0, 0.5)
        adaptive(noisy(torch.tensor([0.0, 0.25], dtype=torch.float64), 4, expected=40.0, number=number))
        logs.append(-math.log(adaptive.clip) / 0.2)
    # Σ (b − ½) is 1, over m = 40.
    hold_to_normal(torch.tensor(logs, dtype=torch.float64) - 1 / 40, 1 / 20)


def test_the_noise_of_the_share_lies_on_a_grid() -> None:
    """Of floats of any size the low bits would tell how many messages were clipped."""
    noisy = NoisySum(clip=1.0, noise_multiplier=0.5, source=source(0), bit_weight=0.5)
    steps = float(noisy(torch.tensor([0.0, 0.25], dtype=torch.float64), 4, expected=64.0, number=1)[-1]) * 64 * 2**28
    assert abs(steps) > 2**20
    assert steps == round(steps)


def test_noise_of_all_clients_adds_up_to_a_twentieth() -> None:
    """Each client's message has noise z S, its bit z S / β, of which the mean of a cohort has a twentieth."""
    settings = privacy("local")
    protection = settings.protection(source(0))
    assert protection is not None
    weight = settings.known_bit_weight
    update_KM = torch.full((20_000, 1), 1e-9, dtype=torch.float64)
    sent_KM = protection(update_KM, [1] * 20_000, range(20_000), clip=1.0)
    hold_to_normal(sent_KM[:, 0], 0.5 * joint_norm(weight))
    hold_to_normal(sent_KM[:, 1] - 0.5, math.sqrt(COHORT) / 20)
    assert settings.release(1.0) == Release(noise_multiplier=0.25)  # of two messages 2 S apart


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_is_that_of_messages_within_the_clip(kind: str) -> None:
    settings = privacy(kind, noise_multiplier=1e-7)
    protection = settings.protection(source(0))
    assert protection is not None
    update_KM = torch.tensor([[3.0, 4.0], [0.0, 0.7], [-0.3, 0.0], [0.1, -0.1]], dtype=torch.float64)
    sent_KM = protection(update_KM, [1] * 4, range(4), clip=2.0)
    mean_M = masked(settings, sent_KM, 1) if kind in ("masked", "distributed") else sent_KM.mean(0)
    adaptive = AdaptiveClip(2.0, 0.5)
    within_KM = torch.tensor([[1.2, 1.6], [0.0, 0.7], [-0.3, 0.0], [0.1, -0.1]], dtype=torch.float64)
    torch.testing.assert_close(adaptive(mean_M), within_KM.mean(0), rtol=0, atol=2 * 2.0**-15)
    # Three of four are short: more than half, so that the clip falls.
    assert adaptive.clip == pytest.approx(2.0 * math.exp(-0.2 * 0.25), rel=1e-3)


NUMBERS = st.floats(width=64, allow_nan=True, allow_infinity=True)


@given(
    st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), min_size=1, max_size=5),
    st.lists(NUMBERS, min_size=3, max_size=3),
    st.sampled_from([1e-100, 1e-3, 0.7, 1.0, 300.0, 1e100]),
    st.sampled_from([0.01, 0.3, 2.0]),
)
def test_no_client_moves_sum_and_share_beyond_their_bound(
    others: list[list[float]], numbers: list[float], clip: float, weight: float
) -> None:
    """In units of the grid, and in fractions, which hide no rounding."""
    without_KM = torch.tensor(others, dtype=torch.float64)
    with_KM = torch.cat([without_KM, torch.tensor([numbers], dtype=torch.float64)])
    protection = Protection(clip=1.0, bit_weight=weight)

    def sent(update_KM: Tensor) -> Tensor:
        count = len(update_KM)
        return protection(update_KM, [1] * count, range(count), clip=clip).float().double().mean(0)

    ways: list[Callable[[Tensor], Tensor]] = [sent]
    if torch.isfinite(with_KM).all():  # as all that reaches the shortcut
        ways.append(lambda update_KM: protection.mean(update_KM, clip))
    for mean in ways:
        sums = [(mean(update_KM) * (len(update_KM) / grid_step(1.0))).round() for update_KM in (with_KM, without_KM)]
        *moved, bit = (int(unit) for unit in (sums[0] - sums[1]).tolist())
        assert abs(bit) * grid_step(1.0) == 0.5
        squares = sum(unit**2 for unit in moved) + Fraction(weight) ** 2 * bit**2
        assert squares <= (1 + Fraction(weight) ** 2 / 4) / Fraction(grid_step(1.0)) ** 2


@given(
    st.lists(st.floats(-1e300, 1e300), min_size=2, max_size=6),
    st.sampled_from([0.01, 0.3, 2.0]),
    st.sampled_from([16, 32, 64]),
)
def test_no_client_adds_more_units_than_skellam_noise_covers(numbers: list[float], weight: float, bits: int) -> None:
    """Whatever its message and bit are."""
    settings = DistributedPrivacy(clip="adaptive", noise_multiplier=1e-9, bit_weight=weight)
    fixed = fixed_point(settings, len(numbers) - 1, bits)
    assert fixed.noise is not None
    units = fixed.noise.units(np.array(numbers), fixed.l2_units, np.random.default_rng(0))
    assert abs(units[-1]) == (fixed.noise.bit_units(fixed.l2_units) if numbers[-1] else 0)
    assert sum(int(unit) ** 2 for unit in units) <= fixed.l2_units**2
    assert sum(abs(int(unit)) for unit in units) <= fixed.l1_units
    release = settings.release(1.0, fixed)
    assert (release.skellam_l2, release.skellam_l1) == (fixed.l2_units, fixed.l1_units)


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("place", ["message", "bound", "fold", "wrap", "odd"])
def test_forged_lanes_give_nobody_a_larger_share(bits: int, place: str) -> None:
    """One client brings masked sums of messages and bits close to where they fold or wrap, before the noise."""
    weight = 0.5
    settings = CentralPrivacy(clip="adaptive", noise_multiplier=1.0, bit_weight=weight)
    fixed = fixed_point(settings, 1000, bits)
    most = 2 * int(fixed.l2_units)
    near = {"message": 0, "bound": most, "fold": 2 * most, "wrap": (1 << (bits - 1)) - 1, "odd": most // 3 + 1}[place]
    message_1M = Protection(clip=1.0, bit_weight=weight)(torch.ones(1, 1000).double(), [1], [0], clip=1.0)
    beside = ClientNumbers([1.0], [1], [0.0])
    generator = np.random.default_rng(0)
    units = []
    for own in (fixed.quantise(message_1M, beside, [generator]).lanes[0], fixed.nothing(generator)):
        total = SecureSum(bits, fixed.lanes)
        total.add(own)
        forged = fixed.nothing(generator)
        forged[:1001] = near
        total.add(forged)
        units.append((fixed.read(total).mean_M * (2 / grid_step(1.0))).round() * grid_step(1.0))
    moved_M = units[0] - units[1]
    assert abs(float(moved_M[-1])) <= 0.5 * (1 + 1e-7)
    assert math.hypot(float(moved_M[:-1].norm()), weight * float(moved_M[-1])) <= joint_norm(weight)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("cohort", [30, COHORT])
def test_bit_and_clip_have_their_weights_in_units(bits: int, cohort: int) -> None:
    weight = bit_weight_for(0.5, cohort)
    fixed = fixed_point(DistributedPrivacy(clip="adaptive", noise_multiplier=0.5, bit_weight=weight), 3, bits)
    assert fixed.noise is not None
    clip = fixed.noise.clip_units(fixed.l2_units)
    bit = fixed.noise.bit_units(fixed.l2_units)
    assert math.hypot(clip, bit) == pytest.approx(fixed.l2_units, rel=1e-12)
    assert 2 * bit / clip == pytest.approx(weight, rel=0.01)


def test_noise_in_lanes_of_bits_is_a_twentieth() -> None:
    """Of 20,000 sums of all clients' noise, as one client would add it that is honest alone."""
    settings = privacy("distributed")
    noise = settings.lane_noise(1)
    assert noise is not None
    fixed = FixedPoint(64, (20_000, 1), (8.0, 8.0), most_clients=1, noise=noise)
    generator = np.random.default_rng(2)
    deviation = 0.5 * fixed.l2_units
    draws = np.array([noise.units(np.zeros(2), fixed.l2_units, generator)[1] for _ in range(20_000)])
    hold_to_normal(torch.from_numpy(draws).double(), deviation)
    share = deviation * 0.5 / noise.bit_units(fixed.l2_units) / COHORT
    assert share == pytest.approx(1 / 20, rel=1e-3)


def test_a_client_without_a_message_says_neither_bit() -> None:
    fixed = fixed_point(privacy("distributed", noise_multiplier=1e-9), 3)
    total = SecureSum(32, fixed.lanes)
    total.add(fixed.nothing(np.random.default_rng(0)))
    found = fixed.read(total)
    assert found.mean_M.tolist() == [0, 0, 0, 0]
    assert found.weight == 1


def test_bits_tell_whether_a_message_was_clipped() -> None:
    protection = Protection(clip=1.0, bit_weight=1.0)
    update_KM = torch.tensor([[1.0], [2.0], [2.2], [math.nan]]).double()
    sent_KM = protection(update_KM, [1] * 4, range(4), clip=2.0)
    assert sent_KM[:, 1].tolist() == [0.5, 0.5, -0.5, -0.5]
    assert sent_KM[:, 0].tolist() == pytest.approx([0.5, 1.0, 1.0, 0.0], rel=1e-6)


@pytest.mark.parametrize("clip", [None, 0.0, -1.0, math.inf, math.nan, 1e-101, 1e101])
def test_a_task_without_a_clip_is_refused(clip: float | None) -> None:
    with pytest.raises(InvalidPayload, match="must say the round's clip"):
        told_clip(clip)


@pytest.mark.parametrize("share", [-1e300, 1e300])
def test_one_that_lies_moves_the_clip_by_little(share: float) -> None:
    adaptive = AdaptiveClip(1.0, 0.5)
    adaptive(torch.tensor([0.0, share], dtype=torch.float64))
    assert abs(math.log(adaptive.clip)) <= 0.2 * 1.5 * (1 + 1e-9)


@pytest.mark.parametrize(("noise_multiplier", "expected"), [(1.0, 100), (1.0, 15), (7.0, 200)])
def test_the_weight_gives_the_share_its_noise(noise_multiplier: float, expected: int) -> None:
    weight = bit_weight_for(noise_multiplier, expected)
    assert weight < 2
    assert noise_multiplier * joint_norm(weight) / weight == pytest.approx(expected / 20)


def test_a_share_that_is_lost_in_noise_is_refused() -> None:
    assert bit_weight_for(1.0, 4) == 2.0
    check_share(1.0, 2.0, 4)
    with pytest.raises(InvalidExperiment, match=r"at most 0\.2, got 0\.236 with 3 clients a round"):
        check_share(1.0, 2.0, 3)
