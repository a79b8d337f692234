"""Mixing matrices: the weights that a peer gives its neighbours' vectors.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from typing import TYPE_CHECKING, Literal, TypeAlias

import networkx as nx

from fed.errors import InvalidExperiment
from fed.vectors.tensors import Tensor, torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WeightsKind", "is_doubly_stochastic", "mixing_matrix"]

WeightsKind: TypeAlias = Literal["metropolis", "uniform", "laplacian", "column_stochastic"]
"""Rules that make weights of a graph."""

_ROUNDING = 1e-12  # of sums of weights up to 1


def mixing_matrix(graph: "nx.Graph[int]", kind: WeightsKind | None = None, *, lazy: bool = False) -> Tensor:
    r"""W [N, N], in which W_ij is the weight that peer i gives the vector of peer j.

    .. math::
        \text{metropolis: } W_{ij} = \frac{1}{1 + \max(d_i, d_j)}, \qquad \text{uniform: } \frac{1}{1 + d_i}, \qquad
        \text{laplacian: } \frac{1}{1 + \max_k d_k}, \qquad \text{column stochastic: } \frac{1}{1 + d_j^{out}}

    W_ii is the rest to 1 of the row, or of the column where columns are stochastic. Metropolis–Hastings and Laplacian
    weights are symmetric and doubly stochastic. Uniform ones are so where all peers have equally many neighbours; on
    other graphs they converge to a mean weighted by the degrees, and are refused. Column-stochastic ones need push-sum.

    Args:
        graph: graph of the nodes 0 … N − 1; a directed one has edges from sender to receiver. A node is not its own
            neighbour. Edges may bring symmetric weights of their own, as ``weight``.
        kind: rule of the weights. None: the edges' own weights where they have some; else metropolis on an undirected
            graph, and on a directed one uniform if that is doubly stochastic, or column_stochastic if not.
        lazy: True for (I + W)/2 in place of W.

    Returns:
        A sparse float64 tensor.

    Raises:
        InvalidExperiment: if the graph has other nodes, or the weights do not suit it.

    Example:
        >>> import networkx as nx
        >>> mixing_matrix(nx.cycle_graph(4)).to_dense()[0].mul(3).round().tolist()
        [1.0, 1.0, 0.0, 1.0]

    References:
        Xiao, Boyd & Lall 2006, "Distributed average consensus with time-varying Metropolis weights".
    """
    if sorted(graph) != list(range(len(graph))):
        raise InvalidExperiment(f"a topology must have the nodes 0 to {len(graph) - 1}, got {graph}")
    directed = graph.is_directed()
    incoming = graph.reverse() if isinstance(graph, nx.DiGraph) else graph
    senders = {i: sorted({*incoming[i]} - {i}) for i in sorted(graph)}
    receivers = {j: len({*graph[j]} - {j}) for j in graph}
    degrees = {i: len(of_one) for i, of_one in senders.items()}
    is_regular = len({*degrees.values(), *receivers.values()}) <= 1
    own = nx.get_edge_attributes(graph, "weight")
    if kind is None and not own:
        of_directed: WeightsKind = "uniform" if is_regular else "column_stochastic"
        kind = of_directed if directed else "metropolis"
    _check_kind(kind, graph, degrees, is_regular=is_regular)
    most = max(degrees.values(), default=0)
    weight: dict[WeightsKind | None, Callable[[int, int], float]] = {
        None: lambda i, j: own[(i, j) if (i, j) in own else (j, i)],
        "metropolis": lambda i, j: 1 / (1 + max(degrees[i], degrees[j])),
        "uniform": lambda i, j: 1 / (1 + degrees[i]),
        "laplacian": lambda i, j: 1 / (1 + most),
        "column_stochastic": lambda i, j: 1 / (1 + receivers[j]),
    }
    entries: dict[tuple[int, int], float] = {}
    for i, neighbours in senders.items():
        row = {j: weight[kind](i, j) for j in neighbours}
        # One rounding: a row's sum is as near 1 as float64 allows.
        row[i] = 1 / (1 + receivers[i]) if kind == "column_stochastic" else 1 - math.fsum(row.values())
        entries |= {(i, j): (row[j] + (i == j)) / 2 if lazy else row[j] for j in sorted(row)}
    rows, columns = zip(*entries, strict=True)
    values = torch.tensor(list(entries.values()), dtype=torch.float64)
    shape = len(graph), len(graph)
    return torch.sparse_coo_tensor(torch.tensor([rows, columns]), values, shape, check_invariants=True).coalesce()


def _check_kind(kind: WeightsKind | None, graph: "nx.Graph[int]", degrees: dict[int, int], *, is_regular: bool) -> None:
    """Refuse weights that do not suit a graph.

    Args:
        kind: rule of the weights.
        graph: graph of the peers.
        degrees: number of neighbours that send to each peer.
        is_regular: True if all peers send to, and receive from, the same number of peers.

    Raises:
        InvalidExperiment: if the weights do not suit the graph, with the reason and the way out.
    """
    if kind in ("metropolis", "laplacian") and graph.is_directed():
        raise InvalidExperiment(
            f"topology.weights {kind} needs an undirected graph, got {graph}: write column_stochastic, with algorithm "
            "sgp"
        )
    if kind == "uniform" and not is_regular:
        raise InvalidExperiment(
            "topology.weights uniform needs equally many neighbours of all peers, or else converges to a mean weighted "
            f"by degrees, got {min(degrees.values())} to {max(degrees.values())}: write metropolis, or "
            "column_stochastic with algorithm sgp"
        )


def is_doubly_stochastic(matrix_NN: Tensor) -> bool:
    """Tell whether rows and columns add up to 1, so that mixing keeps the peers' mean."""
    ones_N1 = torch.ones(len(matrix_NN), 1, dtype=torch.float64)
    sums = matrix_NN @ ones_N1, matrix_NN.T @ ones_N1
    return all(bool(((one - 1).abs() <= _ROUNDING).all()) for one in sums)
