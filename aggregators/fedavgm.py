"""Federated averaging with server momentum.

Hsu, Qi & Brown, "Measuring the effects of non-identical data distribution for federated visual classification", 2019,
arXiv 1909.06335.
"""

from dataclasses import dataclass

from pydantic import PositiveFloat

from fed.aggregators.transforms import Composed, Momentum, Scale, Transform
from fed.config.hyperparameters import DecayRate

__all__ = ["FedAvgM"]


@dataclass(frozen=True, kw_only=True)
class FedAvgM(Composed):
    r"""The mean update gathers momentum on the server (Hsu et al. 2019, 1909.06335).

    .. math:: v ← β v + Δ, \qquad x ← x + η_g v, \qquad Δ = \sum_{i ∈ S} p_i (y_i - x)

    In the long run a constant Δ moves the model by η_g / (1 − β) times Δ a round. With β = 0 and η_g = 1 it is FedAvg.

    Args:
        momentum: β in [0, 1), the share of the velocity that stays each round.
        server_lr: η_g > 0, the server's learning rate.
    """

    momentum: DecayRate = 0.9
    server_lr: PositiveFloat = 1.0

    def transforms(self) -> tuple[Transform, ...]:
        """Momentum, then the server's learning rate."""
        return Momentum(momentum=self.momentum), Scale(factor=self.server_lr)
