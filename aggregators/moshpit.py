"""Moshpit SGD: averages of groups that change so that all peers meet.

Ryabinin et al., "Moshpit SGD: communication-efficient decentralized training on heterogeneous unreliable devices",
NeurIPS 2021, arXiv 2103.03239.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pydantic import PositiveInt

from fed.aggregators.dpsgd import DPSGD
from fed.topology.changing import grid_groups

if TYPE_CHECKING:
    from collections.abc import Callable

    import networkx as nx

__all__ = ["Moshpit"]


@dataclass(frozen=True, kw_only=True)
class Moshpit(DPSGD):
    r"""D-PSGD over groups of peers along one axis of a grid, another in each round (Ryabinin et al. 2021, 2103.03239).

    .. math:: x_i ← \frac{1}{|G_t(i)|} \sum_{j ∈ G_t(i)} (x_j - η g_j)

    Peers are on a grid of d axes with M places each. In round t those that differ in axis t mod d alone are a group.
    With M^d peers, d averages are the mean of all; else some places are empty, and the mean is approached. Between two
    averages are local steps. The paper forms groups by a distributed hash table, which finds the same ones where no
    peer is away.

    Args:
        axes: d ≥ 1, the grid's axes. M is the smallest number with M^d ≥ peers: groups of √N with 2 axes, one group of
            all with 1.
    """

    axes: PositiveInt = 2

    def partners(self) -> "Callable[..., nx.Graph[int]]":
        """Cliques along one axis of the grid."""
        return partial(grid_groups, axes=self.axes)
