"""Bandwidth below which codecs pay: what is saved, by the time that is spent."""

import time

import pytest
import torch

from fed.compression.chain import CodecChain
from fed.compression.codec import Codec, Values
from fed.compression.feedback import EF, Encoder
from fed.compression.quantisers import Int8
from fed.compression.sparsifiers import TopK
from fed.compression.timing import facts_of, pays_below_bytes_per_s


def encoder(codec: Codec) -> Encoder:
    return Encoder(CodecChain((codec,), Values(1000, torch.float32)), EF())


def test_bytes_saved_are_divided_by_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that runs a second each time that it is read."""
    ticks = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    message = encoder(Int8()).size_bytes
    assert pays_below_bytes_per_s(encoder(Int8())) == 4000 - message
    assert facts_of(encoder(Int8())) == {"uplink_pays_below_bytes_per_s": 4000 - message}
    assert facts_of(None) == {}


def test_a_chain_that_saves_nothing_never_pays() -> None:
    """All values, and where they are."""
    assert pays_below_bytes_per_s(encoder(TopK(fraction=1.0))) == 0
