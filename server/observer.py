"""Observers of a run: one stream of events, simulated or deployed, and all who listen to it.

Two kinds of observers listen. An essential one, such as the files that results rest on, is called in line, in order,
and its error ends the run. Any other, a tracker, is called in a thread of its own: it may be slow and it may fail, and
costs no round and no bit.
"""

import logging
import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from fed.config.experiment import Experiment
from fed.processes.clock import SYSTEM_CLOCK, Clock
from fed.server.accumulator import Participation

__all__ = [
    "Essential",
    "Event",
    "Expectation",
    "Kinds",
    "ModelScored",
    "NodeCame",
    "NodeWent",
    "Observer",
    "Observers",
    "Refused",
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

_log = logging.getLogger(__name__)

_MOST_WAITING = 10_000  # events of tasks and nodes that wait for a tracker
_ROOM_FOR_ROUNDS = 1_000  # beside them: a round's own events matter more than those of its tasks
_CLOSING_S = 5.0


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
        proviso: condition under which this holds, as a clause; empty where it holds anyhow.
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
        experiment: with every default resolved.
        rounds_done: number of rounds before a resume; 0 in a new run.
        clients: ids of the clients that have registered by now; at a real peer its own.
        folder: of the run; None: nothing is written.
    """

    experiment: Experiment
    rounds_done: int
    clients: Sequence[int | str]
    folder: Path | None


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """End of a run; what it has come to is written.

    Args:
        status: "finished", "interrupted" or "failed".
        summary: as in ``summary.json``.
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
        line: the round's line of the metrics.
        participation: clients by what became of their tasks.
        clients: for each client that was scored its id, samples, loss and metrics.
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
        discount: factor in (0, 1] with which it moved the model; 0: it did not count.
    """

    discount: float


@dataclass(frozen=True, slots=True)
class Refused(Event):
    """Message of a node that breaks the protocol.

    Args:
        client: its sender: a client's id, or an address.
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

_OF_ROUNDS: Kinds = (Expectation, RunBegan, RunEnded, RoundBegan, RoundEnded, ModelScored)


class Observer(Protocol):
    """Listener to the events of a run; it is told of all, or of its ``kinds`` alone where it is :class:`Selective`."""

    def observe(self, event: Event) -> None:
        """Take note of an event.

        Args:
            event: what has happened; it must not be changed.
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
        observer: is called in the thread that runs the rounds, which waits for it.
    """

    observer: Observer


class Observers:
    """All observers of one run.

    Args:
        observers: trackers, and essential ones; each is told of events in their order.
        clock: time, by which trackers are waited for at the end.
    """

    def __init__(self, observers: Iterable[Observer | Essential] = (), clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._essential: list[Observer] = []
        self._trackers: list[_Tracker] = []
        self._listeners: dict[type[Event], tuple[list[Observer], list[_Tracker]]] = {}
        for observer in observers:
            if isinstance(observer, Essential):
                self._essential.append(observer.observer)
            else:
                self._trackers.append(_Tracker(observer))

    def put_first(self, *essential: Observer) -> None:
        """Have essential observers called before all others.

        Args:
            essential: in their order.
        """
        self._essential[:0] = essential
        self._listeners = {}

    def want(self, kind: type[Event]) -> bool:
        """True if an observer is told of such events, so that others need not be made.

        Args:
            kind: class of the events.
        """
        essential, trackers = self._of(kind)
        return bool(essential or trackers)

    def tell(self, event: Event) -> None:
        """Tell all whom it concerns, essential observers first; to be called in the thread that runs the rounds.

        Args:
            event: what has happened.

        Raises:
            Exception: that an essential observer has raised.
        """
        essential, trackers = self._of(type(event))
        for observer in essential:
            observer.observe(event)
        for tracker in trackers:
            tracker.put(event)

    def close(self) -> None:
        """Wait until trackers have seen all events, for five seconds at most, and say what they have not seen."""
        until_s = self._clock.monotonic_s() + _CLOSING_S
        for tracker in self._trackers:
            tracker.end()
        for tracker in self._trackers:
            self._clock.wait(until_s - self._clock.monotonic_s(), tracker.ended)
            tracker.leave()

    def _of(self, kind: type[Event]) -> "tuple[list[Observer], list[_Tracker]]":
        found = self._listeners.get(kind)
        if found is None:
            essential = [observer for observer in self._essential if _is_of(kind, _kinds_of(observer))]
            trackers = [tracker for tracker in self._trackers if _is_of(kind, tracker.kinds)]
            found = self._listeners[kind] = essential, trackers
        return found


class _Tracker:
    """Thread of one observer, and the events that wait for it.

    Attributes:
        kinds: classes of the events that it is told of.
        ended: event that is set once nothing waits any more.
    """

    def __init__(self, observer: Observer) -> None:
        self.kinds = _kinds_of(observer)
        self.ended = threading.Event()
        self._observer = observer
        self._name = getattr(observer, "__name__", type(observer).__name__)
        self._waiting: deque[Event] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._dropped = 0
        self._is_ending = self._has_failed = False

    def put(self, event: Event) -> None:
        """Have an event wait for the observer, if there is room; the caller waits for nothing."""
        with self._changed:
            if self._has_failed:
                return
            room = _MOST_WAITING + (_ROOM_FOR_ROUNDS if isinstance(event, tuple(_OF_ROUNDS)) else 0)
            if len(self._waiting) >= room:
                self._drop()
                return
            self._waiting.append(event)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"observer {self._name}", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Have the thread end once nothing waits."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
            if self._thread is None:
                self.ended.set()

    def leave(self) -> None:
        """Give the observer nothing more, and say how many events it has not seen."""
        with self._changed:
            unseen = self._dropped + len(self._waiting)
            self._waiting.clear()
        if unseen and not self._has_failed:
            _log.warning("observer %s has not seen %d events: it is slower than the run", self._name, unseen)

    def _drop(self) -> None:
        if not self._dropped:
            _log.warning(
                "observer %s is slower than the run: %d events wait for it, and those that come while as many do are "
                "dropped",
                self._name,
                len(self._waiting),
            )
        self._dropped += 1

    def _run(self) -> None:
        """Give the observer one event after another."""
        while (event := self._next()) is not None:
            try:
                self._observer.observe(event)
            except BaseException as error:  # whatever it is, the run goes on
                self._fail(error)
        self.ended.set()

    def _next(self) -> Event | None:
        with self._changed:
            while not self._waiting and not self._is_ending:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None

    def _fail(self, error: BaseException) -> None:
        """Drop the observer."""
        with self._changed:
            self._has_failed = self._is_ending = True
            self._waiting.clear()
        _log.warning(
            "observer %s has failed, and is told nothing more: %s: %s", self._name, type(error).__name__, error
        )


def _kinds_of(observer: Observer) -> Kinds:
    if isinstance(observer, Selective):
        return observer.kinds
    return (Event,)


def _is_of(kind: type[Event], kinds: Kinds) -> bool:
    """True if events of a class belong to these kinds; expectations only where they are named."""
    if kind is Expectation:
        return Expectation in kinds
    return issubclass(kind, tuple(kinds))
