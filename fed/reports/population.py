"""Samples that clients hold, and the graph of peers, as a run's folder keeps them for its report.

Shapes: see :mod:`fed.layout`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["Partition", "can_be_drawn", "described", "read"]

_MOST_EDGES = 5000
"""The most that a page draws."""


class Partition(NamedTuple):
    """Samples by client and class.

    Args:
        clients: ids of the clients shown.
        counts_KC: their samples of each class; [K, 1] where targets are no labels.
        population: the number of all clients.
    """

    clients: Sequence[object]
    counts_KC: NDArray[np.int64]
    population: int


def described(partition: Partition | None, graph: "nx.Graph[Any] | None" = None) -> dict[str, Any]:
    """Content of ``population.json``.

    Args:
        partition: who held what; None: not known.
        graph: of the first round's neighbours, where there are some; of a real peer's run, of its own in the last one.
            One with too many edges to be drawn is left out.

    Example:
        >>> described(Partition([3, "ann"], np.array([[2, 0], [1, 5]]), 9))["partition"]
        {'clients': [3, 'ann'], 'counts': [[2, 0], [1, 5]], 'population': 9}
    """
    held = partition and {
        "clients": list(partition.clients),
        "counts": partition.counts_KC.tolist(),
        "population": partition.population,
    }
    return {"partition": held, "graph": _edges(graph) if graph is not None and can_be_drawn(graph) else None}


def can_be_drawn(graph: "nx.Graph[Any]") -> bool:
    """True for a graph with few edges enough for a page."""
    return graph.number_of_edges() <= _MOST_EDGES


def read(content: Mapping[str, Any]) -> "tuple[Partition | None, nx.Graph[Any] | None]":
    """Partition and graph that :func:`described` wrote down."""
    held, met = content["partition"], content["graph"]
    partition = held and Partition(held["clients"], np.array(held["counts"]), held["population"])
    if met is None:
        return partition, None
    import networkx as nx

    graph: nx.Graph[Any] = nx.DiGraph() if met["is_directed"] else nx.Graph()
    graph.add_nodes_from(met["nodes"])
    graph.add_edges_from(met["edges"])
    return partition, graph


def _edges(graph: "nx.Graph[Any]") -> dict[str, Any]:
    return {
        "is_directed": graph.is_directed(),
        "nodes": list(graph.nodes),
        "edges": [list(edge) for edge in graph.edges],
    }
