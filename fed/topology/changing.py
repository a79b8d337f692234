"""Graphs of peers that change with the round: functions of (peers, round, streams)."""

from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Literal

import networkx as nx
import numpy as np
from pydantic import Field

from fed.randomness import Streams
from fed.topology import graphs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["grid_groups", "matcha", "one_peer_exponential", "random_matching"]

_CLOSE = 1e-4  # of the largest algebraic connectivity, by which it may be missed
_CUTS, _AT_ONCE = 100, 6


def one_peer_exponential(peers: int, number: int) -> "nx.Graph[int]":
    """Each peer i sends to one, i + 2^(t − 1): log₂ n rounds are the exact mean if n is a power of two.

    Args:
        peers: n ≥ 1.
        number: t, the round, from 1.

    References:
        Ying et al. 2021, "Exponential graph is provably efficient for decentralized deep training", arXiv 2110.13363.
    """
    exponents = max(1, (peers - 1).bit_length())
    hop = 1 << ((number - 1) % exponents)
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(peers))
    graph.add_edges_from((peer, (peer + hop) % peers) for peer in range(peers) if hop % peers)
    return graph


def random_matching(peers: int, number: int, streams: Streams) -> "nx.Graph[int]":
    """Random pairs, anew in each round; of an odd number of peers one is alone.

    Args:
        peers: n ≥ 1.
        number: the round, from 1.
        streams: the run's.
    """
    order = streams.generator("topology", number).permutation(peers).tolist()
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(peers))
    graph.add_edges_from(zip(order[::2], order[1::2], strict=False))
    return graph


def grid_groups(peers: int, number: int, streams: Streams, axes: int) -> "nx.Graph[int]":
    """Cliques of peers along one axis of a grid, another in each round, for rules that choose partners by it.

    Args:
        peers: n ≥ 1.
        number: the round, from 1.
        streams: the run's; not used.
        axes: d ≥ 1, each with as few places as hold all peers.
    """
    places = 1
    while places**axes < peers:
        places += 1
    stride = places ** ((number - 1) % axes)
    groups: dict[int, list[int]] = {}
    for peer in range(peers):
        groups.setdefault(peer - peer // stride % places * stride, []).append(peer)
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(peers))
    for group in groups.values():
        graph.add_edges_from(combinations(group, 2))
    return graph


def matcha(
    peers: int,
    number: int,
    streams: Streams,
    budget: Annotated[float, Field(gt=0, le=1)] = 0.5,
    base: Literal["ring", "torus", "complete", "exponential", "erdos_renyi", "random_regular"] = "erdos_renyi",
) -> "nx.Graph[int]":
    r"""Random matchings of a base graph, those that connect it more often (Wang et al. 2019, 1905.09435).

    .. math:: W = I - α \sum_j B_j L_j, \qquad P(B_j = 1) = p_j, \qquad \sum_j p_j ≤ c \cdot \#\text{matchings}

    The p_j maximise the algebraic connectivity of the mean graph, α minimises the expected contraction.

    Args:
        peers: n ≥ 2.
        number: the round, from 1.
        streams: the run's.
        budget: c in (0, 1], the share of the base graph's messages that a round has on average.
        base: the graph that is taken apart, with its defaults.
    """
    matchings, probabilities, weight = _plan(peers, streams, budget, base)
    drawn = streams.generator("matchings", number).random(len(matchings)) < probabilities
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(peers))
    active = [edge for matching, is_active in zip(matchings, drawn, strict=True) if is_active for edge in matching]
    graph.add_edges_from(active, weight=weight)
    return graph


@cache
def _plan(
    peers: int, streams: Streams, budget: float, base: str
) -> tuple["Sequence[Sequence[tuple[int, int]]]", np.ndarray, float]:
    """The matchings of a base graph, their probabilities, and α."""
    given = {"streams": streams} if base in ("erdos_renyi", "random_regular") else {}
    graph: nx.Graph[int] = getattr(graphs, base)(peers, **given)
    colours = nx.greedy_color(nx.line_graph(graph), "DSATUR")  # edges of one colour share no peer
    matchings = [[edge for edge in colours if colours[edge] == colour] for colour in sorted({*colours.values()})]
    laplacians = np.stack([_laplacian(peers, matching) for matching in matchings])
    probabilities = _most_connected(laplacians, budget * len(matchings))
    mean = np.tensordot(probabilities, laplacians, 1)
    # E[(Σ B L)²] = (Σ p L)² + Σ p (1 − p) L², and of a matching L² = 2 L
    square = mean @ mean + 2 * np.tensordot(probabilities * (1 - probabilities), laplacians, 1)
    return matchings, probabilities, _best_weight(mean, square)


def _laplacian(peers: int, matching: "Sequence[tuple[int, int]]") -> np.ndarray:
    laplacian = np.zeros((peers, peers))
    for one, other in matching:
        laplacian[[one, other], [one, other]] += 1
        laplacian[[one, other], [other, one]] -= 1
    return laplacian


def _most_connected(laplacians: np.ndarray, total: float) -> np.ndarray:
    """Probabilities p with Σ p ≤ total that maximise the second smallest eigenvalue of Σ p L.

    It is the least of vᵀ (Σ p L) v over unit vectors v of mean 0: each that is found cuts a linear program.
    """
    from scipy.optimize import linprog

    count = len(laplacians)
    probabilities, cuts, bound = np.full(count, total / count), np.zeros((0, count + 1)), float(2 * count)
    best, most = probabilities, -1.0
    for _ in range(_CUTS):
        values, vectors = np.linalg.eigh(np.tensordot(probabilities, laplacians, 1))
        if values[1] > most:
            best, most = probabilities, float(values[1])
        if bound - most <= _CLOSE * most:
            break
        found = vectors[:, 1:_AT_ONCE]
        rows = np.einsum("ik,jil,lk->kj", found, laplacians, found, optimize=True)
        cuts = np.concatenate([cuts, np.column_stack([-rows, np.ones(len(rows))])])
        solved = linprog(
            np.append(np.zeros(count), -1.0),
            np.concatenate([cuts, np.append(np.ones(count), 0.0)[None]]),
            np.append(np.zeros(len(cuts)), total),
            bounds=[(0, 1)] * count + [(None, None)],
        )
        assert solved.x is not None  # all zeros are feasible
        probabilities, bound = np.clip(solved.x[:-1], 0, 1), float(solved.x[-1])
    return best


def _best_weight(mean: np.ndarray, square: np.ndarray) -> float:
    """α with the least largest eigenvalue of I − 2 α E[L] + α² E[L²] beside that of the mean."""
    from scipy.optimize import minimize_scalar

    peers = len(mean)

    def contraction(weight: float) -> float:
        expected = np.eye(peers) - 2 * weight * mean + weight**2 * square - np.full((peers, peers), 1 / peers)
        return float(np.linalg.eigvalsh(expected)[-1])

    return float(minimize_scalar(contraction, bounds=(0, 1), method="bounded", options={"xatol": 1e-10}).x)
