"""Stochastic gradient push: push-sum on graphs whose messages go one way.

Assran et al., "Stochastic gradient push for distributed deep learning", ICML 2019, arXiv 1811.10792.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fed.aggregators.peer_rule import Descend, Mix, PeerRule
from fed.errors import RunFailed
from fed.vectors.tensors import Tensor, torch

__all__ = ["SGP", "State"]

_LEAST_WEIGHT = 2.0**-30  # a peer of this weight takes steps that are a billion times too long


class State(NamedTuple):
    """Every peer's model z = x / w, its numerator and its weight."""

    model_NP: Tensor
    x_NP: Tensor
    w_N1: Tensor


@dataclass(frozen=True, kw_only=True)
class SGP(PeerRule):
    r"""Push-sum: sums and weights travel together, and their ratio is the mean (Assran et al. 2019, 1811.10792).

    .. math:: x ← P (x - η g(z)), \qquad w ← P w, \qquad z = x / w

    The columns of P add up to 1, so that Σ w = n always, on directed graphs and on those that change. Messages must
    lead from every peer to every other, over some rounds: a step of peer i moves z_i by η g/w_i, and w_i falls to 0
    where nothing comes in. That happens behind a peer of a directed ring whose messages are always late. Such a peer
    keeps the weight that it would have sent: none is lost, but it gathers there. The run ends with an error once a
    weight is below 2⁻³⁰.

    A member that goes for good takes its x and w along. The others still agree on Σ x / Σ w, but they are n, and Σ w is
    not: each step would move their mean by n / Σ w of itself. They begin anew, each with its own z and a weight of 1.
    """

    corrects_weights: ClassVar[bool] = True
    conserves_sum: ClassVar[bool] = True

    def init(self, params_NP: Tensor) -> State:
        """All peers start from one model, with a weight of 1."""
        return State(params_NP, params_NP, torch.ones_like(params_NP[:, :1]))

    def joined(self, state: State) -> State:
        """Another's model with a weight of 1."""
        return self.init(state.model_NP)

    def renewed(self, state: State) -> State:
        """Own models, each with a weight of 1."""
        return self.init(state.model_NP)

    def step(self, state: State, descend: Descend, mix: Mix) -> State:
        """Local steps from z, and one exchange.

        Raises:
            RunFailed: if so little weight is left to a peer that its steps have no bound.
        """
        z_NP = state.model_NP
        # Gradients are taken at z, the unbiased model, and steps are added to x, which is what mixing conserves.
        x_NP, w_N1 = mix(state.x_NP + (descend(z_NP) - z_NP), state.w_N1)
        if (least := float(w_N1.min())) < _LEAST_WEIGHT:
            raise RunFailed(
                f"sgp needs messages that reach every peer, got a push-sum weight of {least:.2g}, as where a neighbour "
                "is always late or away: raise rounds.deadline_s, or choose an undirected topology"
            )
        return State(x_NP / w_N1, x_NP, w_N1)
