"""Topology of a run: each round's graph of peers, and its weights.

Shapes: see :mod:`fed.vectors.layout`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import networkx as nx

from fed.errors import InvalidExperiment
from fed.topology.facts import separate_parts
from fed.topology.weights import WeightsKind, is_doubly_stochastic, mixing_matrix
from fed.vectors.mixing import Weights
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor

__all__ = ["Topology"]


class Topology:
    """Graphs and weights of a section ``topology``.

    Attributes:
        changes: True if graphs differ between rounds.
        is_directed: True if edges have a direction, from sender to receiver.
        keeps_mean: True if W of the first round is doubly stochastic.

    Args:
        make: function that makes a graph from ``peers``, ``number`` and ``streams``.
        kind: callable behind ``make``; graphs change with the round if it has a parameter ``number``.
        peers: N, the number of peers.
        streams: random streams of the run.
        weights: rule of the weights; None: the one that suits the graph.
        lazy: True to mix by (I + W)/2.

    Raises:
        InvalidExperiment: if the graph has other nodes, falls into parts though it never changes, or does not suit the
            weights.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        kind: Callable[..., Any],
        peers: int,
        streams: Streams,
        weights: WeightsKind | None = None,
        lazy: bool = False,
    ) -> None:
        self.changes = "number" in inspect.signature(kind).parameters
        self._make = make
        self._peers = peers
        self._streams = streams
        self._rule = weights
        self._lazy = lazy
        self._last: tuple[int, nx.Graph[int], Tensor, Weights] | None = None
        graph, matrix_NN, _ = self._of(1)
        self.is_directed = graph.is_directed()
        self.keeps_mean = is_doubly_stochastic(matrix_NN)
        # Rounds of a changing graph may fall into parts, such as pairs: they connect over time.
        if not self.changes and (parts := separate_parts(graph)) > 1:
            raise InvalidExperiment(f"a topology must be connected, got {parts} separate parts")

    def graph(self, number: int) -> "nx.Graph[int]":
        """The graph of a round, from 1; a directed one has edges from sender to receiver."""
        return self._of(number)[0]

    def matrix(self, number: int) -> Tensor:
        """W of a round, sparse."""
        return self._of(number)[1]

    def weights(self, number: int) -> Weights:
        """W of a round, as each row's neighbours and weights."""
        return self._of(number)[2]

    def _of(self, number: int) -> tuple["nx.Graph[int]", Tensor, Weights]:
        # One round is kept, not all: a run asks for the same round several times, and rarely for an earlier one.
        if self._last is None or (self.changes and self._last[0] != number):
            graph = self._make(peers=self._peers, number=number, streams=self._streams)
            if not isinstance(graph, nx.Graph) or len(graph) != self._peers:
                raise InvalidExperiment(
                    f"topology must have a node for each of {self._peers} peers, got {graph}: make as many nodes"
                )
            matrix_NN = mixing_matrix(graph, self._rule, lazy=self._lazy)
            self._last = (number, graph, matrix_NN, Weights.of(matrix_NN))
        return self._last[1:]
