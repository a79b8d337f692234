"""All data in one place: the ceiling of every comparison."""

from dataclasses import dataclass
from typing import ClassVar

from fed.aggregators.fedavg import FedAvg

__all__ = ["Centralized"]


@dataclass(frozen=True, kw_only=True)
class Centralized(FedAvg):
    r"""One client holds all clients' data and trains alone: the ceiling, no federation.

    .. math:: x ← x - η ∇f(x), \qquad f = \sum_i n_i f_i / \sum_j n_j

    A round is the section ``local`` on all the data; the cohort does not matter. In practice the data would have to
    move for this. Only models count as bytes, and none is sent.
    """

    pools_data: ClassVar[bool] = True
