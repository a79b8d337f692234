"""Synthetic(α, β): devices that differ in what they learn, by α, and in what they see, by β.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, 1812.06127, section 5.1. Shapes: D features,
C classes, n samples of one device.
"""

from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveInt

from fed.clients.data import held_out
from fed.clients.data.samples import Samples
from fed.randomness import Streams

__all__ = ["synthetic"]

_FEATURES = 60
_CLASSES = 10


def synthetic(
    streams: Streams,
    alpha: NonNegativeFloat = 1.0,
    beta: NonNegativeFloat = 1.0,
    clients: PositiveInt = 30,
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1,
) -> Samples:
    r"""Every device k draws a linear model of its own, inputs about a centre of its own, and labels these by that.

    .. math::
        y = \arg\max(x W_k + b_k), \quad W_k, b_k \sim N(u_k, 1), \quad u_k \sim N(0, \alpha) \\
        x \sim N(v_k, \Sigma), \quad \Sigma_{jj} = j^{-1.2}, \quad v_k \sim N(B_k, 1), \quad B_k \sim N(0, \beta) \\
        n_k = \lfloor \mathrm{lognormal}(4, 2) \rfloor + 50

    α and β are standard deviations, as in the authors' program; the paper does not say. A device's samples are a
    function of the seed and its number alone. The sizes have a heavy tail: one device may hold most samples.

    Args:
        streams: the experiment's random streams; a device draws from one of its own.
        alpha: α ≥ 0, how much the devices' models differ.
        beta: β ≥ 0, how much the centres of their inputs differ.
        clients: how many devices.
        test_fraction: the share of every device's samples held out.

    Example:
        >>> samples = synthetic(Streams(0), clients=3)
        >>> samples.inputs.shape[1], samples.classes, sorted(set(samples.columns["client"].tolist()))
        (60, 10, [0, 1, 2])
    """
    devices = [_device(streams.generator("synthetic", client), alpha, beta) for client in range(clients)]
    ends = [len(y_n) - held_out.share(len(y_n), test_fraction) for _, y_n in devices]
    train = [(x_nD[:end], y_n[:end]) for (x_nD, y_n), end in zip(devices, ends, strict=True)]
    test = [(x_nD[end:], y_n[end:]) for (x_nD, y_n), end in zip(devices, ends, strict=True)]
    inputs, targets = _joined(train)
    return Samples(
        inputs,
        targets,
        _joined(test) if test_fraction else None,
        {"client": np.repeat(np.arange(clients), ends)},
        _CLASSES,
    )


def _device(generator: np.random.Generator, alpha: float, beta: float) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    n = int(generator.lognormal(4, 2)) + 50
    u, B = generator.normal(0, alpha), generator.normal(0, beta)
    W_DC, b_C = generator.normal(u, 1, (_FEATURES, _CLASSES)), generator.normal(u, 1, _CLASSES)
    v_D = generator.normal(B, 1, _FEATURES)
    deviation_D = np.arange(1, _FEATURES + 1) ** -0.6  # the root of Σ
    x_nD = generator.normal(v_D, deviation_D, (n, _FEATURES))
    return x_nD.astype(np.float32), np.argmax(x_nD @ W_DC + b_C, axis=1)


def _joined(parts: list[tuple[NDArray[np.float32], NDArray[np.int64]]]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = zip(*parts, strict=True)
    return torch.from_numpy(np.concatenate(x)), torch.from_numpy(np.concatenate(y))
