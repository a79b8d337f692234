"""Asynchronous decentralised SGD: random pairs average while gradients are computed.

Lian et al., "Asynchronous decentralized parallel stochastic gradient descent", ICML 2018, arXiv 1710.06952.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fed.aggregators.peer_rule import Descend, Mix, PeerRule
from fed.topology.changing import random_matching
from fed.vectors.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    import networkx as nx

__all__ = ["ADPSGD", "State"]


class State(NamedTuple):
    """Every peer's model."""

    model_NP: Tensor


@dataclass(frozen=True, kw_only=True)
class ADPSGD(PeerRule):
    r"""Random pairs average their models, then add the steps from before the average (Lian et al. 2018, 1710.06952).

    .. math:: x_i, x_j ← \frac{x_i + x_j}{2}, \qquad x_i ← x_i - η g_i(\hat x_i)

    Gradients are stale: x̂ is the model before the average, at which a peer began its local steps while another averaged
    with it. A peer waits for its partner and for no other peer, so that pairs of one round may run long after those of
    another. Each peer takes as many rounds as the others; in the paper a fast one takes more, and gradients are then
    older than one average.
    """

    def partners(self) -> "Callable[..., nx.Graph[int]]":
        """Random pairs."""
        return random_matching

    def init(self, params_NP: Tensor) -> State:
        """All peers start from one model."""
        return State(params_NP)

    def step(self, state: State, descend: Descend, mix: Mix) -> State:
        """Local steps, and one exchange of the models before them."""
        x_NP = state.model_NP
        change_NP = descend(x_NP) - x_NP
        # The model from before the steps is mixed: the staleness that the paper is about.
        return State(mix(x_NP) + change_NP)
