"""Mixing matrices against closed forms: ρ is the second largest modulus of W's eigenvalues."""

import math
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fed.errors import InvalidExperiment
from fed.topology import mixing_matrix
from fed.topology.graphs import complete, exponential, ring

Graph = Callable[[int], "nx.Graph[int]"]
KINDS: list[Graph] = [ring, complete, exponential]
each_kind = pytest.mark.parametrize("kind", KINDS)
ROUNDING = 1e-12  # eigenvalues of symmetric matrices with entries up to 1 are good to some 1e-16 times their size


def rho(graph: "nx.Graph[int]") -> float:
    eigenvalues = torch.linalg.eigvalsh(mixing_matrix(graph).to_dense())
    return float(eigenvalues.abs().sort().values[-2])


@pytest.mark.parametrize("peers", [3, 4, 5, 6, 10, 33, 100])
def test_a_ring_contracts_by_its_closed_form(peers: int) -> None:
    assert rho(ring(peers)) == pytest.approx((1 + 2 * math.cos(2 * math.pi / peers)) / 3, abs=ROUNDING)


@pytest.mark.parametrize("peers", [2, 3, 10, 33])
def test_a_complete_graph_agrees_at_once(peers: int) -> None:
    weights_NN = mixing_matrix(complete(peers)).to_dense()
    torch.testing.assert_close(weights_NN, torch.full_like(weights_NN, 1 / peers), rtol=1e-14, atol=0)
    assert rho(complete(peers)) < ROUNDING


@pytest.mark.parametrize(("peers", "expected"), [(6, 1 / 5), (8, 1 / 3), (10, 3 / 7)])
def test_an_exponential_graph_contracts_by_the_references_figures(peers: int, expected: float) -> None:
    assert rho(exponential(peers)) == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (nx.path_graph(7), (1 + 2 * math.cos(math.pi / 7)) / 3),
        (nx.star_graph(6), 1 - 1 / 7),
        (
            nx.convert_node_labels_to_integers(nx.grid_2d_graph(5, 5, periodic=True)),
            (3 + 2 * math.cos(0.4 * math.pi)) / 5,
        ),
        (nx.convert_node_labels_to_integers(nx.hypercube_graph(4)), 3 / 5),
    ],
    ids=["path", "star", "torus", "hypercube"],
)
def test_graphs_of_unequal_degrees_contract_by_their_closed_forms(graph: "nx.Graph[int]", expected: float) -> None:
    assert rho(graph) == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.parametrize(
    ("peers", "expected"),
    [(4, {1, 2}), (5, {1, 2}), (8, {1, 2, 4}), (9, {1, 2, 4}), (11, {1, 2, 3, 4}), (17, {1, 2, 4, 8})],
)
def test_exponential_neighbours_are_powers_of_two_away(peers: int, expected: set[int]) -> None:
    """Counted the shorter way round: 4 of 5 is 1, 8 of 9 is 1, 8 of 11 is 3, 16 of 17 is 1."""
    graph = exponential(peers)
    for peer in range(peers):
        assert {min((peer - other) % peers, (other - peer) % peers) for other in graph[peer]} == expected


@each_kind
@given(peers=st.integers(1, 40))
def test_weights_are_symmetric_doubly_stochastic_and_no_less_than_zero(kind: Graph, peers: int) -> None:
    weights_NN = mixing_matrix(kind(peers)).to_dense()
    assert (weights_NN.shape, weights_NN.dtype) == ((peers, peers), torch.float64)
    assert torch.equal(weights_NN, weights_NN.T)
    torch.testing.assert_close(weights_NN.sum(0), torch.ones(peers, dtype=torch.float64), rtol=1e-15 * peers, atol=0)
    assert (weights_NN >= 0).all()
    assert (weights_NN.diagonal() > 0).all()


@each_kind
@pytest.mark.parametrize("peers", [1, 2, 3])
def test_few_peers_are_all_neighbours(kind: Graph, peers: int) -> None:
    weights_NN = mixing_matrix(kind(peers))
    torch.testing.assert_close(weights_NN.to_dense(), torch.full((peers, peers), 1 / peers, dtype=torch.float64))
    assert weights_NN.is_coalesced()


@given(st.integers(2, 12), st.integers(0, 10**6))
def test_weights_are_those_of_metropolis_and_hastings_on_any_graph(peers: int, seed: int) -> None:
    """The equation, entry by entry, on random connected graphs; a node's loop to itself is no neighbour."""
    generator = np.random.default_rng(seed)
    graph: nx.Graph[int] = nx.path_graph(peers)
    graph.add_edges_from(tuple(pair) for pair in generator.integers(peers, size=(peers, 2)).tolist())
    got_NN = mixing_matrix(graph).to_dense()
    adjacent_NN = nx.to_numpy_array(graph, nodelist=range(peers)) > 0
    np.fill_diagonal(adjacent_NN, False)
    degrees_N = adjacent_NN.sum(1)
    expected_NN = adjacent_NN / (1 + np.maximum(degrees_N[:, None], degrees_N[None, :]))
    np.fill_diagonal(expected_NN, 1 - expected_NN.sum(1))
    np.testing.assert_allclose(got_NN.numpy(), expected_NN, rtol=0, atol=1e-15)


def test_mixing_keeps_the_mean_and_contracts_by_rho_at_least() -> None:
    x_NP = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for kind in KINDS:
        mixed_NP = torch.sparse.mm(mixing_matrix(kind(20)), x_NP)
        torch.testing.assert_close(mixed_NP.mean(0), x_NP.mean(0), rtol=1e-13, atol=1e-15)
        spread, mixed_spread = (float((one - one.mean(0)).norm()) for one in (x_NP, mixed_NP))
        assert mixed_spread <= rho(kind(20)) * spread + 1e-14


def test_separate_parts_are_refused() -> None:
    graph: nx.Graph[int] = nx.Graph([(0, 1), (2, 3)])
    with pytest.raises(InvalidExperiment, match="must be connected, got 2 separate parts"):
        mixing_matrix(graph)


@pytest.mark.parametrize(
    "graph",
    [nx.DiGraph([(0, 1), (1, 0)]), nx.Graph([("a", "b")]), nx.Graph([(1, 2)])],
    ids=["directed", "named", "from one"],
)
def test_a_graph_whose_nodes_are_no_peers_is_refused(graph: Any) -> None:
    with pytest.raises(InvalidExperiment, match="undirected, with nodes 0 to 1"):
        mixing_matrix(graph)
