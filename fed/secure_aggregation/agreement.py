"""Digests of a plan and of a task, field by field: those that a session's clients agree on, and those of one client.

A field that no table below names is agreed on, so that a new one is among the terms until somebody says why not.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from google.protobuf.message import Message

from fed.protocol.protocol_pb2 import Assignment, Plan
from fed.secure_aggregation.key_agreement import digest
from fed.vectors.tensors import Tensor

__all__ = [
    "PLAN_APART",
    "TASK_APART",
    "TASK_OWN",
    "TaskDigests",
    "digests_of",
    "ledger_term",
    "model_digest",
    "plan_digest",
    "task_digest",
]

_Message = TypeVar("_Message", bound=Message)

PLAN_APART: Mapping[str, str] = {
    "run": "a term by itself",
    "identities": "a term by itself: the digest of all keys",
    "heartbeat_s": "when a node says that it lives, which shapes no update",
}
"""Fields of a plan that are not in its digest, each with the reason."""

TASK_OWN: Mapping[str, str] = {
    "place": "each client's own number; algorithms that read it are refused under secure aggregation",
    "payload": "the bytes that lead to the model, whose digest is agreed on",
    "reference": "the name of the model among the client's own",
    "since": "the model that the client has already",
    "differences": "what the client lacks of the model, whose digest is agreed on",
    "kept_after": "the client's own state that counted",
    "kept_discount": "the part of that state that counted",
    "lost_after": "the client's own messages that were lost",
    "durable_after": "what the client may forget",
}
"""Fields of an assignment that differ between the clients of a round, each with the reason."""

TASK_APART: Mapping[str, str] = {
    "task": "a name, which the server chooses",
    "attempt": "a term by itself: another attempt masks the same message",
    "ledger": "a term by itself: what was released before, without which a repeated round is known",
    "deadline_s": "the time that is left, which ends no training: a secure client takes all steps or drops out",
}
"""Fields of an assignment that shape no message, each with the reason."""


class TaskDigests(NamedTuple):
    """The two digests of a task.

    Args:
        agreed: digest of all that the round's tasks have in common; it is among the terms.
        own: digest of the run, the plan and all that shapes this client's message; the message is kept under it.
    """

    agreed: bytes
    own: bytes


def plan_digest(plan: Plan) -> bytes:
    """Digest of a run's plan, without the fields of :data:`PLAN_APART`."""
    return digest("plan", _without(plan, PLAN_APART))


def task_digest(assignment: Assignment) -> bytes:
    """Digest of all that the tasks of one round have in common: the model, the step size, the steps and the rest."""
    return digest("task", _without(assignment, [*TASK_OWN, *TASK_APART]))


def digests_of(plan: Plan, assignment: Assignment) -> TaskDigests:
    """The two digests of a task.

    Args:
        plan: the run's plan.
        assignment: the task, as the server told it.
    """
    # With the run: two runs may have one plan, and messages of one must not be masked in the other.
    own = digest("message", plan.run.encode(), plan_digest(plan), _without(assignment, TASK_APART))
    return TaskDigests(agreed=task_digest(assignment), own=own)


def ledger_term(assignment: Assignment) -> bytes:
    """State of the coordinator's ledger of privacy in a task, as a term; empty where it tells none."""
    return assignment.ledger.SerializeToString(deterministic=True) if assignment.HasField("ledger") else b""


def model_digest(tensors: Sequence[Tensor]) -> bytes:
    """Digest of a model's tensors and of those that are broadcast beside it."""
    return digest("model", *(tensor.contiguous().numpy().tobytes() for tensor in tensors))


def _without(message: _Message, fields: Iterable[str]) -> bytes:
    """The bytes of a message, in the order of its fields' numbers, without some fields."""
    rest = type(message)()
    rest.CopyFrom(message)
    for name in fields:
        rest.ClearField(name)
    return rest.SerializeToString(deterministic=True)
