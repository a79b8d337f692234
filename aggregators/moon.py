"""Model-contrastive federated learning.

Li, He & Song, "Model-contrastive federated learning", CVPR 2021, arXiv 2103.16257, algorithm 1.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from pydantic import NonNegativeFloat, PositiveFloat

from fed.aggregators.base import ClientWork, Report
from fed.aggregators.fedavg import FedAvg
from fed.vectors.tensors import Tensor, nn

__all__ = ["MOON", "ClientState"]


class ClientState(NamedTuple):
    """Client state, kept from task to task."""

    previous_P: Tensor  # its model at the end of its last task


@dataclass(frozen=True, kw_only=True)
class MOON(FedAvg):
    r"""Representations are drawn to the server's and away from the client's last ones (Li et al. 2021, 2103.16257).

    .. math::
        ℓ = ℓ_{task} + μ \frac{1}{B} \sum_b
        - \log \frac{e^{s(z_b, z^x_b) / T}}{e^{s(z_b, z^x_b) / T} + e^{s(z_b, z^p_b) / T}}

    z is the input of the model's last linear layer, z^x and z^p the same of the model that came with the task and of
    the client's model at the end of its last task, s the cosine of the angle between two. Before its first task a
    client's last model is the run's first. The mean is FedAvg's; with μ = 0 it is FedAvg.

    A step takes three forward passes, one client at a time.

    Args:
        mu: μ ≥ 0, the weight of the contrastive term; the paper tunes it among 0.1, 1, 5 and 10.
        temperature: T > 0, the softmax's temperature; 0.5 in the paper.
    """

    update_alone: ClassVar[bool] = True

    mu: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5

    def init_client(self, params_P: Tensor) -> ClientState:
        """The run's first model."""
        return ClientState(params_P)

    def penalty(self, features_BF: Tensor, server_BF: Tensor, previous_BF: Tensor) -> Tensor:
        """Term added to a batch's loss: μ times the mean of −log of a softmax of two."""
        similarity = nn.functional.cosine_similarity
        nearer_B = similarity(features_BF, server_BF) - similarity(features_BF, previous_BF)
        # −log of a softmax of two, without overflow.
        return self.mu * nn.functional.softplus(-nearer_B / self.temperature).mean()

    def report(self, work: ClientWork) -> Report:
        """The update, weighted by samples; the client keeps its model."""
        return Report((work.update_KP,), work.samples_K1, ClientState(work.began_KP + work.update_KP))
