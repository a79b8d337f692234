"""Clock of a process: time and waiting, asked of one object, so that a test can move time by hand."""

import asyncio
import threading
import time
from collections.abc import Awaitable
from queue import SimpleQueue
from typing import Protocol, TypeVar

__all__ = ["SYSTEM_CLOCK", "Clock", "SystemClock"]

_Result = TypeVar("_Result")


class Clock(Protocol):
    """Time that server, nodes and peers go by: they ask no other clock, and wait nowhere else for a time to pass.

    Limits of gRPC's own calls, and of bytes that do not move, stay with the event loop and the system: they guard
    against the machine, not against a member of the run.
    """

    def monotonic_s(self) -> float:
        """Seconds since some moment; they never run backwards."""

    def wall_ns(self) -> int:
        """Nanoseconds since 1970, as the machine has them; its user may set them back."""

    def wait(self, limit_s: float, event: threading.Event | None = None) -> bool:
        """Let time pass, until an event where there is one.

        Args:
            limit_s: seconds to wait at most; none where it is not positive.
            event: event that ends the wait.

        Returns:
            True if the event is set.
        """

    def wait_on(self, condition: threading.Condition, limit_s: float) -> None:
        """Let time pass until a condition is notified.

        Args:
            condition: condition whose lock this thread holds.
            limit_s: seconds to wait at most.
        """

    def take(self, queue: SimpleQueue[_Result], limit_s: float) -> _Result:
        """The next item of a queue.

        Args:
            queue: queue that is waited on.
            limit_s: seconds to wait at most.

        Raises:
            queue.Empty: if none comes in time.
        """

    async def pause(self, limit_s: float) -> None:
        """Let time pass, in an event loop.

        Args:
            limit_s: seconds to wait.
        """

    async def within(self, limit_s: float | None, step: Awaitable[_Result]) -> _Result:
        """The result of a step of an event loop.

        Args:
            limit_s: seconds that it may take; None: any time.
            step: step to wait for; it is cancelled when its time is over.

        Raises:
            TimeoutError: if it takes longer.
        """


class SystemClock:
    """Clock of the machine. Its monotonic time is the same in all processes of one machine."""

    def monotonic_s(self) -> float:
        """Seconds since the machine was started."""
        return time.monotonic()

    def wall_ns(self) -> int:
        """Nanoseconds since 1970."""
        return time.time_ns()

    def wait(self, limit_s: float, event: threading.Event | None = None) -> bool:
        """Sleep, until an event where there is one."""
        if event is not None:
            return event.wait(max(0.0, limit_s))
        time.sleep(max(0.0, limit_s))
        return False

    def wait_on(self, condition: threading.Condition, limit_s: float) -> None:
        """Wait for a notification."""
        condition.wait(limit_s)

    def take(self, queue: SimpleQueue[_Result], limit_s: float) -> _Result:
        """The next item of a queue."""
        return queue.get(timeout=max(0.0, limit_s))

    async def pause(self, limit_s: float) -> None:
        """Leave the event loop to others."""
        await asyncio.sleep(limit_s)

    async def within(self, limit_s: float | None, step: Awaitable[_Result]) -> _Result:
        """The result of a step."""
        async with asyncio.timeout(limit_s):  # Python 3.11's wait_for swallows a cancellation as the step ends
            return await step


SYSTEM_CLOCK: Clock = SystemClock()
"""Default of the front doors; all behind them are given theirs."""
