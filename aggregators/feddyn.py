"""Dynamic regularisation: each client's loss is tilted until its minimum is that of the mean loss.

Acar et al., "Federated learning based on dynamic regularization", ICLR 2021, arXiv 2111.04263.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from pydantic import PositiveFloat

from fed.aggregators.base import Aggregator, Broadcast, ClientWork, Reduced, Report
from fed.config.compatibility import Feature, Term
from fed.vectors.tensors import Tensor, torch

__all__ = ["ClientState", "FedDyn", "State"]


class State(NamedTuple):
    """Server state."""

    model_P: Tensor
    tilt_P: Tensor  # h, the mean of all clients' g_i


class ClientState(NamedTuple):
    """Client state, kept from task to task."""

    gradient_P: Tensor  # g_i, the gradient where its last task ended


@dataclass(frozen=True, kw_only=True)
class FedDyn(Aggregator):
    r"""Clients minimise their loss tilted by their own past gradients (Acar et al. 2021, 2111.04263).

    .. math::
        y_i ≈ \arg\min_y \; f_i(y) - ⟨g_i, y⟩ + \frac{α}{2} ‖y - x‖^2, \qquad g_i ← g_i - α (y_i - x)

    .. math::
        h ← h - α \frac{1}{N} \sum_{i ∈ S} (y_i - x), \qquad x ← \frac{1}{|S|} \sum_{i ∈ S} y_i - h / α

    On the right-hand sides x is the model that the task came with. The experiment's local steps approach the minimum,
    each along ∇f_i(y) − g_i + α (y − x). Where all rest, h is 0 and x a stationary point of the mean loss: clients
    count alike, however many samples they hold.

    A message is an update, as FedAvg's.

    Args:
        alpha: α > 0, the pull towards x; the paper tries 0.1, 0.01 and 0.001. In the long run the model moves by 1/α
            gradients. Where K local steps stop far from the minimum, α K η ≪ 1, h acts as a momentum of 1 − α K η, so
            a small α overshoots and swings.
    """

    linear_client_state: ClassVar[bool] = True
    update_alone: ClassVar[bool] = True

    alpha: PositiveFloat = 0.1

    def needs(self) -> Sequence[Term]:
        """Features of its base, and a mean over those that answered: each step takes the whole of −h/α."""
        why = "because every step of the model takes the whole of −h/α"
        return [*super().needs(), Term(Feature.MEAN_OF_ANSWERS, "choose scaffold", why)]

    def init(self, params_P: Tensor) -> State:
        """The model, and a tilt of zero."""
        return State(params_P, torch.zeros_like(params_P))

    def init_client(self, params_P: Tensor) -> ClientState:
        """A gradient of zero."""
        return ClientState(torch.zeros_like(params_P))

    def correct(
        self, gradient_P: Tensor, x_P: Tensor, anchor_P: Tensor, client_state: ClientState, broadcast: Broadcast
    ) -> Tensor:
        """∇f − g_i + α (y − x)."""
        return gradient_P - client_state.gradient_P + self.alpha * (x_P - anchor_P)

    def report(self, work: ClientWork) -> Report:
        """The update, weighted alike; the client keeps g_i − α (y − x)."""
        kept = ClientState(work.client_state.gradient_P - self.alpha * work.update_KP)
        # Clients count alike, as in the paper: h is a mean over clients, and so must be the update that it corrects.
        return Report((work.update_KP,), torch.ones_like(work.samples_K1), kept)

    def resized(self, state: State, before: int, after: int) -> State:
        """Rescale h: the gradients of new clients are zero."""
        return state._replace(tilt_P=state.tilt_P * (before / after))

    def apply(self, state: State, reduced: Reduced) -> State:
        """Tilt against the sum of the updates; then go to the mean model, and against the tilt."""
        share = reduced.clients / reduced.population
        # H is a mean over all clients; a silent one adds nothing.
        tilt_P = state.tilt_P - self.alpha * share * reduced.update_P
        return State(state.model_P + reduced.update_P - tilt_P / self.alpha, tilt_P)
