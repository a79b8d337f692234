"""One battery over all codecs: round trips, the bounds of their papers, hard vectors, groups and hostile bytes."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fed.compression.chain import CodecChain
from fed.compression.codec import Codec, CodecState, Draw, Values
from fed.compression.eden import Eden
from fed.compression.lossless import Zstd
from fed.compression.powersgd import PowerSGD
from fed.compression.quantisers import (
    FP4,
    QSGD,
    BFloat16,
    Float16,
    Int8,
    Natural,
    Sign,
    TernGrad,
    TwoLevel,
)
from fed.compression.rotation import Rotation, rotate
from fed.compression.sketch import Sketch
from fed.compression.sparsifiers import DGC, STC, RandomK, Threshold, TopK, largest
from fed.errors import InvalidInput, InvalidPayload
from fed.vectors.randomness import Streams
from tests.thinned import thinned

CODECS: dict[str, Codec | Zstd] = {
    "float16": Float16(),
    "bfloat16": BFloat16(),
    "int8": Int8(block=128),
    "fp4": FP4(),
    "qsgd_1": QSGD(bits=1, bucket=64),
    "qsgd_2": QSGD(bits=2, bucket=64),
    "qsgd_4": QSGD(bits=4),
    "qsgd_8": QSGD(bits=8, bucket=100),
    "qsgd_max": QSGD(bits=3, bucket=100, norm="max"),
    "terngrad": TernGrad(),
    "sign": Sign(),
    "natural": Natural(),
    "two_level": TwoLevel(),
    "topk": TopK(fraction=0.1),
    "randomk": RandomK(fraction=0.1),
    "threshold": Threshold(magnitude=1.0),
    "stc": STC(fraction=0.1),
    "dgc": DGC(fraction=0.1),
    "eden_1": Eden(bits=1),
    "eden_4": Eden(bits=4),
    "powersgd": PowerSGD(rank=2),
    "sketch": Sketch(fraction=0.5, read=0.1),
    "rotation": Rotation(),
    "zstd": Zstd(),
}
CHAINS: dict[str, tuple[Codec | Zstd, ...]] = {name: (codec,) for name, codec in CODECS.items()} | {
    "topk two_level": (TopK(fraction=1 / 64), TwoLevel()),
    "topk int8 zstd": (TopK(fraction=0.1), Int8(), Zstd()),
    "threshold qsgd": (Threshold(magnitude=1.0), QSGD(bits=4)),
    "powersgd float16": (PowerSGD(), Float16()),
    "randomk eden": (RandomK(fraction=0.5), Eden(bits=2)),
    "dgc sign zstd": (DGC(), Sign(), Zstd()),
    "sketch float16": (Sketch(fraction=0.5), Float16()),
    "rotation randomk": (Rotation(), RandomK(fraction=0.5)),
    "rotation int8": (Rotation(), Int8()),
}
LAYERS = (
    torch.Size([30, 20]),
    torch.Size([30]),
    torch.Size([5, 3, 3, 9]),
    torch.Size([9]),
    torch.Size([0]),
    torch.Size([]),
)
NUMBERS = sum(shape.numel() for shape in LAYERS)


def chain(name: str, dtype: torch.dtype = torch.float32, layers: tuple[torch.Size, ...] = LAYERS) -> CodecChain:
    return CodecChain(CHAINS[name], Values(sum(shape.numel() for shape in layers), dtype, layers))


def gaussian(rows: int, dtype: torch.dtype = torch.float32, numbers: int = NUMBERS) -> Tensor:
    return torch.from_numpy(np.random.default_rng(3).standard_normal((rows, numbers))).to(dtype)


def draw(rows: int, first: int = 1) -> Draw:
    return Draw(Streams(5), range(first, first + rows), [*"abcdefghij"[: min(rows, 10)], *range(10, rows)])


def state(of: CodecChain, rows: int) -> dict[str, Tensor]:
    return {name: part.expand(rows, -1).clone() for name, part in of.init().items()}


def round_trip(of: CodecChain, rows_KM: Tensor, first: int = 1) -> Tensor:
    drawn = draw(len(rows_KM), first)
    return of.read(of.decode(of.encode(rows_KM, state(of, len(rows_KM)), drawn).content, drawn), drawn)


def error(found_KM: Tensor, rows_KM: Tensor) -> Tensor:
    """The squared error of each row, as a share of its squared norm."""
    return (found_KM.double() - rows_KM.double()).square().sum(1) / rows_KM.double().square().sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CHAINS)
def test_shape_and_type_come_back_within_the_bytes_said(name: str, dtype: torch.dtype) -> None:
    of, rows_KM = chain(name, dtype), gaussian(3, dtype)
    before_KM = rows_KM.clone()
    messages = of.encode(rows_KM, state(of, 3), draw(3)).content
    assert torch.equal(rows_KM, before_KM)
    found_KM = of.read(of.decode(messages, draw(3)), draw(3))
    assert (found_KM.shape, found_KM.dtype) == (rows_KM.shape, dtype)
    for message in messages:
        assert message.dtype == torch.uint8
        assert len(message) <= of.most_bytes
        if all(codec.has_fixed_size for codec in of.lossy) and not of.lossless:
            assert len(message) == of.size_bytes


@pytest.mark.parametrize("layers", [LAYERS, (torch.Size([250, 280]), torch.Size([11]))], ids=["short", "in pieces"])
@pytest.mark.parametrize("name", thinned(CHAINS, quick=16))
def test_groups_encode_as_single_clients_do(name: str, layers: tuple[torch.Size, ...]) -> None:
    of, drawn = chain(name, layers=layers), draw(4)
    rows_KM = gaussian(4, numbers=of.values.numbers)
    kept = {key: torch.rand(4, part.shape[1]) for key, part in state(of, 4).items()}
    together = of.encode(rows_KM, kept, drawn)
    found_KM = of.decode(together.content, drawn)
    for row in range(4):
        alone = of.encode(
            rows_KM[row : row + 1], {key: part[row : row + 1] for key, part in kept.items()}, drawn.of(row)
        )
        assert torch.equal(alone.content[0], together.content[row])
        assert torch.equal(of.decode(alone.content, drawn.of(row))[0], found_KM[row])
        for ours, others in ((alone.counted, together.counted), (alone.lost, together.lost)):
            assert all(torch.equal(ours[key][0], others[key][row]) for key in of.init())


# The mean squared error of unbiased codecs, as a share of the squared norm: at most so much.
VARIANCES: dict[str, Callable[[int], float]] = {
    "qsgd_1": lambda d: 64 - 1,
    "qsgd_2": lambda d: min(64, 64**0.5),
    "qsgd_4": lambda d: min(512 / 49, 512**0.5 / 7),
    "qsgd_8": lambda d: min(100 / 127**2, 100**0.5 / 127),
    "qsgd_max": lambda d: 100 / (4 * 9),
    "terngrad": lambda d: 600**0.5 * 4,  # max |x| is below 4 of 600 Gaussian values but for one case in 27
    "natural": lambda d: 1 / 8,
    "randomk": lambda d: d / max(1, round(0.1 * d)) - 1,
}


def test_each_codec_that_claims_to_be_unbiased_is_tested() -> None:
    claims = {name for name, codec in CODECS.items() if isinstance(codec, Codec) and codec.is_unbiased}
    assert claims == VARIANCES.keys()


@pytest.mark.parametrize("name", VARIANCES)
def test_unbiased_codecs_have_the_mean_and_the_variance_claimed(name: str) -> None:
    """Of n draws the mean's expected squared error is ω/n of the squared norm; five times that has a chance of a fifth
    by Markov's inequality alone, and far less for a sum over a thousand coordinates. A bias b would add b²."""
    draws, of = 1000, chain(name, torch.float64)
    row_M = gaussian(1, torch.float64)
    found_KM = round_trip(of, row_M.expand(draws, -1))
    variance = VARIANCES[name](NUMBERS)
    assert float(error(found_KM, row_M.expand(draws, -1)).mean()) <= variance * 1.02
    assert float(error(found_KM.mean(0, keepdim=True), row_M)) <= 5 * variance / draws


SPARSE: dict[str, list[float]] = {
    "one": [1.0],
    "two": [2.0, 1.0],
    "equal": [1.0, 1.0],
    "opposite": [1.0, -1.0, 1.0],
    "three": [3.0, -2.0, 1.0],
    "powers": [1.0, 0.5, 0.25, 0.125],
    "nearly a power": [1.0, 1.0 - 2.0**-10, 1.0 + 2.0**-10],
    "large and small": [1.0, *[0.01] * 31],
    "dense": [1.0 + number / 64 for number in range(64)],
}
"""The first of 64 values; the others are 0."""

RANGES = {"randomk": 64 / 6, "natural": 2.0, "eden_1": 2.0}
"""The largest magnitude of a decoded value, as a multiple of ‖x‖, where it is not 1: d/k, and twice the value."""


def bias(name: str, vector: str, draws: int = 2000) -> tuple[Tensor, Tensor]:
    """The mean of decoded vectors less the vector, and what chance allows each coordinate.

    Empirical Bernstein bound (Maurer & Pontil 2009, theorem 4) of n values within ±B, of variance V, on both sides:
    √(2 V ln(2/δ)/n) + 7 · 2B ln(2/δ)/(3 (n − 1)). With δ = 1e-9/128 some of 64 coordinates exceeds it with a chance of
    1e-9 at most.
    """
    row_M = torch.zeros(1, 64, dtype=torch.float64)
    row_M[0, : len(SPARSE[vector])] = torch.tensor(SPARSE[vector], dtype=torch.float64)
    of = CodecChain(CHAINS[name], Values(64, torch.float64))
    found_KM = round_trip(of, row_M.expand(draws, -1))
    largest = RANGES.get(name, 1.0) * float(row_M.norm())
    assert float(found_KM.abs().max()) <= largest * (1 + 1e-12)
    logarithm = math.log(2 * 128 / 1e-9)
    by_variance_M = (2 * found_KM.var(0) * logarithm / draws).sqrt()
    allowed_M = by_variance_M + 14 * largest * logarithm / (3 * (draws - 1))
    return found_KM.mean(0) - row_M[0], allowed_M


SPARSE_ENOUGH = ("one", "two", "opposite", "nearly a power", "large and small")


@pytest.mark.parametrize(
    "vector", [name if name in SPARSE_ENOUGH else pytest.param(name, marks=pytest.mark.long) for name in SPARSE]
)
@pytest.mark.parametrize("name", thinned(VARIANCES, quick=2))
def test_unbiased_codecs_are_so_of_sparse_vectors(name: str, vector: str) -> None:
    bias_M, allowed_M = bias(name, vector)
    assert (bias_M.abs() <= allowed_M).all()


def test_eden_is_biased_where_a_rotation_shows_two_values() -> None:
    """Every sign of R (2, 1, 0, …) is that of the 2, whose share of ‖x‖₁ makes 2.5 of it and 0 of the 1."""
    bias_M, allowed_M = bias("eden_1", "two")
    torch.testing.assert_close(bias_M[:2], torch.tensor([0.5, -1.0], dtype=torch.float64), rtol=0, atol=1e-6)
    assert float(bias_M.norm()) == pytest.approx(0.5 * 5**0.5, rel=1e-6)
    assert (bias_M.abs()[:2] > allowed_M[:2]).all()


def test_edens_bias_of_dense_vectors_is_small() -> None:
    """At most 0.002 of the squared norm beside the five variances of a mean."""
    of, draws = chain("eden_1", torch.float64), 1000
    row_M = gaussian(1, torch.float64)
    found_KM = round_trip(of, row_M.expand(draws, -1))
    assert float(error(found_KM.mean(0, keepdim=True), row_M)) <= 5 * (math.pi / 2 - 0.9) / draws + 0.002


@pytest.mark.parametrize("numbers", [1, 2, 63, 1000])
def test_random_positions_have_exactly_their_variance(numbers: int) -> None:
    """Over all draws of one position: with k = 1 each draw's error is known."""
    of = CodecChain((RandomK(fraction=1e-9),), Values(numbers, torch.float64))
    row_M = gaussian(1, torch.float64, numbers)
    found_M = round_trip(of, row_M)[0]
    (place,) = found_M.nonzero()[:, 0].tolist()
    assert found_M[place] == row_M[0, place] * numbers


HARD = {
    "zeros": torch.zeros(NUMBERS),
    "constant": torch.full((NUMBERS,), -0.3),
    "huge": torch.linspace(-1, 1, NUMBERS) * 3e38,
    "subnormal": torch.linspace(-1e-39, 1e-39, NUMBERS),
    "tiny and huge": torch.cat([torch.full((NUMBERS - 1,), 1e-30), torch.tensor([1e30])]),
}
GROWING = {
    "eden_1",
    "eden_4",
    "powersgd",
    "powersgd float16",
    "randomk",
    "randomk eden",
    "sketch",
    "sketch float16",
    "dgc",
    "dgc sign zstd",
    "rotation",
    "rotation randomk",
    "rotation int8",
}


@pytest.mark.parametrize(
    ("name", "vector"),
    # sums and multiples of the largest numbers leave float32's range
    [(name, vector) for name in CHAINS for vector in HARD if name not in GROWING or vector != "huge"],
)
def test_hard_vectors_come_back_finite(name: str, vector: str) -> None:
    of, row_M = chain(name), HARD[vector][None]
    found_M = round_trip(of, row_M)
    assert torch.isfinite(found_M).all()
    if vector == "zeros":
        assert not found_M.any()
    if of.is_contraction and vector != "subnormal":
        assert float(error(found_M / row_M.abs().max(), row_M / row_M.abs().max())) <= 1 or vector == "zeros"


@pytest.mark.parametrize("name", CHAINS)
def test_one_number_comes_back(name: str) -> None:
    of = chain(name, layers=(torch.Size([1]),))
    for value in (0.0, -2.5):
        found_M = round_trip(of, torch.tensor([[value]]))
        assert found_M.shape == (1, 1)
        assert torch.isfinite(found_M).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    row_M = gaussian(1)
    row_M[0, 3] = value
    for name in CHAINS:
        with pytest.raises(InvalidInput, match="finite"):
            round_trip(chain(name), row_M)


@settings(max_examples=15)
@given(st.data())
@pytest.mark.parametrize("name", thinned(CHAINS, quick=16))
def test_any_bytes_are_a_vector_or_refused(name: str, data: st.DataObject) -> None:
    of = chain(name)
    whole = bytes(of.encode(gaussian(1), state(of, 1), draw(1)).content[0].tolist())
    cut = data.draw(st.integers(0, len(whole)))
    message = data.draw(
        st.sampled_from([whole[:cut], whole[:cut] + data.draw(st.binary(max_size=40)) + whole[cut + 9 :]])
    )
    message = data.draw(st.one_of(st.just(message), st.binary(max_size=60).map(lambda tail: b"\x01" + tail)))
    tensor = torch.tensor([*message], dtype=torch.uint8)
    try:
        found_M = of.read(of.decode([tensor], draw(1)), draw(1))
    except InvalidPayload:
        return
    assert found_M.shape == (1, NUMBERS)


def test_a_sketch_without_finite_numbers_is_refused() -> None:
    of = chain("sketch")
    message = of.encode(gaussian(1), {}, draw(1)).content[0]
    message[-1], message[-2] = 0x7F, 0xC0  # NaN in the last bucket
    with pytest.raises(InvalidPayload, match="finite"):
        of.read(of.decode([message], draw(1)), draw(1))


def test_float16_errs_by_half_a_unit_in_the_last_place() -> None:
    row_M = gaussian(1)
    assert ((round_trip(chain("float16"), row_M) - row_M).abs() <= row_M.abs() * 2**-11 + 2**-25).all()
    assert ((round_trip(chain("bfloat16"), row_M) - row_M).abs() <= row_M.abs() * 2**-8).all()


def test_int8_errs_by_half_a_step_of_its_block() -> None:
    row_M = gaussian(1)
    found_M = round_trip(chain("int8"), row_M)
    for place in range(0, NUMBERS, 128):
        block = row_M[0, place : place + 128]
        assert ((found_M[0, place : place + 128] - block).abs() <= block.abs().max() / 254 * (1 + 1e-6)).all()


def test_fp4_takes_the_nearest_of_its_numbers() -> None:
    row_M = gaussian(1)
    found_M = round_trip(chain("fp4"), row_M)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for place in range(0, NUMBERS, 32):
        block = row_M[0, place : place + 32]
        scale = 2.0 ** math.ceil(math.log2(float(block.abs().max()) / 6))
        nearest = (block.abs()[:, None] / scale - magnitudes).abs().min(1).values * scale
        assert torch.allclose((found_M[0, place : place + 32] - block).abs(), nearest, atol=1e-6)


def test_scaled_sign_has_exactly_its_error() -> None:
    row_M = gaussian(1, torch.float64)
    expected = 1 - row_M.abs().sum() ** 2 / (NUMBERS * row_M.square().sum())
    found_M = round_trip(chain("sign", torch.float64), row_M)
    assert float(error(found_M, row_M)) == pytest.approx(float(expected), rel=1e-12)


def test_two_levels_are_the_means_of_the_halves() -> None:
    row_M = gaussian(1, torch.float64)
    found_M = round_trip(chain("two_level", torch.float64), row_M)
    magnitudes = row_M.abs().sort().values[0]
    low, high = magnitudes[: NUMBERS // 2].mean(), magnitudes[NUMBERS // 2 :].mean()
    expected = torch.where(row_M.abs() > (low + high) / 2, high, low).copysign(row_M)
    assert torch.allclose(found_M, expected, rtol=1e-12)


@pytest.mark.parametrize("count", [1, 7, 600])
@pytest.mark.parametrize("numbers", [600, 1 << 17])
def test_the_largest_values_are_those_of_a_sort(numbers: int, count: int) -> None:
    rows_KM = gaussian(2, numbers=numbers).mul(4).round()  # with many equal ones
    for row_M, places in zip(rows_KM, largest(rows_KM, count), strict=True):
        order = (-row_M.abs()).sort(stable=True).indices.tolist()
        assert places.tolist() == sorted(order[:count])


def test_a_sample_that_misleads_does_not_change_the_largest() -> None:
    """Every value that the sample sees is large, so that its threshold leaves too few."""
    numbers = 1 << 17
    row_M = torch.rand(numbers, generator=torch.Generator().manual_seed(0))
    row_M[:: numbers >> 13] += 10
    found = largest(row_M[None], 60_000)[0]
    assert set(found.tolist()) == set(row_M.topk(60_000).indices.tolist())


def test_topk_loses_what_it_does_not_send() -> None:
    row_M = gaussian(1, torch.float64)
    found_M = round_trip(chain("topk", torch.float64), row_M)
    kept = row_M.abs().sort(descending=True).values[0, : round(0.1 * NUMBERS)]
    assert float(error(found_M, row_M)) == pytest.approx(
        1 - float(kept.square().sum() / row_M.square().sum()), rel=1e-12
    )


def test_stc_has_exactly_its_error() -> None:
    row_M, count = gaussian(1, torch.float64), round(0.1 * NUMBERS)
    mean = row_M.abs().sort(descending=True).values[0, :count].mean()
    found_M = round_trip(chain("stc", torch.float64), row_M)
    expected = 1 - count * mean**2 / row_M.square().sum()
    assert float(error(found_M, row_M)) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("fraction", [0.1, 0.01, 0.001])
def test_stc_takes_the_bits_of_its_formula(fraction: float) -> None:
    """Within 2 %, header included, for ten million values whose largest are at random places."""
    numbers = 10**7
    of = CodecChain((STC(fraction=fraction),), Values(numbers, torch.float32))
    (message,) = of.encode(torch.randn(1, numbers, generator=torch.Generator().manual_seed(1)), {}, draw(1)).content
    bits = 1 + math.floor(math.log2(math.log((math.sqrt(5) - 1) / 2) / math.log(1 - fraction)))
    expected = fraction * (bits + 1 / (1 - (1 - fraction) ** (2**bits)) + 1)
    assert 8 * len(message) / numbers == pytest.approx(expected, rel=0.02)


def test_sparse_two_level_chain_takes_a_205th_of_float32() -> None:
    of = CodecChain(CHAINS["topk two_level"], Values(10**6, torch.float32))
    (message,) = of.encode(gaussian(1, numbers=10**6), {}, draw(1)).content
    assert 8 * len(message) / 10**6 <= 0.156


@pytest.mark.parametrize("size", [1, 2, 64])
def test_the_rotation_is_a_hadamard_matrix(size: int) -> None:
    matrix = rotate(torch.eye(size, dtype=torch.float64))
    assert torch.allclose(matrix.abs(), torch.full((size, size), size**-0.5, dtype=torch.float64))
    assert torch.allclose(matrix @ matrix, torch.eye(size, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("numbers", [1, 100, 999, 65_537, 159_010, 10**6])
def test_eden_pads_by_less_than_a_hundredth(numbers: int) -> None:
    bits = 8 * CodecChain((Eden(bits=4),), Values(numbers, torch.float32)).size_bytes
    blocks = numbers.bit_length() + numbers // 65_536 + 1
    assert bits <= 4 * (1.01 * numbers + 8) + 32 * blocks + 8


def test_matrices_of_low_rank_are_exact_under_powersgd() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in (40, 50))
    row_M = torch.cat([(left @ right.T).flatten(), torch.ones(7, dtype=torch.float64)])[None]
    of = CodecChain((PowerSGD(rank=3),), Values(2007, torch.float64, (torch.Size([40, 50]), torch.Size([7]))))
    assert float(error(round_trip(of, row_M), row_M)) < 1e-24
    assert of.size_bytes == 1 + 4 + 8 * (3 * 90 + 7)


def test_powersgd_goes_on_from_what_counted() -> None:
    """With the factors of before, a second step on the same matrix comes nearer to its best approximation."""
    of, row_M = chain("powersgd", torch.float64), gaussian(1, torch.float64)
    first = of.encode(row_M, state(of, 1), draw(1))
    second = of.encode(row_M, first.counted, draw(1))
    errors = [float(error(of.decode(made.content, draw(1)), row_M)) for made in (first, second)]
    assert errors[1] < errors[0]
    again = of.encode(row_M, first.lost, draw(1))
    assert torch.equal(again.content[0], first.content[0])


def test_sketches_add() -> None:
    sketch, values, rows_KM = Sketch(fraction=0.5), Values(NUMBERS, torch.float64), gaussian(3, torch.float64)
    of_each = sketch.encode(rows_KM, values, {}, draw(3)).values
    of_sum = sketch.encode(rows_KM.sum(0, keepdim=True), values, {}, draw(1)).values
    assert of_each is not None
    assert of_sum is not None
    assert torch.allclose(torch.stack([*of_each]).sum(0), of_sum[0], atol=1e-12)


def test_a_sketch_finds_what_is_large() -> None:
    """Ten values that are a hundred times the others' norm, in ten thousand: each is read, nearly as it is."""
    numbers = 10_000
    row_M = torch.zeros(1, numbers, dtype=torch.float64)
    row_M[0, ::1000] = torch.arange(10, 20).double()
    noise = gaussian(1, torch.float64, numbers) * 1e-3
    of = CodecChain((Sketch(fraction=0.2, read=0.001),), Values(numbers, torch.float64))
    assert torch.allclose(round_trip(of, row_M + noise), row_M, atol=0.05)


def test_dgc_sends_the_sum_of_its_updates_in_time() -> None:
    """Without momentum nothing is lost: what was sent and what waits is the sum of all updates."""
    of = CodecChain((DGC(fraction=0.05, momentum=0.0, warm_up_rounds=2),), Values(100, torch.float64))
    kept: CodecState = state(of, 1)
    sent, given = torch.zeros(100, dtype=torch.float64), torch.zeros(100, dtype=torch.float64)
    counts = []
    for number in range(1, 8):
        row_M = torch.from_numpy(np.random.default_rng(number).standard_normal((1, 100)))
        made = of.encode(row_M, kept, draw(1, number))
        found_M = of.decode(made.content, draw(1, number))[0]
        given += row_M[0]
        counts.append(int((found_M != 0).sum()))
        if number % 3:
            sent, kept = sent + found_M, made.counted
        else:
            kept = made.lost
        assert torch.allclose(sent + kept["residual"][0], given, atol=1e-12)
    assert counts == [25, 11, 5, 5, 5, 5, 5]


def test_dgc_corrects_its_momentum_and_masks_it() -> None:
    """Algorithm 1 of the paper, on two coordinates of which one is sent."""
    of = CodecChain((DGC(fraction=0.5, momentum=0.5, warm_up_rounds=0),), Values(2, torch.float64))
    made = of.encode(torch.tensor([[3.0, 1.0]], dtype=torch.float64), state(of, 1), draw(1))
    assert made.counted["momentum"].tolist() == [[0, 1]]
    assert made.counted["residual"].tolist() == [[0, 1]]
    made = of.encode(torch.tensor([[0.0, 1.0]], dtype=torch.float64), made.counted, draw(1))
    assert of.decode(made.content, draw(1)).tolist() == [[0, 2.5]]
    assert made.lost["momentum"].tolist() == [[0, 1.5]]
