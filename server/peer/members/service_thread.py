"""Thread in which a peer's service runs, while its run trains in another."""

from typing import Generic, TypeVar

from fed.server.peer.members.member_service import MemberService
from fed.wire.loop_thread import LoopThread

__all__ = ["ServiceThread"]

_Service = TypeVar("_Service", bound=MemberService)


class ServiceThread(LoopThread, Generic[_Service]):
    """A service and its event loop.

    Args:
        service: service of this peer, not yet started.
    """

    def __init__(self, service: _Service) -> None:
        super().__init__("peers")
        self.service = service

    def close(self, reason: str) -> None:
        """Leave the others; messages stay on disk, for a peer that comes back.

        Args:
            reason: the sentence that the others are told.
        """
        self.wait_for(self.service.stop(reason))
        self.end()
