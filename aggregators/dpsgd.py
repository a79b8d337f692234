"""Decentralised parallel stochastic gradient descent.

Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NeurIPS 2017, arXiv 1705.09056.
Shapes: P, a peer's parameters; N, all simulated peers.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fed.aggregators.base import Descend, Mix, PeerRule

__all__ = ["DPSGD"]


@dataclass(frozen=True, kw_only=True)
class DPSGD(PeerRule):
    r"""Peers descend on their own data and average with their neighbours (Lian et al. 2017, 1705.09056).

    .. math::
        \text{combine, then adapt: } X ← W X - η G(X), \qquad \text{adapt, then combine: } X ← W (X - η G(X))

    Where a peer takes several local steps between two exchanges, −η G(X) is what they add up to. On a complete graph,
    adapt-then-combine with equal samples is FedAvg with everybody in every round.

    Args:
        order: whether a round's local steps are part of what neighbours see in that round (adapt_then_combine) or only
            in the next (combine_then_adapt, as in the paper: communication can overlap with computation).
    """

    order: Literal["combine_then_adapt", "adapt_then_combine"] = "adapt_then_combine"

    def step(self, x_P: Tensor, descend: Descend, mix: Mix) -> Tensor:
        """Local steps and one exchange."""
        if self.order == "adapt_then_combine":
            return mix(descend(x_P))
        return mix(x_P) + (descend(x_P) - x_P)
