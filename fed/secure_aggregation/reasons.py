"""Sentences that a client under secure aggregation may say: a closed list, without any number or name in it."""

from enum import StrEnum

from fed.errors import FedError, RunFailed, SessionFailed

__all__ = ["ClientRefusal", "Reason", "reason_of"]


class Reason(StrEnum):
    """Sentence that leaves a client; its own log has the particulars.

    It tells which of these things happened, and nothing else of the client's data or settings.
    """

    NOT_READY = "the server has sent a task before the plan of its run"
    HIDES_TOO_LITTLE = "the plan protects clients less than this node's owner asks for: the node's log names the limit"
    KEEPS_STATE = "the plan's clients keep a state, which a lying server could learn: start the node with --allow-state"
    OLD_IDENTITIES = "the plan's identities are older than those that the node has, or not signed by its authority"
    CANNOT_FOLLOW = "the node cannot follow the plan: its log has the reason"
    TOLD_TWICE = "the server has described one task in two different ways"
    TAKES_PARTS = "the server asks for fewer steps than the task's, and under secure aggregation clients take all"
    REVEALED = "the node has revealed shares of this round, or of this message, already: it joins no second sum"
    BROKEN_RULE = "the server has broken a rule of the session: the node's log says which one"
    NO_MESSAGE = "the node could not make a message of this task: its log has the reason"
    OTHER_MODEL = "the model is not the one that the round's clients have agreed on"
    LACKS_MODEL = "the node does not have the earlier model that the differences belong to, and needs the whole model"
    NO_PRIVACY = "the plan promises no privacy, and this node's owner asks for it"
    OTHER_LEDGER = "the server's ledger of privacy is older than the one that the node remembers: put the newest back"
    BUDGET_SPENT = "the task would pass a budget of privacy: the node's log says which"
    SCORES_NOTHING = "the node scores no model, since scores are numbers of one client, which secure aggregation hides"
    NODE_FAILED = "the node could not do what the server asked: its log has the reason"


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
