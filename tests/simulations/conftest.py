"""Small federations whose answers are known in closed form."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fed


@dataclass(frozen=True)
class Quadratics:
    """Clients with f_i(x) = ½ (x − b_i)ᵀ A_i (x − b_i), so many equal samples each.

    Shapes: N clients, D dimensions.
    """

    curvature_NDD: NDArray[np.float64]
    centre_ND: NDArray[np.float64]
    samples_N: NDArray[np.int64]
    start_D: NDArray[np.float64]

    def data(self, dtype: torch.dtype = torch.float64) -> fed.FederatedData:
        clients = {}
        for client, (curvature_DD, centre_D, samples) in enumerate(
            zip(self.curvature_NDD, self.centre_ND, self.samples_N, strict=True)
        ):
            one = torch.from_numpy(np.vstack([curvature_DD, centre_D])).to(dtype)
            clients[client] = (one.expand(samples, -1, -1).clone(), torch.zeros(samples, dtype=dtype))
        return fed.FederatedData(train=clients)

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        return Point(torch.from_numpy(self.start_D).to(dtype))


class Point(nn.Module):
    """A model that is a point x, and whose output is each sample's f(x)."""

    def __init__(self, start_D: Tensor) -> None:
        super().__init__()
        self.x_D = nn.Parameter(start_D.clone())

    def forward(self, samples: Tensor) -> Tensor:
        curvature_BDD, centre_BD = samples[:, :-1], samples[:, -1]
        away_BD = self.x_D - centre_BD
        return 0.5 * torch.einsum("bi,bij,bj->b", away_BD, curvature_BDD, away_BD)


def mean_output(output: Tensor, target: Tensor) -> Tensor:
    """A loss that is the model's own output."""
    return output.mean() + 0 * target.sum()


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.long)])
def quadratics(request: pytest.FixtureRequest) -> Quadratics:
    """Unequal curvature, centres and sample counts; eigenvalues in [0.5, 4]."""
    generator = np.random.default_rng(request.param)
    clients, dimensions = 4, 3
    curvature = []
    for _ in range(clients):
        basis, _ = np.linalg.qr(generator.normal(size=(dimensions, dimensions)))
        curvature.append(basis @ np.diag(generator.uniform(0.5, 4.0, dimensions)) @ basis.T)
    return Quadratics(
        np.stack(curvature),
        generator.normal(size=(clients, dimensions)),
        np.array([1, 2, 5, 3]),
        generator.normal(size=dimensions),
    )
