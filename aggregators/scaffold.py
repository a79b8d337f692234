"""Stochastic controlled averaging: control variates correct each client's steps for its own drift.

Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning", ICML 2020, arXiv 1910.06378,
algorithm 1 with option II.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from pydantic import PositiveFloat

from fed.aggregators.base import Aggregator, Broadcast, ClientWork, Reduced, Report
from fed.config.experiment import Local
from fed.errors import InvalidExperiment
from fed.vectors.tensors import Tensor, torch

__all__ = ["ClientState", "Scaffold", "State"]


class State(NamedTuple):
    """Server state."""

    model_P: Tensor
    control_P: Tensor  # c, the mean of all clients' controls


class ClientState(NamedTuple):
    """Client state, kept from task to task."""

    control_P: Tensor  # c_i, the client's mean gradient in its last task


@dataclass(frozen=True, kw_only=True)
class Scaffold(Aggregator):
    r"""Control variates remove what is particular to a client's gradient (Karimireddy et al. 2020, 1910.06378).

    .. math::
        y ← y - η (∇f_i(y) - c_i + c), \qquad c_i^+ = c_i - c + (x - y_i) / (K η)

    .. math::
        x ← x + η_g \frac{1}{|S|} \sum_{i ∈ S} (y_i - x), \qquad
        c ← c + \frac{1}{N} \sum_{i ∈ S} (c_i^+ - c_i)

    K are the local steps; where those have momentum, ‖a‖₁ (see :mod:`fed.aggregators.fednova`) takes the place of K, so
    that a control stays a mean gradient. Controls begin at zero, and stay where clients do not take part. Clients count
    alike, however many samples they hold: what is minimised is the mean of their losses.

    A message is twice the model: the update and that of the control. Weight decay is part of the losses.

    Args:
        server_lr: η_g > 0, the server's learning rate; the paper's experiments have 1.
    """

    linear_client_state: ClassVar[bool] = True

    server_lr: PositiveFloat = 1.0

    def init(self, params_P: Tensor) -> State:
        """The model, without a control."""
        return State(params_P, torch.zeros_like(params_P))

    def broadcast(self, state: State) -> Broadcast:
        """The control c."""
        return (state.control_P,)

    def init_client(self, params_P: Tensor) -> ClientState:
        """A control of zero."""
        return ClientState(torch.zeros_like(params_P))

    def check_local(self, local: Local) -> None:
        """Steps of sgd, with momentum or without.

        Raises:
            InvalidExperiment: under adam and adamw, whose steps are no sum of gradients: (x − y_i) / (K η) would be no
                mean gradient, and what a control corrects no drift.
        """
        if local.optimizer != "sgd":
            raise InvalidExperiment(
                "scaffold needs local.optimizer sgd, for a control is the mean gradient of a client's steps, and "
                f"steps of adam are no sum of gradients, got {local.optimizer}: choose sgd, or feddyn, which takes any"
            )

    def correct(
        self, gradient_P: Tensor, x_P: Tensor, anchor_P: Tensor, client_state: ClientState, broadcast: Broadcast
    ) -> Tensor:
        """Corrected gradient: ∇f − c_i + c."""
        (control_P,) = broadcast
        return gradient_P - client_state.control_P + control_P

    def report(self, work: ClientWork) -> Report:
        """The update y − x, and c_i⁺ − c_i, which the client adds to its control."""
        (control_P,) = work.broadcast
        # Option II of the paper: no gradient beside those of the steps.
        mean_gradient_KP = -work.update_KP / (work.gradients_K1 * work.lr)
        change_KP = mean_gradient_KP - control_P
        kept = ClientState(work.client_state.control_P + change_KP)
        # Clients count alike, as in the paper, whose mean is over clients and not over samples.
        return Report((work.update_KP, change_KP), torch.ones_like(work.samples_K1), kept)

    def resized(self, state: State, before: int, after: int) -> State:
        """Rescale c: the controls of new clients are zero."""
        return state._replace(control_P=state.control_P * (before / after))

    def apply(self, state: State, reduced: Reduced) -> State:
        """Take the mean update, and the mean change of the controls times the share of clients that took part."""
        update_P, change_P = reduced.mean
        # C is a mean over all N clients; the controls of those that were not asked have not changed.
        share = reduced.clients / reduced.population
        return State(state.model_P + self.server_lr * update_P, state.control_P + share * change_P)
