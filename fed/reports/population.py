"""Samples that clients hold, graph of peers and confusion matrix, as a run's folder keeps them for its report.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["Confusion", "Partition", "can_be_drawn", "described", "read"]

_MOST_EDGES = 5000
"""Largest number of edges that a page draws."""


class Partition(NamedTuple):
    """Samples by client and class.

    Args:
        clients: ids of the clients shown.
        counts_KC: number of their samples of each class; [K, 1] where targets are no labels.
        population: number of all clients.
    """

    clients: Sequence[object]
    counts_KC: NDArray[np.int64]
    population: int


class Confusion(NamedTuple):
    """Test samples of a classification by true and predicted class.

    Args:
        counts_CC: number of samples of each true class (a row) that the model takes for each class (a column); None
            where there are too many classes.
        names: names of the classes.
    """

    counts_CC: NDArray[np.int64] | None
    names: Sequence[object]


def described(
    partition: Partition | None, graph: "nx.Graph[Any] | None" = None, confusion: Confusion | None = None
) -> dict[str, Any]:
    """Content of ``population.json``.

    Args:
        partition: samples by client and class; None: not known.
        graph: graph of the first round's neighbours, where there are some; for a real peer's run the graph of its own
            neighbours in the last round. A graph with too many edges to be drawn is left out.
        confusion: confusion matrix of the final model on the test set, where it classifies.

    Example:
        >>> described(Partition([3, "ann"], np.array([[2, 0], [1, 5]]), 9))["partition"]
        {'clients': [3, 'ann'], 'counts': [[2, 0], [1, 5]], 'population': 9}
        >>> described(None, None, Confusion(np.array([[2, 0], [1, 5]]), ["no", "yes"]))["confusion"]
        {'counts': [[2, 0], [1, 5]], 'names': ['no', 'yes']}
    """
    held = partition and {
        "clients": list(partition.clients),
        "counts": partition.counts_KC.tolist(),
        "population": partition.population,
    }
    taken = confusion and {
        "counts": None if confusion.counts_CC is None else confusion.counts_CC.tolist(),
        "names": list(confusion.names),
    }
    # A graph that is too large to draw would fill the folder with edges that no page shows.
    met = _edges(graph) if graph is not None and can_be_drawn(graph) else None
    return {"partition": held, "graph": met, "confusion": taken}


def can_be_drawn(graph: "nx.Graph[Any]") -> bool:
    """True for a graph with few edges enough for a page."""
    return graph.number_of_edges() <= _MOST_EDGES


def read(content: Mapping[str, Any]) -> "tuple[Partition | None, nx.Graph[Any] | None, Confusion | None]":
    """Partition, graph and confusion matrix that :func:`described` wrote down; older runs have no such matrix."""
    held = content["partition"]
    met = content["graph"]
    taken = content.get("confusion")
    partition = held and Partition(held["clients"], np.array(held["counts"]), held["population"])
    confusion = taken and Confusion(taken["counts"] and np.array(taken["counts"]), taken["names"])
    return partition, None if met is None else _graph(met), confusion


def _graph(met: Mapping[str, Any]) -> "nx.Graph[Any]":
    import networkx as nx

    graph: nx.Graph[Any] = nx.DiGraph() if met["is_directed"] else nx.Graph()
    graph.add_nodes_from(met["nodes"])
    graph.add_edges_from(met["edges"])
    return graph


def _edges(graph: "nx.Graph[Any]") -> dict[str, Any]:
    return {
        "is_directed": graph.is_directed(),
        "nodes": list(graph.nodes),
        "edges": [list(edge) for edge in graph.edges],
    }
