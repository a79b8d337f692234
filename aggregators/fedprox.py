"""Federated averaging with a proximal term.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, arXiv 1812.06127, algorithm 2.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import NonNegativeFloat

from fed.aggregators.base import Broadcast
from fed.aggregators.fedavg import FedAvg
from fed.vectors.tensors import Tensor

__all__ = ["FedProx"]


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    r"""Local steps are drawn back towards the model they started from (Li et al. 2020, 1812.06127).

    .. math:: y ← y - η (∇f_i(y) + μ (y - x))

    The mean is FedAvg's. With μ = 0 it is FedAvg, to the bit.

    Args:
        mu: μ ≥ 0, the pull towards x; the paper tries 0.001 to 1.
    """

    told_to_apps: ClassVar[tuple[str, ...]] = ("mu",)

    mu: NonNegativeFloat = 0.01

    def correct(
        self, gradient_P: Tensor, x_P: Tensor, anchor_P: Tensor, client_state: Any, broadcast: Broadcast
    ) -> Tensor:
        """Gradient with the proximal term: ∇f + μ (y − x)."""
        return gradient_P + self.mu * (x_P - anchor_P)
