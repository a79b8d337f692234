"""Counts of each node's tasks and refusals, which belong to the run: they go on after a resume."""

import operator
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from fed.storage.checkpoints import Tree
from fed.wire.rate_limits import Unnamed

__all__ = ["NodeCounts"]


class _Counts(NamedTuple):
    answered: int = 0
    late: int = 0
    failed: int = 0
    refused: int = 0
    last_reason: str = ""

    def plus(self, later: "_Counts") -> "_Counts":
        return _Counts._make([*map(operator.add, self[:-1], later[:-1]), later.last_reason or self.last_reason])


_NONE = _Counts()


class NodeCounts:
    """Counts by client: answers, late tasks, failed tasks, refusals, and the reason of the last failure or refusal.

    A refused answer counts twice: as a refusal, and as the failure of its task.

    Example:
        >>> counts = NodeCounts()
        >>> counts.add("ann", answered=1)
        >>> counts.add("ann", failed=1, last_reason="it was killed")
        >>> counts.lines()
        {'ann': {'answered': 1, 'late': 0, 'failed': 1, 'refused': 0, 'last_reason': 'it was killed'}}
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # calls of nodes are refused in a thread of their own
        self._before: dict[int | str, _Counts] = {}  # a resume
        self._since: dict[int | str, _Counts] = {}
        self._refused_before = self._refused_since = 0

    @property
    def refused(self) -> int:
        """The number of refusals, those of senders without a name among them."""
        return self._refused_before + self._refused_since

    def add(self, client: int | str, **counts: Any) -> None:
        """Count what became of a client's task.

        Args:
            client: its id.
            counts: what to add, by name, and perhaps ``last_reason``.
        """
        with self._lock:
            self._since[client] = self._since.get(client, _NONE).plus(_Counts(**counts))

    def refuse(self, sender: int | str, reason: str) -> None:
        """Count a refusal; one of a sender without a name belongs to no client."""
        self._refused_since += 1
        if not isinstance(sender, Unnamed):
            self.add(sender, refused=1, last_reason=reason)

    def lines(self) -> dict[str, dict[str, int | str]]:
        """Counts of each client, for the summary: numbers, then names."""
        found = self._all()
        ordered = sorted(found, key=lambda client: (isinstance(client, str), client))
        return {str(client): found[client]._asdict() for client in ordered}

    def state(self) -> Tree:
        """State for a checkpoint."""
        return {"refused": self.refused, "clients": {client: tuple(one) for client, one in self._all().items()}}

    def restore(self, state: Tree) -> None:
        """Go on from :meth:`state`; what was counted since this server began is added to it."""
        self._refused_before = state["refused"]
        self._before = {client: _Counts(*one) for client, one in state["clients"].items()}

    def _all(self) -> Mapping[int | str, _Counts]:
        with self._lock:
            since = dict(self._since)  # copied under the lock: an iteration fails when another thread adds a key
        return {
            client: self._before.get(client, _NONE).plus(since.get(client, _NONE)) for client in self._before | since
        }
