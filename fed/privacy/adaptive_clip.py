"""Adaptive clip: one that follows a quantile of the norms of clients' messages, found with noise.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from dataclasses import dataclass

from fed.errors import InvalidExperiment
from fed.privacy.clipping import LARGEST_CLIP, SMALLEST_CLIP, joint_norm
from fed.storage.checkpoints import Tree
from fed.vectors.tensors import Tensor

__all__ = ["LARGEST_WEIGHT", "SMALLEST_WEIGHT", "AdaptiveClip", "bit_weight_for", "check_share"]

SMALLEST_WEIGHT = 0.01
"""Smallest β: the bit takes a forty-thousandth of what a release costs, and less would gain nothing."""

LARGEST_WEIGHT = 2.0
"""Largest β: the bit takes half of what a release costs."""

_RATE = 0.2  # η
_NOISE_OF_SHARE = 1 / 20
_MOST_NOISE_OF_SHARE = 1 / 5
_FURTHEST_SHARE = 1.0  # beyond 0 and 1: a client that lies moves the clip by no more than that


def bit_weight_for(noise_multiplier: float, expected: float) -> float:
    r"""Weight of the bit with which the noise of the share has a standard deviation of a twentieth.

    .. math:: \frac{z}{β} \sqrt{1 + \tfrac{β^2}{4}} = \frac{m}{20}

    It is the largest weight where that is not enough, and the smallest where less would do.

    Args:
        noise_multiplier: z > 0 of the sum of a round.
        expected: m > 0, expected size of the cohort.

    Example:
        >>> round(bit_weight_for(1.0, 100), 4), bit_weight_for(1.0, 10)
        (0.201, 2.0)
    """
    left = (expected * _NOISE_OF_SHARE) ** 2 - noise_multiplier**2 / 4
    if left <= (noise_multiplier / LARGEST_WEIGHT) ** 2:
        return LARGEST_WEIGHT
    return max(noise_multiplier / math.sqrt(left), SMALLEST_WEIGHT)


def check_share(noise_multiplier: float, bit_weight: float, expected: float) -> None:
    """Refuse cohorts so small that the share of messages which are not clipped is lost in its noise.

    Args:
        noise_multiplier: z > 0 of the sum of a round.
        bit_weight: β > 0.
        expected: m > 0, expected size of the cohort.

    Raises:
        InvalidExperiment: if the noise of the share has a standard deviation above a fifth.
    """
    noise = noise_multiplier * joint_norm(bit_weight) / (bit_weight * expected)
    if noise > _MOST_NOISE_OF_SHARE:
        raise InvalidExperiment(
            "privacy.clip adaptive follows the share of messages that are not clipped, whose noise must have a "
            f"standard deviation of at most {_MOST_NOISE_OF_SHARE:g}, got {noise:.3g} with {expected:g} clients a "
            "round: raise rounds.cohort, lower the noise, or give a number as the clip"
        )


@dataclass(eq=False)
class AdaptiveClip:
    r"""Clip of the next round, by the noisy share of messages that were not clipped (Andrew et al. 2021, 1905.03871).

    .. math:: \tilde b = \tfrac12 + \frac{1}{m} \sum_k (b_k - \tfrac12) + \text{noise}, \qquad b_k = 1[‖u_k‖ ≤ C],
        \qquad C ← C \exp(-η (\tilde b - γ))

    with η = 0.2. Messages are sent in units of the round's clip, each with b − ½ behind it. Message and bit are one
    vector, in which the bit has the weight β, and whose noise covers both:

    .. math:: ‖(\tfrac{u}{C}, β (b - \tfrac12))‖ ≤ \sqrt{1 + \tfrac{β^2}{4}} = S

    Noise of standard deviation z S on each number costs what z says. That is the paper's division of the noise between
    two releases, with :math:`z_Δ = z S` and :math:`σ_b = z S / β`, for :math:`z_Δ^{-2} + (2 σ_b)^{-2} = z^{-2}`.

    Attributes:
        clip: C, the clip of the round.

    Args:
        clip: C of the first round.
        quantile: γ in (0, 1), the share of messages that are not to be clipped.
    """

    clip: float
    quantile: float

    def __call__(self, released_M: Tensor) -> Tensor:
        """The mean without the share, in float64; the clip moves.

        Args:
            released_M: mean of the messages in units of the clip, with its noise, and the mean of b − ½ behind it.
        """
        share = min(max(float(released_M[-1]) + 0.5, -_FURTHEST_SHARE), 1 + _FURTHEST_SHARE)
        mean_M = released_M[:-1] * self.clip
        moved = self.clip * math.exp(-_RATE * (share - self.quantile))
        self.clip = min(max(moved, SMALLEST_CLIP), LARGEST_CLIP)
        return mean_M

    def state(self) -> Tree:
        """State for a checkpoint."""
        return {"clip": self.clip}

    def restore(self, state: Tree) -> None:
        """Resume from what :meth:`state` wrote down."""
        self.clip = state["clip"]
