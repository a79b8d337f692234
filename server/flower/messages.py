"""Messages to Flower's nodes, and checks of their untrusted responses."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from fed.errors import InvalidPayload
from fed.server.validation import refusal_of_joining, refusal_of_scores
from fed.wire import protocol_pb2 as pb
from fed.wire.flower_records import array_of, flower, unpacked
from fed.wire.payloads import joined

__all__ = ["Kind", "flat_payload", "message_to", "response_of"]

Kind = Literal["query", "train", "evaluate"]
"""What a node is asked: who it is, to do a task, or to score a model."""

_ANSWERS: Mapping[Kind, str] = {"query": "joining", "train": "answer", "evaluate": "scores"}
_MOST_LETTERS = 200


def flat_payload(tensors: Sequence[Tensor]) -> tuple[pb.Payload, Any]:
    """Tensors as they travel: described by a header's payload, and one of Flower's arrays, which messages may share.

    Raises:
        InvalidPayload: if one has a type that does not travel.
    """
    payload, data = joined(tensors)
    return payload, array_of(data)


def message_to(node: int, kind: Kind, content: Any, ttl_s: float | None, number: int = 0) -> Any:
    """One of Flower's messages.

    Args:
        node: the receiver.
        kind: what it is asked.
        content: as :func:`fed.wire.flower_records.packed` makes it.
        ttl_s: in which it must be answered; Flower's 12 hours if it is None.
        number: of the round.
    """
    return flower("app").Message(content, node, kind, ttl=ttl_s, group_id=str(number))


def response_of(kind: Kind, content: Mapping[str, Any]) -> tuple[pb.Response, bytes]:
    """A node's response, as far as it can be checked without the task, and the bytes of its payload.

    Args:
        kind: what the node was asked.
        content: of its message.

    Raises:
        InvalidPayload: if no node can answer that.
    """
    response, data = unpacked(content, pb.Response)
    if (what := response.WhichOneof("what")) not in ("failed", _ANSWERS[kind]):
        raise InvalidPayload(f"a node must answer {_ANSWERS[kind]} or failed, got {what or 'nothing'}")
    reason = refusal_of_scores(response.scores) if what == "scores" else None
    if what == "joining":
        name, reason = response.joining.name, refusal_of_joining(response.joining)
        if not 0 < len(name) <= _MOST_LETTERS:
            reason = f"a client's name must have 1 to {_MOST_LETTERS} letters, got {len(name)}"
    if reason is not None:
        raise InvalidPayload(reason)
    return response, data
