"""Observers of a run, and the events that they are told of, the same simulated and deployed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from fed.config.experiment import Experiment
from fed.server.round_stats import Participation

__all__ = [
    "Essential",
    "Event",
    "Expectation",
    "Kinds",
    "MessageRefused",
    "ModelScored",
    "NodeCame",
    "NodeWent",
    "Observer",
    "RoundBegan",
    "RoundEnded",
    "RunBegan",
    "RunEnded",
    "Selective",
    "TaskAnswered",
    "TaskEvent",
    "TaskFailed",
    "TaskLate",
    "TaskSent",
    "TaskSettled",
]


# With slots, for a large cohort makes tens of thousands of them a round.
@dataclass(frozen=True, slots=True)
class Event:
    """One thing that has happened in a run."""


@dataclass(frozen=True, slots=True)
class Expectation(Event):
    """Expected time and bytes of a simulation.

    A few steps before it begins tell them. These take time, so an observer is told only where its ``kinds`` name this.

    Args:
        rounds: number of rounds.
        wall_s: seconds on this machine in one process.
        bytes_up: bytes from clients, over all rounds.
        bytes_down: bytes to clients.
        proviso: condition under which this holds, as a clause; empty where it always holds.
    """

    rounds: int
    wall_s: float
    bytes_up: int
    bytes_down: int
    proviso: str = ""

    def after(self, rounds_done: int) -> "Expectation":
        """Expectation of the rounds that are left, each of which takes its part.

        Args:
            rounds_done: number of rounds that are over.

        Example:
            >>> Expectation(10, 60.0, 1000, 2000).after(8)
            Expectation(rounds=2, wall_s=12.0, bytes_up=200, bytes_down=400, proviso='')
        """
        left = max(0, self.rounds - rounds_done)
        up, down = (left * size_bytes // self.rounds for size_bytes in (self.bytes_up, self.bytes_down))
        return replace(self, rounds=left, wall_s=self.wall_s * left / self.rounds, bytes_up=up, bytes_down=down)


@dataclass(frozen=True, slots=True)
class RunBegan(Event):
    """Beginning of a run, or of its continuation.

    Args:
        experiment: experiment with every default resolved.
        rounds_done: number of rounds before a resume; 0 in a new run.
        clients: ids of the clients that have registered by now; at a real peer its own.
        folder: folder of the run; None: nothing is written.
    """

    experiment: Experiment
    rounds_done: int
    clients: Sequence[int | str]
    folder: Path | None


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """End of a run; its results are written.

    Args:
        status: "finished", "interrupted" or "failed".
        summary: figures of the run, as ``summary.json`` has them.
    """

    status: str
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RoundBegan(Event):
    """Beginning of a round.

    Args:
        round: number, from 1.
    """

    round: int


@dataclass(frozen=True, slots=True)
class ModelScored(Event):
    """Scores of the models that a round has left.

    Args:
        round: number, from 1.
        scores: name → value, such as ``test_loss``.
    """

    round: int
    scores: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RoundEnded(Event):
    """End of a round, with all that is known of it.

    Where models are scored beside the next round, a round ends during the next one.

    Args:
        round: number, from 1.
        line: line of the round's metrics.
        participation: clients by what became of their tasks.
        clients: id, samples, loss and metrics of each client that was scored.
    """

    round: int
    line: Mapping[str, Any]
    participation: Participation
    clients: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class TaskEvent(Event):
    """Base of the events of a task.

    Args:
        round: number of the round that the task belongs to; of a verdict, the round that the model moves in.
        client: id of the client that has the task.
        task: number of the task in its run.
    """

    round: int
    client: int | str
    task: int


@dataclass(frozen=True, slots=True)
class TaskSent(TaskEvent):
    """Task that was given to a client."""


@dataclass(frozen=True, slots=True)
class TaskAnswered(TaskEvent):
    """Answer that is part of the sum by which the model may move."""


@dataclass(frozen=True, slots=True)
class TaskLate(TaskEvent):
    """Task whose answer is not waited for any more, or came too late to count."""


@dataclass(frozen=True, slots=True)
class TaskFailed(TaskEvent):
    """Task without an answer, or with one that was refused.

    Args:
        reason: sentence for the user.
        has_diverged: True if the client's numbers were not finite.
    """

    reason: str
    has_diverged: bool = False


@dataclass(frozen=True, slots=True)
class TaskSettled(TaskEvent):
    """Verdict on an answer.

    Args:
        discount: factor in (0, 1] with which the answer moved the model; 0: it did not count.
    """

    discount: float


@dataclass(frozen=True, slots=True)
class MessageRefused(Event):
    """Message of a node that breaks the protocol.

    Args:
        client: sender of the message: a client's id, or an address.
        reason: sentence for the user.
    """

    client: int | str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeCame(Event):
    """Client that is there from now on.

    Args:
        client: id of the client.
    """

    client: int | str


@dataclass(frozen=True, slots=True)
class NodeWent(Event):
    """Client that is away from now on.

    Args:
        client: id of the client.
    """

    client: int | str


Kinds: TypeAlias = Collection[type[Event]]
"""Classes of events; a base class stands for all that derive from it."""


class Observer(Protocol):
    """Listener to the events of a run; it is told of all, or of its ``kinds`` alone where it is :class:`Selective`."""

    def observe(self, event: Event) -> None:
        """Take note of an event.

        Args:
            event: event that has happened; it must not be changed.
        """


@runtime_checkable
class Selective(Observer, Protocol):
    """Observer that is told of some events alone.

    Attributes:
        kinds: classes of the events that it is told of.
    """

    kinds: Kinds


@dataclass(frozen=True)
class Essential:
    """Observer without which a run must not go on: it is called in line, and its error ends the run.

    Args:
        observer: observer that is called in the thread that runs the rounds, which waits for it.
    """

    observer: Observer
