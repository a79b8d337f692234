"""One exchange of vectors with neighbours: what is open, what has arrived, and what has come of it.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from fed.server.peer.gossip.copies import Differences, hash_of
from fed.server.peer.gossip.outbox import ExchangeKey
from fed.vectors.tensors import Tensor

__all__ = ["Arrival", "OpenExchange", "Outcome"]

_LACKS = "this peer has no copy of the vector that the differences are added to"


class Outcome(NamedTuple):
    """Outcome of an exchange.

    Args:
        tensors: contents of the messages that count here, by the names of their neighbours.
        reached: names of the neighbours at which this peer's vectors count.
    """

    tensors: dict[str, list[Tensor]]
    reached: frozenset[str]


@dataclass
class OpenExchange:
    """Exchange that has begun and not ended.

    Args:
        key: round and place of the exchange.
        view: hash of the members by which the neighbours were found, and this peer's generation.
        senders: names of the neighbours that send to this peer.
        receivers: names of the neighbours that this peer sends to.
        differences: vectors that messages are added to; None: messages stand by themselves.
    """

    key: ExchangeKey
    view: str
    senders: frozenset[str]
    receivers: frozenset[str]
    differences: Differences | None


class Arrival(NamedTuple):
    """Message of a neighbour that is whole.

    Args:
        view: hash of the members by which its sender found its neighbours, and its generation.
        tensors: contents of the message.
        before: hash of the vector that its differences are added to; empty where it has none.
    """

    view: str
    tensors: list[Tensor]
    before: str

    def flaw(self, held: str | None) -> str | None:
        """Reason why its differences cannot be added to the copy with the hash ``held``, or None."""
        if not self.before:
            return "its differences must name the vector that they are added to"
        if (whole_P := self.tensors[-1]).numel():
            return None if hash_of(whole_P) == self.before else "the vector that it sent has another hash than it named"
        return None if held == self.before else _LACKS
