"""Federated averaging with server momentum.

Hsu, Qi & Brown, "Measuring the effects of non-identical data distribution for federated visual classification", 2019,
arXiv 1909.06335, section 4.3. Shapes: P, the model's parameters.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from fed.aggregators.contracts import Aggregator

__all__ = ["FedAvgM", "State"]


class State(NamedTuple):
    """What the coordinator keeps."""

    model_P: Tensor
    velocity_P: Tensor


@dataclass(frozen=True, kw_only=True)
class FedAvgM(Aggregator):
    r"""The mean update gathers momentum on the server (Hsu et al. 2019, 1909.06335).

    .. math:: v ← β v + Δ, \qquad x ← x + η_g v, \qquad Δ = \sum_{i ∈ S} p_i (y_i - x)

    In the long run a constant Δ moves the model by η_g / (1 − β) times Δ a round. With β = 0 and η_g = 1 it is FedAvg.

    Args:
        momentum: β in [0, 1).
        server_lr: η_g > 0.
    """

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    server_lr: PositiveFloat = 1.0

    def init(self, params_P: Tensor) -> State:
        """The model, at rest."""
        return State(params_P, torch.zeros_like(params_P))

    def apply(self, state: State, mean_update_P: Tensor) -> State:
        """One step of momentum along the mean update."""
        velocity_P = self.momentum * state.velocity_P + mean_update_P
        return State(state.model_P + self.server_lr * velocity_P, velocity_P)
