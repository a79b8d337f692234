"""Reference: both sides hold the same numbers, whatever the codec, and other differences than announced are refused.

Shapes: see :mod:`fed.vectors.layout`.
"""

import itertools

import pytest
import torch
from torch import Tensor

from fed.compression.chain import CodecChain
from fed.compression.codec import Codec, CodecState, Values
from fed.compression.eden import Eden
from fed.compression.feedback import EF21, Encoder
from fed.compression.lossless import Zstd
from fed.compression.powersgd import PowerSGD
from fed.compression.quantisers import QSGD, Float16, Int8, Sign, TwoLevel
from fed.compression.sparsifiers import RandomK, TopK
from fed.errors import InvalidPayload
from fed.vectors.randomness import Streams
from fed.wire.reference import Reference

LAYERS = (torch.Size([12, 16]), torch.Size([8]))
PARAMETERS = 200
CHAINS: list[tuple[Codec | Zstd, ...]] = [
    (Float16(),),
    (Int8(), Zstd()),
    (Sign(),),
    (QSGD(bits=2),),
    (TopK(fraction=0.1), TwoLevel()),
    (RandomK(fraction=0.2),),
    (Eden(bits=1),),
    (PowerSGD(rank=2),),
]
chains = pytest.mark.parametrize("codecs", CHAINS, ids=lambda codecs: "+".join(type(one).__name__ for one in codecs))


def encoder_of(codecs: tuple[Codec | Zstd, ...], dtype: torch.dtype = torch.float32) -> Encoder:
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    return Encoder(CodecChain(codecs, Values(PARAMETERS, wide, LAYERS)), EF21())


def numbers(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, PARAMETERS, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@chains
def test_both_sides_hold_the_same_bits(codecs: tuple[Codec | Zstd, ...], dtype: torch.dtype) -> None:
    encoder, streams, model_KP = encoder_of(codecs, dtype), Streams(3), numbers(0, dtype)
    ours = theirs = Reference.first(model_KP)
    state: CodecState = {name: part.expand(2, -1) for name, part in encoder.chain.init().items()}
    for version in range(1, 12):
        model_KP = model_KP + 0.1 * numbers(version, dtype)
        before_KP = ours.numbers_KP
        ours, difference, state = ours.towards(model_KP, version, encoder, state, streams)
        theirs = theirs.moved(difference, encoder, streams)
        assert theirs.name == ours.name == difference.after
        assert torch.equal(theirs.numbers_KP, ours.numbers_KP)
        assert ours.numbers_KP.dtype == dtype
        assert not torch.equal(ours.numbers_KP, before_KP)


@chains
def test_the_reference_comes_to_a_model_that_rests(codecs: tuple[Codec | Zstd, ...]) -> None:
    """Each difference takes a share of what is left: C is a contraction, if need be by the scale of its message."""
    encoder, model_KP = encoder_of(codecs, torch.float64), numbers(1, torch.float64)
    reference = Reference.first(numbers(0, torch.float64))
    state: CodecState = {name: part.expand(2, -1) for name, part in encoder.chain.init().items()}
    errors = []
    for version in range(1, 120):
        reference, _, state = reference.towards(model_KP, version, encoder, state, Streams(0))
        errors.append(float((model_KP - reference.numbers_KP).norm() / model_KP.norm()))
    assert all(later <= earlier for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < errors[0] / 20


def test_a_difference_that_is_another_than_was_said_is_refused() -> None:
    encoder, streams = encoder_of((Int8(),)), Streams(0)
    first = Reference.first(numbers(0))
    second, one, _ = first.towards(numbers(1), 1, encoder, {}, streams)
    _, two, _ = second.towards(numbers(2), 2, encoder, {}, streams)
    damaged = tuple(message.clone() for message in one.messages)
    damaged[1][-1] ^= 1
    for start, difference in (
        (first, one._replace(messages=damaged)),
        (first, two),
        (first, one._replace(messages=one.messages[::-1])),
        (first, one._replace(after=two.after)),
    ):
        with pytest.raises(InvalidPayload, match="does not lead to the version of the model that was announced"):
            start.moved(difference, encoder, streams)
    assert first.moved(one, encoder, streams).moved(two, encoder, streams).name == two.after


def test_equal_names_mean_equal_numbers() -> None:
    names = [Reference.first(numbers(seed)).name for seed in (0, 0, 1)]
    assert names[0] == names[1] != names[2]
