"""Slow momentum: server momentum over whole rounds of local steps, in units of gradients.

Wang et al., "SlowMo: Improving communication-efficient distributed SGD with slow momentum", ICLR 2020, arXiv
1910.00643, algorithm 1.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from pydantic import PositiveFloat

from fed.aggregators.base import Aggregator, ClientWork, Reduced, Report
from fed.config.hyperparameters import DecayRate
from fed.vectors.tensors import Tensor, torch

__all__ = ["SlowMo", "State"]


class State(NamedTuple):
    """Server state."""

    model_P: Tensor
    momentum_P: Tensor  # u, a sum of gradients


@dataclass(frozen=True, kw_only=True)
class SlowMo(Aggregator):
    r"""The sum of a round's gradients gathers momentum on the server (Wang et al. 2020, 1910.00643).

    .. math::
        u ← β u + (x_0 - x_τ) / γ, \qquad x ← x_0 - α γ u, \qquad x_τ = \sum_{i ∈ S} p_i y_i

    x₀ is the model that a round starts from, and γ the step size of that round's local steps. Write D = −α γ u for the
    model's move. As long as γ stays the same it cancels,

    .. math:: D ← β D + α (x_τ - x_0), \qquad x ← x_0 + D

    which is block momentum: :class:`fed.aggregators.bmuf.BMUF` with η = β and ζ = α. Where a schedule changes γ from
    γ' to γ, β D becomes β (γ / γ') D: u holds gradients, so that old ones move the model by no more than new ones do.
    With β = 0 and α = 1 it is FedAvg, as γ / γ is 1.

    A message is the update over γ, γ, and a 1 that tells how much it counts.

    Args:
        slow_momentum: β in [0, 1), the share of u that stays each round. It should grow with the number of clients:
            FairScale has 0.2 for 4 machines and 0.6 for 16.
        slow_lr: α > 0, the slow learning rate; FairScale advises 1.
    """

    slow_momentum: DecayRate = 0.5
    slow_lr: PositiveFloat = 1.0

    def init(self, params_P: Tensor) -> State:
        """The model, at rest."""
        return State(params_P, torch.zeros_like(params_P))

    def report(self, work: ClientWork) -> Report:
        """(y − x₀) / γ, γ and a 1; weighted by samples."""
        lr_K1 = torch.full_like(work.samples_K1, work.lr)
        counted_K1 = torch.ones_like(work.samples_K1)
        # Γ travels, since a schedule changes it while late answers are on their way.
        return Report((work.update_KP / work.lr, lr_K1, counted_K1), work.samples_K1)

    def apply(self, state: State, reduced: Reduced) -> State:
        """Momentum, and a step along it; staleness discounts the updates and not γ."""
        descent_P, lr_1, counted_1 = reduced.mean
        momentum_P = self.slow_momentum * state.momentum_P - descent_P
        # This round's γ, so that old gradients move the model no more than new ones.
        return State(state.model_P - self.slow_lr * (lr_1 / counted_1) * momentum_P, momentum_P)
