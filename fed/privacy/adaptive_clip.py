"""Adaptive clip: one that follows a quantile of the norms of clients' messages, found with noise.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from dataclasses import dataclass

from fed.errors import InvalidExperiment
from fed.privacy.noise import NoiseSource
from fed.privacy.noisy_sum import NoisySum
from fed.storage.checkpoints import Tree
from fed.vectors.tensors import Tensor

__all__ = ["AdaptiveClip", "check_cohort"]

_RATE = 0.2  # η
_BITS_NOISE = 20.0  # m/σ_b
_STEP = 2.0**-24  # of the noise of the bits: low bits of their sum say nothing of it
_MOST_STEPS = 60.0  # of a factor of e: neither clip nor its square leaves the range of numbers


def check_cohort(noise_multiplier: float, expected: float) -> None:
    """Refuse cohorts so small that the noise of the quantile would need more than all of the noise.

    Args:
        noise_multiplier: z > 0.
        expected: m > 0, expected size of the cohort.

    Raises:
        InvalidExperiment: if m ≤ 10 z.
    """
    least = _BITS_NOISE / 2 * noise_multiplier
    if expected <= least:
        raise InvalidExperiment(
            f"privacy.clip adaptive needs more than {least:g} clients a round, 10 times the noise multiplier, got "
            f"{expected:g}: raise rounds.cohort, or give a number as the clip"
        )


@dataclass(eq=False)
class AdaptiveClip:
    r"""Noise on the sum of messages, and the clip of the next round (Andrew et al. 2021, 1905.03871).

    .. math::
        \tilde b = \frac{1}{m} \left( \sum_k (b_k - \tfrac12) + N(0, σ_b²) \right) + \tfrac12, \qquad
        b_k = 1[‖u_k‖ ≤ C], \qquad C ← C \exp(-η (\tilde b - γ))

    with η = 0.2 and σ_b = m/20. The sum of the messages has noise of z_Δ C, so that both releases together cost what z
    alone would:

    .. math:: z_Δ = (z^{-2} - (2 σ_b)^{-2})^{-1/2}

    Attributes:
        clip: C, the clip of the round.

    Args:
        clip: C of the first round.
        quantile: γ in (0, 1), the share of messages that are not to be clipped.
        noise_multiplier: z > 0.
        source: source of the noise.
    """

    clip: float
    quantile: float
    noise_multiplier: float
    source: NoiseSource

    def __post_init__(self) -> None:
        """Begin before the first round."""
        self._first = self._before = self.clip

    def __call__(self, mean_M: Tensor, clients: int, expected: float, number: int, attempt: int = 0) -> Tensor:
        """The mean as it may be published, without the bits, in float64; the clip moves.

        Args:
            mean_M: mean of the messages that count, each on the grid and with its bit, b − ½, behind it.
            clients: |S| ≥ 0, number of these messages.
            expected: m > 0, expected size of the cohort.
            number: number of the round, from 1.
            attempt: number of other sums that the round has released before, each with noise of its own.
        """
        if attempt:
            self.clip = self._before  # nothing of the attempts before is handed out
        self._before = self.clip
        check_cohort(self.noise_multiplier, expected)
        deviation = expected / _BITS_NOISE
        of_sum = (self.noise_multiplier**-2 - (2 * deviation) ** -2) ** -0.5
        noisy_sum = NoisySum(clip=self.clip, noise_multiplier=of_sum, source=self.source)
        released_M = noisy_sum(mean_M[:-1], clients, expected=expected, number=number, attempt=attempt)
        # Halves, whose sum is exact.
        bits = round(2 * float(mean_M[-1]) * clients) / 2
        again = [attempt] if attempt else []
        normal = float(self.source.generator("of the bits", number, *again).standard_normal())
        noise = _STEP * round(deviation * normal / _STEP)
        share = (bits + noise) / expected + 0.5
        moved = self.clip * math.exp(-_RATE * (share - self.quantile))
        self.clip = min(max(moved, self._first * math.exp(-_MOST_STEPS)), self._first * math.exp(_MOST_STEPS))
        return released_M

    def state(self) -> Tree:
        """State for a checkpoint."""
        return {"clip": self.clip}

    def restore(self, state: Tree) -> None:
        """Resume from what :meth:`state` wrote down."""
        self.clip = state["clip"]
