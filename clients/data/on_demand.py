"""Data on demand: clients whose samples are made or read only when needed, so that there may be a million."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from fed.clients.data.held import Held
from fed.clients.data.samples import ClientId
from fed.errors import InvalidData

__all__ = ["ByClient", "ClientsOnDemand"]

_Made = TypeVar("_Made")


@dataclass(frozen=True, eq=False)
class ByClient(Mapping[Any, _Made]):
    """A mapping that keeps nothing: it makes a client's value whenever it is asked.

    Args:
        clients: the ids, in order.
        make: client id → its value.
    """

    clients: Sequence[ClientId]
    make: Callable[[Any], _Made]  # Any, for a Callable[[ClientId], …] would refuse functions of int alone

    def __getitem__(self, client: ClientId) -> _Made:
        """Make a client's value."""
        return self.make(client)

    def __iter__(self) -> Iterator[ClientId]:
        """The ids, in order."""
        return iter(self.clients)

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.clients)


@dataclass(frozen=True)
class ClientsOnDemand(ByClient[Held]):
    """A mapping client id → (inputs, targets) that keeps no data: it makes or reads a client's whenever asked.

    It can be pickled, as for worker processes, where ``make`` and ``size`` can: functions of a module, their
    ``functools.partial``, methods of objects that can be pickled themselves.

    Args:
        clients: the ids, in order and each once. A ``range`` takes no memory, however long.
        make: client id → (inputs [n, ...], targets [n, ...]), the same whenever it is asked.
        size: client id → n, where that is known without making the data; None: the data are made to count them.

    Raises:
        InvalidData: if ``clients`` is no sequence or names one twice, or ``make`` cannot be called.

    Example:
        >>> import torch
        >>> def draw(client):
        ...     generator = torch.Generator().manual_seed(client)
        ...     inputs = torch.randn(20, 2, generator=generator)
        ...     return inputs, (inputs.sum(1) > 0).long()
        >>> train = ClientsOnDemand(range(1_000_000), draw, size=lambda client: 20)
        >>> len(train), 999_999 in train, train[7][0].shape
        (1000000, True, torch.Size([20, 2]))
    """

    size: Callable[[Any], int] | None = None
    _known: Sequence[ClientId] | frozenset[ClientId] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.clients, Sequence) or isinstance(self.clients, str):
            raise InvalidData(
                f"clients must be a sequence of ids, such as range(1000) or a list of names, got {self.clients!r}"
            )
        for name, function in (("make", self.make), ("size", self.size)):
            if not callable(function) and (name, function) != ("size", None):
                raise InvalidData(f"{name} must be a function of a client's id, got {function!r}")
        # A range knows its members by arithmetic: a set of a million numbers takes tens of megabytes.
        known = self.clients if isinstance(self.clients, range) else frozenset(self.clients)
        if len(known) < len(self.clients):
            raise InvalidData(
                f"clients must name each client once, got {len(self.clients)} ids of {len(known)} clients: "
                "remove those that come twice"
            )
        object.__setattr__(self, "_known", known)

    def size_of(self, client: ClientId) -> int | None:
        """Number of samples as ``size`` gives it; None where there is no ``size``."""
        self._check_known(client)
        if self.size is None:
            return None
        size = self.size(client)
        if not isinstance(size, int | np.integer) or size < 1:
            raise InvalidData(f"size must return a number of samples, at least 1, got {size!r} for client {client!r}")
        return int(size)

    def __getitem__(self, client: ClientId) -> Held:
        self._check_known(client)
        try:
            return super().__getitem__(client)
        except Exception as error:
            # A note, not an error of ours: the user's own traceback is what helps.
            error.add_note(f"while client {client!r} was made or read")
            raise

    def __contains__(self, client: object) -> bool:
        if isinstance(self._known, range):
            # Of anything but an int a range would look at every number that it holds.
            return isinstance(client, int | np.integer) and int(client) in self._known
        return client in self._known

    def _check_known(self, client: ClientId) -> None:
        if client not in self:
            raise KeyError(client)
