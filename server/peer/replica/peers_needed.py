"""Peers that a replica cannot go on without: who they are, and for how long it waits for them."""

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from fed.server.peer.members.waiting import Waiting, nobody_came
from fed.server.peer.replica.ballots import Record

__all__ = ["PeersNeeded"]

_log = logging.getLogger(__name__)
_LOGS_EVERY_S = 30.0
_SAID_AFTER_S = 1.0  # a shorter wait is not worth a line of the log


@dataclass(kw_only=True)
class PeersNeeded:
    """Limit on the time for which a replica waits for others.

    Args:
        own: name of this replica.
        rounds: the number of rounds of the run, ≥ 1.
        waiting: time that it has waited, with its limit.
        have_ended: function that returns True if all peers of these names have ended their rounds and left.
    """

    own: str
    rounds: int
    waiting: Waiting
    have_ended: Callable[[Collection[str]], bool]
    _logged_s: float = -math.inf
    _seen_round: int = 0

    def wait(self, needs: str, record: Record, now_s: float) -> None:
        """Log that this replica waits for others, and end the run where too few come.

        Args:
            needs: clause that names the peers that this replica lacks; empty where it can go on.
            record: state of this replica.
            now_s: seconds on a monotonic clock.

        Raises:
            RunFailed: if it has waited for as long as it may, or nobody is left who could come.
        """
        is_moving = record.round != self._seen_round
        self._seen_round = record.round
        if is_moving or not needs:
            self.waiting.renew()
            self._logged_s = -math.inf
            return
        # No member is left that could come: to wait until the time limit would be in vain.
        if self.have_ended({*record.members} - {self.own}):
            raise nobody_came(needs, None)
        if self.waiting.is_exhausted(now_s):
            raise nobody_came(needs, self.waiting.limit_s)
        if now_s - self._logged_s > _LOGS_EVERY_S and self.waiting.waited_s > _SAID_AFTER_S:
            self._logged_s = now_s
            _log.warning("%s: this peer waits for up to %.0f s more", needs, self.waiting.left_s)

    def needs(self, record: Record, present: Collection[str], *, lacks_sums: bool) -> str:
        """Clause that names the peers that a member of a group lacks; empty where it can go on.

        Args:
            record: state of this replica.
            present: names of the present members, with this one's.
            lacks_sums: True if this replica cannot go on without a copy of another's state.
        """
        if record.round > self.rounds:
            return ""
        here = [name for name in record.members if name in present]
        if record.members and len(here) <= len(record.members) // 2:
            return (
                f"round {record.round} waits: {len(here)} of its {len(record.members)} members are there, and more "
                "than half are needed"
            )
        if (lacks_sums or not record.members) and len(present) == 1:
            return "this peer waits for a copy of another's state, and no other is there"
        return ""
