"""Federated averaging of a model's first layers; the last ones are each client's own.

Arivazhagan et al., "Federated learning with personalization layers", 2019, arXiv 1912.00818, section 3.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import PositiveInt

from fed.aggregators.fedavg import FedAvg
from fed.errors import InvalidModel
from fed.vectors.layout import names_held_by

if TYPE_CHECKING:
    from fed.vectors.tensors import nn

__all__ = ["FedPer"]


@dataclass(frozen=True, kw_only=True)
class FedPer(FedAvg):
    r"""Clients share a body, and each has a head of its own, trained jointly (Arivazhagan et al. 2019, 1912.00818).

    .. math::
        (y_i, v_i^+) = \text{local steps from } (x, v_i), \qquad x ← x + \sum_{i ∈ S} p_i (y_i - x)

    v_i is the head of client i, its model's last layers; x is the body. The mean is FedAvg's. A client that was never
    asked has the head of the run's first model.

    Args:
        personal_layers: number of last layers that are the head, ≥ 1. A layer is a module that holds parameters itself;
            layers are in the order in which the model registers them.
    """

    personal: ClassVar[bool] = True

    personal_layers: PositiveInt = 1

    def private(self, module: "nn.Module") -> Collection[str]:
        """The parameters and buffers of the last layers.

        Raises:
            InvalidModel: if that leaves no layer to share.
        """
        # Without recurse=False a container would count as a layer of its own.
        layers = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
        if len(layers) <= self.personal_layers:
            raise InvalidModel(
                f"personal_layers must be less than the model's {len(layers)} layers, got {self.personal_layers}: "
                "lower it, or choose a deeper model such as mlp"
            )
        return names_held_by(layers[-self.personal_layers :], module)
