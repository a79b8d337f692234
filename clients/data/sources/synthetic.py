"""Source ``synthetic``, Synthetic(α, β): devices that differ in their labels' model, by α, and in their inputs, by β.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, 1812.06127, section 5.1.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveInt

from fed.clients.data import held_out
from fed.clients.data.federated import FederatedData
from fed.clients.data.held import Pair
from fed.clients.data.on_demand import ClientsOnDemand
from fed.vectors.randomness import Streams
from fed.vectors.tensors import torch

__all__ = ["synthetic"]

_FEATURES = 60
_CLASSES = 10


def synthetic(
    streams: Streams,
    alpha: NonNegativeFloat = 1.0,
    beta: NonNegativeFloat = 1.0,
    clients: PositiveInt = 30,
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1,
) -> FederatedData:
    r"""Linear model and inputs drawn for each device k: α spreads the models, β the centres of the inputs.

    .. math::
        y = \arg\max(x W_k + b_k), \quad W_k, b_k \sim N(u_k, 1), \quad u_k \sim N(0, \alpha) \\
        x \sim N(v_k, \Sigma), \quad \Sigma_{jj} = j^{-1.2}, \quad v_k \sim N(B_k, 1), \quad B_k \sim N(0, \beta) \\
        n_k = \lfloor \mathrm{lognormal}(4, 2) \rfloor + 50

    α and β are standard deviations, as in the authors' program; the paper does not say. A device's samples are a
    function of the seed and its number alone, and drawn whenever they are needed: there may be a million devices. The
    sizes have a heavy tail: one device may hold most samples.

    Args:
        streams: the experiment's random streams; a device draws from one of its own.
        alpha: α ≥ 0, how much the devices' models differ.
        beta: β ≥ 0, how much the centres of their inputs differ.
        clients: number of devices.
        test_fraction: the share of every device's samples held out. Those of the first 1,000 devices are the test set.

    Example:
        >>> data = synthetic(Streams(0), clients=1_000_000, test_fraction=0.0)
        >>> data.clients, data.classes, data.read(999_999)[0].shape[1]
        (range(0, 1000000), 10, 60)
    """
    devices = _Devices(streams, alpha, beta)
    data = FederatedData(ClientsOnDemand(range(clients), devices.draw, devices.size), classes=_CLASSES)
    return held_out.of_each_on_demand(data, test_fraction) if test_fraction else data


@dataclass(frozen=True)
class _Devices:
    streams: Streams
    alpha: float
    beta: float

    def size(self, client: int) -> int:
        return _size(self._generator(client))

    def draw(self, client: int) -> Pair:
        generator = self._generator(client)
        n = _size(generator)  # drawn first, so that size() draws nothing else
        # The order of draws fixes the data of a seed.
        u = generator.normal(0, self.alpha)
        B = generator.normal(0, self.beta)
        W_FC = generator.normal(u, 1, (_FEATURES, _CLASSES))
        b_C = generator.normal(u, 1, _CLASSES)
        v_F = generator.normal(B, 1, _FEATURES)
        deviation_F = np.arange(1, _FEATURES + 1) ** -0.6  # the root of Σ
        x_EF = generator.normal(v_F, deviation_F, (n, _FEATURES))
        return torch.from_numpy(x_EF.astype(np.float32)), torch.from_numpy(np.argmax(x_EF @ W_FC + b_C, axis=1))

    def _generator(self, client: int) -> np.random.Generator:
        return self.streams.generator("synthetic", client)


def _size(generator: np.random.Generator) -> int:
    """Number of samples n, a device's first draw."""
    return int(generator.lognormal(4, 2)) + 50
