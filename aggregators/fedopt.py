"""Federated averaging with an adaptive optimiser on the server: FedAdagrad, FedAdam and FedYogi.

Reddi et al., "Adaptive federated optimization", ICLR 2021, arXiv 2003.00295, algorithm 2.
"""

from dataclasses import dataclass

from pydantic import PositiveFloat

from fed.aggregators.transforms import Adagrad, Adam, Composed, Scale, Transform, Yogi
from fed.config.hyperparameters import DecayRate

__all__ = ["FedAdagrad", "FedAdam", "FedYogi"]


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
        beta1: β₁ in [0, 1), the decay of the first moment; the paper's FedAdagrad has 0.
        tau: τ > 0, added to √v: steps of parameters whose updates are well below τ are not made longer. The
            authors recommend 0.001 to start with.
    """

    server_lr: PositiveFloat = 0.1
    beta1: DecayRate = 0.0
    tau: PositiveFloat = 1e-3

    def transforms(self) -> tuple[Transform, ...]:
        """Adagrad, then the server's learning rate."""
        return Adagrad(beta1=self.beta1, tau=self.tau), Scale(factor=self.server_lr)


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
        beta1: β₁ in [0, 1), the decay of the first moment; 0.9 in the paper.
        beta2: β₂ in [0, 1), the decay of the second moment; 0.99 in the paper.
        tau: τ > 0, added to √v: steps of parameters whose updates are well below τ are not made longer. The
            authors recommend 0.001 to start with.
    """

    server_lr: PositiveFloat = 0.03
    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.99
    tau: PositiveFloat = 1e-3

    def transforms(self) -> tuple[Transform, ...]:
        """Adam, then the server's learning rate."""
        return Adam(beta1=self.beta1, beta2=self.beta2, tau=self.tau), Scale(factor=self.server_lr)


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
