"""Copies of neighbours' vectors, for rules that send only the differences from them.

A message names the vector that its difference is added to, by a hash. A receiver with another copy, which has missed a
message, does not take it. A receiver with another copy or none gets the whole vector with the next message.

Shapes: see :mod:`fed.vectors.layout`.
"""

import hashlib
from collections.abc import Collection, Mapping
from typing import NamedTuple

from fed.storage.checkpoints import Tree
from fed.storage.serialization import bytes_of
from fed.vectors.tensors import Tensor, torch

__all__ = ["Copies", "Differences", "hash_of"]


class Differences(NamedTuple):
    """Differences of an exchange.

    Args:
        before: hash of the vector that this peer's own message is added to.
        whole_P: the vector with that hash, in float64.
        known_by: names of the receivers that have this vector.
        held: hashes of the copies of neighbours' vectors that this peer has, by neighbour.
    """

    before: str
    whole_P: Tensor
    known_by: frozenset[str]
    held: Mapping[str, str]


class Copies:
    """Copies of the neighbours' vectors, and the names of neighbours that have a copy of this peer's own."""

    def __init__(self) -> None:
        self._first_P: Tensor | None = None
        self._vectors: dict[str, Tensor] = {}
        self._hashes: dict[str, str] = {}
        self._known_by: frozenset[str] | None = None

    def begin(self, number: int, before_P: Tensor, receivers: Collection[str], senders: Collection[str]) -> Differences:
        """Begin an exchange.

        Args:
            number: the round, from 1; in the first all peers' vectors are the same.
            before_P: the vector of this peer that its message is added to.
            receivers: names of the neighbours that this peer sends to.
            senders: names of the neighbours that send to this peer.

        Returns:
            The hashes by which both ends tell whether their copies are the same.
        """
        if self._first_P is None and self._known_by is None and number == 1:
            self._first_P = before_P
        known_by: Collection[str] = ()
        if self._known_by is not None:
            known_by = self._known_by
        elif number == 1:
            known_by = receivers
        held = {name: self._hashes[name] for name in senders if name in self._hashes}
        if self._first_P is not None:
            first = hash_of(self._first_P)
            held |= {name: first for name in senders if name not in held}
        return Differences(before=hash_of(before_P), whole_P=before_P, known_by=frozenset(known_by), held=held)

    def before(self, name: str, whole_P: Tensor) -> Tensor:
        """The vector that a neighbour's message is added to.

        Args:
            name: the neighbour's name.
            whole_P: the whole vector, if it came with the message; empty where the copy is here.
        """
        found = whole_P if whole_P.numel() else self._vectors.get(name, self._first_P)
        assert found is not None
        return found

    def end(self, vectors: Mapping[str, Tensor], reached: Collection[str], members: Collection[str]) -> None:
        """End an exchange.

        Args:
            vectors: new vectors, in float64, of the neighbours whose messages counted, by name.
            reached: names of the neighbours that count this peer's own vector.
            members: names of all members; copies of other peers' vectors are dropped.
        """
        self._vectors |= vectors
        self._hashes |= {name: hash_of(vector_P) for name, vector_P in vectors.items()}
        # Each is as large as a model.
        for name in [name for name in self._vectors if name not in members]:
            del self._vectors[name], self._hashes[name]
        # Who has not taken this message has an older copy, and gets the whole vector next.
        self._known_by = frozenset(reached)

    def state(self) -> Tree:
        """State for a checkpoint."""
        known_by = None if self._known_by is None else sorted(self._known_by)
        return {"first": self._first_P, "of": dict(self._vectors), "known_by": known_by}

    def restore(self, state: Tree) -> None:
        """Resume from a state that :meth:`state` gave."""
        self._first_P = state["first"]
        self._vectors = dict(state["of"])
        self._hashes = {name: hash_of(vector_P) for name, vector_P in self._vectors.items()}
        self._known_by = None if state["known_by"] is None else frozenset(state["known_by"])


def hash_of(vector_P: Tensor) -> str:
    """SHA-256 of a vector's numbers, in float64.

    Example:
        >>> hash_of(torch.zeros(2))[:8]
        '374708ff'
    """
    return hashlib.sha256(bytes_of(vector_P.to(torch.float64))).hexdigest()
