"""Training data by client, a test set, and test sets of the clients' own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from fed.clients.data.brought import (
    TargetNames,
    are_from_arrays,
    common_types,
    held_of,
    in_types,
    names_of_samples,
)
from fed.clients.data.frames import is_frame
from fed.clients.data.held import Held, Pair, SamplesOnDemand, joined, labels_of, size_of
from fed.clients.data.on_demand import ByClient, ClientsOnDemand
from fed.clients.data.samples import ClientId, Names, check_alike, check_classes, check_pair, pattern_of
from fed.config.table import TableSection
from fed.errors import InvalidData
from fed.quantities import counted
from fed.vectors import trees

__all__ = ["FederatedData"]

_MOST_READ = 1000  # number of test sets on demand that become one


@dataclass(frozen=True, repr=False)
class FederatedData:
    """Training data by client, a test set, and test sets of the clients' own.

    Args:
        train: client id → (inputs [n, ...], targets [n, ...]), n ≥ 1, of one type and shape over all clients. Both may
            be dictionaries, tuples and named tuples of such tensors; in the place of a tensor a list has a value for
            each sample, of any lengths where there is a ``collate``. Targets may be None, or left out, where the model
            finds its loss from the inputs alone. A client may also hold
            :class:`fed.clients.data.held.SamplesOnDemand`. A dict is data in memory, and checked at once. Any other
            mapping, such as :class:`ClientsOnDemand`, is data on demand: its first client is read and checked now,
            every other when it is read.
        test: (inputs [m, ...], targets [m, ...]), m ≥ 1, on which the coordinator evaluates. None: the clients' own
            test sets together, where there are some; otherwise it evaluates nothing.
        classes: number of classes; None: one more than the largest integer label in memory.
        names: names of features and classes; nodes that join are held to them.
        client_tests: client id → its own test set, on which it evaluates where clients do; a client may lack one.
            Beside data on demand it may be on demand too. None: clients hold out a share of what they train on.
        collate: function that makes a batch of a list of samples, as :mod:`fed.clients.data.collate` says; None: that
            of the experiment, or samples of one shape are stacked.
        targets: name of the targets, or a list of several names, where clients hold frames with a column of targets, or
            data sets whose samples are dictionaries. All else there is inputs.
        table: schema by which columns of frames are found, as those of files are: the experiment's section table.
            Inputs, targets and classes are then its own, and there are no ``targets``.

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
        >>> print(data)
        FederatedData(2 clients with 8 samples, 4 samples to test on)
        >>> many = FederatedData(ClientsOnDemand(range(1_000_000), lambda client: pair), classes=3)
        >>> len(many.clients), many.is_on_demand, many.size_of(7)
        (1000000, True, 4)
    """

    train: Mapping[Any, Any]  # keys are ClientId: a Mapping[int, …] would be no Mapping[int | str, …]
    test: Held | None = None
    classes: int | None = None
    names: Names = field(default_factory=Names)
    client_tests: Mapping[Any, Any] | None = None
    collate: Callable[..., Any] | None = None
    targets: TargetNames = None
    table: TableSection | None = None
    clients: Sequence[ClientId] = field(init=False, repr=False, compare=False)
    """The ids of all clients, in order."""
    is_from_arrays: bool | None = field(default=None, repr=False, kw_only=True)
    """True where inputs came as arrays, frames or lists, whose float64 nobody has chosen; None: found from them."""
    _of_frames: Names | None = field(default=None, repr=False, kw_only=True)  # of the first client's frame
    _are_labels: bool = field(default=False, repr=False, kw_only=True)
    _frames: tuple[Any, Any, Any] | None = field(default=None, init=False, repr=False, compare=False)  # to read anew
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
        # The first client on demand is the pattern for all others, which are read when they are needed.
        first = self.train[clients[0]]
        if self.table is not None and is_frame(first):
            self._take_schema(self.table)
        if self.is_from_arrays is None:
            object.__setattr__(self, "is_from_arrays", are_from_arrays(first))
        found = names_of_samples(first, self.targets)
        if any(found):
            object.__setattr__(self, "_of_frames", found)
            object.__setattr__(self, "names", self.names if any(self.names) else found)
            object.__setattr__(self, "classes", len(found.labels) or None if self.classes is None else self.classes)
        if isinstance(self.train, dict):
            object.__setattr__(self, "train", self._taken_in(self.train, _client))
        for client in clients[:1] if self.is_on_demand else clients:
            held = self._held(first, _client(client)) if self.is_on_demand else self.train[client]
            self._check(client, held)
        if self.test is not None:
            object.__setattr__(self, "test", self._held(self.test, "the test set"))
            self._check_test(self.test, "the test set")
        if self.client_tests is not None:
            self._check_client_tests(self.client_tests)

    def __repr__(self) -> str:
        # The values would fill the screen.
        train = counted(len(self.clients), "client")
        if not self.is_on_demand:
            train += f" with {counted(sum(map(self.size_of, self.clients)), 'sample')}"
        test = "no test set" if self.test is None else f"{counted(size_of(self.test), 'sample')} to test on"
        own_tests = f", {counted(len(self.client_tests), 'test set')} of clients" if self.client_tests else ""
        return f"FederatedData({train}, {test}{own_tests})"

    def _take_schema(self, table: TableSection) -> None:
        """Names and classes of a schema, by which frames are read."""
        if self.targets is not None:
            raise InvalidData(f"table says what to predict, got targets={self.targets!r} beside it: remove one of them")
        object.__setattr__(self, "_frames", (self.train, self.test, self.client_tests))
        object.__setattr__(self, "is_from_arrays", False)  # its types are those of files
        object.__setattr__(self, "names", Names((*table.inputs, *table.targets), table.classes or ()))
        object.__setattr__(self, "classes", len(table.classes) if table.classes else None)

    def by(self, table: TableSection) -> "FederatedData":
        """The same frames, read by another schema.

        Raises:
            InvalidData: if data are no frames that a schema was given for.
        """
        if self._frames is None:
            raise InvalidData(
                "standardize: federated reads tables three times, got data that are no frames any more: give frames by "
                "client, with FederatedData(…, table=experiment.table), or write the numbers"
            )
        train, test, client_tests = self._frames
        return FederatedData(train, test, client_tests=client_tests, collate=self.collate, table=table)

    @property
    def is_on_demand(self) -> bool:
        """True if clients are read when they are needed, rather than held in memory."""
        return not isinstance(self.train, dict)

    @property
    def sizes(self) -> Mapping[ClientId, int]:
        """Client id → its number of samples, found when it is asked for."""
        return ByClient(self.clients, self.size_of)

    def read(self, client: ClientId) -> Held:
        """Data of a client, (inputs [E, ...], targets [E, ...]); data on demand are checked first.

        Args:
            client: one of ``clients``.

        Raises:
            InvalidData: if it is no valid pair, or has another number of samples than its size said.
        """
        held = self.train[client]
        if self.is_on_demand:
            held = self._held(held, _client(client))
            self._check(client, held)
        return held

    def read_test(self, client: ClientId) -> Held:
        """Own test set of a client, (inputs [E, ...], targets [E, ...]); one on demand is checked first.

        Args:
            client: one of ``client_tests``.

        Raises:
            InvalidData: if it is no valid pair.
        """
        assert self.client_tests is not None
        held = self.client_tests[client]
        if not isinstance(self.client_tests, dict):
            held = self._held(held, _test_set_of(client))
            self._check_test(held, _test_set_of(client))
        return held

    def tests(self) -> Iterator[tuple[str, Held]]:
        """Test sets in memory, each with its name in errors."""
        if self.test is not None:
            yield "the test set", self.test
        if isinstance(self.client_tests, dict):
            yield from ((_test_set_of(client), held) for client, held in self.client_tests.items())

    def with_test_set(self) -> "FederatedData":
        """Same data with a test set where there is none: the clients' own, one after the other.

        Of test sets on demand those of the first 1,000 clients are read.
        """
        if self.test is not None or not self.client_tests:
            return self
        # There may be a million test sets on demand: the first ones stand for all.
        most = None if isinstance(self.client_tests, dict) else _MOST_READ
        return replace(self, test=joined([*map(self.read_test, islice(self.client_tests, most))]))

    def size_of(self, client: ClientId) -> int:
        """Number of samples of a client; a client on demand is read for it where its size is not given."""
        if isinstance(self.train, dict):
            return size_of(self.train[client])
        said = self._said_size_of(client)
        return size_of(self.read(client)) if said is None else said

    def number_of_classes(self) -> int | None:
        """Number of classes of the labels; None where targets are no labels, that is, not integers.

        Raises:
            InvalidData: if all clients would have to be read to count them.
        """
        if self.classes is not None:
            return self.classes
        assert self._like is not None
        if labels_of(self._like[1]) is None:
            return None
        if self.is_on_demand or self._reads_samples:
            raise InvalidData(
                "data on demand must say how many classes there are, for not all samples are read before the first "
                "round, got classes=None: give FederatedData(…, classes=…)"
            )
        held = [*self.train.values(), *(held for _, held in self.tests())]
        labels = [values for _, targets in held if (values := labels_of(targets)) is not None and values.numel()]
        return 1 + max(-1, *(int(values.long().max()) for values in labels))  # not all integers have a max

    def may_hold_negative_labels(self) -> bool:
        """True if an integer target may be below 0, such as a label that a loss ignores; on demand it may."""
        assert self._like is not None
        if labels_of(self._like[1]) is None or self._are_labels:
            return False
        if self.is_on_demand or self._reads_samples:
            return True
        held = [labels_of(targets) for _, targets in self.train.values()]
        return any(bool((labels.long() < 0).any()) for labels in held if labels is not None)

    def labelled(self, classes: int) -> "FederatedData":
        """Same data with every target a class label, so that negative numbers are refused too.

        Args:
            classes: number of classes, unless the data say it themselves.

        Raises:
            InvalidData: if a target in memory is no such label. A client on demand is checked when it is read.
        """
        return replace(self, classes=classes if self.classes is None else self.classes, _are_labels=True)

    def pooled(self) -> "FederatedData":
        """All training data in one place: one client, named ``all``, holds every sample, and all clients' test sets."""
        tests = self.client_tests
        if tests:
            tests = {"all": joined([self.read_test(client) for client in tests])}
        train = {"all": joined([self.read(client) for client in self.clients])}
        return replace(self, train=train, client_tests=tests)

    def only(self, client: ClientId, name: ClientId) -> "FederatedData":
        """One client's data, in memory, with its own test set where it has one; the common test set is left out.

        Args:
            client: one of ``clients``.
            name: id of the client from now on.
        """
        tests = self.client_tests
        if tests is not None:
            tests = {name: self.read_test(client)} if client in tests else {}
        held = self.read(client)
        return FederatedData(
            {name: held},
            # Of samples that are read as they are needed nobody counts the classes; names list them.
            classes=self.classes if isinstance(held, SamplesOnDemand) or self.names.labels else None,
            names=self.names,
            client_tests=tests,
            collate=self.collate,
            is_from_arrays=self.is_from_arrays,
        )

    def _taken_in(self, given: dict[Any, Any], owner: Callable[[ClientId], str]) -> dict[Any, Any]:
        """Clients' samples as they are held; the same dictionary where all of them are."""
        taken = {client: self._held(held, owner(client)) for client, held in given.items()}
        if all(taken[client] is held for client, held in given.items()):
            return given
        # A column of one client's frame may be of whole numbers by chance.
        brought = [client for client, held in given.items() if _may_be_cast(held, taken[client])]
        types = common_types(taken[client] for client in brought) if self._like is None else None
        return taken if types is None else taken | {client: in_types(taken[client], types) for client in brought}

    def _held(self, given: Any, owner: str) -> Held:
        held = held_of(given, owner, self.targets, self._of_frames, self.table)
        if self._like is None or not _may_be_cast(given, held):
            return held
        return in_types(held, [leaf.dtype for tree in self._like for leaf in trees.leaves(tree)])

    def _said_size_of(self, client: ClientId) -> int | None:
        return self.train.size_of(client) if isinstance(self.train, ClientsOnDemand) else None

    @property
    def _reads_samples(self) -> bool:
        """True if samples are read when they are needed, of the first client in memory and so of all."""
        return isinstance(self.train, dict) and isinstance(self.train[self.clients[0]], SamplesOnDemand)

    def _check(self, client: ClientId, held: Held) -> None:
        if not isinstance(client, int | str | np.integer):
            raise InvalidData(
                f"a client's id must be an integer or a text, for it names random streams, got {client!r}: "
                "number the clients, or name them"
            )
        owner = _client(client)
        check_pair(held, owner)
        if self._like is None:
            object.__setattr__(self, "_like", pattern_of(held))
        self._check_like_the_first(held, owner)
        said = self._said_size_of(client)
        found = size_of(held)
        if said not in (None, found):
            raise InvalidData(
                f"size must be the number of samples that make returns, got {said} and {found} samples for {owner}: "
                "correct one of them"
            )

    def _check_client_tests(self, tests: Mapping[ClientId, Pair]) -> None:
        if not isinstance(tests, Mapping):
            raise InvalidData(
                "client_tests must be a mapping from a client's id to its test set (inputs, targets), got "
                f"{type(tests).__name__}: name the clients as in train"
            )
        if not self.is_on_demand and not isinstance(tests, dict):
            tests = dict(tests)  # a dict, as the data themselves are, so that labels can be counted
        if isinstance(tests, dict):
            tests = self._taken_in(tests, _test_set_of)
        object.__setattr__(self, "client_tests", tests)
        # One of those on demand, for to read all of them could take hours.
        ids = list(tests) if isinstance(tests, dict) else list(islice(tests, 1))
        for client in ids:
            if client not in self.train:
                raise InvalidData(
                    f"client_tests must be of clients that train, got one of client {client!r}, which is none of "
                    f"{len(self.clients)}: correct its id, or put these samples into test"
                )
            self._check_test(self._held(tests[client], _test_set_of(client)), _test_set_of(client))

    def _check_test(self, held: Held, owner: str) -> None:
        check_pair(held, owner)
        self._check_like_the_first(held, owner)

    def _check_like_the_first(self, held: Held, owner: str) -> None:
        assert self._like is not None
        check_alike(held, owner, model=self._like, others=_client(self.clients[0]))
        if not isinstance(held, SamplesOnDemand):
            check_classes(held[1], owner, self.classes, are_labels=self._are_labels)


def _client(client: ClientId) -> str:
    return f"client {client!r}"


def _may_be_cast(given: Any, held: Held) -> bool:
    """True for samples in memory that came as arrays, frames or lists, whose types nobody has chosen."""
    return isinstance(held, tuple) and len(held) == 2 and held is not given and are_from_arrays(given)


def _test_set_of(client: ClientId) -> str:
    return f"the test set of client {client!r}"
