"""DiLoCo: many local steps of AdamW, and Nesterov's momentum on their sum.

Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023, arXiv 2311.08105, algorithm
1.
"""

from dataclasses import dataclass

from pydantic import PositiveFloat

from fed.aggregators.transforms import Composed, Nesterov, Scale, Transform
from fed.config.hyperparameters import DecayRate

__all__ = ["DiLoCo"]


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Composed):
    r"""The mean update is the gradient of an outer Nesterov SGD (Douillard et al. 2023, 2311.08105).

    .. math:: v ← μ v + Δ, \qquad x ← x + η_o (Δ + μ v), \qquad Δ = \sum_{i ∈ S} p_i (y_i - x)

    This is ``torch.optim.SGD(nesterov=True)`` with the outer gradient −Δ. It keeps the model one momentum step ahead,
    where the next round starts: x is W_g of :class:`fed.aggregators.bmuf.BMUF` with ``nesterov``, η = μ and ζ = η_o,
    whose own W lies η D behind it.

    The local steps are the experiment's; the paper's are ``optimizer: adamw`` and ``steps: 500``.

    Args:
        outer_lr: η_o > 0, the outer learning rate; 0.7 in the paper.
        outer_momentum: μ in [0, 1), the outer momentum; 0.9 in the paper. With μ = 0 and η_o = 1 it is FedAvg.
    """

    outer_lr: PositiveFloat = 0.7
    outer_momentum: DecayRate = 0.9

    def transforms(self) -> tuple[Transform, ...]:
        """Nesterov's momentum, then the outer learning rate."""
        return Nesterov(momentum=self.outer_momentum), Scale(factor=self.outer_lr)
