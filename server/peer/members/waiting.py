"""Waiting of a peer for others without whom it cannot go on."""

from fed.errors import RunFailed

__all__ = ["Waiting", "nobody_came"]

_MOST_STEP_S = 1.0  # a longer pause between two looks counts as this much: the process was frozen


class Waiting:
    """Time that a peer has waited for others while it was awake; it reads no clock.

    Attributes:
        waited_s: seconds that the peer has waited.

    Args:
        limit_s: seconds after which the waiting is exhausted, > 0.

    Example:
        >>> waiting = Waiting(1.5)
        >>> [waiting.is_exhausted(now_s) for now_s in (0.0, 1.0, 9.0)]
        [False, False, True]
        >>> waiting.renew()
        >>> waiting.is_exhausted(9.5)
        False
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.waited_s = 0.0
        self._looked_s: float | None = None

    @property
    def left_s(self) -> float:
        """Seconds until it is exhausted."""
        return max(self.limit_s - self.waited_s, 0.0)

    def is_exhausted(self, now_s: float) -> bool:
        """Let time pass in which the peer waits; true once it has waited for the limit.

        Args:
            now_s: seconds on a monotonic clock.
        """
        if self._looked_s is not None:
            self.waited_s += min(now_s - self._looked_s, _MOST_STEP_S)
        self._looked_s = now_s
        return self.waited_s >= self.limit_s

    def renew(self) -> None:
        """Begin anew: the peer does not wait any more."""
        self.waited_s = 0.0
        self._looked_s = None


def nobody_came(needs: str, limit_s: float | None) -> RunFailed:
    """Error of a peer that has waited for others in vain.

    Args:
        needs: clause that names the needed and the present peers, such as "1 of 3 peers are there".
        limit_s: seconds that the peer has waited; None: all others have ended and left, so that waiting is in vain.
    """
    waited = "all others have ended and left" if limit_s is None else f"no more came for {limit_s:g} s"
    return RunFailed(
        f"{needs}, and {waited}: if the run has ended at others, let one of them serve its end (fed peer --resume with "
        "its folder and options), then resume this peer; else resume it once the others are back"
    )
