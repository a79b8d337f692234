"""Graphs of peers that change with the round: functions of (peers, round, streams)."""

import math
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Literal

import networkx as nx
import numpy as np
from pydantic import Field

from fed.topology import graphs
from fed.vectors.randomness import Streams

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["grid_groups", "matcha", "one_peer_exponential", "random_matching"]

_CLOSE = 1e-4  # of the largest algebraic connectivity, by which it may be missed
_WIDTHS = (1e-9, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # μ of smoothing, in shares of λ₂; the first for equal probabilities


def one_peer_exponential(peers: int, number: int) -> "nx.Graph[int]":
    """Each peer i sends to one, i + 2^(t − 1): log₂ n rounds are the exact mean if n is a power of two.

    Args:
        peers: n ≥ 1.
        number: t, the number of the round, from 1.

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
    """Random pairs, drawn anew in each round; of an odd number of peers one is alone.

    Args:
        peers: n ≥ 1.
        number: number of the round, from 1.
        streams: random streams of the run.
    """
    order = streams.generator("topology", number).permutation(peers).tolist()
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(peers))
    graph.add_edges_from(zip(order[::2], order[1::2], strict=False))
    return graph


def grid_groups(peers: int, number: int, streams: Streams, axes: int) -> "nx.Graph[int]":
    """Cliques of peers along one axis of a grid, another in each round, for rules that choose their partners so.

    Args:
        peers: n ≥ 1.
        number: number of the round, from 1.
        streams: random streams of the run; not used.
        axes: d ≥ 1, the number of axes; all have the smallest length M with M^d ≥ n.
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
    r"""Random matchings of a base graph, most often those that connect it best (Wang et al. 2019, 1905.09435).

    .. math:: W = I - α \sum_j B_j L_j, \qquad P(B_j = 1) = p_j, \qquad \sum_j p_j ≤ c \cdot \#\text{matchings}

    The p_j maximise the algebraic connectivity of the mean graph, α minimises the expected contraction.

    Args:
        peers: n ≥ 1; a single one is alone in every round.
        number: number of the round, from 1.
        streams: random streams of the run.
        budget: c in (0, 1], the share of the base graph's messages that a round has on average.
        base: kind of the graph that is taken apart, with its defaults.
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
    matchings = _matchings(getattr(graphs, base)(peers, **given))
    if not matchings:  # of a single peer
        return [], np.zeros(0), 0.0
    probabilities = _most_connected(peers, matchings, budget * len(matchings))
    mean = _laplacian(peers, matchings, probabilities)
    # E[(Σ B L)²] = (Σ p L)² + Σ p (1 − p) L², and of a matching L² = 2 L.
    square = mean @ mean + 2 * _laplacian(peers, matchings, probabilities * (1 - probabilities))
    return matchings, probabilities, _best_weight(mean, square)


def _matchings(graph: "nx.Graph[int]") -> list[list[tuple[int, int]]]:
    """A graph's edges in at most d + 1 matchings, d the most neighbours of a peer (Misra & Gries 1992).

    Each edge gets a colour, and edges of one colour share no peer.
    """
    colours = range(max((degree for _, degree in graph.degree()), default=0) + 1)
    mates: dict[int, dict[int, int]] = {peer: {} for peer in graph}  # by colour
    for peer, other in graph.edges:
        both = next((colour for colour in colours if colour not in mates[peer] and colour not in mates[other]), None)
        if both is None:
            _turn_fan(mates, colours, peer, other)
        else:
            mates[peer][both] = other
            mates[other][both] = peer
    edges = ((colour, peer, mate) for peer in graph for colour, mate in mates[peer].items() if peer < mate)
    by_colour: dict[int, list[tuple[int, int]]] = {}
    # Sorted by colour: a round draws for the matchings in this order.
    for colour, peer, mate in sorted(edges):
        by_colour.setdefault(colour, []).append((peer, mate))
    return [*by_colour.values()]


def _turn_fan(mates: dict[int, dict[int, int]], colours: range, peer: int, other: int) -> None:
    """Colour an edge whose ends lack no colour in common, by moving colours of other edges.

    Args:
        mates: neighbours of each peer, by the colour of the edge to them.
        colours: all colours, one more than any peer has neighbours.
        peer: one end of the edge.
        other: other end of the edge.
    """
    fan = [other]
    before = [-1]  # the colour of each edge of the fan, which the fan's peer before it lacks
    while True:
        free = (c for c, mate in mates[peer].items() if c not in mates[fan[-1]] and mate not in fan)
        if (found := next(free, None)) is None:
            break
        fan.append(mates[peer][found])
        before.append(found)
    own, last = (next(c for c in colours if c not in mates[one]) for one in (peer, fan[-1]))
    path = []
    at = peer
    colour = last
    while colour in mates[at]:
        following = mates[at][colour]
        path.append((at, following, colour))
        at = following
        colour = own + last - colour  # the other of the two colours
    _recolour(mates, path, [own + last - colour for _, _, colour in path])
    # The exchange along the path may have broken the fan behind the first that lacks the colour now.
    before = [-1, *(next(c for c, mate in mates[peer].items() if mate == one) for one in fan[1:])]
    end = next(place for place, one in enumerate(fan) if last not in mates[one])
    turned = list(zip([peer] * (end + 1), fan, before, strict=False))
    _recolour(mates, turned, [*before[1 : end + 1], last])


def _recolour(
    mates: dict[int, dict[int, int]], edges: "Sequence[tuple[int, int, int]]", after: "Sequence[int]"
) -> None:
    """Give edges, with the colours that they have, others.

    Args:
        mates: neighbours of each peer, by the colour of the edge to them.
        edges: two ends and the colour of each edge; −1: no colour.
        after: colours that the edges get.
    """
    for one, other, colour in edges:
        mates[one].pop(colour, None)
        mates[other].pop(colour, None)
    for (one, other, _), colour in zip(edges, after, strict=True):
        mates[one][colour] = other
        mates[other][colour] = one


def _laplacian(peers: int, matchings: "Sequence[Sequence[tuple[int, int]]]", weights: np.ndarray) -> np.ndarray:
    """Σ w L over matchings."""
    laplacian = np.zeros((peers, peers))
    for matching, weight in zip(matchings, weights, strict=True):
        one, other = np.array(matching).T  # each peer at most once
        laplacian[one, one] += weight
        laplacian[other, other] += weight
        laplacian[one, other] = laplacian[other, one] = -weight
    return laplacian


def _most_connected(peers: int, matchings: "Sequence[Sequence[tuple[int, int]]]", total: float) -> np.ndarray:
    """Probabilities p with Σ p ≤ total that maximise λ₂, the second smallest eigenvalue of Σ p L.

    λ₂ is smoothed, less and less: −μ log Σ exp(−λ/μ) over all but the smallest. Its gradient g bounds what can be
    reached, λ₂(q) ≤ gᵀ q for every q, which tells when p is close enough; matchings that are all alike are so at once.
    """
    from scipy.optimize import Bounds, LinearConstraint, minimize

    count = len(matchings)
    ends = [np.array(matching).T for matching in matchings]

    def smoothed(probabilities: np.ndarray, width: float) -> tuple[float, float, np.ndarray]:
        eigenvalues, eigenvectors = np.linalg.eigh(_laplacian(peers, matchings, probabilities))
        values = eigenvalues[1:]
        vectors = eigenvectors[:, 1:]
        shares = np.exp((values[0] - values) / width)
        mean = (vectors * (shares / shares.sum())) @ vectors.T
        slope = np.array([(mean[i, i] + mean[j, j] - 2 * mean[i, j]).sum() for i, j in ends])
        return values[0], values[0] - width * np.log(shares.sum()), slope

    def maximised(start: np.ndarray, width: float) -> np.ndarray:
        def negative(probabilities: np.ndarray) -> tuple[float, np.ndarray]:
            _, value, slope = smoothed(probabilities, width)
            return -value, -slope

        within = LinearConstraint(np.ones((1, count)), -np.inf, total)
        solved = minimize(negative, start, jac=True, method="SLSQP", bounds=Bounds(0, 1), constraints=within)
        probabilities: np.ndarray = np.clip(solved.x, 0, 1)
        # SLSQP keeps its constraint to a tolerance only.
        probabilities *= min(1, total / probabilities.sum())
        return probabilities

    # Equal probabilities first: on a symmetric graph they are the best, and the bound shows it at once.
    candidate = best = np.full(count, total / count)
    scale = smoothed(candidate, 1.0)[0]
    most = 0.0
    bound = math.inf
    for width in scale * np.array(_WIDTHS):
        if most:
            candidate = maximised(candidate, width)
        value, _, slope = smoothed(candidate, width)
        if value > most:
            best = candidate
            most = value
        # Gᵀ q is largest where the largest slopes count in full, up to the budget.
        bound = min(bound, float(np.sort(slope)[::-1] @ np.clip(total - np.arange(count), 0, 1)))
        if bound - most <= _CLOSE * most:
            break
    return best


def _best_weight(mean: np.ndarray, square: np.ndarray) -> float:
    """α with the least largest eigenvalue of I − 2 α E[L] + α² E[L²] beside that of the mean."""
    from scipy.optimize import minimize_scalar

    peers = len(mean)

    def contraction(weight: float) -> float:
        # The mean vector is taken off: it has eigenvalue 1 at every α, and is no disagreement.
        expected = np.eye(peers) - 2 * weight * mean + weight**2 * square - np.full((peers, peers), 1 / peers)
        return float(np.linalg.eigvalsh(expected)[-1])

    return float(minimize_scalar(contraction, bounds=(0, 1), method="bounded", options={"xatol": 1e-10}).x)
