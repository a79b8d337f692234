"""Federated averaging of all but batch normalisation.

Li et al., "FedBN: federated learning on non-IID features via local batch normalization", ICLR 2021, arXiv 2102.07623,
algorithm 1.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from fed.aggregators.fedavg import FedAvg
from fed.errors import InvalidModel
from fed.vectors.layout import names_held_by
from fed.vectors.tensors import nn

__all__ = ["FedBN"]


@dataclass(frozen=True, kw_only=True)
class FedBN(FedAvg):
    r"""Batch normalisation never leaves a client, all else is averaged (Li et al. 2021, 2102.07623).

    .. math::
        (y_i, v_i^+) = \text{local steps from } (x, v_i), \qquad x ← x + \sum_{i ∈ S} p_i (y_i - x)

    v_i are scales, shifts and running statistics of client i, x all other state. The mean is FedAvg's. A client that
    was never asked has those of the run's first model.
    """

    personal: ClassVar[bool] = True

    def private(self, module: "nn.Module") -> Collection[str]:
        """The parameters and buffers of batch normalisation layers.

        Raises:
            InvalidModel: if there is none.
        """
        # The base of all kinds, SyncBatchNorm among them.
        layers = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        if not layers:
            raise InvalidModel(
                "fedbn needs a model with batch normalisation, got none: choose mlp or cnn with batch_norm: true"
            )
        return names_held_by(layers, module)
