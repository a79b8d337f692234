"""Graphs by their definitions and closed forms, and those that change with the round."""

import itertools
import math
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch

import fed
from fed.aggregators.d2 import D2
from fed.config.registry import TOPOLOGIES
from fed.errors import InvalidExperiment
from fed.topology import Topology, changing, facts, graphs
from fed.vectors.randomness import Streams

STREAMS = Streams(5)
NEEDS_KEYS: dict[str, dict[str, Any]] = {"edges": {"pairs": [[peer, (peer + 3) % 16] for peer in range(16)]}}


def topology(kind: str, peers: int = 16, **keys: Any) -> Topology:
    rules = {name: keys.pop(name) for name in ("weights", "lazy") if name in keys}
    section = TOPOLOGIES.make(kind, **NEEDS_KEYS.get(kind, {}) | keys)
    return Topology(section.make, section.target, peers, STREAMS, **rules)


@pytest.mark.parametrize("kind", TOPOLOGIES.builtin)
def test_every_kind_leads_all_peers_to_the_mean(kind: str) -> None:
    """Push-sum's ratio, which is the plain mean where W is doubly stochastic."""
    of = topology(kind)
    x_NP = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mean_P, w_N1, mixed_NP = x_NP.mean(0), torch.ones(16, 1, dtype=torch.float64), x_NP
    for number in range(1, 3001):
        mixed_NP, w_N1 = (torch.sparse.mm(of.matrix(number), part) for part in (mixed_NP, w_N1))
        if of.keeps_mean:
            assert torch.allclose(w_N1, torch.ones_like(w_N1), rtol=0, atol=1e-12)
        if number % 100 == 0 and float((mixed_NP / w_N1 - mean_P).abs().max()) < 1e-11:
            break  # slow graphs need all rounds
    assert float(w_N1.sum()) == pytest.approx(16, abs=1e-11)
    torch.testing.assert_close(mixed_NP / w_N1, mean_P.expand(16, -1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", TOPOLOGIES.builtin)
def test_a_graph_is_a_function_of_peers_round_and_streams(kind: str) -> None:
    one, other = topology(kind), topology(kind)
    backwards = {number: other.graph(number) for number in (5, 4, 3, 2, 1)}
    for number in range(1, 6):
        assert nx.utils.graphs_equal(one.graph(number), backwards[number])
    same = all(nx.utils.graphs_equal(one.graph(1), backwards[number]) for number in range(2, 6))
    assert same == (not one.changes)


@pytest.mark.parametrize(
    ("kind", "peers", "keys", "rho"),
    [
        ("path", 9, {}, (1 + 2 * math.cos(math.pi / 9)) / 3),
        ("torus", 25, {}, (3 + 2 * math.cos(2 * math.pi / 5)) / 5),
        ("hypercube", 32, {}, 4 / 6),
        ("star", 12, {}, 1 - 1 / 12),
        ("complete", 7, {}, 0.0),
        ("clusters", 10, {"count": 1}, 0.0),
        ("small_world", 11, {"degree": 2, "rewired": 0.0}, (1 + 2 * math.cos(2 * math.pi / 11)) / 3),
        ("random_regular", 6, {"degree": 5}, 0.0),
        ("erdos_renyi", 6, {"probability": 1.0}, 0.0),
        ("tree", 7, {"branching": 6}, 1 - 1 / 7),
    ],
)
def test_a_kind_contracts_by_its_closed_form(kind: str, peers: int, keys: dict[str, Any], rho: float) -> None:
    of = topology(kind, peers, **keys)
    found = facts(of.graph, of.matrix, changes=False)
    assert found.contraction == pytest.approx(rho, abs=1e-9)
    assert found.rounds_to_consensus == (1 if rho == 0 else math.ceil(math.log(1e-3) / math.log(rho)))


def test_degrees_and_diameters_are_those_of_the_definition() -> None:
    for kind, expected in {
        "ring": (2, 2, 8),
        "path": (1, 2, 15),
        "torus": (4, 4, 4),
        "hypercube": (4, 4, 4),
        "star": (1, 15, 2),
        "tree": (1, 3, 7),
        "directed_ring": (1, 1, 15),
        "directed_exponential": (4, 4, 4),
    }.items():
        of = topology(kind)
        assert facts(of.graph, of.matrix, changes=False)[:3] == expected, kind
    bridged = graphs.clusters(11, 3, bridges=2)
    assert bridged.number_of_edges() == 6 + 6 + 3 + 3 * 2
    assert sorted(degree for _, degree in graphs.random_regular(10, STREAMS, 3).degree()) == [3] * 10


@pytest.mark.parametrize(
    "peers", [pytest.param(n, marks=[] if n in (2, 3, 4, 6, 16, 17) else pytest.mark.long) for n in range(2, 18)]
)
def test_one_peer_rounds_are_exact_for_powers_of_two_alone(peers: int) -> None:
    of = topology("one_peer_exponential", peers)
    rounds = math.ceil(math.log2(peers))
    product_NN = torch.eye(peers, dtype=torch.float64)
    for number in range(1, rounds + 1):
        product_NN = torch.sparse.mm(of.matrix(number), product_NN)
    error = float((product_NN - 1 / peers).abs().max())
    is_power = peers & (peers - 1) == 0
    assert (error < 1e-15) == is_power
    assert (facts(of.graph, of.matrix, changes=True).exact_after == rounds) == is_power


def test_pairs_are_matched_at_random() -> None:
    met = np.zeros((7, 7))
    for number in range(1, 2001):
        graph = changing.random_matching(7, number, STREAMS)
        assert graph.number_of_edges() == 3
        assert max(degree for _, degree in graph.degree()) == 1
        met += nx.to_numpy_array(graph, nodelist=range(7))
    # each pair in one round of 7; 5 standard deviations of a binomial count
    counts = met[np.triu_indices(7, 1)]
    assert np.abs(counts - 2000 / 7).max() < 5 * math.sqrt(2000 * (1 / 7) * (6 / 7))


def laplacian(graph: Any) -> np.ndarray:
    found: np.ndarray = nx.laplacian_matrix(graph, nodelist=range(len(graph))).toarray()
    return found


@pytest.mark.parametrize("budget", [0.3, 0.6, 1.0])
def test_matcha_connects_as_no_other_probabilities_do(budget: float) -> None:
    """λ₂ of the mean Laplacian is the largest within the budget, and α contracts fastest, beside a search at random."""
    matchings, probabilities, weight = changing._plan(12, STREAMS, budget, "erdos_renyi")
    base = graphs.erdos_renyi(12, STREAMS)
    assert sorted(map(sorted, itertools.chain(*matchings))) == sorted(map(sorted, base.edges))
    assert all(len({*itertools.chain(*one)}) == 2 * len(one) for one in matchings)
    assert probabilities.sum() <= budget * len(matchings) + 1e-9
    assert ((probabilities >= 0) & (probabilities <= 1)).all()
    laplacians = np.stack(
        [laplacian(nx.empty_graph(12)) + changing._laplacian(12, [one], np.ones(1)) for one in matchings]
    )
    assert np.array_equal(laplacians.sum(0), laplacian(base))

    def connectivity(of: np.ndarray) -> float:
        return float(np.linalg.eigvalsh(np.tensordot(of, laplacians, 1))[1])

    best, generator = connectivity(probabilities), np.random.default_rng(0)
    for _ in range(300):
        step = generator.standard_normal(len(matchings)) * 10 ** generator.uniform(-4, 0)
        other = np.clip(probabilities + step, 0, 1)
        if other.sum() <= budget * len(matchings):
            assert connectivity(other) <= 1.0001 * best

    def contraction(of: float) -> float:
        """E[Wᵀ W] − J, over all ways in which matchings are active."""
        expected = -np.full((12, 12), 1 / 12)
        for active in itertools.product((0, 1), repeat=len(matchings)):
            share = np.prod(np.where(active, probabilities, 1 - probabilities))
            matrix = np.eye(12) - of * np.tensordot(active, laplacians, 1)
            expected = expected + share * matrix @ matrix
        return float(np.linalg.eigvalsh(expected)[-1])

    at_best = contraction(weight)
    assert all(at_best <= contraction(weight * factor) + 1e-9 for factor in (0.9, 0.99, 1.01, 1.1))


def test_matchings_are_as_many_as_neighbours_or_one_more() -> None:
    """By Vizing's theorem no graph needs more."""
    drawn = [nx.gnp_random_graph(3 + seed % 20, seed % 7 / 6, seed=seed) for seed in range(200)]
    for graph in (*drawn, nx.complete_graph(64), nx.complete_graph(9), nx.petersen_graph()):
        matchings = changing._matchings(graph)
        assert sorted(map(sorted, itertools.chain(*matchings))) == sorted(map(sorted, graph.edges))
        assert all(len({*itertools.chain(*one)}) == 2 * len(one) for one in matchings)
        assert len(matchings) <= max(degree for _, degree in graph.degree()) + 1


def test_matchings_that_are_all_alike_are_equally_probable() -> None:
    """Each of n − 1 perfect matchings has trace n, and n − 1 eigenvalues share that of Σ p L: none exceeds c n."""
    matchings, probabilities, _ = changing._plan(32, STREAMS, 0.5, "complete")
    assert [len(one) for one in matchings] == [16] * 31
    np.testing.assert_allclose(probabilities, 0.5, rtol=1e-12)


def test_matcha_sends_its_budget_on_average() -> None:
    base = graphs.erdos_renyi(12, STREAMS).number_of_edges()
    matchings, probabilities, _ = changing._plan(12, STREAMS, 0.5, "erdos_renyi")
    sent = [changing.matcha(12, number, STREAMS).number_of_edges() for number in range(1, 1001)]
    sizes = np.array([len(one) for one in matchings])
    # of independent matchings: the mean and its standard deviation
    deviation = math.sqrt((sizes**2 * probabilities * (1 - probabilities)).sum() / 1000)
    assert abs(np.mean(sent) - (sizes * probabilities).sum()) < 5 * deviation
    assert np.mean(sent) < 0.7 * base


def test_edges_come_from_a_list_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("# from to\n0 1\n\n1 2  # last\n2 0\n")
    listed = graphs.edges(3, pairs=((0, 1), (1, 2), (2, 0)))
    assert nx.utils.graphs_equal(graphs.edges(3, file=str(tmp_path / "edges.txt")), listed)
    assert graphs.edges(3, pairs=((0, 1), (1, 2), (2, 0)), directed=True).is_directed()


@pytest.mark.parametrize(
    ("kind", "peers", "keys", "reason"),
    [
        ("hypercube", 12, {}, "power of two as the number of peers, got 12: take 8 of them"),
        ("torus", 12, {"rows": 5}, "must have full rows, got 12 peers in 5 rows"),
        ("random_regular", 5, {"degree": 3}, "an even product of both, got 5 peers and degree 3"),
        ("small_world", 10, {"degree": 3}, "needs an even degree below the number of peers, got 3 of 10"),
        ("clusters", 5, {"count": 3, "bridges": 2}, "needs 2 peers in each of 3 clusters, got 5 peers"),
        ("erdos_renyi", 50, {"probability": 0.001}, "must be connected, and none of 100 draws is: raise probability"),
        ("random_directed", 2, {}, "needs more peers than receivers of each, got 2 of 2"),
        ("edges", 3, {"pairs": None}, "needs pairs or file, and not both"),
        ("edges", 3, {"pairs": [(0, 3)]}, r"two numbers from 0 to 2, got \(0, 3\)"),
        ("edges", 4, {"pairs": [(0, 1), (2, 3)]}, "must be connected, got 2 separate parts"),
        (
            "edges",
            3,
            {"pairs": None, "file": "nowhere.txt"},
            "nowhere.txt must hold two peers' numbers a line: No",
        ),
        ("edges", 3, {"pairs": [(0, 1), (1, 2), (0, 2)], "directed": True}, "got 3 separate parts"),
    ],
)
def test_what_is_no_topology_is_refused(kind: str, peers: int, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidExperiment, match=reason):
        topology(kind, peers, **keys)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"topology": "random_directed"}, "got topology random_directed, whose weights do not keep the peers' mean"),
        (
            {"topology": "directed_ring", "devices": {"failure": 0.1}},
            "got topology directed_ring with devices that come and go: choose algorithm sgp",
        ),
        (
            {"algorithm": "d2", "local": {"steps": 1}},
            r"d2 needs weights whose smallest eigenvalue is above −1/3, got -0.3333: write topology.lazy",
        ),
        *(
            (
                {"algorithm": "d2", "local": {"steps": 1}, "topology": {"kind": kind, "lazy": True}},
                f"d2 needs a fixed graph whose messages go both ways, .*, got {got}: choose .* gradient_tracking",
            )
            for kind, got in (
                ("one_peer_exponential", "one that changes with the round"),
                ("matcha", "one that changes with the round"),
                ("random_matching", "one that changes with the round"),
                ("directed_ring", "a directed one"),
                ("directed_exponential", "a directed one"),
            )
        ),
    ],
)
def test_weights_that_an_algorithm_cannot_use_are_refused(changed: dict[str, Any], reason: str) -> None:
    keys: dict[str, Any] = {"algorithm": "dpsgd", "data": {"clients": 8}, "rounds": {"count": 1}}
    with pytest.raises(InvalidExperiment, match=reason):
        fed.simulate(fed.Experiment(**{**keys, **changed}))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("kind", TOPOLOGIES.builtin)
def test_d2_takes_graphs_on_which_its_disagreement_shrinks(kind: str, lazy: bool) -> None:
    """Without gradients X' = W (2 X − X_before): of an eigenvalue λ below 1 the roots of r² − 2 λ r + λ must be inside
    the unit circle, which those of some complex λ are not."""
    made = topology(kind, lazy=lazy)
    eigenvalues = np.linalg.eigvals(made.matrix(1).to_dense().numpy())
    roots = [abs(np.roots([1, -2 * value, value])) for value in eigenvalues if abs(value - 1) > 1e-9]
    radius = max(map(max, roots), default=0.0)
    try:
        D2().check_topology(made)
    except InvalidExperiment:
        assert radius >= 1 - 1e-6 or made.changes or made.is_directed
    else:
        assert radius < 1
    if kind == "directed_ring":
        assert radius > 1


@pytest.mark.parametrize("peers", [1, 2, 3])
@pytest.mark.parametrize("kind", TOPOLOGIES.builtin)
def test_few_peers_have_a_topology_or_a_sentence(kind: str, peers: int) -> None:
    keys = {"pairs": [[0, peers - 1]]} if kind == "edges" else {}
    try:
        made = topology(kind, peers, **keys)
    except InvalidExperiment:
        assert kind in ("hypercube", "random_regular", "small_world", "clusters", "edges", "random_directed", "torus")
        return
    for number in range(1, 4):
        sums = made.matrix(number).to_dense().sum(0)  # what a peer sends, and keeps, is all that it has
        torch.testing.assert_close(sums, torch.ones(peers, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("base", ["ring", "torus", "complete", "exponential", "erdos_renyi"])
def test_a_single_peer_is_alone_in_matcha(base: str) -> None:
    made = topology("matcha", 1, base=base)
    assert [made.matrix(number).to_dense().tolist() for number in (1, 2)] == [[[1.0]], [[1.0]]]


def test_matcha_trains_a_single_peer() -> None:
    keys: dict[str, Any] = {"algorithm": "matcha", "data": {"clients": 1}, "rounds": {"count": 2}}
    run = fed.simulate(fed.Experiment(**keys, model="logistic", local={"steps": 1}))
    assert run.summary["status"] == "finished"
