"""NoLoCo: low-communication training without all-reduce.

Kolehmainen et al., "NoLoCo: no-all-reduce low communication training method for large models", 2025, arXiv 2506.10911.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pydantic import PositiveFloat

from fed.aggregators.peer_rule import Descend, Mix, PeerRule
from fed.config.hyperparameters import DecayRate
from fed.topology.changing import random_matching
from fed.vectors.tensors import Tensor, torch

if TYPE_CHECKING:
    from collections.abc import Callable

    import networkx as nx

__all__ = ["NoLoCo", "State"]


class State(NamedTuple):
    """Every peer's model, and its outer momentum δ."""

    model_NP: Tensor
    momentum_NP: Tensor


@dataclass(frozen=True, kw_only=True)
class NoLoCo(PeerRule):
    r"""Outer momentum of random pairs, which draws their models together (Kolehmainen et al. 2025, 2506.10911).

    .. math:: δ_i ← α δ_i + β \operatorname{mean}(y - x) - γ (x_i - \operatorname{mean}(x)), \qquad x_i ← x_i + δ_i

    The means are over i and its partner, who is another in each round; y are the models after local steps from x. Where
    all peers have one model this is DiLoCo of pairs. A round sends two vectors of the model's length in one message. Of
    an odd number of peers one is alone, and its means are its own.

    Args:
        outer_momentum: α in [0, 1), the share of δ that stays each round; 0.3 in the paper's code.
        outer_lr: β > 0, the outer learning rate; 0.7 in the paper's code.
        consensus_step: γ > 0, the pull between partners; the paper's code has γ = β. Two peers that always meet need
            γ < 2 + 2 α.
    """

    outer_momentum: DecayRate = 0.3
    outer_lr: PositiveFloat = 0.7
    consensus_step: PositiveFloat = 0.7

    def partners(self) -> "Callable[..., nx.Graph[int]]":
        """Random pairs."""
        return random_matching

    def init(self, params_NP: Tensor) -> State:
        """All peers start from one model, at rest."""
        return State(params_NP, torch.zeros_like(params_NP))

    def step(self, state: State, descend: Descend, mix: Mix) -> State:
        """Local steps, and one exchange."""
        x_NP = state.model_NP
        # Both means in one message, since a pair meets once a round.
        change_NP, mean_NP = mix(descend(x_NP) - x_NP, x_NP)
        drawn_NP = self.consensus_step * (x_NP - mean_NP)
        momentum_NP = self.outer_momentum * state.momentum_NP + self.outer_lr * change_NP - drawn_NP
        return State(x_NP + momentum_NP, momentum_NP)
