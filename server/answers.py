"""A real node's answer, checked before anything is done with it. Shapes: see :mod:`fed.messages`."""

from torch import Tensor

from fed.messages import GroupReply, Reply, Task, refusal

__all__ = ["checked"]


def checked(
    task: Task,
    tensors: tuple[Tensor, Tensor],
    *,
    samples: int,
    weight: float,
    train_loss: float,
    size_bytes: int,
    message_size: int | None,
) -> GroupReply | str:
    """An answer as the coordinator counts it, or why it must not touch the model.

    Args:
        task: that it answers.
        tensors: the message [M] in float64, or the trained model [V] in the model's type; and integers [I].
        samples: how many the node holds.
        weight: of a message in the mean; a model's is the number of samples.
        train_loss: mean over the samples trained on.
        size_bytes: of what was sent.
        message_size: M, or None where it is a model.
    """
    message_M, integers_I = tensors
    reply = Reply(task.id, task.round, task.client, message_M, integers_I, samples, train_loss)
    if (reason := refusal(reply, task, weight, message_size=message_size)) is not None:
        return reason
    if message_size is None:
        message_M, weight = message_M.double().sub_(task.vector_V), float(samples)
    counts = (samples,), (train_loss,), size_bytes
    return GroupReply((task.id,), task.round, (task.client,), message_M, weight, integers_I, *counts)
