"""Normalised averaging: a client that takes more local steps pulls the model no harder for it.

Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated optimization", NeurIPS 2020, arXiv
2007.07481: FedNova, with the normalising vectors of plain steps and of momentum.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import ClassVar

from fed.aggregators.base import ClientWork, Reduced, Report
from fed.aggregators.fedavg import FedAvg, State
from fed.vectors.tensors import torch

__all__ = ["FedNova"]


@dataclass(frozen=True, kw_only=True)
class FedNova(FedAvg):
    r"""Updates are divided by the steps they took, and multiplied by the mean of those (Wang et al. 2020, 2007.07481).

    .. math::
        d_i = (x - y_i) / (η ‖a_i‖_1), \qquad τ_{eff} = \sum_{i ∈ S} p_i ‖a_i‖_1, \qquad
        x ← x - η τ_{eff} \sum_{i ∈ S} p_i d_i, \qquad p_i = n_i / \sum_{j ∈ S} n_j

    ‖a_i‖₁ is how many gradients the τ_i local steps of client i have added up: τ_i of plain steps, with momentum ρ

    .. math:: ‖a_i‖_1 = \frac{1}{1 - ρ} \left(τ - ρ \frac{1 - ρ^τ}{1 - ρ}\right), \qquad τ = τ_i

    and with Nesterov's momentum ρ² in place of the ρ before the fraction. η cancels, so clients divide by ‖a‖₁ alone.
    Where all take as many steps this is FedAvg. Under Adam, whose steps are no sum of gradients, ‖a‖₁ is τ.
    """

    asks: ClassVar[frozenset[str]] = frozenset({"steps"})

    def report(self, work: ClientWork) -> Report:
        """The normalised update −η d_i = (y − x) / ‖a‖₁, ‖a‖₁ and a 1; weighted by samples."""
        # Divided here, so that the coordinator needs only means: it never sees a single client's steps.
        message = work.update_KP / work.gradients_K1, work.gradients_K1, torch.ones_like(work.gradients_K1)
        return Report(message, work.samples_K1)

    def apply(self, state: State, reduced: Reduced) -> State:
        """The mean of the normalised updates, times τ_eff; staleness discounts the former alone."""
        normalised_P, gradients_1, counted_1 = reduced.mean
        # The 1 that clients report is discounted alike, and cancels the discount of ‖a‖₁.
        return State(state.model_P + gradients_1 / counted_1 * normalised_P)
