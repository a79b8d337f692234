"""Sentences that a client under secure aggregation may say: a closed list, without any number or name in it."""

from enum import StrEnum

from fed.errors import FedError, RunFailed, SessionFailed

__all__ = ["ClientRefusal", "Reason", "reason_of"]


class Reason(StrEnum):
    """Sentence that leaves a client; its own log has the particulars.

    It tells which of these things happened, and nothing else of the client's data or settings.
    """

    NOT_READY = "the server asks before it has told its plan"
    HIDES_TOO_LITTLE = "the plan hides less than this node's owner allows: the node's log names the limit"
    KEEPS_STATE = "the plan has clients keep something between tasks, which a sum could show of one of them alone"
    OLD_IDENTITIES = "the plan's identities are older than those that the node knows, or not signed by its authority"
    CANNOT_FOLLOW = "the node cannot follow the plan: its log has the reason"
    TOLD_TWICE = "the server has told one task in two ways"
    TAKES_PARTS = "under secure aggregation a client takes all steps of a task: the server must not ask for fewer"
    REVEALED = "the node has revealed shares of this round, or of this message, before: it joins no other sum of it"
    BROKEN_RULE = "the server has broken a rule of the session: the node's log has which"
    NO_MESSAGE = "the task gave no message that can be added: the node's log has the reason"
    OTHER_MODEL = "the model is not the one that the round's clients have agreed on"
    LACKS_MODEL = "the node does not have the model that the differences are added to"
    SCORES_NOTHING = "a node under secure aggregation scores no model, since scores are numbers of one client"
    NODE_FAILED = "the node could not do it: its log has the reason"


class ClientRefusal(RunFailed):
    """A demand of the server that a client refuses.

    Args:
        message: the sentence for the client's owner.
        reason: the sentence for the server.
    """

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        """The sentence for the client's owner."""
        return str(self.args[0])


def reason_of(error: Exception, otherwise: Reason) -> Reason:
    """The sentence that may leave the client, for an error whose own words stay in its log.

    Args:
        error: error that ended the client's work for the server.
        otherwise: sentence for errors of this package that name none.
    """
    if isinstance(error, ClientRefusal):
        return error.reason
    # Its own words name other clients.
    if isinstance(error, SessionFailed):
        return Reason.BROKEN_RULE
    return otherwise if isinstance(error, FedError) else Reason.NODE_FAILED
