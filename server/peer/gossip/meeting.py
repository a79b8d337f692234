"""Meeting of peers that mix, before their first round: who is there, and whether the others have begun."""

import logging
import math
from collections.abc import Collection

from fed.server.peer.gossip.gossip_service import GossipService
from fed.server.peer.members.service_thread import ServiceThread
from fed.server.peer.members.waiting import Waiting, nobody_came

__all__ = ["await_members", "is_late"]

_log = logging.getLogger(__name__)
_LOOKS_EVERY_S = 0.05
_SAID_AFTER_S = 1.0
_FOUND_WITHIN_S = 1.0  # wait for another peer to tell its round, where there is one


def await_members(thread: ServiceThread[GossipService], count: int, last: Collection[str], deadline_s: float) -> int:
    """Wait until enough members are ready; after a resumption for the members of before, until the deadline.

    Where others are in their first round for longer than the deadline, this peer goes on without the missing ones: they
    may have ended before this peer saw them.

    Args:
        thread: event loop of this peer's service.
        count: the smallest number of members, this peer among them.
        last: names of the members of before; empty unless this peer resumes.
        deadline_s: seconds that the missing ones are waited for, > 0.

    Returns:
        The number of members that are ready, or were ready and have left.

    Raises:
        RunFailed: if too few have come for as long as this peer may wait.
    """
    service = thread.service
    clock = service.clock
    until_s = clock.monotonic_s() + deadline_s
    said_s = clock.monotonic_s() + _SAID_AFTER_S
    waiting = Waiting(service.patience_s)
    while True:
        thread.call(service.raise_failure)
        standing = thread.call(service.standing)
        ready = thread.call(service.ready)
        missing = {*last} - {member.name for member in standing.present}
        if (len(ready) >= count or last) and not missing:
            return len(ready)
        if (missing or standing.furthest) and clock.monotonic_s() > until_s:
            _log.warning("the run goes on without %s", ", ".join(sorted(missing)) or "the missing peers")
            return len(ready)
        if waiting.is_exhausted(clock.monotonic_s()):
            raise nobody_came(f"{len(ready)} of {len(last) or count} peers are there", waiting.limit_s)
        if clock.monotonic_s() > said_s:
            said_s = math.inf
            _log.info("%d of %d peers are there", len(ready), len(last) or count)
        clock.wait(_LOOKS_EVERY_S)


def is_late(thread: ServiceThread[GossipService]) -> bool:
    """True if another peer is past round 1. Waits up to 1 s for one to tell its round."""
    clock = thread.service.clock
    until_s = clock.monotonic_s() + _FOUND_WITHIN_S
    while True:
        standing = thread.call(thread.service.standing)
        if standing.rounds or clock.monotonic_s() > until_s:
            return standing.furthest > 1
        clock.wait(_LOOKS_EVERY_S)
