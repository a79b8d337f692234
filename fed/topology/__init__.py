"""Graphs of peers, fixed or changing with the round, the weights with which neighbours are mixed, and what follows."""

from fed.topology.facts import Facts, facts
from fed.topology.topology import Topology
from fed.topology.weights import mixing_matrix

__all__ = ["Facts", "Topology", "facts", "mixing_matrix"]
