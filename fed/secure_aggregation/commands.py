"""Commands of a participant in sessions: all that it has its driver do or know."""

from typing import NamedTuple, TypeAlias

from fed.protocol.protocol_pb2 import FromSession
from fed.secure_aggregation.reasons import Reason
from fed.vectors.tensors import Tensor

__all__ = ["Command", "Deliver", "Ended", "Remember", "Say"]


class Say(NamedTuple):
    """Command to send the coordinator a message."""

    message: FromSession


class Deliver(NamedTuple):
    """Command to deliver a masked message.

    Args:
        own_sha256: the own digest of the message's task.
        lanes: the masked message.
    """

    own_sha256: bytes
    lanes: Tensor


class Remember(NamedTuple):
    """Command to write down that a round is revealed, and then to call :meth:`.Participant.recorded`.

    Args:
        entries: the entries that :class:`.RevealedRounds` has for the round and its message.
    """

    entries: tuple[bytes, ...]


class Ended(NamedTuple):
    """Notice that a session has ended without the client's shares.

    Args:
        own_sha256: the own digest of the task whose message is not masked.
        reason: the sentence that the coordinator hears.
        problem: the particulars, for the client's own log.
    """

    own_sha256: bytes
    reason: Reason
    problem: str


Command: TypeAlias = Say | Deliver | Remember | Ended
"""All that a participant has its driver do."""
