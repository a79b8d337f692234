"""Log of members that fall silent, go and come back, each change once."""

import logging

from fed.server.peer.members.membership import MembershipList

__all__ = ["PresenceLog"]

_log = logging.getLogger(__name__)


class PresenceLog:
    """Names of the silent members and of those that are gone, as they were logged last."""

    def __init__(self) -> None:
        self._suspected: set[str] = set()
        self._gone: set[str] = set()
        self._is_contested = False

    def forget(self, name: str) -> None:
        """Say nothing more of a member that was dropped: its return would be no return."""
        self._suspected.discard(name)
        self._gone.discard(name)

    def look(self, members: MembershipList, now_s: float) -> bool:
        """Log what has changed since the last look; true if members have gone or come back.

        Args:
            members: members that this peer knows of.
            now_s: seconds on a monotonic clock.
        """
        suspected = {member.name for member in members.suspected(now_s)}
        gone = {member.name for member in members.gone(now_s)}
        for name in sorted(suspected - self._suspected - self._gone):
            _log.info("peer %r has given no sign of life for a while: it is still waited for", name)
        for name in sorted(gone - self._gone):
            _log.warning("peer %r is gone, or cannot be reached: the others go on", name)
        for name in sorted(self._gone - gone):
            _log.info("peer %r is back", name)
        has_changed = gone != self._gone
        self._suspected = suspected
        self._gone = gone
        # A single time shows no second process, but a clock that was set back between two starts of this one.
        if members.contested > 1 and not self._is_contested:
            self._is_contested = True
            _log.warning(
                "another process has this peer's name, %r: give each peer a certificate of its own", members.own.name
            )
        return has_changed
