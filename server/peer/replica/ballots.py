"""Ballots, votes, messages, outputs and times of the agreement in :mod:`fed.server.peer.replica.agreement`."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from fed.errors import ValueRange
from fed.protocol.limits import NODE_NAME

__all__ = [
    "NO_BALLOT",
    "Apply",
    "Ballot",
    "BallotTiming",
    "Copy",
    "Fetch",
    "Kind",
    "Message",
    "Output",
    "Persist",
    "Record",
    "RunRing",
    "Send",
    "Value",
    "Vote",
    "refusal_of_message",
]


class Ballot(NamedTuple):
    """Number of a proposal to decide a round; no two proposers share one.

    Args:
        number: number of the proposal, from 1 to 2^53; 0: before the first.
        proposer: name of the member that makes the proposal; empty before the first.
    """

    number: int = 0
    proposer: str = ""


_MOST_COUNT = 2**53
_MOST_NAMES = 10_000
_SHA256 = re.compile("[0-9a-f]{64}")

NO_BALLOT = Ballot()
"""Ballot before the first proposal."""


class Value(NamedTuple):
    """Outcome of a round.

    Args:
        sum_sha256: hash of the round's sum, 64 hexadecimal digits.
        contributors: names of the members whose updates are in the sum.
        members: names of the next round's members, in the order of their clients.
    """

    sum_sha256: str
    contributors: tuple[str, ...]
    members: tuple[str, ...]


class Vote(NamedTuple):
    """Vote of a member in a round. The member holds the value's sum."""

    ballot: Ballot
    value: Value


class Record(NamedTuple):
    """State of a member that outlives its process.

    Args:
        round: the round that is being decided, from 1; 0 at a peer that has yet to join.
        members: names of the members that decide it; empty at a peer that has yet to join.
        promised: lowest ballot that the member still takes part in.
        vote: latest vote of the member in this round; None: it has not voted.
        decided: (round, value) of each of the last rounds, ascending.
    """

    round: int = 0
    members: tuple[str, ...] = ()
    promised: Ballot = NO_BALLOT
    vote: Vote | None = None
    decided: tuple[tuple[int, Value], ...] = ()


class Kind(Enum):
    """Kinds of messages, each with its content."""

    PREPARE = "prepare"  # proposer to members: ballot
    PROMISE = "promise"  # to the proposer: ballot, vote, is_ready
    REFUSE = "refuse"  # to a proposer: the later ballot that was promised
    RING = "ring"  # proposer to members: ballot, names of the ring
    SUMMED = "summed"  # member of the ring to the proposer: ballot, sum_sha256
    BROKEN = "broken"  # member of the ring to the proposer: ballot, names of members that it could not reach
    PROPOSE = "propose"  # proposer to members: ballot, vote, names of members that hold the sum
    ACCEPTED = "accepted"  # to the proposer: ballot
    DECIDED = "decided"  # to anyone: the value, as vote
    ASK = "ask"  # to anyone: the round that the sender is in
    COPY = "copy"  # to one that is too far behind: the value of the sender's last round, as vote


class Message(NamedTuple):
    """Message of one member to another; the transport names the sender.

    Args:
        kind: meaning of the message, on which the use of the other fields depends.
        round: round of the message, in [0, 2^53].
        ballot: ballot of the message.
        vote: value, and the ballot of the vote for it.
        names: names of members.
        sum_sha256: hash of a ring's sum, 64 hexadecimal digits; empty: none.
        is_ready: True if the sender has an update for the round.
    """

    kind: Kind
    round: int
    ballot: Ballot = NO_BALLOT
    vote: Vote | None = None
    names: tuple[str, ...] = ()
    sum_sha256: str = ""
    is_ready: bool = False


class Persist(NamedTuple):
    """Output: write the record, and have it on disk, before any output that follows."""

    record: Record


class Send(NamedTuple):
    """Output: send a message; it may be lost."""

    receiver: str
    message: Message


class RunRing(NamedTuple):
    """Output: reduce in a ring with these members; end with :meth:`Agreement.summed` or :meth:`Agreement.broken`."""

    round: int
    ballot: Ballot
    members: tuple[str, ...]


class Fetch(NamedTuple):
    """Output: get a sum from one of its holders, have it on disk, and call :meth:`Agreement.holds`; it may repeat."""

    sum_sha256: str
    holders: tuple[str, ...]


class Apply(NamedTuple):
    """Output: move the model by a round's sum, which is held."""

    round: int
    value: Value


class Copy(NamedTuple):
    """Output: copy a holder's state as it is after a round, and call :meth:`Agreement.copied`; it may repeat."""

    round: int
    value: Value
    holder: str


Output = Persist | Send | RunRing | Fetch | Apply | Copy


@dataclass(frozen=True, kw_only=True)
class BallotTiming:
    """Time limits of an agreement.

    Args:
        resend_s: seconds after which a message without an answer is sent again, > 0.
        takeover_s: seconds of a proposer's silence after which the next member proposes, the one after it after twice
            as many; several times ``resend_s``.
        ballot_s: seconds in which a ring must end, and in which votes must come, > 0.
        deadline_s: seconds after which a round waits no longer for members that are not ready; None: it waits for ever.
        kept: number of the last rounds whose decisions are kept for members that are behind, ≥ 1.

    Raises:
        ValueRange: if they contradict each other.
    """

    resend_s: float = 0.5
    takeover_s: float = 3.0
    ballot_s: float = 30.0
    deadline_s: float | None = None
    kept: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.resend_s < self.takeover_s or self.ballot_s <= 0 or self.kept < 1:
            raise ValueRange(
                "an agreement needs 0 < resend_s < takeover_s, ballot_s > 0 and kept >= 1, got "
                f"{self.resend_s:g}, {self.takeover_s:g}, {self.ballot_s:g} and {self.kept}: lengthen takeover_s"
            )


def refusal_of_message(message: Message) -> str | None:
    """Reason why no member may send this message; None if it is in order."""
    ballots = [message.ballot]
    names = [*message.names]
    # A message may lack the hash, and zeros pass the check below.
    hashes = [message.sum_sha256 or "0" * 64]
    if message.vote is not None:
        value = message.vote.value
        ballots.append(message.vote.ballot)
        names += [*value.contributors, *value.members]
        hashes.append(value.sum_sha256)
    if not all(0 <= count <= _MOST_COUNT for count in (message.round, *[ballot.number for ballot in ballots])):
        return "rounds and numbers of ballots must be up to 2^53"
    names += [ballot.proposer for ballot in ballots if ballot != NO_BALLOT]
    if len(names) > _MOST_NAMES:
        return f"a message of an agreement may have {_MOST_NAMES} names at most, got {len(names)}"
    if wrong := [name for name in names if not NODE_NAME.fullmatch(name)]:
        return f"a member's name must be a node's name, got {wrong[0][:80]!r}"
    if wrong := [text for text in hashes if not _SHA256.fullmatch(text)]:
        return f"a sum's hash must have 64 hexadecimal digits, got {wrong[0][:80]!r}"
    return None
