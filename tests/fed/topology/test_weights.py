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
from fed.topology.graphs import complete, directed_exponential, directed_ring, exponential, random_directed, ring
from fed.topology.weights import is_doubly_stochastic
from fed.vectors.randomness import Streams

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


@pytest.mark.parametrize("graph", [nx.Graph([("a", "b")]), nx.Graph([(1, 2)])], ids=["named", "from one"])
def test_a_graph_whose_nodes_are_no_peers_is_refused(graph: Any) -> None:
    with pytest.raises(InvalidExperiment, match="must have the nodes 0 to 1"):
        mixing_matrix(graph)


STAR = nx.star_graph(4)


def test_uniform_weights_on_unequal_degrees_are_refused() -> None:
    """They converge to a mean by degree: the hub of a star of five counts 5 of 13, each other peer 2."""
    with pytest.raises(InvalidExperiment, match=r"equally many neighbours .* got 1 to 4: write metropolis"):
        mixing_matrix(STAR, "uniform")
    adjacent_NN = nx.to_numpy_array(STAR, nodelist=range(5)) + np.eye(5)
    rows_NN = adjacent_NN / adjacent_NN.sum(1, keepdims=True)
    np.testing.assert_allclose(np.linalg.matrix_power(rows_NN, 200)[0], np.array([5, 2, 2, 2, 2]) / 13, atol=1e-12)
    metropolis_NN = mixing_matrix(STAR).to_dense().numpy()
    np.testing.assert_allclose(np.linalg.matrix_power(metropolis_NN, 500)[0], np.full(5, 0.2), atol=1e-12)


def test_laplacian_weights_follow_their_equation() -> None:
    graph = nx.lollipop_graph(4, 3)
    laplacian_NN = nx.laplacian_matrix(graph, nodelist=range(7)).toarray()
    expected_NN = np.eye(7) - laplacian_NN / (1 + max(dict(graph.degree()).values()))
    np.testing.assert_allclose(mixing_matrix(graph, "laplacian").to_dense().numpy(), expected_NN, atol=1e-15)


@pytest.mark.parametrize("peers", [4, 6, 8, 10, 16])
def test_directed_graphs_of_equal_degrees_have_uniform_weights(peers: int) -> None:
    ring_NN, exponential_NN = (mixing_matrix(kind(peers)) for kind in (directed_ring, directed_exponential))
    for matrix_NN in (ring_NN, exponential_NN):
        assert is_doubly_stochastic(matrix_NN)
    second = [float(torch.linalg.eigvals(one.to_dense()).abs().sort().values[-2]) for one in (ring_NN, exponential_NN)]
    hops = math.ceil(math.log2(peers))
    assert second == pytest.approx([math.cos(math.pi / peers), 1 - 2 / (1 + hops)], abs=1e-9)
    # from the sender to the receiver: what peer 0 sends arrives at peer 1
    assert ring_NN.to_dense()[1, 0] == 0.5
    assert ring_NN.to_dense()[0, 1] == 0


def test_columns_add_up_on_any_directed_graph() -> None:
    graph = random_directed(9, Streams(1), degree=3)
    matrix_NN = mixing_matrix(graph).to_dense()
    torch.testing.assert_close(matrix_NN.sum(0), torch.ones(9, dtype=torch.float64), rtol=1e-15, atol=0)
    assert not is_doubly_stochastic(mixing_matrix(graph))
    assert float(matrix_NN[:, 2].max()) == 1 / 4
    for kind in ("metropolis", "laplacian"):
        with pytest.raises(InvalidExperiment, match=f"topology.weights {kind} needs an undirected graph"):
            mixing_matrix(graph, kind)


def test_lazy_weights_keep_half() -> None:
    whole_NN, lazy_NN = (mixing_matrix(ring(6), lazy=lazy).to_dense() for lazy in (False, True))
    torch.testing.assert_close(lazy_NN, (torch.eye(6) + whole_NN) / 2, rtol=0, atol=1e-16)
    assert float(torch.linalg.eigvalsh(lazy_NN).min()) == pytest.approx((1 - 1 / 3) / 2, abs=ROUNDING)
