"""Refusals, all counted but few of one sender logged, and limits on the rate of an action."""

import logging
from collections.abc import Callable

from fed.processes.clock import Clock

__all__ = ["Allowance", "Refusals", "Unnamed"]

_log = logging.getLogger(__name__)
_LINES = 20  # of the log for a sender at once, and then one in ten seconds
_MOST_SENDERS = 1000  # that are told apart in that


class Allowance:
    """Limit on the rate of an action: a number of times at once, and again as time passes.

    Args:
        most: number of times at once, > 0.
        per_s: number of times that each second adds, > 0.
        clock: time that passes.
    """

    def __init__(self, most: float, per_s: float, clock: Clock) -> None:
        self._most = self._left = most
        self._per_s = per_s
        self._clock = clock
        self._since_s = clock.monotonic_s()  # the wall clock may be set back
        self.denied = 0

    @property
    def left(self) -> float:
        """Number of times that it may be used now."""
        now_s = self._clock.monotonic_s()
        self._left = min(self._most, self._left + self._per_s * (now_s - self._since_s))
        self._since_s = now_s
        return self._left

    def spend(self) -> bool:
        """Use the allowance once; False if nothing is left of it, which ``denied`` counts until it is reset."""
        if self.left < 1:
            self.denied += 1
            return False
        self._left -= 1
        return True


class Unnamed(str):
    """Sender without a name that counts: its address, or the number of its connection."""

    __slots__ = ()


class Refusals:
    """Refusals of messages and calls.

    Attributes:
        count: number of refusals.

    Args:
        clock: clock by which the log has few lines of one sender.
        on_refusal: function that is called with the sender and the reason of each refusal.
    """

    def __init__(
        self, clock: Clock, on_refusal: Callable[[int | str, str], object] = lambda sender, reason: None
    ) -> None:
        self.count = 0
        self._clock = clock
        self._on_refusal = on_refusal
        self._lines: dict[object, Allowance] = {}

    def note(self, sender: int | str, reason: str) -> None:
        """Count a refusal, and log it unless the same sender fills the log."""
        self.count += 1
        self._on_refusal(sender, reason)  # before the limit of the log: each one counts
        # Beyond that they share one allowance, so that memory stays bounded.
        known = sender if sender in self._lines or len(self._lines) < _MOST_SENDERS else None
        lines = self._lines.setdefault(known, Allowance(_LINES, 0.1, self._clock))
        if lines.spend():
            more = lines.denied
            lines.denied = 0
            _log.warning("refused %r: %s%s", sender, reason, f" ({more} more were not logged)" if more else "")
