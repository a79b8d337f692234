"""Training data by client, and a test set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fed.clients.data.on_demand import ByClient, ClientsOnDemand
from fed.clients.data.samples import ClientId, Names, Pair, check_alike, check_classes, check_pair, is_real
from fed.errors import InvalidData
from fed.tensors import torch

__all__ = ["FederatedData"]


@dataclass(frozen=True)
class FederatedData:
    """Training data by client, and a test set.

    Args:
        train: client id → (inputs [n, ...], targets [n, ...]), n ≥ 1, of one type and shape over all clients. A dict
            is data in memory, and checked at once. Any other mapping, such as :class:`ClientsOnDemand`, is data on
            demand: its first client is read and checked now, every other when it is read.
        test: (inputs [m, ...], targets [m, ...]), m ≥ 1, or None: then nothing is evaluated.
        classes: how many classes there are; where it is None, one more than the largest integer label in memory.
        names: what features and classes are called; nodes that join are held to them.

    Raises:
        InvalidData: if a client has no samples, its id is no integer or text, inputs and targets differ in number,
            types or shapes differ between clients, a value is not finite, or a label is no less than ``classes``; the
            message names the client.

    Example:
        >>> import torch
        >>> pair = (torch.zeros(4, 2), torch.tensor([0, 1, 1, 2]))
        >>> data = FederatedData(train={"a": pair, "b": pair}, test=pair)
        >>> data.clients, data.size_of("b"), data.number_of_classes()
        (('a', 'b'), 4, 3)
        >>> many = FederatedData(ClientsOnDemand(range(1_000_000), lambda client: pair), classes=3)
        >>> len(many.clients), many.is_on_demand, many.size_of(7)
        (1000000, True, 4)
    """

    train: Mapping[Any, Pair]  # keys are ClientId: a Mapping[int, …] would be no Mapping[int | str, …]
    test: Pair | None = None
    classes: int | None = None
    names: Names = field(default_factory=Names)
    clients: Sequence[ClientId] = field(init=False, repr=False, compare=False)
    """The ids of all clients, in order."""
    _are_labels: bool = field(default=False, repr=False, kw_only=True)
    _like: Pair | None = field(default=None, init=False, repr=False, compare=False)  # the first client's, emptied

    def __post_init__(self) -> None:
        if not isinstance(self.train, Mapping):
            raise InvalidData(
                "train must be a mapping from a client's id to its pair (inputs, targets), got "
                f"{type(self.train).__name__}: number the clients, as dict(enumerate(pairs)) does"
            )
        if not self.train:
            raise InvalidData("data must have at least one client, got none")
        clients = self.train.clients if isinstance(self.train, ClientsOnDemand) else tuple(self.train)
        object.__setattr__(self, "clients", clients)
        for client in clients[:1] if self.is_on_demand else clients:
            self._check(client, self.train[client])
        if self.test is not None:
            check_pair(self.test, "the test set")
            self._check_like_the_first(self.test, "the test set")

    @property
    def is_on_demand(self) -> bool:
        """True if clients are read when they are needed, rather than held in memory."""
        return not isinstance(self.train, dict)

    @property
    def sizes(self) -> Mapping[ClientId, int]:
        """Client id → its number of samples, found when it is asked for."""
        return ByClient(self.clients, self.size_of)

    def read(self, client: ClientId) -> Pair:
        """Data of a client, (inputs [E, ...], targets [E, ...]); data on demand are checked first.

        Args:
            client: one of ``clients``.

        Raises:
            InvalidData: if it is not what a client may hold, or another number of samples than its size said.
        """
        pair = self.train[client]
        if self.is_on_demand:
            self._check(client, pair)
        return pair

    def size_of(self, client: ClientId) -> int:
        """Number of samples of a client; where the data on demand do not say it, the client is read for it."""
        if isinstance(self.train, dict):
            return len(self.train[client][1])
        said = self._said_size_of(client)
        return self.read(client)[1].shape[0] if said is None else said

    def number_of_classes(self) -> int | None:
        """Number of classes of the labels; None where targets are no labels, that is, not integers.

        Raises:
            InvalidData: if that is not known without reading every client.
        """
        if self.classes is not None:
            return self.classes
        assert self._like is not None
        if is_real(self._like[1]):
            return None
        if self.is_on_demand:
            raise InvalidData(
                "data on demand must say how many classes there are, for not all clients are read before the first "
                "round, got classes=None: give FederatedData(…, classes=…)"
            )
        held = [*self.train.values(), *([self.test] if self.test is not None else [])]
        return 1 + max(int(targets.long().max()) for _, targets in held)  # not all integers have a max

    def may_hold_negative_labels(self) -> bool:
        """True if an integer target may be below 0, like those that a loss is told to ignore; on demand it may be."""
        assert self._like is not None
        if is_real(self._like[1]) or self._are_labels:
            return False
        return self.is_on_demand or any(bool((targets.long() < 0).any()) for _, targets in self.train.values())

    def labelled(self, classes: int) -> "FederatedData":
        """Same data with every target a class label: a negative number has no meaning of its own either.

        Args:
            classes: how many there are, unless the data say so themselves.

        Raises:
            InvalidData: if a target in memory is none; of those on demand, when it is read.
        """
        return replace(self, classes=classes if self.classes is None else self.classes, _are_labels=True)

    def pooled(self) -> "FederatedData":
        """All training data in one place: one client, named ``all``, holds every sample."""
        inputs, targets = zip(*(self.read(client) for client in self.clients), strict=True)
        return FederatedData({"all": (torch.cat(inputs), torch.cat(targets))}, self.test, self.classes, self.names)

    def _said_size_of(self, client: ClientId) -> int | None:
        return self.train.size_of(client) if isinstance(self.train, ClientsOnDemand) else None

    def _check(self, client: ClientId, pair: Pair) -> None:
        if not isinstance(client, int | str | np.integer):
            raise InvalidData(
                f"a client's id must be an integer or a text, for it names random streams, got {client!r}: "
                "number the clients, or name them"
            )
        whose = f"client {client!r}"
        check_pair(pair, whose)
        if self._like is None:
            # copies, since views would keep the client's samples
            object.__setattr__(self, "_like", tuple(part[:0].clone() for part in pair))
        self._check_like_the_first(pair, whose)
        said, found = self._said_size_of(client), len(pair[1])
        if said not in (None, found):
            raise InvalidData(
                f"size must be the number of samples that make returns, got {said} and {found} samples for {whose}: "
                "correct one of them"
            )

    def _check_like_the_first(self, pair: Pair, whose: str) -> None:
        assert self._like is not None
        check_alike(pair, whose, self._like, f"client {self.clients[0]!r}")
        check_classes(pair[1], whose, self.classes, are_labels=self._are_labels)
