"""Reachability of members: of two that only dial, neither can reach the other."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fed.errors import InvalidExperiment
from fed.server.peer.members.member import Member

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["reachable_graph"]

_log = logging.getLogger(__name__)


def reachable_graph(members: Sequence[Member], graph: "nx.Graph[int]") -> "nx.Graph[int]":
    """The graph without edges between two members that only dial; parts that this cuts off join a listening member.

    Args:
        members: one record for each of the graph's nodes, in their order.
        graph: the topology's graph, with nodes 0, 1, …

    Returns:
        The same graph where all its edges can be dialled, otherwise a changed copy without weights.

    Raises:
        InvalidExperiment: if no member listens.
    """
    import networkx as nx

    cannot = [(one, other) for one, other in graph.edges if not members[one].address and not members[other].address]
    if not cannot:
        return graph
    listening = [place for place, member in enumerate(members) if member.address]
    if not listening:
        raise InvalidExperiment("one peer at least must listen, got none: start it with --listen HOST:PORT")
    reachable = graph.copy()
    reachable.remove_edges_from(cannot)
    for whole in map(sorted, nx.connected_components(graph.to_undirected())):
        # A part in which nobody listens joins the listener of another.
        hub = next((place for place in whole if members[place].address), listening[0])
        for part in _parts(reachable.subgraph(whole), before=graph.subgraph(whole)):
            if hub not in part:
                reachable.add_edge(part[0], hub)
                if reachable.is_directed():
                    reachable.add_edge(hub, part[0])
    for _, _, values in reachable.edges(data=True):  # the topology made its weights for the whole graph
        values.pop("weight", None)
    named = ", ".join(f"{members[one].name}–{members[other].name}" for one, other in cannot)
    _log.info("these pairs of peers only dial, and so cannot be neighbours: %s; let one of each pair listen", named)
    return reachable


def _parts(reachable: Any, before: Any) -> list[list[int]]:
    """Parts that removed edges have cut off from each other; a path one way counts where all had paths both ways."""
    import networkx as nx

    if before.is_directed() and nx.is_strongly_connected(before):
        return sorted(map(sorted, nx.strongly_connected_components(reachable)))
    return sorted(map(sorted, nx.connected_components(reachable.to_undirected())))
