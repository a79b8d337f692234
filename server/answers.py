"""Real nodes' answers, checked before anything is done with them. Shapes: see :mod:`fed.messages`."""

from torch import Tensor

from fed.messages import GroupReply, Reply, Task, refusal

__all__ = ["BEGAN_ANEW", "MISSING_SCORES", "checked", "update_of"]

BEGAN_ANEW = (
    "client %r has lost what it kept between tasks (its folder was removed, or is damaged), and goes on from what it "
    "had at first"
)
"""What is logged of a client whose answer says so."""

MISSING_SCORES = "%d clients have not scored the model within %g s, and are not waited for until they have: %s"
"""What is logged of clients that let an examination's time pass: their number, the time, and some of them."""


def checked(
    task: Task,
    tensors: tuple[Tensor, Tensor],
    *,
    samples: int,
    weight: float,
    train_loss: float,
    size_bytes: int,
    message_size: int | None,
) -> GroupReply | Reply | str:
    """An answer as it is counted, a model as it came, so that no copy is made; or why it must not touch the model.

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
        return reply
    counts = (samples,), (train_loss,), size_bytes
    return GroupReply((task.id,), task.round, (task.client,), message_M, weight, integers_I, *counts)


def update_of(reply: Reply, task: Task) -> GroupReply:
    """A trained model as what it adds to the task's, in float64."""
    update_V = reply.vector_V.double() - task.vector_V.double()
    counts = (reply.samples,), (reply.train_loss,), reply.size_bytes()
    return GroupReply((task.id,), task.round, (task.client,), update_V, float(reply.samples), reply.integers_I, *counts)
