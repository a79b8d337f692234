"""Thread in which a peer's service runs, while its run trains in another."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from fed.server.peer.members.member_service import MemberService

__all__ = ["ServiceThread"]

_Service = TypeVar("_Service", bound=MemberService)
_Result = TypeVar("_Result")
_ENDING_S = 2.0


class ServiceThread(Generic[_Service]):
    """A service and its event loop.

    Args:
        service: service of this peer, not yet started.
    """

    def __init__(self, service: _Service) -> None:
        self.service = service
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="peers", daemon=True)
        self._thread.start()

    def listen(self, address: str | None, advertise: str | None) -> int | None:
        """Begin to speak with others; returns the port.

        Raises:
            InvalidInput: if nothing can listen there.
        """
        return self.wait_for(self.service.start(address, advertise))

    def call(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call a function of the service in its thread."""

        async def called() -> _Result:
            return function(*arguments)

        return self.wait_for(called())

    def wait_for(self, step: Coroutine[Any, Any, _Result]) -> _Result:
        """Result of a coroutine of the service."""
        result = asyncio.run_coroutine_threadsafe(step, self._loop)
        try:
            return result.result()
        except KeyboardInterrupt:
            result.cancel()
            raise

    def close(self, reason: str) -> None:
        """Leave the others; messages stay on disk, for a peer that comes back.

        Args:
            reason: the sentence that the others are told.
        """
        self.wait_for(self.service.stop(reason))
        self.wait_for(_ended())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _ended() -> None:
    """Give gRPC's calls some turns of the loop to end in."""
    if ending := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(ending, timeout=_ENDING_S)
