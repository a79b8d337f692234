"""Neighbours that can reach each other: no two of them only dial, and no part of the graph falls off."""

import random
from typing import Any

import networkx as nx
import pytest

from fed.errors import InvalidExperiment
from fed.server.peer.members.member import Member
from fed.server.peer.reachability import reachable_graph
from fed.topology.weights import is_doubly_stochastic, mixing_matrix


def members(listening: list[bool]) -> list[Member]:
    return [Member(str(place), f"host:{place + 1}" if listens else "", 1) for place, listens in enumerate(listening)]


def test_parts_with_listening_members_are_joined_too() -> None:
    reachable = reachable_graph(members([True, False, False, True, False, False]), nx.cycle_graph(6))
    assert sorted(map(sorted, reachable.edges)) == [[0, 1], [0, 2], [0, 5], [2, 3], [3, 4]]


def components(graph: Any) -> list[list[int]]:
    found = nx.strongly_connected_components(graph) if graph.is_directed() else nx.connected_components(graph)
    return sorted(map(sorted, found))


@pytest.mark.parametrize("is_directed", [False, True])
def test_a_graph_stays_connected_whichever_members_only_dial(is_directed: bool) -> None:
    draws, tried = random.Random(0), 0
    while tried < 200:
        peers = draws.randint(2, 9)
        graph = nx.gnp_random_graph(peers, draws.uniform(0.2, 0.8), seed=draws.randrange(10**9), directed=is_directed)
        whole = nx.is_strongly_connected(graph) if is_directed else True
        listening = [draws.random() < 0.5 for _ in range(peers)]
        has_hub = all(
            any(listening[place] for place in part) for part in nx.connected_components(graph.to_undirected())
        )
        if not (whole and has_hub):
            continue
        tried += 1
        reachable = reachable_graph(members(listening), graph)
        assert components(reachable) == components(graph)
        assert all(listening[one] or listening[other] for one, other in reachable.edges)
        kept = {(one, other) for one, other in graph.edges if listening[one] or listening[other]}
        assert kept <= {*reachable.edges} | {(other, one) for one, other in reachable.edges if not is_directed}


def test_graph_with_weights_of_its_own_is_weighed_anew() -> None:
    """As MATCHA's is, whose weights are those of its edges."""
    graph = nx.cycle_graph(6)
    nx.set_edge_attributes(graph, dict.fromkeys(graph.edges, 0.45), "weight")
    whole = reachable_graph(members([True] * 6), graph)
    assert nx.get_edge_attributes(whole, "weight")
    reachable = reachable_graph(members([True, False, False, True, False, False]), graph)
    assert is_doubly_stochastic(mixing_matrix(reachable))
    assert nx.get_edge_attributes(graph, "weight")


def test_one_member_at_least_must_listen() -> None:
    with pytest.raises(InvalidExperiment, match="one peer at least must listen"):
        reachable_graph(members([False, False]), nx.path_graph(2))
