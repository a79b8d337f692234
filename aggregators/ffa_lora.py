"""Low-rank adapters whose first factor is frozen, so that the mean of the second is the mean of their products.

Sun, Li, Li & Ding, "Improving LoRA in privacy-preserving federated learning", ICLR 2024, arXiv 2403.12313, section 4.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fed.aggregators.adapters import adapted_layers
from fed.aggregators.fedavg import FedAvg

if TYPE_CHECKING:
    from fed.vectors.tensors import nn

__all__ = ["FFALoRA"]


@dataclass(frozen=True, kw_only=True)
class FFALoRA(FedAvg):
    r"""Clients train B of each adapter, and A stays as it begins (Sun et al. 2024, 2403.12313).

    .. math:: \sum_{i ∈ S} p_i B_i A = \bar B A, \qquad \bar B = \sum_{i ∈ S} p_i B_i

    The mean is FedAvg's, of half as many numbers, and it is exact: A is the same on all clients, as part of the model's
    fixed part. Other parameters that the model trains are averaged as in FedAvg.
    """

    def fixes(self, module: "nn.Module") -> list[str]:
        """A of each adapter."""
        return [layer.down for layer in adapted_layers(module)]
