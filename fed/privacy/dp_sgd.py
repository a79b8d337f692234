r"""DP-SGD: gradient descent whose every step is differentially private for each of a client's samples.

Abadi et al., "Deep learning with differential privacy", CCS 2016, 1607.00133, algorithm 1. Each step draws each sample
with probability q, clips its gradient to norm C, and adds Gaussian noise to the sum of the clipped gradients:

.. math::
    g = \frac{1}{q n} \Big( \sum_{i \in B} g_i \min(1, C / ‖g_i‖_2) + N(0, z^2 C^2 I) \Big)

The divisor is the expected size of a batch, as in the paper: the size that was drawn would tell of single samples.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fed.privacy.clipping import grid_step
from fed.privacy.releases import Release
from fed.vectors.tensors import Tensor

__all__ = ["Inclusion", "SamplePrivacy", "noised_means", "sampling_rate", "task_releases"]

_NUMBERS_AT_ONCE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class SamplePrivacy:
    """Privacy of each of a client's samples in its local steps.

    Args:
        clip: C > 0, the largest L2 norm of a sample's gradient over all parameters that are trained.
        noise_multiplier: z ≥ 0, standard deviation of the noise over C; 0: no noise, and no privacy. Or a function from
            a client's number of samples to its own z.
    """

    clip: float
    noise_multiplier: float | Callable[[int], float]

    def __post_init__(self) -> None:
        """Refuse what is no clip, or no noise."""
        is_noise = callable(self.noise_multiplier) or 0 <= self.noise_multiplier < math.inf
        if not (0 < self.clip < math.inf and is_noise):
            raise ValueError(
                f"clip must be above 0 and noise_multiplier at least 0, got {self.clip} and {self.noise_multiplier}"
            )

    def noise_of(self, samples: int) -> float:
        """Noise multiplier z ≥ 0 of a client.

        Args:
            samples: number of the client's samples, at least 1.
        """
        return self.noise_multiplier(samples) if callable(self.noise_multiplier) else self.noise_multiplier


def sampling_rate(samples: int, batch: int) -> float:
    """Probability q with which each sample is in a batch: min(batch / samples, 1).

    Args:
        samples: number n of the client's samples, at least 1.
        batch: number of samples that a step is to see, ``local.batch_size`` × ``local.accumulate``.

    Example:
        >>> sampling_rate(400, 16), sampling_rate(10, 16)
        (0.04, 1.0)
    """
    return min(batch / samples, 1.0)


def task_releases(samples: int, batch: int, steps: int, privacy: SamplePrivacy) -> dict[Release, int]:
    """Releases of one task of a client: each step is one.

    Args:
        samples: number of the client's samples, at least 1.
        batch: number of samples that a step is to see.
        steps: number of steps of the task.
        privacy: clip and noise of the steps; its noise multiplier is above 0.

    Returns:
        Each release with the number of times that it happens.

    Example:
        >>> task_releases(400, 16, 25, SamplePrivacy(clip=1.0, noise_multiplier=0.8))
        {Release(noise_multiplier=0.8, sampling=0.04, skellam_l2=None, skellam_l1=None): 25}
    """
    rate = sampling_rate(samples, batch)
    return {Release(noise_multiplier=privacy.noise_of(samples), sampling=rate): steps} if steps else {}


class Inclusion:
    """Poisson sampling: the samples of one step after another, each drawn by itself with probability q.

    Args:
        stream: the client's stream for these draws.
        samples: number n of its samples.
        rate: q in (0, 1]; for 1 nothing is drawn.
        steps: number of steps.

    Example:
        >>> inclusion = Inclusion(np.random.default_rng(0), samples=6, rate=0.5, steps=2)
        >>> inclusion.next().tolist(), inclusion.next().tolist()
        ([1, 2, 3], [5])
    """

    def __init__(self, stream: np.random.Generator, samples: int, rate: float, steps: int) -> None:
        self._stream = stream
        self._samples = samples
        self._rate = rate
        self._at_once = max(1, _NUMBERS_AT_ONCE // samples)
        self._left = steps
        self._drawn: list[NDArray[np.int64]] = []

    def next(self) -> NDArray[np.int64]:
        """Places of the next step's samples, in ascending order."""
        if self._rate >= 1:
            return np.arange(self._samples)
        if not self._drawn:
            count = min(self._at_once, max(self._left, 1))
            self._left -= count
            # In rows, so that the draws are the same however many steps are drawn at once.
            drawn_LE = self._stream.random((count, self._samples)) < self._rate
            self._drawn = [row_E.nonzero()[0] for row_E in drawn_LE[::-1]]
        return self._drawn.pop()


def noised_means(
    sums_KQ: Tensor, normals_KQ: Tensor | None, expected_K1: Tensor, *, clip: float, noise_K1: Tensor
) -> Tensor:
    """Means of clipped gradients with noise.

    Each sum with its noise is rounded onto the grid of :func:`fed.privacy.clipping.grid_step`, in float64: the low bits
    of a floating-point sum would tell what was added.

    Args:
        sums_KQ: each client's sum of clipped gradients.
        normals_KQ: draws of the standard normal distribution, in float64, which are overwritten; None without noise.
        expected_K1: each client's expected number of samples in a batch, in float64.
        clip: C > 0.
        noise_K1: each client's noise multiplier z, in float64.
    """
    if normals_KQ is None:
        return sums_KQ / expected_K1.to(sums_KQ.dtype)
    grid = grid_step(clip)
    units_KQ = normals_KQ.mul_(noise_K1 * clip / grid)
    units_KQ.add_(sums_KQ, alpha=1 / grid).round_()
    return units_KQ.mul_(grid / expected_K1).to(sums_KQ.dtype)
