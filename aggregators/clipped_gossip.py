"""Clipped gossip: no neighbour moves a peer further than a radius.

He, Karimireddy & Jaggi, "Byzantine-robust decentralized learning via ClippedGossip", 2022, arXiv 2202.01545.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from pydantic import PositiveFloat

from fed.aggregators.peer_rule import Descend, Mix, PeerRule
from fed.vectors.tensors import Tensor

__all__ = ["ClippedGossip", "State"]


class State(NamedTuple):
    """Every peer's model."""

    model_NP: Tensor


@dataclass(frozen=True, kw_only=True)
class ClippedGossip(PeerRule):
    r"""D-PSGD whose differences between neighbours are clipped to a radius (He et al. 2022, 2202.01545).

    .. math:: x_i ← x_i + \sum_j W_{ij} \operatorname{clip}(x_j - x_i, τ), \qquad
        \operatorname{clip}(v, τ) = v \min(1, τ / ‖v‖)

    Where nothing is clipped this is D-PSGD, adapt then combine.

    Args:
        radius: τ > 0, about the distance between honest peers' models.
    """

    radius: PositiveFloat = 1.0

    def init(self, params_NP: Tensor) -> State:
        """All peers start from one model."""
        return State(params_NP)

    def step(self, state: State, descend: Descend, mix: Mix) -> State:
        """Local steps, and one exchange."""
        x_NP = descend(state.model_NP)
        mixed_NP = x_NP.clone()
        for rows_K, weights_K1, theirs_KP in mix.neighbours(x_NP):
            apart_KP = theirs_KP - x_NP[rows_K]
            # Between equal models the quotient is infinite, and becomes 1 as for all near ones.
            shrink_K1 = (self.radius / apart_KP.norm(dim=1, keepdim=True)).clamp(max=1.0)
            mixed_NP[rows_K] += weights_K1 * shrink_K1 * apart_KP
        return State(mixed_NP)
