"""MimeLite: clients descend with the server's momentum, which stays fixed during a round.

Karimireddy et al., "Mime: Mimicking centralized stochastic algorithms in federated learning", 2021, arXiv 2008.03606.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from fed.aggregators.base import Aggregator, Broadcast, ClientWork, Reduced, Report
from fed.config.experiment import Local
from fed.config.hyperparameters import DecayRate
from fed.errors import InvalidExperiment
from fed.vectors.tensors import Tensor, torch

__all__ = ["MimeLite", "State"]


class State(NamedTuple):
    """Server state."""

    model_P: Tensor
    momentum_P: Tensor  # m, of gradients at the server's models


@dataclass(frozen=True, kw_only=True)
class MimeLite(Aggregator):
    r"""Local steps mix in a momentum that stays frozen during the round (Karimireddy et al. 2021, 2008.03606).

    .. math::
        y ← y - η ((1 - β) ∇f_i(y) + β m), \qquad x ← x + \sum_{i ∈ S} p_i (y_i - x), \qquad
        m ← (1 - β) \sum_{i ∈ S} p_i ∇f_i(x) + β m

    ∇f_i(x) is the gradient of all of a client's samples at the model that its task came with, which costs as much as an
    epoch. p_i = n_i / Σ n, where the paper has clients that are alike. A message is twice the model.

    Args:
        beta: β in [0, 1), the server's momentum. It begins at 0, so that the first steps are short, by 1 − β. With
            β = 0 this is FedAvg.
    """

    asks: ClassVar[frozenset[str]] = frozenset({"gradient"})

    beta: DecayRate = 0.9

    def init(self, params_P: Tensor) -> State:
        """The model, at rest."""
        return State(params_P, torch.zeros_like(params_P))

    def broadcast(self, state: State) -> Broadcast:
        """The momentum m."""
        return (state.momentum_P,)

    def check_local(self, local: Local) -> None:
        """Steps of sgd without momentum.

        Raises:
            InvalidExperiment: under adam, adamw and local.momentum, which would gather the client's own gradients on
                top of m, the very drift that m is frozen against.
        """
        if local.optimizer != "sgd" or local.momentum:
            raise InvalidExperiment(
                "mimelite needs local.optimizer sgd and local.momentum 0, for clients descend with the server's "
                f"momentum in place of their own, got {local.optimizer} and {local.momentum:g}: set beta instead, or "
                "choose fedavgm, whose clients may have any optimizer"
            )

    def correct(
        self, gradient_P: Tensor, x_P: Tensor, anchor_P: Tensor, client_state: Any, broadcast: Broadcast
    ) -> Tensor:
        """(1 − β) ∇f + β m."""
        (momentum_P,) = broadcast
        # The momentum stays frozen: a client's own would be its drift.
        return (1 - self.beta) * gradient_P + self.beta * momentum_P

    def report(self, work: ClientWork) -> Report:
        """The update y − x, and ∇f_i(x); weighted by samples."""
        assert work.start_gradient_KP is not None
        return Report((work.update_KP, work.start_gradient_KP), work.samples_K1)

    def apply(self, state: State, reduced: Reduced) -> State:
        """Take the mean update, and mix the mean gradient into the momentum."""
        update_P, gradient_P = reduced.mean
        return State(state.model_P + update_P, (1 - self.beta) * gradient_P + self.beta * state.momentum_P)
