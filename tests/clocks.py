"""Clocks that tests move by hand."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

__all__ = ["HandClock", "PatientClock", "turns"]

_Result = TypeVar("_Result")
_LOOKS_EVERY_S = 0.002


class HandClock:
    """A clock whose time passes when a test moves it: a minute takes no longer than a second."""

    def __init__(self) -> None:
        self._now_s = 1_000.0
        self._timers: list[tuple[float, asyncio.AbstractEventLoop, Callable[[], object]]] = []
        self._lock = threading.Lock()

    def move(self, passed_s: float) -> None:
        """Let time pass, at once."""
        with self._lock:
            self._now_s += passed_s
            due = [timer for timer in self._timers if timer[0] <= self._now_s]
            self._timers = [timer for timer in self._timers if timer[0] > self._now_s]
        for _, loop, wake in due:
            loop.call_soon_threadsafe(wake)

    def monotonic_s(self) -> float:
        return self._now_s

    def wall_ns(self) -> int:
        return int(1e9 * self._now_s)

    def wait(self, limit_s: float, event: threading.Event | None = None) -> bool:
        event, due_s = event or threading.Event(), self._now_s + limit_s
        while not event.is_set() and self._now_s < due_s:
            event.wait(_LOOKS_EVERY_S)
        return event.is_set()

    def wait_on(self, condition: threading.Condition, limit_s: float) -> None:
        due_s = self._now_s + limit_s
        while self._now_s < due_s and not condition.wait(_LOOKS_EVERY_S):
            pass

    def take(self, queue: SimpleQueue[_Result], limit_s: float) -> _Result:
        due_s = self._now_s + limit_s
        while True:
            try:
                return queue.get(timeout=_LOOKS_EVERY_S)
            except Empty:
                if self._now_s >= due_s:
                    raise

    async def pause(self, limit_s: float) -> None:
        over = asyncio.Event()
        self._call_after(limit_s, over.set)
        await over.wait()

    async def within(self, limit_s: float | None, step: Awaitable[_Result]) -> _Result:
        awaits = True
        async with asyncio.timeout(None) as scope:
            if limit_s is not None:
                self._call_after(limit_s, lambda: scope.reschedule(0.0) if awaits else None)
            try:
                return await step
            finally:
                awaits = False

    def _call_after(self, limit_s: float, wake: Callable[[], object]) -> None:
        with self._lock:
            self._timers.append((self._now_s + limit_s, asyncio.get_running_loop(), wake))


class PatientClock(HandClock):
    """A clock for programs of one thread, moved by their waits; a look at it takes a millisecond."""

    def monotonic_s(self) -> float:
        self.move(0.001)
        return self._now_s

    def wait(self, limit_s: float, event: threading.Event | None = None) -> bool:
        if event is None or not event.is_set():
            self.move(max(limit_s, 0.0))
        return event is not None and event.is_set()


async def turns(count: int = 20) -> None:
    """Give what a moved clock has woken some turns of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)
