"""Record of a peer as it is passed on, and the bounds to which a table of such records is held."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Self

from fed.protocol import protocol_pb2 as pb
from fed.protocol.limits import NODE_NAME
from fed.wire.messages import MOST_SAMPLES, client_id_of

__all__ = ["MOST_BEAT", "MOST_MEMBERS", "MOST_START", "Member", "refusal_of_table"]

MOST_MEMBERS = 10_000
"""Largest number of members that a table may have, and that a peer remembers."""

MOST_START = 2**62
"""Largest start of a life, in nanoseconds since 1970: a sum with it still fits the 64 bits of a message."""

MOST_BEAT = 2**53
"""Largest number of a heartbeat."""

_ADDRESS = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([1-9][0-9]{0,4})")


class Member(NamedTuple):
    """Record of a peer, as it is passed on.

    Args:
        name: the peer's name, as in its certificate.
        address: HOST:PORT where it listens; empty if it only dials.
        start: time at which its process began, in nanoseconds since 1970; a process with a later start replaces an
            earlier one.
        beat: number of its heartbeats since then, in [0, 2^53].
        left: True if it has left, and said so.
        samples: number of samples that it trains on, in [0, 2^53].
        is_ready: True if it takes part in rounds; a peer that joins copies another's state first.
        has_ended: True if it has ended all its rounds, and waits for nobody.
    """

    name: str
    address: str
    start: int
    beat: int = 0
    left: bool = False
    samples: int = 0
    is_ready: bool = False
    has_ended: bool = False

    @classmethod
    def of(cls, said: pb.Member) -> Self:
        """Record that another has sent; its bounds are not checked."""
        return cls(**{name: getattr(said, name) for name in cls._fields})

    @property
    def client(self) -> int | str:
        """Identifier of the client that this peer is."""
        return client_id_of(self.name)

    @property
    def age(self) -> tuple[int, int, bool]:
        """Key that orders the records of one name: the largest is the latest."""
        return self.start, self.beat, self.left

    def next_beat(self) -> Self:
        """Count a heartbeat; past the largest count a new life begins, as far as there is one."""
        if self.beat < MOST_BEAT:
            return self._replace(beat=self.beat + 1)
        return self._replace(start=self.start + 1, beat=0) if self.start < MOST_START else self


def refusal_of_table(table: Sequence[Member]) -> str | None:
    """Reason why no member may send this table; None if it is in order."""
    if len(table) > MOST_MEMBERS:
        return f"a table may have {MOST_MEMBERS} members at most, got {len(table)}"
    for member in table:
        if not NODE_NAME.fullmatch(member.name):
            return f"a member's name must be a node's name, got {member.name[:80]!r}"
        if member.address and not _is_address(member.address):
            return f"member {member.name!r} must have HOST:PORT as its address, got {member.address[:80]!r}"
        counts = (member.start, MOST_START), (member.beat, MOST_BEAT), (member.samples, MOST_SAMPLES)
        if not all(0 <= count <= most for count, most in counts):
            return (
                f"member {member.name!r} must have a start up to 2^62, and a beat and samples up to 2^53, got "
                f"{member.start}, {member.beat} and {member.samples}"
            )
    return None


def _is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    return found is not None and int(found[2]) < 1 << 16
