"""Connections as they come: held to a rate, and counted until they show a certificate."""

import logging
import threading

from fed.processes.clock import Clock
from fed.wire.door import Door
from fed.wire.rate_limits import Allowance

__all__ = ["HANDSHAKE_MS", "Newcomers"]

_log = logging.getLogger(__name__)

HANDSHAKE_MS = 20_000
"""Milliseconds in which a connection must show a certificate; gRPC would hold one that says nothing for two minutes."""

_AT_ONCE = 300  # connections, as when a fleet comes back
_PER_S = 100.0
_OPENS_FOR = 10  # connections, so that a door that was shut is not shut again at the next one
_LOOKS_EVERY_S = 0.1
_SAYS_EVERY_S = 10.0
_MOST_KNOWN = 10_000  # connections with a certificate that are told apart


class Newcomers:
    """Connections that have begun, and the number of them that have shown a certificate.

    A connection counts as a stranger's until a call over it shows a certificate. gRPC ends it by itself where TLS
    fails; it tells nobody but its own log.

    Attributes:
        begun: number of connections that have begun.
        identified: number of connections over which a call has shown a certificate.

    Args:
        clock: clock of the process.
        at_once: number of connections that may come at once.
        per_s: number of connections that may come in each second after that.
    """

    def __init__(self, clock: Clock, at_once: float = _AT_ONCE, per_s: float = _PER_S) -> None:
        self.begun = 0
        self.identified = 0
        self._lock = threading.Lock()  # gRPC tells of connections in threads of its own
        self._clock = clock
        self._allowance = Allowance(at_once, per_s, clock)
        self._per_s = per_s
        self._door: Door | None = None
        self._known: dict[str, None] = {}
        self._settled = 0  # connections that have had the time to show a certificate
        self._said = 0  # strangers that the log has been told of

    def arrived(self) -> None:
        """Count a connection, and shut the door after too many."""
        with self._lock:
            self.begun += 1
            # watch() makes the door, in the loop: the first connections may come before that.
            if not self._allowance.spend() and self._door is not None:
                self._door.shut()

    def identify(self, address: str) -> None:
        """Take note that a certificate was shown over the connection from this address."""
        if address in self._known:
            return
        self._known[address] = None
        # Without the lock: calls are all in the loop's thread, unlike the beginnings of connections.
        self.identified += 1
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]  # dicts keep their order: the oldest

    async def watch(self, port: int) -> None:
        """Open and shut the door of a port, and say now and then how many strangers have come, until it is cancelled.

        Args:
            port: port on which they come.
        """
        door = self._door = Door(port)
        try:
            while True:
                for _ in range(round(_SAYS_EVERY_S / _LOOKS_EVERY_S)):
                    await self._clock.pause(_LOOKS_EVERY_S)
                    with self._lock:
                        if door.is_shut and self._allowance.left >= _OPENS_FOR:
                            door.open()
                self._say(self._settled - self.identified)
                self._settled = self.begun  # those that have just come may still show a certificate
        finally:
            with self._lock:
                self._door = None
                door.close()
            self._say(self.begun - self.identified)

    def _say(self, strangers: int) -> None:
        if strangers <= self._said:
            return
        more = strangers - self._said
        self._said = strangers
        with self._lock:
            denied = self._allowance.denied
            self._allowance.denied = 0
        held = f", and new ones are held to {self._per_s:g} a second" if denied else ""
        _log.warning(
            "%d connections came to nothing: they showed no certificate of this authority, or broke off before a call "
            "(%d in all%s)",
            more,
            strangers,
            held,
        )
