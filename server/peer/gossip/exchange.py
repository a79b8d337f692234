"""One exchange of vectors with neighbours: what this peer sends, whom it waits for, and what has come of it.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fed.server.peer.gossip.copies import Differences
from fed.vectors.tensors import Tensor

__all__ = ["ExchangeKey", "GossipExchange"]


class ExchangeKey(NamedTuple):
    """Round, from 1, and place of an exchange in it, from 0."""

    round: int
    exchange: int


@dataclass
class GossipExchange:
    """Exchange of a peer with its neighbours.

    Args:
        key: round and place of the exchange.
        tensors: contents of this peer's message.
        view: hash of the members by which the neighbours were found, and this peer's generation.
        senders: names of the neighbours that send to this peer.
        receivers: names of the neighbours that this peer sends to.
        differences: vectors that messages are added to, where they are differences; None: messages stand by
            themselves.

    Attributes:
        received: contents of the messages that count here, by the names of their neighbours; empty until it has ended.
        reached: names of the neighbours at which this peer's vectors count; empty until it has ended.
    """

    key: ExchangeKey
    tensors: Sequence[Tensor]
    view: str
    senders: frozenset[str]
    receivers: frozenset[str]
    differences: Differences | None = None
    received: dict[str, list[Tensor]] = field(default_factory=dict)
    reached: frozenset[str] = frozenset()
