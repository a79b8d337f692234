"""Noise on the sum of clients' messages, added by a coordinator that they trust.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass, field
from typing import Any

from fed.privacy.clipping import grid_step
from fed.privacy.noise import NoiseSource, deviations_in_steps, gaussian_units
from fed.storage.checkpoints import Tree
from fed.vectors.tensors import Tensor

__all__ = ["NoisySum"]


@dataclass(frozen=True)
class NoisySum:
    r"""The mean of a cohort, with noise, over the number of clients that were expected.

    .. math:: \frac{1}{m} \left( \sum_{k ∈ S} u_k + N(0, z² C² I) \right)

    Where the clip moves, a bit follows each message: one noise covers both, as
    :class:`fed.privacy.adaptive_clip.AdaptiveClip` says.

    Args:
        clip: C > 0, largest L2 norm of a message as it is sent.
        noise_multiplier: z > 0.
        source: source of the noise.
        bit_weight: β > 0, weight of the bit behind each message; 0 where there is none.
    """

    clip: float
    noise_multiplier: float
    source: NoiseSource
    bit_weight: float = field(default=0.0, kw_only=True)

    def __call__(self, mean_M: Tensor, clients: int, expected: float, number: int, attempt: int = 0) -> Tensor:
        """The mean as it may be published, in float64.

        Args:
            mean_M: mean of the messages that count, each within the clip; zeros where there are none.
            clients: |S| ≥ 0, number of these messages.
            expected: m > 0, expected size of the cohort.
            number: number of the round, from 1.
            attempt: number of other sums that the round has released before, each with noise of its own.
        """
        step = grid_step(self.clip)
        # Whole numbers from here on. Messages are shorter than the clip by what this rounding may add to one of them.
        units_M = (mean_M * (clients / step)).round_()
        return units_M.add_(self.noise_units(len(mean_M), number, attempt)).mul_(step / expected)

    def noise_units(self, numbers: int, number: int, attempt: int = 0) -> Tensor:
        """Noise of a round, in whole steps of the grid [M].

        Args:
            numbers: M.
            number: number of the round, from 1.
            attempt: number of other sums that the round has released before.
        """
        generator = self.source.generator("of the sum", number, *([attempt] if attempt else []))
        deviation, bit_deviation = deviations_in_steps(self.noise_multiplier, self.clip, self.bit_weight)
        return gaussian_units(generator, numbers, deviation, bit_deviation)

    @property
    def deviation(self) -> float:
        """Standard deviation of independent noise on a message's numbers, in steps of the grid."""
        return deviations_in_steps(self.noise_multiplier, self.clip, self.bit_weight)[0]

    def state(self) -> Tree:
        """State for a checkpoint; None: independent noise has none."""
        return None

    def restore(self, state: Any) -> None:
        """Resume from what :meth:`state` wrote down."""
