"""Gradient tracking: each peer follows an estimate of all peers' mean gradient.

Pu & Nedić, "Distributed stochastic gradient tracking methods", 2018, arXiv 1805.11454.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fed.aggregators.peer_rule import Descend, Mix, PeerRule
from fed.vectors.tensors import Tensor, torch

__all__ = ["GradientTracking", "State"]


class State(NamedTuple):
    """Every peer's model, its estimate of the mean gradient, and its last own gradient."""

    model_NP: Tensor
    tracker_NP: Tensor
    gradient_NP: Tensor


@dataclass(frozen=True, kw_only=True)
class GradientTracking(PeerRule):
    r"""Steps along a mixed estimate of the mean gradient (Pu & Nedić 2018, 1805.11454).

    .. math:: X ← W (X - η Y), \qquad Y ← W Y + G(X_{new}) - G(X_{old})

    The trackers' mean is the mean gradient, so that unequal data leave no bias. A round sends two vectors of the
    model's length in one message. The first round takes the first gradients, and moves nothing.

    Conserved is Σ Y = Σ G over the members. One that goes for good takes its Y − G along, and the mean of the others'
    trackers would be wrong by it for ever: they begin anew, each with Y = G of its last round.
    """

    needs_gradient: ClassVar[bool] = True
    conserves_sum: ClassVar[bool] = True

    def init(self, params_NP: Tensor) -> State:
        """All peers start from one model, with trackers of 0."""
        return State(params_NP, torch.zeros_like(params_NP), torch.zeros_like(params_NP))

    def joined(self, state: State) -> State:
        """Another's model, with trackers of 0: the sum of all trackers stays that of all gradients."""
        return self.init(state.model_NP)

    def renewed(self, state: State) -> State:
        """Trackers of own gradients alone."""
        return state._replace(tracker_NP=state.gradient_NP)

    def step(self, state: State, descend: Descend, mix: Mix) -> State:
        """One exchange, and the gradient at the mixed model."""
        moved_NP, tracked_NP = mix(state.model_NP - descend.lr * state.tracker_NP, state.tracker_NP)
        # At the mixed model, as in the paper: its local steps are measured, and not taken.
        gradient_NP = (moved_NP - descend(moved_NP)) / descend.lr
        return State(moved_NP, tracked_NP + gradient_NP - state.gradient_NP, gradient_NP)
