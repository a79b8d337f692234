"""Messages of an agreement as they travel."""

from fed.errors import InvalidPayload
from fed.protocol import protocol_pb2 as pb
from fed.server.peer.replica.ballots import Ballot, Kind, Message, Value, Vote, refusal_of_message

__all__ = ["ballot_from_wire", "ballot_to_wire", "from_wire", "to_wire"]


def to_wire(message: Message) -> pb.PeerMessage:
    """Message as it travels."""
    vote = message.vote
    decree = pb.Decree(
        kind=message.kind.value,
        round=message.round,
        ballot=ballot_to_wire(message.ballot),
        vote=None if vote is None else pb.Vote(ballot=ballot_to_wire(vote.ballot), **vote.value._asdict()),
        names=message.names,
        sum_sha256=message.sum_sha256,
        is_ready=message.is_ready,
    )
    return pb.PeerMessage(decree=decree)


def from_wire(decree: pb.Decree) -> Message:
    """Message that another has sent.

    Raises:
        InvalidPayload: if it is no message of an agreement.
    """
    try:
        kind = Kind(decree.kind)
    except ValueError:
        raise InvalidPayload(f"a message of an agreement must be of a known kind, got {decree.kind[:20]!r}") from None
    vote = None
    # An absent vote would read as one with empty names.
    if decree.HasField("vote"):
        value = Value(
            decree.vote.sum_sha256,
            contributors=tuple(decree.vote.contributors),
            members=tuple(decree.vote.members),
        )
        vote = Vote(ballot_from_wire(decree.vote.ballot), value)
    message = Message(
        kind,
        round=decree.round,
        ballot=ballot_from_wire(decree.ballot),
        vote=vote,
        names=tuple(decree.names),
        sum_sha256=decree.sum_sha256,
        is_ready=decree.is_ready,
    )
    if reason := refusal_of_message(message):
        raise InvalidPayload(reason)
    return message


def ballot_to_wire(ballot: Ballot) -> pb.Ballot:
    """Ballot as it travels."""
    return pb.Ballot(number=ballot.number, proposer=ballot.proposer)


def ballot_from_wire(ballot: pb.Ballot) -> Ballot:
    """Ballot that another has sent; its numbers and names are not checked."""
    return Ballot(ballot.number, ballot.proposer)
