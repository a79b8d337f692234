"""MATCHA: D-PSGD over random matchings of a graph.

Wang et al., "MATCHA: speeding up decentralized SGD via matching decomposition sampling", 2019, arXiv 1905.09435.
"""

from dataclasses import dataclass
from typing import ClassVar

from fed.aggregators.dpsgd import DPSGD

__all__ = ["MATCHA"]


@dataclass(frozen=True, kw_only=True)
class MATCHA(DPSGD):
    r"""D-PSGD over random matchings of a graph, most often those that connect it best (Wang et al. 2019, 1905.09435).

    .. math:: X ← (I - α \sum_j B_j L_j) (X - η G(X))

    The topology is ``matcha`` unless the experiment names another: see its keys ``budget`` and ``base``.
    """

    topology: ClassVar[str] = "matcha"
