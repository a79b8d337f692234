"""Index of available clients: counts, removes, adds and finds the i-th in logarithmic time."""

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import overload

from fed.clients.data import ClientId

__all__ = ["Presence"]

_LEAF = 256  # clients that are counted together, so that all counts of a million stay in a core's cache


class Presence(Sequence[ClientId]):
    """Available clients, in the order of all, as a sequence that changes.

    A Fenwick tree (Fenwick 1994) over runs of clients' places counts the available ones: finding the i-th, removing or
    adding one takes log₂ N steps.

    Args:
        clients: all clients, each once; all are available at first.

    Example:
        >>> present = Presence("abcd")
        >>> present.set("b", False)
        >>> list(present), present[1], len(present)
        (['a', 'c', 'd'], 'c', 3)
    """

    def __init__(self, clients: Sequence[ClientId]) -> None:
        self._clients = clients
        self._size = len(clients)
        self._there = bytearray(b"\x01") * len(clients)
        self._places: dict[ClientId, int] | None = None
        self._counts: list[int] | None = None  # present clients by node of the tree; made when the first client leaves

    def set(self, client: ClientId, is_there: bool) -> None:
        """Note that a client is present, or is not."""
        place = self._place_of(client)
        # A change that is noted twice must count once.
        if by := is_there - self._there[place]:
            self._there[place] = is_there
            self._size += by
            self._change(place, by)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> ClientId: ...
    @overload
    def __getitem__(self, index: slice) -> list[ClientId]: ...
    def __getitem__(self, index: int | slice) -> ClientId | list[ClientId]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        index = range(self._size)[index]  # takes negative places, and raises IndexError like any sequence
        place = self._select(index) if self._size < len(self._clients) else index
        return self._clients[place]

    def __iter__(self) -> Iterator[ClientId]:
        return compress(self._clients, self._there)

    def _place_of(self, client: ClientId) -> int:
        # A range knows places by arithmetic: a dictionary of a million clients would take tens of megabytes.
        if isinstance(self._clients, range):
            return self._clients.index(int(client))
        if self._places is None:
            self._places = {client: place for place, client in enumerate(self._clients)}
        return self._places[client]

    def _change(self, place: int, by: int) -> None:
        if self._counts is None:
            nodes = range(-(-len(self._clients) // _LEAF) + 1)
            # The last leaf counts places beyond the last client as well, so that no search goes past it.
            self._counts = [_LEAF * (node & -node) for node in nodes]
        counts = self._counts
        size = len(counts)
        node = place // _LEAF + 1
        while node < size:
            counts[node] += by
            node += node & -node

    def _select(self, index: int) -> int:
        """Place of the available client with ``index`` others before it."""
        assert self._counts is not None
        counts = self._counts
        size = len(counts)
        leaf = 0
        step = 1 << (size.bit_length() - 1)
        while step:
            node = leaf + step
            if node < size and counts[node] <= index:
                leaf = node
                index -= counts[node]
            step >>= 1
        there = self._there
        place = leaf * _LEAF
        width = _LEAF
        while width > 1:
            width //= 2
            # A count of bytes runs at the speed of memory: to halve a leaf takes fewer steps than a deeper tree.
            before = there.count(1, place, place + width)
            if before <= index:
                place += width
                index -= before
        return place
