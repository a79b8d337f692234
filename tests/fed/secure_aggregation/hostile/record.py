"""Record of a transcript: its steps for a reader, and all that left honest clients for the checker."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fed.protocol.protocol_pb2 import SealedShares, SessionKeys, Unmasking


@dataclass(frozen=True)
class Dealt:
    """Shares that an honest client has dealt, and the session that it believes in.

    Args:
        owner: the client.
        session: id of the session.
        place: its own, from 0.
        names: the clients that it was told.
        keys: those that it was told, by place; its own, too.
        holds_own: it keeps a share of its own secrets.
        shares: the shares that have left it.
    """

    owner: str
    session: bytes
    place: int
    names: Sequence[str]
    keys: Mapping[int, SessionKeys]
    holds_own: bool
    shares: SealedShares

    @property
    def holders(self) -> list[int]:
        """Places that hold a share, in the order of the shares' points."""
        return [place for place in sorted(self.keys) if place != self.place or self.holds_own]


@dataclass(frozen=True)
class Masked:
    """A masked message.

    Args:
        dealt: the secrets that its client has dealt.
        message: name of the message that its session's task leads to.
        senders: places whose boxes its client had.
        bits: the bits of a lane.
        lanes: the vector.
    """

    dealt: Dealt
    message: str
    senders: Sequence[int]
    bits: int
    lanes: np.ndarray


@dataclass(frozen=True)
class Unmasked:
    """Shares that a client has revealed."""

    dealt: Dealt
    shares: Unmasking


@dataclass
class Record:
    """All of a transcript.

    Args:
        steps: sentences.
        dealt, masked, unmasked: what left honest clients.
        plain: client → lanes, as bytes → name of the message, empty if anybody knows it.
        drawn: client → the secrets of 32 bytes that it has drawn.
        adversary: public → private keys that the adversary has.
    """

    steps: list[str] = field(default_factory=list)
    dealt: list[Dealt] = field(default_factory=list)
    masked: list[Masked] = field(default_factory=list)
    unmasked: list[Unmasked] = field(default_factory=list)
    plain: dict[str, dict[bytes, str]] = field(default_factory=lambda: defaultdict(dict))
    drawn: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    adversary: dict[bytes, bytes] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(f"{number:4}. {step}" for number, step in enumerate(self.steps, 1))
