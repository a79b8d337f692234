"""Federated averaging.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017, arXiv
1602.05629, algorithm 1.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from fed.aggregators.base import Aggregator, Reduced
from fed.vectors.tensors import Tensor

__all__ = ["FedAvg", "State"]


class State(NamedTuple):
    """Server state."""

    model_P: Tensor


@dataclass(frozen=True, kw_only=True)
class FedAvg(Aggregator):
    r"""The next model is the mean of the clients' models, weighted by their samples (McMahan et al. 2017, 1602.05629).

    .. math:: x ← x + \sum_{i ∈ S} p_i (y_i - x), \qquad p_i = n_i / \sum_{j ∈ S} n_j

    S are the clients that replied; clients that did not reply do not dilute the mean.

    Example:
        >>> import torch
        >>> rule = FedAvg()
        >>> round = Reduced((torch.tensor([0.5]),), clients=3, population=10)
        >>> rule.apply(rule.init(torch.tensor([1.0])), round).model_P
        tensor([1.5000])
    """

    def init(self, params_P: Tensor) -> State:
        """The model alone."""
        return State(params_P)

    def apply(self, state: State, reduced: Reduced) -> State:
        """The model plus the mean update."""
        return State(state.model_P + reduced.update_P)
