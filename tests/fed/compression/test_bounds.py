"""Bounds that codecs state: they hold for random and for hard vectors, and the worst ones attain them."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fed.compression.chain import CodecChain
from fed.compression.codec import Codec, Draw, Values
from fed.compression.eden import Eden
from fed.compression.powersgd import PowerSGD
from fed.compression.quantisers import FP4, QSGD, Int8, Natural, Sign, TernGrad, TwoLevel
from fed.compression.rotation import block_sizes
from fed.compression.sketch import Sketch
from fed.compression.sparsifiers import STC, RandomK, Threshold, TopK
from fed.config.registry import CODECS
from fed.vectors.randomness import Streams
from tests.fed.compression.test_codecs import CHAINS, LAYERS, NUMBERS, chain, draw, error, gaussian, round_trip

KEPT = round(0.1 * NUMBERS)
A_64TH = round(NUMBERS / 64)


def test_every_codec_states_its_bound() -> None:
    for kind in CODECS.builtin:
        made = CODECS.make(kind).make()
        assert made.bound
        if isinstance(made, Codec):
            assert made.bound.startswith("δ") == made.is_contraction
            assert made.bound.startswith("ω") == made.is_unbiased


# The squared error of contractions, as a share of the squared norm: at most so much.
MOST: dict[str, float] = {
    # Half a unit in the last of 11 or 8 places, relative to the value.
    "float16": 2.0**-22,
    "bfloat16": 2.0**-16,
    # Half a step, m/254, for all values of a block but the largest, m.
    "int8": 127 / 254**2,
    # The largest value is above 3 and others of a quarter go to 0; no other y has a larger e² − t y² with this share t.
    "fp4": 31 / 175,
    # ‖x‖₁ ≥ ‖x‖.
    "sign": 1 - 1 / NUMBERS,
    # What both means keep is least for a single value, of which the mean of the larger half keeps one part in as many.
    "two_level": 1 - 1 / -(-NUMBERS // 2),
    "topk": 1 - KEPT / NUMBERS,
    # With the sum of the k largest given, the norm is largest for one value among equal ones. The share k μ² rises with
    # these and then falls, so that it is least where they are 0 or as large as the one.
    "stc": 1 - min(1 / KEPT, KEPT / NUMBERS),
    # A projection.
    "powersgd": 1.0,
    # What topk leaves out and what it sends lie apart, so squared errors add, and δ is the product.
    "topk two_level": 1 - A_64TH / NUMBERS / -(-A_64TH // 2),
    "topk int8 zstd": 1 - KEPT / NUMBERS * (1 - KEPT / 254**2),
    "zstd": 0.0,
    # A dozen roundings of float64.
    "rotation": (12 * 2.0**-53) ** 2,
    "rotation int8": (sum(block_sizes(NUMBERS)) - 1) / 254**2,
}


def vectors() -> Tensor:
    """Dense, heavy-tailed, sparse and regular vectors of many scales, within the range of float16, [K, M]."""
    generator = np.random.default_rng(8)
    dense = generator.standard_normal((40, NUMBERS))
    heavy = np.exp(3 * generator.standard_normal((40, NUMBERS))) * np.sign(dense)
    sparse = dense * (generator.random(dense.shape) < generator.random((40, 1)) ** 4)
    levels = np.round(2 * dense)
    regular = np.stack([np.ones(NUMBERS), np.arange(NUMBERS), np.eye(NUMBERS)[5], 0.99 ** np.arange(NUMBERS)])
    rows_KM = np.concatenate([dense, heavy, sparse, levels, regular, regular[:, ::-1] * -1])
    rows_KM = rows_KM[np.abs(rows_KM).max(1) > 0]
    rows_KM /= np.abs(rows_KM).max(1, keepdims=True)
    rows_KM *= np.exp2(generator.integers(-3, 15, (len(rows_KM), 1)))
    rows_KM[np.abs(rows_KM) < 2.0**-14] = 0
    return torch.from_numpy(rows_KM)


def test_each_chain_that_claims_to_be_a_contraction_is_tested() -> None:
    assert {name for name in CHAINS if chain(name).is_contraction} == MOST.keys()


@pytest.mark.parametrize("name", MOST)
def test_contractions_err_by_at_most_their_share(name: str) -> None:
    rows_KM = vectors()
    found_KM = round_trip(chain(name, torch.float64), rows_KM)
    assert float(error(found_KM, rows_KM).max()) <= MOST[name] * (1 + 1e-12)


def place(value: float) -> Tensor:
    """One value among zeros."""
    return torch.nn.functional.pad(torch.tensor([value]), (3, NUMBERS - 4))


@pytest.mark.parametrize(
    ("codec", "row_M", "share"),
    [
        (Int8(block=NUMBERS), torch.tensor([127.0, *[0.499] * (NUMBERS - 1)]), (NUMBERS - 1) / 254**2),
        (FP4(), torch.tensor([3.001, *[0.2499] * 31]), 31 / 175),
        (Sign(), place(2.0), 1 - 1 / NUMBERS),
        (TopK(fraction=0.1), torch.ones(NUMBERS), 1 - KEPT / NUMBERS),
        (STC(fraction=0.1), place(-2.0), 1 - 1 / KEPT),
        (STC(fraction=1 / 64), torch.ones(NUMBERS), 1 - A_64TH / NUMBERS),
        (RandomK(fraction=0.1), torch.ones(NUMBERS), NUMBERS / KEPT - 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_worst_vector_attains_the_bound(codec: Codec, row_M: Tensor, share: float) -> None:
    """Within 2 %, where halves are rounded down and thresholds are exceeded by no more than need be."""
    of, rows_KM = CodecChain((codec,), Values(len(row_M), torch.float64)), row_M[None].double()
    found = float(error(round_trip(of, rows_KM), rows_KM))
    assert 0.98 * share <= found <= share * (1 + 1e-12)


@pytest.mark.parametrize(
    ("codec", "row_M", "share"),
    [
        # A value of the share f of a step errs by f (1 − f) squared steps, in the mean.
        (QSGD(bits=2, bucket=64), torch.ones(64), 64**0.5 - 1),
        (QSGD(bits=4), torch.ones(512), 512**0.5 / 7 - 1),
        (QSGD(bits=3, bucket=100, norm="max"), torch.tensor([3, *[0.4] * 99]), 99 * 0.24 / (9 + 99 * 0.16)),
        # ‖x‖² − x_i² for each of d values.
        (QSGD(bits=1, bucket=64), torch.arange(64), 63),
    ],
    ids=["2 bits", "4 bits", "max", "1 bit"],
)
def test_random_rounding_has_its_variance(codec: Codec, row_M: Tensor, share: float) -> None:
    """Six standard deviations of the mean over draws are allowed."""
    draws, of = 500, CodecChain((codec,), Values(len(row_M), torch.float64))
    rows_KM = row_M.double().expand(draws, -1)
    found = error(round_trip(of, rows_KM), rows_KM)
    assert float(found.mean()) == pytest.approx(share, abs=6 * float(found.std()) / draws**0.5)


def test_four_thirds_attain_an_eighth_under_natural() -> None:
    """The squared error of 4/3 is 1/16 or 1/4 of its square, with probabilities 2/3 and 1/3: a standard deviation below
    0.09. Six of those of a mean over d values are allowed."""
    numbers = 100_000
    row_M = torch.full((1, numbers), 4 / 3, dtype=torch.float64)
    found_M = round_trip(CodecChain((Natural(),), Values(numbers, torch.float64)), row_M)
    assert float(error(found_M, row_M)) == pytest.approx(1 / 8, abs=6 * 0.09 / numbers**0.5)


def test_one_large_value_attains_the_bound_of_terngrad() -> None:
    """1 and d − 1 values a = 1/(√d + 1), of which about d a arrive as 1. The variance of each squared error is below a,
    and that of the share's mean over n draws below d a/(n ‖x‖⁴): six standard deviations are allowed."""
    numbers, draws = 99**2, 100
    row_M = torch.full((numbers,), 0.01, dtype=torch.float64)
    row_M[0] = 1
    rows_KM, square = row_M.expand(draws, -1), float(row_M.square().sum())
    found = error(round_trip(CodecChain((TernGrad(),), Values(numbers, torch.float64)), rows_KM), rows_KM)
    assert float(found.mean()) == pytest.approx((99 - 1) / 2, abs=6 * (numbers * 0.01 / draws) ** 0.5 / square)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_eden_errs_as_the_best_quantiser_of_gaussian_values(bits: int) -> None:
    """D at the best scale and D/(1 − D) unbiased, with the distortion D of the quantiser by numerical integration.

    At the best scale the share is 1 − ⟨z, q⟩²/(‖z‖² ‖q‖²), to first order D plus the mean over d coordinates of
    (z − q)² − D z²: six of its standard deviations are allowed."""
    numbers = 1 << 16
    of = CodecChain((Eden(bits=bits),), Values(numbers, torch.float64))
    row_M = torch.from_numpy(np.random.default_rng(1).exponential(size=(1, numbers)))
    found_M = round_trip(of, row_M)
    best_M = (row_M * found_M).sum() / found_M.square().sum() * found_M
    distortion, deviation = best_distortion(bits)
    tolerance = 6 * deviation / numbers**0.5
    assert float(error(best_M, row_M)) == pytest.approx(distortion, abs=tolerance)
    unbiased = distortion / (1 - distortion)
    assert float(error(found_M, row_M)) == pytest.approx(unbiased, abs=tolerance / (1 - distortion - tolerance) ** 2)
    assert unbiased == pytest.approx({1: math.pi / 2 - 1, 2: 0.133, 3: 0.0358, 4: 0.00959}[bits], rel=2e-3)


def best_distortion(bits: int) -> tuple[float, float]:
    """D of the best quantiser of a Gaussian, by Lloyd's iteration, and the standard deviation of (z − q)² − D z²."""
    z = np.linspace(-8, 8, 40_001)
    weights = np.exp(-(z**2) / 2)
    weights /= weights.sum()
    levels = np.linspace(-2, 2, 2**bits)
    for _ in range(200):
        cells = np.searchsorted((levels[1:] + levels[:-1]) / 2, z)
        levels = np.bincount(cells, weights * z) / np.bincount(cells, weights)
    errors = (z - levels[cells]) ** 2
    distortion = float((weights * errors).sum())
    return distortion, float((weights * (errors - distortion * z**2) ** 2).sum() ** 0.5)


def test_powersgd_lacks_what_is_orthogonal_to_its_left_factor() -> None:
    """‖M‖² − ‖PᵀM‖² exactly, with P as it is sent."""
    shape = LAYERS[0]
    values, row_M = Values(shape.numel(), torch.float64, (shape,)), gaussian(1, torch.float64, shape.numel())
    codec = PowerSGD(rank=2)
    state = {"factors": codec.init(values)["factors"][None]}
    sent = codec.encode(row_M, values, state, draw(1)).values
    assert sent is not None
    left = sent[0][: 2 * shape[0]].view(shape[0], 2)
    expected = 1 - (left.T @ row_M.view(shape)).square().sum() / row_M.square().sum()
    found = float(error(round_trip(CodecChain((codec,), values), row_M), row_M))
    assert found == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("behind", [Sign(), TwoLevel()], ids=str)
def test_coded_factors_of_powersgd_can_err_by_more_than_all(behind: Codec) -> None:
    """Common magnitudes for both factors mix P, whose norm is √r, with Q, whose norm is about the matrix's."""
    of = CodecChain((PowerSGD(), behind), chain("powersgd", torch.float64).values)
    rows_KM = gaussian(4, torch.float64) * torch.tensor([[1e-3], [0.1], [10], [1e3]])
    assert not of.is_contraction
    assert float(error(round_trip(of, rows_KM), rows_KM).max()) > 1


def test_a_threshold_leaves_out_only_less() -> None:
    row_M = gaussian(1, torch.float64)
    found_M = round_trip(CodecChain((Threshold(magnitude=0.7),), Values(NUMBERS, torch.float64)), row_M)
    assert float((found_M - row_M).abs().max()) < 0.7


def test_estimates_of_a_sketch_have_their_variance() -> None:
    """Of one row that is read whole: (‖x‖² − x_i²)/w each, in the mean over hashes; six standard deviations of it."""
    seeds, of = 200, CodecChain((Sketch(fraction=0.1, rows=1, read=1.0),), Values(NUMBERS, torch.float64))
    row_M, found = gaussian(1, torch.float64), []
    for seed in range(seeds):
        drawn = Draw(Streams(seed), [1], [0])
        found.append(float(error(of.read(of.decode(of.encode(row_M, {}, drawn).content, drawn), drawn), row_M)))
    buckets = of.summed.numbers
    assert np.mean(found) == pytest.approx((NUMBERS - 1) / buckets, abs=6 * np.std(found) / seeds**0.5)
