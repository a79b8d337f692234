"""Federated averaging with Yogi on the server.

Reddi et al., "Adaptive federated optimization", ICLR 2021, arXiv 2003.00295, algorithm 2.
"""

from dataclasses import dataclass

from fed.aggregators.fedadam import FedAdam
from fed.aggregators.transforms import Scale, Transform, Yogi

__all__ = ["FedYogi"]


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedAdam):
    r"""Adam, whose second moment moves by no more than the square at hand (Reddi et al. 2021, 2003.00295).

    .. math::
        m ← β_1 m + (1 - β_1) Δ, \qquad v ← v - (1 - β_2) Δ^2 \, \mathrm{sign}(v - Δ^2), \qquad
        x ← x + η_g \, m / (\sqrt v + τ)

    Δ = Σ p_i (y_i − x) is FedAvg's mean update, m begins at 0 and v at τ².
    Where updates become small, v falls by no more than their squares, and steps grow slowly; Adam's grow fast.
    """

    def transforms(self) -> tuple[Transform, ...]:
        """Yogi, then the server's learning rate."""
        return Yogi(beta1=self.beta1, beta2=self.beta2, tau=self.tau), Scale(factor=self.server_lr)
