"""Federated averaging with Adagrad on the server.

Reddi et al., "Adaptive federated optimization", ICLR 2021, arXiv 2003.00295, algorithm 2.
"""

from dataclasses import dataclass

from pydantic import PositiveFloat

from fed.aggregators.transforms import Adagrad, Composed, Scale, Transform
from fed.config.hyperparameters import DecayRate

__all__ = ["FedAdagrad"]


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(Composed):
    r"""Each parameter's step shrinks with the sum of its squared updates (Reddi et al. 2021, 2003.00295).

    .. math::
        m ← β_1 m + (1 - β_1) Δ, \qquad v ← v + Δ^2, \qquad
        x ← x + η_g \, m / (\sqrt v + τ)

    Δ = Σ p_i (y_i − x) is FedAvg's mean update, m begins at 0 and v at τ².
    v only grows, so steps only shrink: good where few parameters get updates, as in embeddings of rare words.

    Args:
        server_lr: η_g > 0, about how far each parameter moves in a round at most. The paper tunes it together with τ,
            and its best values for different tasks lie orders of magnitude apart.
        beta1: β₁ in [0, 1), of the first moment; the paper's FedAdagrad has 0.
        tau: τ > 0, how adaptive: steps of parameters whose updates are well below τ are not made longer. The
            authors recommend 0.001 to start with.
    """

    server_lr: PositiveFloat = 0.1
    beta1: DecayRate = 0.0
    tau: PositiveFloat = 1e-3

    def transforms(self) -> tuple[Transform, ...]:
        """Adagrad, then the server's learning rate."""
        return Adagrad(beta1=self.beta1, tau=self.tau), Scale(factor=self.server_lr)
