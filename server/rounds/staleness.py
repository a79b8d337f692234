"""Staleness discounts: factors in (0, 1] of the weight of an update that started from an older model.

An update's staleness is the number of versions between the model that it started from and the present one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from fed.config.hyperparameters import Hyperparameters

__all__ = ["ConstantStaleness", "Hinge", "Polynomial", "Staleness"]


@dataclass(frozen=True, kw_only=True)
class Staleness(Hyperparameters, ABC):
    """Discount by staleness: one for a fresh update, and never more for a staler one."""

    @property
    def discounts(self) -> bool:
        """True if some updates count less than others."""
        return True

    @abstractmethod
    def weight(self, staleness: int) -> float:
        """Factor s(τ) of an update's weight.

        Args:
            staleness: τ ≥ 0, versions.

        Returns:
            Factor in (0, 1], as far as float64 tells it from 0.
        """


@dataclass(frozen=True, kw_only=True)
class ConstantStaleness(Staleness):
    """Full weight at any staleness: s = 1 (Xie et al. 2019, 1903.03934)."""

    @property
    def discounts(self) -> bool:
        """False: every update counts in full."""
        return False

    def weight(self, staleness: int) -> float:
        """One."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Polynomial(Staleness):
    r"""Weight falls with staleness by a power (Xie et al. 2019, 1903.03934).

    .. math:: s(τ) = (τ + 1)^{-a}

    With a = 0.5 it is FedBuff's :math:`1 / \sqrt{1 + τ}` (Nguyen et al. 2022, 2106.06639).

    Args:
        exponent: power a ≥ 0; with 0 every update counts in full.

    Example:
        >>> [round(Polynomial().weight(staleness), 3) for staleness in range(5)]
        [1.0, 0.707, 0.577, 0.5, 0.447]
    """

    exponent: NonNegativeFloat = 0.5

    @property
    def discounts(self) -> bool:
        """True unless the exponent is 0."""
        return self.exponent > 0

    def weight(self, staleness: int) -> float:
        """Power of one more than the staleness."""
        return float((staleness + 1.0) ** -self.exponent)


@dataclass(frozen=True, kw_only=True)
class Hinge(Staleness):
    r"""Full weight up to a staleness, and a hyperbola beyond it (Xie et al. 2019, 1903.03934).

    .. math:: s(τ) = 1 \text{ if } τ ≤ b, \text{ else } 1 / (a (τ - b) + 1)

    Args:
        slope: steepness a > 0 with which s begins to fall beyond the hinge.
        grace: staleness b ≥ 0, in versions of the model, up to which an update counts in full.

    Example:
        >>> [round(Hinge().weight(staleness), 3) for staleness in range(3, 8)]
        [1.0, 1.0, 0.091, 0.048, 0.032]
    """

    slope: PositiveFloat = 10.0
    grace: NonNegativeInt = 4

    def weight(self, staleness: int) -> float:
        """One, and behind the hinge a hyperbola that begins at one."""
        return 1 / (self.slope * max(staleness - self.grace, 0) + 1)
