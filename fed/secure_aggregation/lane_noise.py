"""Skellam noise that clients add to their lanes, so that the sum promises differential privacy.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["LaneNoise"]

_MOST_UNITS = 2.0**16
"""Largest norm in units: a client's numbers are cut to units far below the noise, and its draws stay exact."""

_ROOM = 9.0
"""Standard deviations of the sum's noise for which there is room: one number in 10¹⁹ wraps."""

_LEAST_UNITS = 16.0
"""Smallest norm of a clip in units: with fewer, most messages would be cut to nothing."""

_LARGEST_RATE = 2.0**62
"""Largest rate of a Poisson distribution whose draws are whole numbers of 64 bits."""

_BELOW = 1 - 2.0**-40  # a scaled row is rounded, and must not be longer than the clip for that


@dataclass(frozen=True)
class LaneNoise:
    r"""Clip and noise of clients whose sum alone is revealed (Agarwal et al. 2021, 2110.04995).

    .. math:: q = \left⌊ \frac{Δ_2}{C} u \min(1, \tfrac{C}{‖u‖}) \right⌋_0 + P_1 - P_2,
        \qquad P_i \sim \operatorname{Poisson}\left( \frac{(z Δ_2)^2}{2 h} \right)

    Numbers are cut towards zero, which makes no message longer. Any h clients together add Skellam noise of variance
    (z Δ₂)², so that it is enough where all others collude or drop out.

    Where the clip moves, the number b − ½ follows a message, ½ or −½. It becomes ±k units, where C has
    :math:`\sqrt{Δ_2^2 - k^2}` of them, so that Δ₂ bounds message and bit together.

    Where the coordinator adds the noise, a client that breaks the protocol could add so much that another's message
    makes the sum wrap, which no noise hides. There messages have half of a lane's range, and :meth:`folded` leads the
    rest of it back to 0.

    Args:
        clip: C > 0, largest L2 norm of a message.
        noise_multiplier: z ≥ 0, standard deviation of the noise of h clients over Δ₂; 0 where they add none.
        least_honest: h ≥ 1, smallest number of honest clients in a sum.
        bit_weight: β > 0, weight of the bit against a clip of 1, cut to whole units; 0 where there is no bit.
    """

    clip: float
    noise_multiplier: float
    least_honest: int
    bit_weight: float = 0.0

    def l2_units(self, levels: int, most_clients: int) -> float:
        """Δ₂, the largest L2 norm of a message in units, with its bit.

        Args:
            levels: largest absolute value that each of so many clients may add to a lane.
            most_clients: largest number of clients in a sum.
        """
        if not self.noise_multiplier:
            return min(levels / 2, _MOST_UNITS)
        noise = self.noise_multiplier / math.sqrt(most_clients * self.least_honest)
        return min(levels / (1 + _ROOM * noise), _MOST_UNITS)

    def folded(self, lanes_M: np.ndarray, l2_units: float, most_clients: int) -> np.ndarray:
        r"""Sums in units: those that no messages have are folded back, where the coordinator has yet to add noise.

        .. math:: \operatorname{sign}(x) \max(\min(|x|, 2 B - |x|), 0), \qquad B = n ⌊Δ_2⌋

        A message moves what is read by no more than its own length, whatever others have added: the function rises and
        falls by one unit a unit, and is 0 where a lane wraps. It is the same whoever drops out: if it followed from the
        number of clients in the sum, one client more would move each number.

        Args:
            lanes_M: sums, signed integers.
            l2_units: Δ₂.
            most_clients: n, largest number of clients in a sum.
        """
        units_M = lanes_M.astype(np.float64)
        if self.noise_multiplier:
            return units_M
        size_M = np.abs(units_M)
        return np.copysign(np.minimum(size_M, np.maximum(2.0 * most_clients * int(l2_units) - size_M, 0.0)), units_M)

    def rate(self, l2_units: float) -> float:
        """Rate of the two Poisson draws of a client's noise.

        Args:
            l2_units: Δ₂.
        """
        return (self.noise_multiplier * l2_units) ** 2 / (2 * self.least_honest)

    def fits(self, l2_units: float) -> bool:
        """True if messages have units enough beside the noise, which can be drawn.

        Args:
            l2_units: Δ₂.
        """
        return l2_units >= _LEAST_UNITS and self.rate(l2_units) <= _LARGEST_RATE

    def bit_units(self, l2_units: float) -> int:
        """k, the units of half a bit; 0 where there is no bit.

        Args:
            l2_units: Δ₂, above 1.
        """
        if not self.bit_weight:
            return 0
        half = self.bit_weight / 2
        return max(math.floor(l2_units * half / math.hypot(1.0, half)), 1)

    def clip_units(self, l2_units: float) -> float:
        """C in units.

        Args:
            l2_units: Δ₂, above 1.
        """
        half_bit = self.bit_units(l2_units)
        return math.sqrt(l2_units**2 - half_bit**2) if half_bit else l2_units

    def units(self, numbers_M: np.ndarray, l2_units: float, generator: np.random.Generator) -> np.ndarray:
        """A message in whole units, clipped, with the client's share of the noise.

        Args:
            numbers_M: finite numbers, and the bit behind them where there is one.
            l2_units: Δ₂.
            generator: generator of this client's noise in this message.
        """
        half_bit = self.bit_units(l2_units)
        message_M = numbers_M[:-1] if half_bit else numbers_M
        with np.errstate(over="ignore"):  # a norm beyond all numbers leaves nothing of a message
            norm = float(np.linalg.norm(message_M))
        scale = _BELOW * min(1.0, self.clip / norm) if norm else 1.0
        units_M = np.trunc(message_M * (scale * self.clip_units(l2_units) / self.clip)).astype(np.int64)
        if half_bit:  # by its sign alone, whatever it is: a message of nothing has 0 there
            units_M = np.append(units_M, half_bit * np.sign(numbers_M[-1]).astype(np.int64))
        rate = self.rate(l2_units)
        size = len(numbers_M)
        return units_M + generator.poisson(rate, size) - generator.poisson(rate, size)
