"""CHOCO-SGD: gossip by compressed differences.

Koloskova, Stich & Jaggi, "Decentralized stochastic optimization and gossip algorithms with compressed communication",
ICML 2019, arXiv 1902.00340, algorithm 2.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from fed.aggregators.peer_rule import Descend, Mix, PeerRule
from fed.vectors.tensors import Tensor

__all__ = ["CHOCO", "State"]


class State(NamedTuple):
    """Every peer's model, and x̂, the copy of it that its neighbours have."""

    model_NP: Tensor
    hat_NP: Tensor


@dataclass(frozen=True, kw_only=True)
class CHOCO(PeerRule):
    r"""Peers exchange encoded differences from the copies that neighbours have (Koloskova et al. 2019, 1902.00340).

    .. math::
        x_i ← x_i - η g_i, \qquad \hat x_i ← \hat x_i + C(x_i - \hat x_i), \qquad
        x_i ← x_i + γ \sum_j W_{ij} (\hat x_j - \hat x_i)

    C is the experiment's ``uplink``; without one, and with γ = 1, this is D-PSGD, adapt then combine. A codec that is
    no contraction is scaled message by message so that it becomes one, as under error feedback. The graph must not
    change, for neighbours keep each other's x̂, which begins as the model that all peers start from, and in the paper as
    0. A peer that was away gets the differences that it missed with the next ones, or x̂ itself where that has fewer
    bytes.

    Args:
        consensus_step: γ in (0, 1], the pull between neighbours. Too large a one diverges: 0.05 suits a
            codec that keeps a hundredth of the values, 0.2 one that keeps a tenth, 1 none.
    """

    compresses: ClassVar[bool] = True
    needs_fixed_graph: ClassVar[bool] = True

    consensus_step: Annotated[float, Field(gt=0, le=1)] = 0.05

    def init(self, params_NP: Tensor) -> State:
        """All peers start from one model, which their neighbours know."""
        return State(params_NP, params_NP)

    def step(self, state: State, descend: Descend, mix: Mix) -> State:
        """Local steps, and one exchange of differences."""
        x_NP = descend(state.model_NP)
        hat_NP, mixed_NP = mix.differences(x_NP, state.hat_NP)
        # From the copies, not from the models: only then do the pulls of two neighbours cancel in the mean.
        return State(x_NP + self.consensus_step * (mixed_NP - hat_NP), hat_NP)
