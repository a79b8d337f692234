"""DeepSqueeze: gossip by compressed models whose errors are sent with the next ones.

Tang et al., "DeepSqueeze: decentralization meets error-compensated compression", 2019, arXiv 1907.07346.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from fed.aggregators.peer_rule import Descend, Mix, PeerRule
from fed.vectors.tensors import Tensor, torch

__all__ = ["DeepSqueeze", "State"]


class State(NamedTuple):
    """Every peer's model, and δ, the error of its last message."""

    model_NP: Tensor
    error_NP: Tensor


@dataclass(frozen=True, kw_only=True)
class DeepSqueeze(PeerRule):
    r"""Peers exchange encoded models with the errors of their last messages (Tang et al. 2019, 1907.07346).

    .. math::
        v_i = x_i - η g_i + δ_i, \qquad δ_i ← v_i - C(v_i), \qquad
        x_i ← x_i - η g_i + γ \sum_j (W - I)_{ij} C(v_j)

    C is the experiment's ``uplink``; without one, and with γ = 1, this is D-PSGD, adapt then combine. Neighbours keep
    nothing of each other, so that the graph may change. Whole models are encoded, and not differences that vanish: with
    a codec that leaves much out, peers agree less than under CHOCO.

    Args:
        consensus_step: γ in (0, 1], the pull between neighbours. Too large a one diverges: 0.02 suits a
            codec that keeps a hundredth of the values, 0.05 one that keeps a tenth, 1 none.
    """

    compresses: ClassVar[bool] = True

    consensus_step: Annotated[float, Field(gt=0, le=1)] = 0.02

    def init(self, params_NP: Tensor) -> State:
        """All peers start from one model, without an error."""
        return State(params_NP, torch.zeros_like(params_NP))

    def joined(self, state: State) -> State:
        """Another's model, without the error of its messages."""
        return state._replace(error_NP=torch.zeros_like(state.error_NP))

    def step(self, state: State, descend: Descend, mix: Mix) -> State:
        """Local steps, and one exchange of encoded models."""
        x_NP = descend(state.model_NP)
        v_NP = x_NP + state.error_NP
        encoded_NP, mixed_NP = mix.encoded(v_NP)
        return State(x_NP + self.consensus_step * (mixed_NP - encoded_NP), v_NP - encoded_NP)
