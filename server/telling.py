"""Telling observers of a run's events, so that neither a slow nor a failing one costs a round or a bit.

An essential observer, such as the files that results rest on, is called in line, in order, and its error ends the run.
Any other, a tracker, is called in a thread of its own.
"""

import logging
import threading
from collections import deque
from collections.abc import Collection, Iterable

from fed.errors import InvalidInput, cause_of
from fed.processes.clock import SYSTEM_CLOCK, Clock
from fed.server.observer import (
    Essential,
    Event,
    Expectation,
    Kinds,
    ModelScored,
    Observer,
    RoundBegan,
    RoundEnded,
    RunBegan,
    RunEnded,
    Selective,
)

__all__ = ["Observers"]

_log = logging.getLogger(__name__)
_MOST_WAITING = 10_000  # events of tasks and nodes that wait for a tracker
_ROOM_FOR_ROUNDS = 1_000  # beside them: a round's own events matter more than those of its tasks
_OF_ROUNDS = (Expectation, RunBegan, RunEnded, RoundBegan, RoundEnded, ModelScored)
_CLOSING_S = 5.0


class Observers:
    """All observers of one run.

    Args:
        observers: trackers, and essential ones; each is told of events in their order.
        clock: time, by which trackers are waited for at the end.

    Raises:
        InvalidInput: if one of them is no observer.
    """

    def __init__(self, observers: Iterable[Observer | Essential] = (), clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._essential: list[Observer] = []
        self._trackers: list[_Tracker] = []
        self._listeners: dict[type[Event], tuple[list[Observer], list[_Tracker]]] = {}
        if not isinstance(observers, Iterable):
            kind = type(observers).__name__
            raise InvalidInput(f"observers must be a list of observers, got {kind}: write [observer]")
        for observer in observers:
            if isinstance(observer, Essential):
                _refuse_no_observer(observer.observer)
                self._essential.append(observer.observer)
            else:
                _refuse_no_observer(observer)
                self._trackers.append(_Tracker(observer))

    def put_first(self, *essential: Observer) -> None:
        """Have essential observers called before all others.

        Args:
            essential: observers, in the order in which they are called.
        """
        self._essential[:0] = essential
        # The listeners found for each kind of event are out of date.
        self._listeners = {}

    def want(self, kind: type[Event]) -> bool:
        """True if an observer is told of such events, so that others need not be made.

        Args:
            kind: class of the events.
        """
        essential, trackers = self._listeners.get(kind) or self._of(kind)  # asked for each task of a run
        return bool(essential or trackers)

    def tell(self, event: Event) -> None:
        """Tell all whom it concerns, essential observers first; to be called in the thread that runs the rounds.

        Args:
            event: event that has happened.

        Raises:
            Exception: if an essential observer has raised it.
        """
        essential, trackers = self._of(type(event))
        for observer in essential:
            observer.observe(event)
        for tracker in trackers:
            tracker.put(event)

    def close(self) -> None:
        """Wait until trackers have seen all events, and say what they have not seen.

        Each is waited for five seconds at most, or as long as its ``closes_within_s`` says; all end side by side.
        """
        began_s = self._clock.monotonic_s()
        for tracker in self._trackers:
            # All are told before one is waited for, so that they end side by side.
            tracker.end()
        for tracker in self._trackers:
            soon_s = began_s + min(_CLOSING_S, tracker.closes_within_s)
            self._clock.wait(soon_s - self._clock.monotonic_s(), tracker.ended)
        for tracker in self._trackers:
            left_s = began_s + tracker.closes_within_s - self._clock.monotonic_s()
            if left_s > 0 and not tracker.ended.is_set():
                _log.warning("the run has ended, and waits %.0f s at most for %s", left_s, tracker.name)
                self._clock.wait(left_s, tracker.ended)
            tracker.leave()

    def _of(self, kind: type[Event]) -> "tuple[list[Observer], list[_Tracker]]":
        found = self._listeners.get(kind)
        if found is None:
            essential = [observer for observer in self._essential if _is_of(kind, _kinds_of(observer))]
            trackers = [tracker for tracker in self._trackers if _is_of(kind, tracker.kinds)]
            found = self._listeners[kind] = essential, trackers  # kept: events of tasks are many, kinds are few
        return found


class _Tracker:
    """Thread of one observer, and the events that wait for it.

    Attributes:
        kinds: classes of the events that it is told of.
        name: name of the observer in the log.
        closes_within_s: seconds that a run waits for it at its end.
        ended: event that is set once nothing waits any more.
    """

    def __init__(self, observer: Observer) -> None:
        self.kinds = _kinds_of(observer)
        self.ended = threading.Event()
        self._observer = observer
        self.name = f"observer {_name_of(observer)}"
        self.closes_within_s = float(getattr(observer, "closes_within_s", _CLOSING_S))
        self._waiting: deque[Event] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._dropped = 0
        self._is_ending = self._has_failed = False

    def put(self, event: Event) -> None:
        """Have an event wait for the observer, if there is room; the caller waits for nothing."""
        with self._changed:
            if self._is_ending:
                return
            room = _MOST_WAITING + (_ROOM_FOR_ROUNDS if isinstance(event, _OF_ROUNDS) else 0)
            if len(self._waiting) >= room:
                self._drop()
                return
            self._waiting.append(event)
            self._changed.notify()
        if self._thread is None:  # an observer that is told of nothing needs none
            self._begin()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread left, which must not end the run
            self._fail(error)
            return
        self._thread = thread

    def end(self) -> None:
        """Have the thread end once nothing waits."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
            # Nothing will set it: there is no thread.
            if self._thread is None:
                self.ended.set()

    def leave(self) -> None:
        """Give the observer nothing more, and say how many events it has not seen."""
        with self._changed:
            unseen = self._dropped + len(self._waiting)
            self._waiting.clear()
        if unseen and not self._has_failed:
            _log.warning("%s has not seen %d events: it is slower than the run", self.name, unseen)
        elif not self.ended.is_set():
            _log.warning("%s has not ended in %g s, and is not waited for any more", self.name, self.closes_within_s)

    def _drop(self) -> None:
        if not self._dropped:
            _log.warning(
                "%s is slower than the run: %d events wait for it, and further ones are dropped until it has "
                "taken some",
                self.name,
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
        _log.warning("%s has failed, and is told nothing more: %s", self.name, cause_of(error))


def _name_of(observer: object) -> str:
    return str(getattr(observer, "name", None) or getattr(observer, "__name__", type(observer).__name__))


def _refuse_no_observer(observer: object) -> None:
    """Refuse what cannot be told of events."""
    name = _name_of(observer)
    if isinstance(observer, type) or not callable(getattr(observer, "observe", None)):
        logs = all(callable(getattr(observer, method, None)) for method in ("begin", "log", "end"))
        remedy = "write fed.server.tracking.Tracking(logger) around a logger" if logs else "see docs/observers.md"
        raise InvalidInput(f"an observer must be an object with a method observe, got {name}: {remedy}")
    kinds = getattr(observer, "kinds", ())
    if not isinstance(kinds, Collection) or not all(
        isinstance(kind, type) and issubclass(kind, Event) for kind in kinds
    ):
        raise InvalidInput(
            f"kinds of observer {name} must be a tuple of events of fed.server.observer, such as (RoundEnded,), got "
            f"{kinds!r}: correct it, or leave it out for all events"
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
