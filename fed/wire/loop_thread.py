"""Event loop in a thread of its own, in which calls of others run while another thread trains."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any, TypeVar

from fed.errors import RunFailed

__all__ = ["LoopThread"]

_Result = TypeVar("_Result")
_ENDING_S = 2.0  # seconds in which gRPC's calls may end after their server has stopped


class LoopThread:
    """Thread with a loop. It alone touches what is used in it, which therefore needs no locks.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., _Result], *arguments: Any, **named: Any) -> _Result:
        """Call a function in the loop's thread; returns its result.

        Args:
            function: function that must not wait, for it holds up all calls of others.
            arguments: positional arguments of the function.
            named: keyword arguments of the function.
        """

        async def called() -> _Result:
            return function(*arguments, **named)

        return self.wait_for(called())

    def wait_for(self, step: Coroutine[Any, Any, _Result]) -> _Result:
        """Result of a coroutine that runs in the loop.

        Raises:
            RunFailed: if it was cancelled, as when the loop's connections were closed.
        """
        result = asyncio.run_coroutine_threadsafe(step, self._loop)
        try:
            return result.result()
        except futures.CancelledError as error:
            raise RunFailed("the connections of this process were closed") from error
        except KeyboardInterrupt:  # else it would go on after the thread that asked for it has left
            result.cancel()
            raise

    def end(self) -> None:
        """End the loop and its thread."""
        self.wait_for(_ended())
        self._loop.call_soon_threadsafe(self._loop.stop)  # a plain stop() from this thread would not wake the loop
        self._thread.join()
        self._loop.close()


async def _ended() -> None:
    """Give gRPC's calls some turns of the loop to end in."""
    if ending := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(ending, timeout=_ENDING_S)
