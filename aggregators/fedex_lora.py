"""Low-rank adapters whose factors are averaged, with what the product of the means lacks added to the adapted matrix.

Singhal, Ponkshe & Vepakomma, "FedEx-LoRA: exact aggregation for federated and efficient fine-tuning of large language
models", ACL 2025, arXiv 2410.09432, section 4.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fed.aggregators.adapters import Adapter, OverAdapters
from fed.aggregators.base import Reduced
from fed.vectors.tensors import Tensor, torch

__all__ = ["FedExLoRA", "State"]


class State(NamedTuple):
    """Server state."""

    model_P: Tensor
    moved_J: Tensor  # the sum of all residuals, of all matrices one after another


@dataclass(frozen=True, kw_only=True)
class FedExLoRA(OverAdapters):
    r"""Adapters' factors are averaged, and W takes what that leaves out (Singhal et al. 2024, 2410.09432).

    .. math::
        B ← \bar B, \quad A ← \bar A, \quad W ← W + s \Big( \sum_{i ∈ S} p_i B_i A_i - \bar B \bar A \Big)
          = W + s \sum_{i ∈ S} p_i (B_i - \bar B)(A_i - \bar A)

    So the model is that of the mean of the clients' products, exactly, although a product of means is no mean of
    products. The residual is the covariance of the factors over clients: 0 where one client answers, or where all have
    one A or one B. s is the adapter's scale. Other parameters that the model trains are averaged as in FedAvg.

    The server needs each client's factors, and sends the matrices W that have adapters with each task: these bytes are
    those of W, not of its factors. Clients keep nothing, so one that misses rounds lacks nothing.
    """

    def init(self, params_P: Tensor) -> State:
        """The model, and no residuals."""
        return State(params_P, self.first_movements())

    def moved(self, state: State) -> Tensor:
        """The sum of all residuals."""
        return state.moved_J

    def combine(
        self, state: State, messages_SM: Tensor, weights_S: Tensor, generator: np.random.Generator
    ) -> tuple[State, Tensor]:
        """The mean update, and the state with the residuals of these messages."""
        shares_S = weights_S / weights_S.sum()
        mean_M = shares_S @ messages_SM
        # Factors and their changes have one covariance, for the clients began at the same factors.
        apart_SM = messages_SM - mean_M
        residuals = [self._residual(adapter, apart_SM, shares_S) for adapter in self.adapters]
        moved_J = state.moved_J + torch.cat(residuals) if residuals else state.moved_J
        return state._replace(moved_J=moved_J), mean_M

    def _residual(self, adapter: Adapter, apart_SM: Tensor, shares_S: Tensor) -> Tensor:
        up, down = adapter.factors(apart_SM)
        return adapter.movement(up, down, shares_S)

    def apply(self, state: State, reduced: Reduced) -> State:
        """The model plus the mean update."""
        return state._replace(model_P=state.model_P + reduced.update_P)
