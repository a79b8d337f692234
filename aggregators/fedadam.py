"""Federated averaging with Adam on the server.

Reddi et al., "Adaptive federated optimization", ICLR 2021, arXiv 2003.00295, algorithm 2.
"""

from dataclasses import dataclass

from pydantic import PositiveFloat

from fed.aggregators.transforms import Adam, Composed, Scale, Transform
from fed.config.hyperparameters import DecayRate

__all__ = ["FedAdam"]


@dataclass(frozen=True, kw_only=True)
class FedAdam(Composed):
    r"""Each parameter's step is divided by how large its updates have been of late (Reddi et al. 2021, 2003.00295).

    .. math::
        m ← β_1 m + (1 - β_1) Δ, \qquad v ← β_2 v + (1 - β_2) Δ^2, \qquad
        x ← x + η_g \, m / (\sqrt v + τ)

    Δ = Σ p_i (y_i − x) is FedAvg's mean update, m begins at 0 and v at τ².
    The bias that this gives early moments is not corrected.

    Args:
        server_lr: η_g > 0, about how far each parameter moves in a round at most. The paper tunes it together with τ,
            and its best values for different tasks lie orders of magnitude apart.
        beta1: β₁ in [0, 1), of the first moment; 0.9 in the paper.
        beta2: β₂ in [0, 1), of the second moment; 0.99 in the paper.
        tau: τ > 0, how adaptive: steps of parameters whose updates are well below τ are not made longer. The
            authors recommend 0.001 to start with.
    """

    server_lr: PositiveFloat = 0.03
    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.99
    tau: PositiveFloat = 1e-3

    def transforms(self) -> tuple[Transform, ...]:
        """Adam, then the server's learning rate."""
        return Adam(beta1=self.beta1, beta2=self.beta2, tau=self.tau), Scale(factor=self.server_lr)
