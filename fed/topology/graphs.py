"""Graphs of peers that stay as they are through a run: nodes 0 … n − 1; directed edges go from sender to receiver.

ρ is the factor by which a round of mixing shrinks the peers' disagreement, with Metropolis–Hastings weights where the
graph is undirected.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import networkx as nx
import numpy as np
from pydantic import Field, PositiveInt

from fed.errors import InvalidExperiment
from fed.vectors.randomness import Streams

__all__ = [
    "clusters",
    "complete",
    "directed_exponential",
    "directed_ring",
    "edges",
    "erdos_renyi",
    "exponential",
    "hypercube",
    "path",
    "random_directed",
    "random_regular",
    "ring",
    "small_world",
    "star",
    "torus",
    "tree",
]

_Pair: TypeAlias = Annotated[tuple[int, int], Field(strict=False)]
_Pairs: TypeAlias = Annotated[tuple[_Pair, ...], Field(strict=False)]
_TRIES = 100  # draws of a random graph, of which one must be connected


def ring(peers: int) -> "nx.Graph[int]":
    """Each peer has two neighbours: ρ = (1 + 2 cos(2π/n))/3, so that consensus needs about n² rounds.

    Args:
        peers: n ≥ 1.
    """
    return nx.circulant_graph(peers, [1])


def path(peers: int) -> "nx.Graph[int]":
    """Ring without one of its edges: ρ = (1 + 2 cos(π/n))/3.

    Args:
        peers: n ≥ 1.
    """
    graph: nx.Graph[int] = nx.path_graph(peers)
    return graph


def torus(peers: int, rows: PositiveInt | None = None) -> "nx.Graph[int]":
    """Grid whose ends are joined, four neighbours each: ρ = (3 + 2 cos(2π/m))/5 for m × m peers, m ≥ 5.

    Args:
        peers: n = rows × columns.
        rows: number of rows; unless given the largest divisor of n up to √n.

    Raises:
        InvalidExperiment: if n is no multiple of the rows.
    """
    # The grid that is most nearly a square has the shortest ways, and mixes fastest.
    rows = rows or max(divisor for divisor in range(1, math.isqrt(peers) + 1) if peers % divisor == 0)
    if peers % rows:
        raise InvalidExperiment(f"topology torus must have full rows, got {peers} peers in {rows} rows: change rows")
    # Sorted labels number the peers row by row.
    grid = nx.grid_2d_graph(rows, peers // rows, periodic=True)
    torus: nx.Graph[int] = nx.convert_node_labels_to_integers(grid, ordering="sorted")
    return torus


def hypercube(peers: int) -> "nx.Graph[int]":
    """Each of 2^d peers has d neighbours, whose numbers differ from its own in one bit: ρ = (d − 1)/(d + 1).

    Args:
        peers: n, a power of two.

    Raises:
        InvalidExperiment: for another n.
    """
    if peers & (peers - 1):
        raise InvalidExperiment(
            f"topology hypercube needs a power of two as the number of peers, got {peers}: take "
            f"{1 << (peers.bit_length() - 1)} of them, or topology exponential"
        )
    cube: nx.Graph[int] = nx.Graph()
    # Nodes first: a cube of one peer has no edge that would bring them.
    cube.add_nodes_from(range(peers))
    bits = [1 << bit for bit in range(peers.bit_length() - 1)]
    cube.add_edges_from((peer, peer ^ bit) for peer in range(peers) for bit in bits)
    return cube


def complete(peers: int) -> "nx.Graph[int]":
    """Each peer has all others as neighbours: ρ = 0, one round of mixing is the mean.

    Args:
        peers: n ≥ 1.
    """
    graph: nx.Graph[int] = nx.complete_graph(peers)
    return graph


def star(peers: int) -> "nx.Graph[int]":
    """Peer 0 is the only neighbour of every other peer: ρ = 1 − 1/n.

    Args:
        peers: n ≥ 1.
    """
    graph: nx.Graph[int] = nx.star_graph(peers - 1)
    return graph


def tree(peers: int, branching: PositiveInt = 2) -> "nx.Graph[int]":
    """Full tree whose root is peer 0.

    Args:
        peers: n ≥ 1.
        branching: number of children of a peer.
    """
    graph: nx.Graph[int] = nx.full_rary_tree(branching, peers)
    return graph


def exponential(peers: int) -> "nx.Graph[int]":
    """Each peer i has i ± 1, i ± 2, i ± 4, … as neighbours: about 2 log₂ n of them, and ρ falls as 1 − O(1/log n).

    Args:
        peers: n ≥ 1.

    References:
        Ying et al. 2021, "Exponential graph is provably efficient for decentralized deep training", arXiv 2110.13363;
        here the graph is undirected, as Metropolis–Hastings weights need it.
    """
    # Of a single peer [1], a loop, which mixing leaves out.
    return nx.circulant_graph(peers, _hops(peers) or [1])


def erdos_renyi(
    peers: int, streams: Streams, probability: Annotated[float, Field(gt=0, le=1)] = 0.3
) -> "nx.Graph[int]":
    """Each pair of peers is joined with the same probability; drawn again until all are connected.

    Args:
        peers: n ≥ 1.
        streams: random streams of the run.
        probability: probability of each edge, in (0, 1]; above ln(n)/n most draws are connected.
    """
    return _connected(
        "erdos_renyi",
        streams,
        draw=lambda generator: nx.gnp_random_graph(peers, probability, seed=generator),
        remedy="raise probability",
    )


def random_regular(peers: int, streams: Streams, degree: PositiveInt = 3) -> "nx.Graph[int]":
    """Each peer has equally many neighbours, drawn at random until all are connected.

    Args:
        peers: n > degree; n × degree even.
        streams: random streams of the run.
        degree: number of neighbours of a peer.

    Raises:
        InvalidExperiment: if there is no such graph.
    """
    if degree >= peers or peers * degree % 2:
        raise InvalidExperiment(
            "topology random_regular needs more peers than neighbours of each, and an even product of both, got "
            f"{peers} peers and degree {degree}: change degree"
        )
    return _connected(
        "random_regular",
        streams,
        draw=lambda generator: nx.random_regular_graph(degree, peers, seed=generator),
        remedy="raise degree",
    )


def small_world(
    peers: int,
    streams: Streams,
    degree: PositiveInt = 4,
    rewired: Annotated[float, Field(ge=0, le=1)] = 0.1,
) -> "nx.Graph[int]":
    """Ring of near neighbours in which some edges lead to random peers instead (Watts & Strogatz 1998).

    Args:
        peers: n > degree.
        streams: random streams of the run.
        degree: even number of near neighbours of a peer.
        rewired: probability in [0, 1] that an edge leads to a random peer instead.

    Raises:
        InvalidExperiment: if there are too few peers.
    """
    if degree >= peers or degree % 2:
        raise InvalidExperiment(
            f"topology small_world needs an even degree below the number of peers, got {degree} of {peers}: change "
            "degree"
        )
    return _connected(
        "small_world",
        streams,
        draw=lambda generator: nx.watts_strogatz_graph(peers, degree, rewired, seed=generator),
        remedy="lower rewired, or raise degree",
    )


def clusters(peers: int, count: PositiveInt = 2, bridges: PositiveInt = 1) -> "nx.Graph[int]":
    """Complete graphs in a ring, neighbouring ones joined by bridges.

    Args:
        peers: n ≥ count.
        count: number of clusters; the first ones have a peer more where n is no multiple of it.
        bridges: number of edges between two neighbouring clusters; no two of them share a peer.

    Raises:
        InvalidExperiment: if a cluster has fewer peers than bridges.
    """
    if peers // count < bridges:
        raise InvalidExperiment(
            f"topology clusters needs {bridges} peers in each of {count} clusters, got {peers} peers: lower count or "
            "bridges"
        )
    members = [part.tolist() for part in np.array_split(np.arange(peers), count)]
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(peers))
    for place, cluster in enumerate(members):
        graph.add_edges_from((one, other) for one in cluster for other in cluster if one < other)
        following = members[(place + 1) % count]
        if count > 1:
            # From the last peers of one to the first of the next.
            graph.add_edges_from(zip(cluster[::-1][:bridges], following[:bridges], strict=True))
    return graph


def edges(
    peers: int,
    pairs: _Pairs | None = None,
    file: str | None = None,
    directed: bool = False,
) -> "nx.Graph[int]":
    """Edges that the experiment gives, as pairs or in a file with two numbers a line.

    Args:
        peers: n; nodes are 0 … n − 1.
        pairs: edges, as pairs of peers.
        file: path of the file; "#" begins a comment.
        directed: True if the first peer of a pair sends and the second receives; False if both do.

    Raises:
        InvalidExperiment: if neither or both are given, the file cannot be read, or a number is no peer's.
    """
    if (pairs is None) == (file is None):
        raise InvalidExperiment("topology edges needs pairs or file, and not both")
    given = _pairs_of(Path(str(file))) if pairs is None else pairs
    if wrong := [pair for pair in given if not all(0 <= end < peers for end in pair)]:
        raise InvalidExperiment(f"an edge must be two numbers from 0 to {peers - 1}, got {wrong[0]}: correct it")
    graph: nx.Graph[int] = nx.DiGraph() if directed else nx.Graph()
    graph.add_nodes_from(range(peers))
    graph.add_edges_from(given)
    return graph


def directed_ring(peers: int) -> "nx.Graph[int]":
    """Each peer sends to the next: with uniform weights ρ = cos(π/n).

    Args:
        peers: n ≥ 1.
    """
    return _circulant(peers, [1])


def directed_exponential(peers: int) -> "nx.Graph[int]":
    """Each peer i sends to i + 1, i + 2, i + 4, …: with uniform weights ρ = 1 − 2/(1 + ⌈log₂ n⌉) for even n.

    Args:
        peers: n ≥ 1.

    References:
        Ying et al. 2021, "Exponential graph is provably efficient for decentralized deep training", arXiv 2110.13363.
    """
    return _circulant(peers, _hops(peers))


def random_directed(peers: int, streams: Streams, degree: PositiveInt = 2) -> "nx.Graph[int]":
    """Each peer sends to the next and to random others: in-degrees differ, so that mixing needs push-sum.

    Args:
        peers: n > degree.
        streams: random streams of the run.
        degree: number of receivers of a peer.

    Raises:
        InvalidExperiment: if there are too few peers.
    """
    if degree >= peers:
        raise InvalidExperiment(
            f"topology random_directed needs more peers than receivers of each, got {degree} of {peers}: lower degree"
        )
    generator = streams.generator("topology")
    # The ring keeps the graph strongly connected, whatever is drawn.
    graph = nx.DiGraph(_circulant(peers, [1]))
    for peer in range(peers):
        # From peer + 2 on: peer + 1 is a receiver already, and nobody sends to itself.
        others = [(peer + 2 + int(hop)) % peers for hop in generator.permutation(peers - 2)[: degree - 1]]
        graph.add_edges_from((peer, other) for other in others)
    return graph


def _hops(peers: int) -> list[int]:
    """1, 2, 4, … below n."""
    return [1 << power for power in range(max(peers - 1, 0).bit_length())]


def _circulant(peers: int, hops: Sequence[int]) -> "nx.Graph[int]":
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(peers))
    graph.add_edges_from((peer, (peer + hop) % peers) for peer in range(peers) for hop in hops if hop % peers)
    return graph


def _connected(
    kind: str, streams: Streams, draw: "Callable[[np.random.Generator], nx.Graph[int]]", remedy: str
) -> "nx.Graph[int]":
    """The first connected graph of many draws.

    Args:
        kind: kind of the topology, for the error.
        streams: random streams of the run.
        draw: function that draws a graph from a generator.
        remedy: clause on the change to make where no draw is connected.

    Raises:
        InvalidExperiment: if no draw is connected.
    """
    generator = streams.generator("topology")
    for _ in range(_TRIES):
        graph = draw(generator)
        if nx.is_connected(graph):
            return graph
    raise InvalidExperiment(f"topology {kind} must be connected, and none of {_TRIES} draws is: {remedy}")


def _pairs_of(file: Path) -> list[tuple[int, int]]:
    try:
        # What stands behind # is a comment, as in the edge lists that networkx reads.
        lines = [line.partition("#")[0].split() for line in file.read_text().splitlines()]
        return [(int(sender), int(receiver)) for sender, receiver in filter(None, lines)]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidExperiment(f"{file} must hold two peers' numbers a line: {reason}") from None
