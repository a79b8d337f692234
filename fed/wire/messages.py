"""Messages between a coordinator and its clients: tasks with the global model, and the clients' answers.

Shapes: see :mod:`fed.vectors.layout`.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from fed.secure_aggregation.fixed_point import SumOfClients
from fed.vectors.reduction import WeightedMean
from fed.vectors.tensors import Tensor, torch

__all__ = [
    "LARGEST",
    "METRIC_NAME",
    "MOST_METRICS",
    "MOST_SAMPLES",
    "Answer",
    "Content",
    "Difference",
    "Failure",
    "GlobalModel",
    "Lanes",
    "PartialSum",
    "RevealedSum",
    "TakenBySession",
    "Task",
    "TrainedModel",
    "Update",
    "answer_of",
    "client_id_of",
    "client_order",
    "one_line",
    "refusal_of_metrics",
    "refusal_of_numbers",
    "task_of",
]

_HEAVIEST = 1e40  # times LARGEST it is below the 2⁸⁰⁰ that an exact sum takes
_MOST_WORDS = 500
_NOTHING = torch.empty(0)

LARGEST = 1e200
"""Largest magnitude of a number that is accepted from a client; a weighted mean of such numbers stays finite."""

MOST_SAMPLES = 2**53
"""Largest number of samples of a client; beyond it float64 does not count one by one."""


MOST_METRICS = 100
"""Largest number of further numbers in an answer."""

METRIC_NAME = re.compile("[A-Za-z][A-Za-z0-9_]{0,59}")
"""Name of a further number."""


class Difference(NamedTuple):
    """Encoded difference of two versions of :class:`fed.wire.reference.Reference`.

    Args:
        number: version of the model after the difference; it names the random streams.
        before: name of the reference that the difference is added to.
        after: name of the reference that results.
        messages: one encoded message for each of K vectors.
    """

    number: int
    before: str
    after: str
    messages: tuple[Tensor, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its messages."""
        return sum([message.nbytes for message in self.messages])


class GlobalModel(NamedTuple):
    """The global model of one version, as it goes out with every task of that version.

    Args:
        version: number of times that the model had moved.
        params_V: parameters and float buffers at which training starts, in the model's type.
        integers_I: integer buffers.
        broadcast: tensors that the algorithm gives to every client beside the model.
        reference: name of the reference that the model is, where differences are encoded; else empty.
        beside: tensors that go with differences, which nothing encodes.
    """

    version: int
    params_V: Tensor
    integers_I: Tensor
    broadcast: tuple[Tensor, ...] = ()
    reference: str = ""
    beside: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in their order on the wire."""
        return (self.params_V, self.integers_I, *self.broadcast)


class Task(NamedTuple):
    """Task: train this model on your data.

    Args:
        id: number of the task, unique within the run.
        round: number of the round that it belongs to, from 1.
        client: client that trains.
        model: global model; tasks of one version share its tensors.
        lr: step size of local steps, > 0; None: as the experiment says.
        steps: number of optimizer steps; None: as the experiment says.
        repeats: number of earlier tasks of the client in this round; with client and round it names the random streams.
        deadline_s: seconds from dispatch in which the answer must arrive; None: no deadline.
        takes_parts: True if the client may answer with fewer steps, where it cannot do more in time.
        differences: differences that are sent in place of the model, to a client that has an earlier version; None: the
            whole model is sent.
        clip: clip of the round, in units of which the message is sent, where it moves; None: the experiment's.
    """

    id: int
    round: int
    client: int | str
    model: GlobalModel
    lr: float | None = None
    steps: int | None = None
    repeats: int = 0
    deadline_s: float | None = None
    takes_parts: bool = False
    differences: tuple[Difference, ...] | None = None
    clip: float | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are sent, in their order on the wire."""
        if self.differences is None:
            return self.model.tensors
        return (*(message for one in self.differences for message in one.messages), *self.model.beside)

    @property
    def content(self) -> tuple[int, int | None]:
        """Key of the tensors that are sent: tasks with the same key have the same tensors."""
        return self.model.version, None if self.differences is None else len(self.differences)

    def size_bytes(self) -> int:
        """Bytes of the tensors that are sent."""
        return sum([part.nbytes for part in self.tensors])


def task_of(saved: Mapping[str, Any]) -> Task:
    """Task whose fields a checkpoint holds."""
    differences = saved["differences"]
    missing = None if differences is None else tuple(Difference(**one) for one in differences)
    return Task(**{**saved, "model": GlobalModel(**saved["model"]), "differences": missing})


class Update(NamedTuple):
    r"""Update of a client, or the mean update of a group whose clients started from one model.

    .. math:: \sum_k w_k u_k / \sum_k w_k

    An update u holds the parts that the algorithm reports, then the update of the float buffers.

    Args:
        update_M: the update, or the weighted mean of a group's; float64 but for a single client's.
        weight: the sum of the clients' weights, > 0.
    """

    update_M: Tensor
    weight: float


class TrainedModel(NamedTuple):
    """Trained model of a client: its update is the difference, found piece by piece, so that nobody copies the model.

    Args:
        params_V: the trained model.
        start_V: the model that training started from.
        weight: the client's weight, > 0.
    """

    params_V: Tensor
    start_V: Tensor
    weight: float

    def update(self) -> Update:
        """The update that it stands for, in float64."""
        return Update(self.params_V.double() - self.start_V.double(), self.weight)


class Lanes(NamedTuple):
    """Message of a client under secure aggregation, or the sum of a group's, modulo 2^R.

    Args:
        lanes: integers of R bits; those of a real client are masked.
    """

    lanes: Tensor


class PartialSum(NamedTuple):
    """Exact sum of clients' updates, from an edge coordinator or a ring of replicas.

    Args:
        total: the sum and its weight.
    """

    total: WeightedMean


class RevealedSum(NamedTuple):
    """Sum of a round under secure aggregation, which tells nothing of one client.

    Args:
        of_clients: the sum, and what is added up beside it.
    """

    of_clients: SumOfClients


class TakenBySession(NamedTuple):
    """Note that a message has come, which a session has taken."""


class Failure(NamedTuple):
    """Reason why a client has no update.

    Args:
        reason: sentence for the user.
        has_diverged: True if the loss or the model is no longer finite.
    """

    reason: str
    has_diverged: bool = False


Content: TypeAlias = Update | TrainedModel | Lanes | PartialSum | RevealedSum | TakenBySession | Failure
"""All that an answer can hold."""


class Answer(NamedTuple):
    """Answer to one task, or to several that started from one model and were reduced.

    Args:
        tasks: ids of the tasks.
        round: number of the tasks' round, from 1.
        clients: the clients that trained, in the order of the tasks.
        content: the update, or what stands for it, or the reason why there is none.
        integers_I: the largest of the trained integer buffers.
        samples: number of samples of each client; empty where the content tells nothing of single clients.
        train_losses: each client's mean loss over the samples trained on; empty likewise.
        size_bytes: bytes that travelled from the clients.
        more_bytes_down: bytes that travelled to clients beside their tasks, or to an edge coordinator to send on.
        metrics: further numbers of each client, where an app tells some; else empty.
    """

    tasks: tuple[int, ...]
    round: int
    clients: tuple[int | str, ...]
    content: Content
    integers_I: Tensor = _NOTHING
    samples: tuple[int, ...] = ()
    train_losses: tuple[float, ...] = ()
    size_bytes: int = 0
    more_bytes_down: int = 0
    metrics: tuple[Mapping[str, float], ...] = ()

    @classmethod
    def failure(cls, task: Task, reason: str, *, has_diverged: bool = False) -> "Answer":
        """The answer of a client that has no update.

        Args:
            task: the task that failed.
            reason: sentence for the user.
            has_diverged: True if the loss or the model is no longer finite.
        """
        return cls((task.id,), task.round, (task.client,), Failure(reason, has_diverged))

    @property
    def problem(self) -> str:
        """Reason why there is no update; empty where there is one."""
        return self.content.reason if isinstance(self.content, Failure) else ""

    @property
    def has_diverged(self) -> bool:
        """True if it is the failure of a client whose loss or model is no longer finite."""
        return isinstance(self.content, Failure) and self.content.has_diverged

    @property
    def update(self) -> Update:
        """Content of the answer, where that is known to be an update."""
        assert isinstance(self.content, Update)
        return self.content

    @property
    def lanes(self) -> Tensor:
        """Lanes of the answer, where its content is known to be some."""
        assert isinstance(self.content, Lanes)
        return self.content.lanes

    def with_update(self, update_M: Tensor) -> "Answer":
        """The same answer with another update in place of its own."""
        return self._replace(content=self.update._replace(update_M=update_M))

    def saved(self) -> dict[str, Any]:
        """Fields for a checkpoint, of an answer that holds an update or lanes."""
        fields = self._asdict()
        del fields["content"]
        fields["metrics"] = tuple(map(dict, self.metrics))
        update = Update(self.content.lanes, 0.0) if isinstance(self.content, Lanes) else self.update
        # The name that earlier checkpoints have.
        return {**fields, "mean_update_M": update.update_M, "weight": update.weight}


def answer_of(saved: Mapping[str, Any]) -> Answer:
    """Answer whose fields a checkpoint holds."""
    # Checkpoints of earlier versions lack the newer fields.
    names = [name for name in Answer._fields if name in saved]
    message = saved["mean_update_M"]
    # Lanes are whole numbers, updates are not.
    content = Update(message, saved["weight"]) if message.is_floating_point() else Lanes(message)
    return Answer(content=content, **{name: saved[name] for name in names})


def refusal_of_numbers(samples: int, weight: float, train_loss: float) -> str | None:
    """Reason why an update must not count, from the numbers beside its tensors; None if it may.

    Args:
        samples: number of samples that the client holds.
        weight: weight of the client in the mean.
        train_loss: mean loss over the samples trained on.
    """
    if type(samples) is not int or not 1 <= samples <= MOST_SAMPLES:  # True is an int, and no count
        return f"samples must be a whole number from 1 to 2^53, got {samples!r}"
    if not 0 < weight <= _HEAVIEST:  # so written, NaN is refused
        return f"the weight must be positive and at most {_HEAVIEST:.0e}, got {weight}"
    if not abs(train_loss) <= LARGEST:
        return f"the training loss must be finite and within ±{LARGEST:.0e}, got {train_loss}"
    return None


def refusal_of_metrics(metrics: Mapping[str, float], count: int | None = None) -> str | None:
    """Reason why an app's further numbers must not count; None if they may.

    Args:
        metrics: name → number.
        count: number of them as they came, names that came twice included; None: as many as names.
    """
    if len(metrics) > MOST_METRICS or count not in (None, len(metrics)):
        return f"an answer may tell {MOST_METRICS} numbers at most, each once, got {max(len(metrics), count or 0)}"
    for name, number in metrics.items():
        if not METRIC_NAME.fullmatch(name) or not abs(number) <= LARGEST:
            return f"an app's numbers must be finite, under names of letters, digits and _, got {name[:20]!r}: {number}"
    return None


def client_id_of(name: str) -> int | str:
    """The client that a node stands for: a name that is a whole number is one, as in experiments.

    Example:
        >>> client_id_of("7"), client_id_of("007"), client_id_of("ann")
        (7, '007', 'ann')
    """
    # Isdigit alone takes "²", which int refuses.
    return int(name) if name.isascii() and name.isdigit() and str(int(name)) == name else name


def client_order(name: str) -> tuple[bool, int | str]:
    """Key that sorts nodes' names in the order of their clients: numbers, then names.

    Example:
        >>> sorted(["ann", "10", "9"], key=client_order)
        ['9', '10', 'ann']
    """
    client = client_id_of(name)
    return isinstance(client, str), client


def one_line(text: str) -> str:
    r"""Text of another party for a log or a terminal: one line of at most 500 characters, all printable.

    Example:
        >>> one_line("all is well\n\x1b[31mrefused 'ann'")
        "all is well??[31mrefused 'ann'"
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_MOST_WORDS])
