"""Workloads for GPUs, and tiny ones of the same models for a test on a processor."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
from torch import nn
from workloads import Arrays, Workload

from fed.clients.models import cnn, mlp

sys.path.append(str(Path(__file__).resolve().parent / "sides"))
from transformer import Transformer

_TEST_SAMPLES = 2000
_TOLERANCE = 0.05


def _images(count: int, classes: int, size: int) -> tuple[Arrays, Arrays]:
    """Images of one random pattern a class, in white noise."""
    generator = np.random.default_rng(0)
    patterns = generator.normal(size=(classes, 1, size, size))

    def draw(samples: int) -> Arrays:
        labels = generator.integers(classes, size=samples)
        images = patterns[labels] + 2.0 * generator.normal(size=(samples, 1, size, size))
        return images.astype(np.float32), labels

    return draw(count), draw(_TEST_SAMPLES)


def _sequences(count: int, classes: int, length: int, vocabulary: int) -> tuple[Arrays, Arrays]:
    """Sequences of tokens, half of which are from the class's own share of the vocabulary."""
    generator = np.random.default_rng(0)
    share = vocabulary // classes

    def draw(samples: int) -> Arrays:
        labels = generator.integers(classes, size=samples)
        own = labels[:, None] * share + generator.integers(share, size=(samples, length))
        others = generator.integers(vocabulary, size=(samples, length))
        return np.where(generator.random((samples, length)) < 0.5, own, others), labels

    return draw(count), draw(_TEST_SAMPLES)


def workloads(*, tiny: bool = False) -> dict[str, Workload]:
    """Workloads by name.

    Args:
        tiny: True for sizes that a processor trains in a second.
    """
    return {"mlp": _mlp(tiny=tiny), "cnn": _cnn(tiny=tiny), "transformer": _transformer(tiny=tiny)}


def _mlp(*, tiny: bool) -> Workload:
    clients = 4 if tiny else 100
    samples = 20 if tiny else 600
    hidden = 16 if tiny else 200
    side = 8 if tiny else 28
    return Workload(
        title=f"MLP {side**2}-{hidden}-10, {clients} clients",
        clients=clients,
        cohort=clients,
        samples=samples,
        batch_size=10,
        agreement_rounds=8,
        tolerance=_TOLERANCE,
        source=partial(_images, clients * samples, classes=10, size=side),
        model=lambda shape: mlp(shape, 10, hidden=(hidden,)),
    )


def _cnn(*, tiny: bool) -> Workload:
    clients = 4 if tiny else 100
    samples = 20 if tiny else 200
    channels = (8, 8) if tiny else (32, 64)
    side = 8 if tiny else 28
    return Workload(
        title=f"CNN {channels[0]}-{channels[1]}, {clients} clients",
        clients=clients,
        cohort=clients,
        samples=samples,
        batch_size=20,
        lr=0.05,
        agreement_rounds=12,
        tolerance=_TOLERANCE,
        source=partial(_images, clients * samples, classes=10, size=side),
        model=lambda shape: cnn(shape, 10, channels=channels, hidden=16 if tiny else 128),
    )


def _transformer(*, tiny: bool) -> Workload:
    clients = 2 if tiny else 10
    samples = 16 if tiny else 128
    length = 8 if tiny else 64
    width = 16 if tiny else 384
    layers = 1 if tiny else 6

    def made(shape: tuple[int, ...]) -> nn.Module:
        return Transformer(vocabulary=40, length=length, width=width, layers=layers, classes=10)

    return Workload(
        title=f"transformer, {layers} layers of {width}, {clients} clients",
        clients=clients,
        cohort=clients,
        samples=samples,
        batch_size=16,
        lr=0.05,
        agreement_rounds=8,
        tolerance=_TOLERANCE,
        source=partial(_sequences, clients * samples, classes=10, length=length, vocabulary=40),
        model=made,
    )
