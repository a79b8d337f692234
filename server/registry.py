"""Registry of the clients that real nodes stand for, in the order that gives each its number."""

import logging

from fed.storage.checkpoints import Tree

__all__ = ["Members"]

_log = logging.getLogger(__name__)


class Members:
    """All clients that have joined, or, once closed, all that had joined by then.

    Example:
        >>> members = Members()
        >>> for client in ("ann", 10, 9):
        ...     members.come(client, samples=5)
        >>> members.close()
        >>> members.come(3, samples=5)
        >>> members.ids()
        [9, 10, 'ann']
    """

    def __init__(self) -> None:
        self._samples: dict[int | str, int] = {}
        self._is_closed = False
        self._came_late: set[int | str] = set()

    def come(self, client: int | str, samples: int) -> None:
        """Enter a client with its number of samples."""
        if self.take(client):
            self._samples[client] = samples
        elif client not in self._came_late:
            self._came_late.add(client)
            _log.info(
                "client %r is not asked in this run: its algorithm numbers the clients when it begins, and this one "
                "came later",
                client,
            )

    def take(self, client: int | str) -> bool:
        """True if a client that joins takes part."""
        return not self._is_closed or client in self._samples

    def close(self) -> None:
        """Let no other client in."""
        self._is_closed = True

    def ids(self) -> list[int | str]:
        """Ids of clients, numbers before names."""
        return sorted(self._samples, key=lambda client: (isinstance(client, str), client))

    def size_of(self, client: int | str) -> int:
        """Number of a client's samples, as it said last."""
        return self._samples[client]

    def state(self) -> Tree:
        """State for a checkpoint."""
        return dict(self._samples)

    def restore(self, state: Tree) -> None:
        """Resume from what :meth:`state` wrote down."""
        self._samples = dict(state)
