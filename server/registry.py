"""Registry of the clients that real nodes stand for, in the order that gives each its number."""

import logging

__all__ = ["Members"]

_log = logging.getLogger(__name__)


class Members(dict[int | str, int]):
    """Client → its number of samples: all that have joined, or, once closed, all that had joined by then.

    Attributes:
        is_closed: true to let no other client in.

    Example:
        >>> members = Members()
        >>> for client in ("ann", 10, 9):
        ...     members.come(client, samples=5)
        >>> members.is_closed = True
        >>> members.come(3, samples=5)
        >>> members.ids()
        [9, 10, 'ann']
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False
        self._came_late: set[int | str] = set()

    def come(self, client: int | str, samples: int) -> None:
        """Enter a client with its number of samples."""
        if self.take(client):
            self[client] = samples
        elif client not in self._came_late:
            self._came_late.add(client)
            _log.info(
                "client %r is not asked in this run: its algorithm numbers the clients when it begins, and this one "
                "came later",
                client,
            )

    def take(self, client: int | str) -> bool:
        """True if a client that joins takes part."""
        return not self.is_closed or client in self

    def ids(self) -> list[int | str]:
        """Ids of clients, numbers before names."""
        return sorted(self, key=lambda client: (isinstance(client, str), client))
