"""What a coordinator and a client say to each other, and the checks that an answer must pass.

Shapes: V, a model's floating-point state; I, its integers (see :mod:`fed.layout`); M, numbers of a
client's message.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fed.reduction import WeightedMean

__all__ = [
    "LARGEST",
    "MOST_SAMPLES",
    "EdgeReply",
    "Failure",
    "GroupReply",
    "Reply",
    "Task",
    "client_id_of",
    "one_line",
    "refusal",
    "refusal_of_numbers",
]

_HEAVIEST = 1e40
_MOST_WORDS = 500

LARGEST = 1e200
"""Of a number that a client says: far above what any holds, and so low that a weighted mean of them can be found."""

MOST_SAMPLES = 2**53
"""That a client may hold: beyond it float64 does not count one by one."""


class Task(NamedTuple):
    """Train this model on your data.

    Args:
        id: unique within the run.
        round: the round it belongs to, from 1.
        client: whom it is for.
        vector_V: where training starts.
        integers_I: the model's integer buffers.
        broadcast: what the rule gives to every client beside the model.
        lr: the step size of local steps; None: the experiment's.
        steps: how many optimizer steps; None: as many as the experiment says.
        repeats: how many tasks of this round the client has had before: with client and round it names the streams.
        deadline_s: how long after its dispatch the answer must be there; None: no matter.
        takes_parts: whether the client may answer with a part of its work, if that is all it can do in time.
    """

    id: int
    round: int
    client: int | str
    vector_V: Tensor
    integers_I: Tensor
    broadcast: tuple[Tensor, ...] = ()
    lr: float | None = None
    steps: int | None = None
    repeats: int = 0
    deadline_s: float | None = None
    takes_parts: bool = False

    def size_bytes(self) -> int:
        """Bytes of its tensors as they travel."""
        return self.vector_V.nbytes + self.integers_I.nbytes + sum([part.nbytes for part in self.broadcast])


@dataclass(frozen=True)
class Reply:
    """What became of a task: the trained model.

    Args:
        task: the task's id.
        round: the task's round.
        client: who trained.
        vector_V: the trained state.
        integers_I: the trained integer buffers.
        samples: how many the client holds: its weight in the mean.
        train_loss: mean over the samples trained on.
    """

    task: int
    round: int
    client: int | str
    vector_V: Tensor
    integers_I: Tensor
    samples: int
    train_loss: float

    def size_bytes(self) -> int:
        """Bytes of its tensors as they travel."""
        return self.vector_V.nbytes + self.integers_I.nbytes


class GroupReply(NamedTuple):
    r"""What became of tasks that started from one model and were trained together: the mean of their messages.

    .. math:: \sum_k w_k m_k / \sum_k w_k

    A message holds the parts that the algorithm reports, and the update of all state but parameters.

    Args:
        tasks: their ids.
        round: the tasks' round.
        clients: who trained, in the order of the tasks.
        mean_M: the mean, in float64.
        weight: of the mean, the sum of the clients' weights.
        integers_I: of the trained integer buffers the largest.
        samples: how many each client holds.
        train_losses: of each client, means over the samples trained on.
        size_bytes: of what was really sent, where that is known.
    """

    tasks: tuple[int, ...]
    round: int
    clients: tuple[int | str, ...]
    mean_M: Tensor
    weight: float
    integers_I: Tensor
    samples: tuple[int, ...]
    train_losses: tuple[float, ...]
    size_bytes: int | None = None


@dataclass(frozen=True)
class EdgeReply:
    """What an edge coordinator has of its clients' answers: their sum, which others can be added to without rounding.

    Args:
        replies: what it counts, without their means.
        sum: of the messages, exact.
    """

    replies: tuple[GroupReply, ...]
    sum: WeightedMean


@dataclass(frozen=True)
class Failure:
    """What became of a task: nothing.

    Args:
        task: the task's id.
        round: the task's round.
        client: who failed.
        reason: one sentence for the user.
        diverged: the loss or the model is no longer finite.
    """

    task: int
    round: int
    client: int | str
    reason: str
    diverged: bool = False


def refusal(reply: Reply, task: Task | None, weight: float = 1.0, *, message_size: int | None = None) -> str | None:
    """Why a reply must not touch the model, or None if it may.

    Args:
        reply: what came, from whoever sent it.
        task: the task in flight that it claims to answer, or None if there is none.
        weight: of it in the mean.
        message_size: how many numbers it must have in float64, where it is a message rather than a trained model.
    """
    if task is None:
        return f"task {reply.task} is not in flight"
    if (reply.client, reply.round) != (task.client, task.round):
        return (
            f"task {task.id} is client {task.client!r}'s of round {task.round}, "
            f"got {reply.client!r} and round {reply.round}"
        )
    vector = (task.vector_V.dtype, task.vector_V.shape) if message_size is None else (torch.float64, (message_size,))
    for name, got, (dtype, shape) in (
        ("vector", reply.vector_V, vector),
        ("integers", reply.integers_I, (task.integers_I.dtype, task.integers_I.shape)),
    ):
        if got.shape != shape or got.dtype != dtype:
            return f"the {name} must be {dtype} {tuple(shape)}, got {got.dtype} {tuple(got.shape)}"
    if reason := refusal_of_numbers(reply.samples, weight, reply.train_loss):
        return reason
    if not reply.vector_V.numel():
        return None
    lowest, highest = torch.aminmax(reply.vector_V)  # both are NaN where one number is
    largest = max(-float(lowest), float(highest))
    if not largest <= LARGEST:
        return f"the vector must be finite and within ±{LARGEST:.0e}, got {largest}"
    return None


def refusal_of_numbers(samples: int, weight: float, train_loss: float) -> str | None:
    """Why a reply must not count for what it says beside its tensors, or None if it may.

    Args:
        samples: how many the client holds.
        weight: of it in the mean.
        train_loss: mean over the samples trained on.
    """
    if type(samples) is not int or not 1 <= samples <= MOST_SAMPLES:
        return f"samples must be a whole number from 1 to 2^53, got {samples!r}"
    if not 0 < weight <= _HEAVIEST:
        return f"the weight must be positive and at most {_HEAVIEST:.0e}, got {weight}"
    if not abs(train_loss) <= LARGEST:
        return f"the training loss must be finite and within ±{LARGEST:.0e}, got {train_loss}"
    return None


def client_id_of(name: str) -> int | str:
    """The client that a node stands for: a name that is a whole number is one, as in experiments.

    Example:
        >>> client_id_of("7"), client_id_of("007"), client_id_of("ann")
        (7, '007', 'ann')
    """
    return int(name) if name.isascii() and name.isdigit() and str(int(name)) == name else name


def one_line(text: str) -> str:
    r"""What somebody else has written, for a log or a terminal: one line of at most 500 characters, all printable.

    Example:
        >>> one_line("all is well\n\x1b[31mrefused 'ann'")
        "all is well??[31mrefused 'ann'"
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_MOST_WORDS])
