"""Noise: where its randomness comes from, and Gaussian noise on a grid.

Shapes: see :mod:`fed.vectors.layout`.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fed.errors import InvalidInput
from fed.privacy.clipping import grid_step, joint_norm
from fed.privacy.experiment_digest import experiment_sha256
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, torch

__all__ = ["NoiseSource", "SeededNoise", "SystemNoise", "deviations_in_steps", "gaussian_units"]


class NoiseSource(Protocol):
    """A source of the randomness of noise."""

    def generator(self, purpose: str, *key: object) -> np.random.Generator:
        """A generator for one draw of noise.

        Args:
            purpose: purpose of the noise.
            key: key of the draw, such as (client, round).
        """


@dataclass(frozen=True)
class SystemNoise:
    """Noise of real nodes and servers: ChaCha20, with a new key of the operating system for each draw.

    Nobody can repeat a draw, its owner included.
    """

    def generator(self, purpose: str, *key: object) -> np.random.Generator:
        """A generator with a new key.

        Raises:
            InvalidInput: if the extra ``privacy`` is missing.
        """
        try:
            from randomgen import ChaCha
        except ImportError:
            raise InvalidInput(
                "privacy needs randomgen, a source of cryptographic noise: pip install 'fed[privacy]'"
            ) from None
        return np.random.Generator(ChaCha(key=secrets.randbits(256), rounds=20))


@dataclass(frozen=True)
class SeededNoise:
    """Noise of a simulation, which anyone who knows the seed can repeat: it protects nothing, and costs as much.

    The experiment names the streams, so that one that differs in anything but its name has other noise: two sums with
    the same noise would show their difference.

    Args:
        streams: random streams of the run.
        experiment_sha256: digest of the experiment.
    """

    streams: Streams
    experiment_sha256: str

    @classmethod
    def of(cls, streams: Streams, experiment: Mapping[str, Any]) -> "SeededNoise":
        """The noise of an experiment.

        Args:
            streams: random streams of the run.
            experiment: keys of the experiment.
        """
        return cls(streams, experiment_sha256(experiment))

    def generator(self, purpose: str, *key: object) -> np.random.Generator:
        """The generator of this draw."""
        return self.streams.long_generator(f"noise {self.experiment_sha256}", purpose, *key)


def deviations_in_steps(noise_multiplier: float, clip: float, bit_weight: float) -> tuple[float, float | None]:
    r"""Standard deviations of the noise on a message's numbers, and on the bit behind it, in steps of the clip's grid.

    .. math:: z C S, \quad \frac{z S}{β}, \qquad S = \sqrt{1 + \tfrac{β^2}{4}}

    Args:
        noise_multiplier: z ≥ 0.
        clip: C > 0, largest L2 norm of a message.
        bit_weight: β ≥ 0, weight of the bit; 0 where there is none, and no noise on it.
    """
    steps = noise_multiplier * joint_norm(bit_weight) / grid_step(clip)
    return clip * steps, steps / bit_weight if bit_weight else None


def gaussian_units(
    generator: np.random.Generator, numbers: int, deviation: float, bit_deviation: float | None = None
) -> Tensor:
    """Gaussian noise, rounded to whole units, [M] in float64.

    Added to whole numbers it is the exact Gaussian mechanism, whose result is rounded. The sampler's own rounding is
    far below a unit, and does not show.

    Args:
        generator: generator of the draw.
        numbers: M ≥ 0.
        deviation: standard deviation in units, large: 2²³ or more on the grid of a clip at a noise multiplier of 1.
        bit_deviation: standard deviation of the last number; None: that of all.
    """
    noise_M = torch.from_numpy(generator.standard_normal(numbers))
    if bit_deviation is None:
        return noise_M.mul_(deviation).round_()
    noise_M[:-1].mul_(deviation)
    noise_M[-1].mul_(bit_deviation)
    return noise_M.round_()
