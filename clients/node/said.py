"""Fields of all messages of a node under secure aggregation to its server, each with the facts that it may tell.

Nothing leaves such a node but through :func:`disclosed`. Two clients whose data have the same shape and names say the
same bytes, except for fresh keys, signatures, sealed boxes, shares and masked messages, and for the choice among the
constant sentences.
"""

from collections.abc import Mapping
from typing import TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from fed.secure_aggregation.reasons import Reason

__all__ = ["SENTENCES", "TOLD", "WITHHELD", "disclosed"]

_Said = TypeVar("_Said", bound=Message)

TOLD: Mapping[str, str] = {
    "FromNode.joining": "that the node is there",
    "FromNode.accepted": "that it holds a task",
    "FromNode.heartbeat": "that it lives",
    "FromNode.failed": "that a task gave no message",
    "FromNode.scores": "that it scores nothing",
    "FromNode.session": "its part in a session",
    "FromNode.farewell": "that it takes no part in this run",
    "Joining.protocol": "the version of the protocol",
    "Joining.software": "the version of this software",
    "Joining.name": "its name",
    "Joining.signature": "the shape of its data",
    "Joining.held": "which tasks it holds, by the server's names",
    "Joining.table_sha256": "that its data are a table, and a digest of the server's own schema",
    "Joining.code_sha256": "a digest of the names of code that the server has told",
    "Joining.ledger": "which state of the server's own ledger it was told last",
    "LedgerHead.count": "the server's own number",
    "LedgerHead.sha256": "a digest of the server's own lines",
    "Joining.hides_numbers": "that it takes part under secure aggregation alone",
    "Signature.input_shape": "the shape of one sample",
    "Signature.input_dtype": "the type of its numbers",
    "Signature.columns": "the names of a table's columns",
    "Signature.labels": "the names of all classes, where its source has names: of a text the characters in it",
    "Signature.names_sha256": "a digest of these names",
    "Signature.target_shape": "the shape of one target",
    "Signature.target_dtype": "the type of targets",
    "Signature.form": "the names, shapes and types of a sample's tensors, where there are several",
    "TaskId.start": "the server's own number",
    "TaskId.number": "the server's own number",
    "Heartbeat.held": "which tasks it holds, by the server's names",
    "Failed.task": "which task failed",
    "Failed.reason": "one of the constant sentences",
    "Failed.lacks_model": "that it does not have an earlier model: its folder was removed",
    "Scores.id": "which model was to be scored",
    "Scores.problem": "one of the constant sentences",
    "Farewell.reason": "one of the constant sentences",
    "Farewell.is_final": "that it does not come back",
    "FromSession.task": "which task the session is of",
    "FromSession.attempt": "the server's own number",
    "FromSession.keys": "fresh public keys, and a signature",
    "FromSession.shares": "sealed boxes, which other clients open",
    "FromSession.consent": "a signature of the survivors",
    "FromSession.unmasking": "shares of survivors' seeds and of the others' masking keys",
    "FromSession.aborted": "one of the constant sentences",
    "SessionKeys.sealing": "random bytes",
    "SessionKeys.masking": "random bytes",
    "SessionKeys.signature": "that the node has made the keys",
    "SealedShares.seed_sha256": "a digest of random bytes",
    "SealedShares.boxes": "one for each mask partner",
    "Box.place": "the mask partner",
    "Box.sealed": "encrypted shares",
    "Consent.signature": "that the node has heard of these survivors",
    "Unmasking.seeds": "shares of survivors' seeds",
    "Unmasking.keys": "shares of others' masking keys",
    "RevealedShare.place": "whose share it is",
    "RevealedShare.share": "a share of a random secret",
    "Answer.task": "which task it answers",
    "Answer.payload": "the masked message: random numbers, of a length that the plan says",
    "Answer.offset": "how much of it has come before",
    "Answer.began_anew": "that its state of earlier tasks is lost: its folder was removed",
    "Payload.sha256": "a digest of random numbers",
    "Payload.size_bytes": "the length that the plan says",
    "Payload.tensors": "the types and lengths that the plan says",
    "Tensor.dtype": "the type that the plan says",
    "Tensor.numbers": "the length that the plan says",
}
"""Fields that a node fills, each with the fact that it may tell."""

WITHHELD: Mapping[str, object] = {
    "Joining.samples": 0,
    "Signature.classes": 0,
    "Failed.diverged": False,
    "Failed.lacks_fixed_part": False,
    "Farewell.is_refusal": False,
    "Scores.samples": 0,
    "Scores.loss": 0.0,
    "Scores.metrics": (),
    "Answer.weight": 1.0,
    "Answer.samples": 1,
    "Answer.train_loss": 0.0,
    "Answer.metrics": (),
    "NamedNumber.name": "",
    "NamedNumber.value": 0.0,
}
"""Fields that a node sets to a constant, whatever its data are, each with that constant."""

SENTENCES = frozenset({"Failed.reason", "Scores.problem", "Farewell.reason", "FromSession.aborted"})
"""Fields whose text is one of :class:`fed.secure_aggregation.reasons.Reason`."""


def disclosed(message: _Said) -> _Said:
    """A message as it may leave the node: with the fields of :data:`TOLD`, and constants in those of :data:`WITHHELD`.

    A sentence that is not on the list is replaced by the constant one that refers to the node's log.

    Args:
        message: a ``FromNode``, or the ``Answer`` that heads a delivery.
    """
    found = type(message)()
    # A copy, since the node itself goes on with these numbers.
    found.CopyFrom(message)
    _withhold(found)
    return found


def _withhold(message: Message) -> None:
    for field, value in message.ListFields():
        name = f"{message.DESCRIPTOR.name}.{field.name}"
        if name in SENTENCES:
            setattr(message, field.name, _sentence(value))
        # A field that no table names stays at home until somebody has decided what it may tell.
        elif name not in TOLD:
            message.ClearField(field.name)
        elif field.message_type is not None:
            for part in value if _is_repeated(field) else [value]:
                _withhold(part)
    # A field that was cleared reads as 0 or empty: only other constants must be set.
    for name, constant in WITHHELD.items():
        kind, field_name = name.split(".")
        if kind == message.DESCRIPTOR.name and constant:
            setattr(message, field_name, constant)


def _sentence(text: str) -> str:
    return text if text in set(Reason) else str(Reason.NODE_FAILED)


def _is_repeated(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)
