"""An assignment, as it came over the wire, made into the work that a node's training does."""

from pathlib import Path

from fed.clients.data import ClientId
from fed.clients.node.training import NodeTask, TaskDone
from fed.clients.training.work_items import Train
from fed.errors import InvalidPayload
from fed.wire.protocol import name_of
from fed.wire.protocol_pb2 import Answer, Assignment, Examination, Payload, TaskId

__all__ = ["answer_of", "kept_state", "node_task"]


def node_task(assignment: Assignment, client: ClientId, path: Path, until_s: float | None = None) -> NodeTask:
    """Task of a node's client.

    Args:
        assignment: as the server made it.
        client: who trains.
        path: of the file with the assignment's payload.
        until_s: when it must be done, by :func:`time.monotonic`; None: no matter.
    """
    train = Train(
        (client,),
        assignment.round,
        "payload",
        assignment.lr if assignment.HasField("lr") else None,
        (assignment.steps if assignment.HasField("steps") else None,),
        assignment.broadcast_count,
        assignment.population,
        (assignment.place,) if assignment.HasField("place") else (),
        ((assignment.round, *filter(None, [assignment.repeats])),),
    )
    payload = assignment.payload.SerializeToString()
    return NodeTask(name_of(assignment.task), train, payload, path, *kept_state(assignment), until_s)


def answer_of(task: TaskId, done: TaskDone) -> Answer:
    """Header of a task's answer."""
    return Answer(
        task=task,
        payload=Payload.FromString(done.payload),
        weight=done.weight,
        samples=done.samples,
        train_loss=done.train_loss,
        began_anew=done.began_anew,
    )


def kept_state(message: Assignment | Examination) -> tuple[str | None, float]:
    """The task whose state a client resumes from, None for the first state; and the share of the way that it moved.

    Raises:
        InvalidPayload: if that is no share.
    """
    after, discount = message.kept_after, message.kept_discount if message.HasField("kept_discount") else 1.0
    if not 0 < discount <= 1:
        raise InvalidPayload(f"the server's kept_discount must be in (0, 1], got {discount}")
    return (name_of(after) if after.start else None), discount
