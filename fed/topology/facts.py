"""Facts of a topology: degrees, diameter, spectral gap, and the rounds to consensus that follow.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import networkx as nx

from fed.vectors.tensors import Tensor, torch

__all__ = ["ROUNDS_MEASURED", "Facts", "facts", "separate_parts"]

ROUNDS_MEASURED = 64
"""Rounds over which the contraction of a changing graph is measured."""
_EXACT = 1e-12
_SHARE = 1e-3  # of the first disagreement, at which peers count as agreed


class Facts(NamedTuple):
    """Properties of a topology, or of its first rounds where it changes.

    Args:
        least_degree: number of neighbours, or receivers, of the peer with the fewest.
        most_degree: number of neighbours, or receivers, of the peer with the most.
        diameter: number of hops between the two peers furthest apart; None where a single round does not connect all.
        contraction: ρ in [0, 1], the factor by which a round of mixing shrinks the disagreement; the geometric mean
            where it changes.
        exact_after: number of rounds after which peers agree exactly; None: never.
    """

    least_degree: int
    most_degree: int
    diameter: int | None
    contraction: float
    exact_after: int | None = None

    @property
    def gap(self) -> float:
        """1 − ρ."""
        return 1 - self.contraction

    @property
    def rounds_to_consensus(self) -> float:
        """Rounds until the disagreement is a thousandth of what it was; infinite where peers never agree."""
        if self.exact_after is not None:
            return self.exact_after
        return math.inf if self.contraction >= 1 - _EXACT else math.ceil(math.log(_SHARE) / math.log(self.contraction))


def facts(graph_in: Callable[[int], "nx.Graph[int]"], matrix_in: Callable[[int], Tensor], *, changes: bool) -> Facts:
    """Find a topology's properties.

    Args:
        graph_in: function from a round to its graph.
        matrix_in: function from a round to its W, dense or sparse.
        changes: True if graphs differ between rounds.
    """
    rounds = range(1, 1 + (ROUNDS_MEASURED if changes else 1))
    degrees = [degree for number in rounds for _, degree in _receivers(graph_in(number))]
    first = graph_in(1)
    diameter = int(nx.diameter(first)) if separate_parts(first) == 1 else None
    contraction, exact_after = _contraction(matrix_in, rounds)
    return Facts(
        least_degree=min(degrees),
        most_degree=max(degrees),
        diameter=diameter,
        contraction=contraction,
        exact_after=exact_after,
    )


def separate_parts(graph: "nx.Graph[int]") -> int:
    """The number of connected parts, strongly connected ones where the graph is directed."""
    if isinstance(graph, nx.DiGraph):
        return int(nx.number_strongly_connected_components(graph))
    return int(nx.number_connected_components(graph))


def _receivers(graph: "nx.Graph[int]") -> list[tuple[int, int]]:
    return [*(graph.out_degree() if isinstance(graph, nx.DiGraph) else graph.degree())]


def _contraction(matrix_in: Callable[[int], Tensor], rounds: range) -> tuple[float, int | None]:
    """ρ, and the rounds after which products of W are the mean."""
    matrix_NN = matrix_in(1).to_dense()
    if len(rounds) == 1:  # push-sum's error falls as W's second eigenvalue, too
        is_symmetric = torch.equal(matrix_NN, matrix_NN.T)  # and its eigenvalues found ten times as fast
        values = torch.linalg.eigvalsh(matrix_NN) if is_symmetric else torch.linalg.eigvals(matrix_NN)
        moduli = values.abs().sort().values
        # The largest eigenvalue, 1, belongs to the mean, which mixing keeps.
        rho = float(moduli[-2]) if len(moduli) > 1 else 0.0
        return (0.0, 1) if rho < _EXACT else (rho, None)
    peers = len(matrix_NN)
    # A product of changing matrices has no eigenvalue that tells: its norm off the mean does.
    product_NN = torch.eye(peers, dtype=torch.float64) - 1 / peers
    left = 1.0
    for number in rounds:
        before = left
        product_NN = matrix_in(number).to_dense() @ product_NN
        left = float(torch.linalg.matrix_norm(product_NN, 2))  # the largest factor by which peers still disagree
        if left < _EXACT:  # at once, or else little by little
            return (0.0, number) if before > _SHARE else (left ** (1 / number), None)
    return left ** (1 / len(rounds)), None
