"""Messages to Flower's nodes, and what may be taken from theirs, whoever sent them.

Shapes: see :mod:`fed.wire.messages`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from fed.errors import InvalidPayload
from fed.randomness import Streams
from fed.server.client_state_versions import CountedTask
from fed.server.incoming import received
from fed.server.validation import refusal_of_joining, refusal_of_scores
from fed.wire.flower_records import field, flower
from fed.wire.format import Format
from fed.wire.messages import Answer, Task
from fed.wire.protocol_pb2 import Answer as Header
from fed.wire.protocol_pb2 import Joining, Scores, Signature

__all__ = ["Kind", "answer_of", "description_of", "message_to", "name_of", "scores_of"]

Kind = Literal["query", "train", "evaluate"]
"""What a node is asked: who it is, to do a task, or to score a model."""

_MOST_LETTERS = 200


def message_to(node: int, kind: Kind, content: Any, ttl_s: float | None, number: int = 0) -> Any:
    """One of Flower's messages.

    Args:
        node: to whom.
        kind: what it is asked.
        content: as :func:`fed.wire.flower_records.packed` makes it.
        ttl_s: in which it must be answered; Flower's 12 hours if it is None.
        number: of the round.
    """
    return flower("app").Message(content, node, kind, ttl=ttl_s, group_id=str(number))


def name_of(task: CountedTask | None) -> str | None:
    """A task's name among all that nodes keep something of."""
    return None if task is None else f"{task[0]}-{task[1]}"


def description_of(fields: Mapping[str, Any]) -> tuple[int | str, Joining]:
    """Which client a node says it is, and of what samples.

    Raises:
        InvalidPayload: if nobody can be or have that.
    """
    client = fields.get("client")
    if not isinstance(client, int | str) or isinstance(client, bool) or len(str(client)) > _MOST_LETTERS:
        raise InvalidPayload(f"a client must be a number or a name, got {str(client)[:40]!r}")
    said = field(fields, "input_shape", list), field(fields, "input_dtype", str)[:40], field(fields, "classes", int)
    try:
        signature = Signature(input_shape=said[0], input_dtype=said[1], classes=said[2])
        joining = Joining(samples=field(fields, "samples", int), signature=signature)
    except (TypeError, ValueError) as error:
        raise InvalidPayload(f"nobody has such samples: {error}") from None
    if reason := refusal_of_joining(joining):
        raise InvalidPayload(reason)
    return client, joining


def answer_of(
    task: Task, fields: Mapping[str, Any], tensors: Sequence[Tensor], message: Format, streams: Streams
) -> Answer:
    """The answer to a task, as it may be counted.

    Args:
        task: that it answers.
        fields: of the message.
        tensors: of the message.
        message: the format of clients' messages.
        streams: the run's, for codecs.

    Raises:
        InvalidPayload: if it is none.
    """
    header = Header(
        samples=field(fields, "samples", int),
        weight=field(fields, "weight", float),
        train_loss=field(fields, "train_loss", float),
    )
    answer = received(task, header, tensors, message, streams)
    if isinstance(answer, str):
        raise InvalidPayload(answer)
    return answer


def scores_of(fields: Mapping[str, Any]) -> Scores:
    """What a node says that it has found of a model.

    Raises:
        InvalidPayload: if nobody can have found that.
    """
    samples, loss = field(fields, "samples", int), field(fields, "loss", float)
    try:
        scores = Scores(samples=samples, loss=loss, metric=fields.get("metric"))
    except (TypeError, ValueError) as error:
        raise InvalidPayload(f"scores must be numbers: {error}") from None
    if reason := refusal_of_scores(scores):
        raise InvalidPayload(reason)
    return scores
