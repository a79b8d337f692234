"""Decentralised parallel stochastic gradient descent.

Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NeurIPS 2017, arXiv 1705.09056.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fed.aggregators.peer_rule import Descend, Mix, PeerRule
from fed.vectors.tensors import Tensor

__all__ = ["DPSGD", "State"]


class State(NamedTuple):
    """Every peer's model."""

    model_NP: Tensor


@dataclass(frozen=True, kw_only=True)
class DPSGD(PeerRule):
    r"""Peers descend on their own data and average with their neighbours (Lian et al. 2017, 1705.09056).

    .. math::
        \text{combine, then adapt: } X ← W X - η G(X), \qquad \text{adapt, then combine: } X ← W (X - η G(X))

    Where a peer takes several local steps between two exchanges, −η G(X) is what they add up to. On a complete graph,
    adapt-then-combine with equal samples is FedAvg with all clients in every round.

    Args:
        order: order of local steps and exchange. adapt_then_combine: neighbours see a round's local steps in that
            round; combine_then_adapt, as in the paper: they see them in the next round, so that communication can
            overlap with computation.
    """

    order: Literal["combine_then_adapt", "adapt_then_combine"] = "adapt_then_combine"

    def init(self, params_NP: Tensor) -> State:
        """All peers start from one model."""
        return State(params_NP)

    def step(self, state: State, descend: Descend, mix: Mix) -> State:
        """Local steps and one exchange."""
        x_NP = state.model_NP
        if self.order == "adapt_then_combine":
            return State(mix(descend(x_NP)))
        # Steps go from x, not from W x, so that they need not wait for the exchange.
        return State(mix(x_NP) + (descend(x_NP) - x_NP))
