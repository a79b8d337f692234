"""Graphs of peers, and the weights with which neighbours are mixed."""

import math

import networkx as nx
import torch
from torch import Tensor

from fed.errors import InvalidExperiment

__all__ = ["complete", "exponential", "mixing_matrix", "ring"]


def ring(peers: int) -> "nx.Graph[int]":
    """Each peer has two neighbours: ρ = (1 + 2 cos(2π/n))/3, so that news needs about n² rounds.

    Args:
        peers: n ≥ 1.
    """
    return nx.circulant_graph(peers, [1])


def complete(peers: int) -> "nx.Graph[int]":
    """Each peer has all others as neighbours: ρ = 0, one round of mixing is the mean.

    Args:
        peers: n ≥ 1.
    """
    graph: nx.Graph[int] = nx.complete_graph(peers)
    return graph


def exponential(peers: int) -> "nx.Graph[int]":
    """Each peer i has i ± 1, i ± 2, i ± 4, … as neighbours: about 2 log₂ n of them, and ρ falls as 1 − O(1/log n).

    Args:
        peers: n ≥ 1.

    References:
        Ying et al. 2021, "Exponential graph is provably efficient for decentralized deep training", arXiv 2110.13363;
        here the graph is undirected, as Metropolis–Hastings weights need it.
    """
    # of a single peer [1], a loop, which mixing leaves out
    offsets = [1 << power for power in range(max(1, math.ceil(math.log2(peers))))]
    return nx.circulant_graph(peers, offsets)


def mixing_matrix(graph: "nx.Graph[int]") -> Tensor:
    r"""Metropolis–Hastings weights, symmetric and doubly stochastic.

    .. math:: W_{ij} = \frac{1}{1 + \max(d_i, d_j)}, \qquad W_{ii} = 1 - \sum_{j \ne i} W_{ij}

    Args:
        graph: undirected and connected, its nodes 0 … N−1. A node is not its own neighbour.

    Returns:
        W [N, N], a sparse float64 tensor.

    Raises:
        InvalidExperiment: if the graph is directed, has other nodes, or falls into parts, which would never agree.

    Example:
        >>> mixing_matrix(ring(4)).to_dense()[0].mul(3).round().tolist()
        [1.0, 1.0, 0.0, 1.0]

    References:
        Xiao, Boyd & Lall 2006, "Distributed average consensus with time-varying Metropolis weights".
    """
    if graph.is_directed() or sorted(graph) != list(range(len(graph))):
        raise InvalidExperiment(f"a topology must be undirected, with nodes 0 to {len(graph) - 1}, got {graph}")
    if not nx.is_connected(graph):
        raise InvalidExperiment(
            f"a topology must be connected, got {nx.number_connected_components(graph)} separate parts"
        )
    entries: dict[tuple[int, int], float] = {}
    for i in sorted(graph):
        neighbours = sorted(set(graph[i]) - {i})
        degree = {j: len(set(graph[j]) - {j}) for j in (i, *neighbours)}
        weights = {j: 1 / (1 + max(degree[i], degree[j])) for j in neighbours}
        weights[i] = 1 - math.fsum(weights.values())  # one rounding: a row's sum is as near 1 as float64 allows
        entries |= {(i, j): weights[j] for j in sorted(weights)}
    rows, columns = zip(*entries, strict=True)
    values = torch.tensor(list(entries.values()), dtype=torch.float64)
    return torch.sparse_coo_tensor(
        torch.tensor([rows, columns]), values, (len(graph), len(graph)), check_invariants=True
    ).coalesce()
