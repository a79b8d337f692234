"""Named random streams: every draw of a run is a function of (seed, purpose, key), never of what was drawn before."""

import hashlib
import math
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

from fed.vectors.tensors import torch

__all__ = ["Streams", "seeded_torch"]

_LOW_32_BITS = 2**32 - 1
_MOST_FLOYD = 32  # places; NumPy chooses more of them in less time, and many by another method


@dataclass(frozen=True)
class Streams:
    """The streams of one seed, each named by a purpose and a key such as (client, round).

    Two names give independent streams; the same name gives the same stream again, whatever was drawn in between, so
    that results depend neither on the order of the work nor on how many processes do it.

    Args:
        seed: seed of the experiment, ≥ 0.

    Example:
        >>> streams = Streams(0)
        >>> int(streams.generator("order", 7, 3).integers(100)) == int(streams.generator("order", 7, 3).integers(100))
        True
        >>> streams.torch_seed("model") == Streams(1).torch_seed("model")
        False
    """

    seed: int

    def generator(self, purpose: str, *key: object) -> np.random.Generator:
        """A NumPy generator (Philox, keyed by a BLAKE2b hash of the name) at the stream's beginning."""
        digest = self._digest(purpose, key, 16)
        seed: Any = _Key(digest)  # Philox takes any ISeedSequence; NumPy's types know of one
        return np.random.Generator(np.random.Philox(seed))

    def long_generator(self, purpose: str, *key: object) -> np.random.Generator:
        """A NumPy generator (SFC64) for many numbers, which take two thirds of the time of :meth:`generator`'s."""
        digest = self._digest(purpose, key, 24)
        seed: Any = _Key(digest)
        return np.random.Generator(np.random.SFC64(seed))

    def uniforms(self, purpose: str, *key: object) -> tuple[float, float, float, float]:
        """Four numbers uniform in [0, 1), multiples of 2⁻⁵³: the hash itself, in a quarter of a generator's time.

        Example:
            >>> [round(number, 3) for number in Streams(0).uniforms("fate", 7)]
            [0.347, 0.939, 0.526, 0.169]
        """
        # >> 11 leaves 53 bits, which float64 holds without rounding: 1 is never drawn.
        a, b, c, d = struct.unpack("<4Q", self._digest(purpose, key, 32))
        return (a >> 11) * 2.0**-53, (b >> 11) * 2.0**-53, (c >> 11) * 2.0**-53, (d >> 11) * 2.0**-53

    def places(self, population: int, count: int, purpose: str, *key: object) -> list[int]:
        """Some of N places without replacement, in any order: those that :meth:`generator` would choose.

        A few are computed here by NumPy's own method, Floyd's on bounded integers by Lemire's (Bentley & Floyd 1987;
        Lemire 2019, 1805.10941). NumPy's call takes most of its time for what is around it.

        Args:
            population: N, number of places from 0 on.
            count: number of places to choose, at most N.
            purpose: purpose of the stream.
            key: key of the stream.

        Example:
            >>> sorted(Streams(0).places(100, 3, "cohort", 7))
            [34, 52, 78]
        """
        if count == population:
            return list(range(population))
        if count <= _MOST_FLOYD and (chosen := self._floyd(population, count, purpose, *key)) is not None:
            return chosen
        places: list[int] = self.generator(purpose, *key).choice(population, size=count, replace=False).tolist()
        return places

    def _floyd(self, population: int, count: int, purpose: str, *key: object) -> list[int] | None:
        """The places, or None where a word might be refused, in whose place NumPy takes the next one."""
        words = _words.first(-(-count // 2), self._digest(purpose, key, 16))
        halves = [half for word in words for half in (word & _LOW_32_BITS, word >> 32)]
        chosen: set[int] = set()
        for last, half in zip(range(population - count, population), halves, strict=False):
            product = half * (last + 1)
            if product & _LOW_32_BITS <= last:
                return None
            place = product >> 32
            chosen.add(last if place in chosen else place)
        return list(chosen)

    def normals(self, purpose: str, *key: object) -> tuple[float, float]:
        """Two independent numbers of the standard normal distribution (Box & Muller 1958)."""
        # A radius of 0 is possible and 1 is not: log1p(-radius) is finite.
        radius, turn, *_ = self.uniforms(purpose, *key)
        length = math.sqrt(-2 * math.log1p(-radius))
        angle = 2 * math.pi * turn
        return length * math.cos(angle), length * math.sin(angle)

    def torch_seed(self, purpose: str, *key: object) -> int:
        """A seed in [0, 2⁶³) for PyTorch's generators."""
        # PyTorch takes seeds of 64 bits with a sign.
        return int.from_bytes(self._digest(purpose, key, 8), "little") >> 1

    def _digest(self, purpose: str, key: tuple[object, ...], size_bytes: int) -> bytes:
        name = repr((self.seed, purpose, *key))  # repr keeps 1 and "1" apart, and the keys (1, 23) and (12, 3)
        if "np." in name:  # NumPy writes np.int64(7) where Python writes 7
            parts = [part.item() if isinstance(part, np.generic) else part for part in key]
            name = repr((self.seed, purpose, *parts))
        return hashlib.blake2b(name.encode(), digest_size=size_bytes).digest()


class _Key(ISeedSequence):
    """A generator's key as it is. Philox(key=…) makes the same one, but asks the system for entropy that it drops."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def generate_state(self, n_words: int, dtype: object = np.uint64) -> np.ndarray:
        """All bits: 128, which is what Philox asks for, or the 192 of SFC64."""
        return np.frombuffer(self._digest, dtype=np.uint64)


class _Words(threading.local):
    """Philox of a thread, which is given one key after another: a new one takes several times as long."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(0)
        self._beginning: Any = self._philox.state

    def first(self, count: int, digest: bytes) -> list[int]:
        """First words, of 64 bits, of the generator with a key."""
        self._beginning["state"]["key"] = np.frombuffer(digest, dtype=np.uint64)
        self._philox.state = self._beginning
        words: list[int] = self._philox.random_raw(count).tolist()
        return words


_words = _Words()


@contextmanager
def seeded_torch(seed: int, device: "torch.device") -> Iterator[None]:
    """Run a user's code, which may draw from PyTorch's global generators, as if it had a stream of its own.

    Args:
        seed: seed of the global generators of the CPU and of ``device`` inside the block.
        device: device that the code computes on. Its generator and the CPU's are restored afterwards.
    """
    if device.type == "cuda":
        with torch.random.fork_rng([device]):
            torch.default_generator.manual_seed(seed)
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
            yield
        return
    # As fork_rng() does for the CPU, without its look at other devices: small models' tasks would feel it.
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
