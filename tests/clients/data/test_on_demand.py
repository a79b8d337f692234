"""Data on demand: a client is read when it is needed, checked then, and named if it is wrong."""

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from fed.clients.data import ClientId, ClientsOnDemand, FederatedData, Pair
from fed.errors import InvalidData

MILLION = range(10**6)
Load = Callable[..., FederatedData]
Named = Callable[[Callable[..., Any]], str]


def size(client: int) -> int:
    return 2 + client % 3


def make(client: int, reads: list[int] | None = None) -> Pair:
    """The client's number, in every sample."""
    if reads is not None:
        reads.append(client)
    return torch.full((size(client), 2), float(client)), torch.arange(size(client)) % 2


class Files(Mapping[ClientId, Pair]):
    """A mapping of a user's own."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __getitem__(self, client: ClientId) -> Pair:
        return make(int(client), self.reads)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(range(5))

    def __len__(self) -> int:
        return 5


def test_a_million_clients_cost_one_read() -> None:
    reads: list[int] = []
    data = FederatedData(ClientsOnDemand(MILLION, partial(make, reads=reads), size), classes=2)
    assert data.clients is MILLION
    assert (len(data.train), data.number_of_classes(), data.size_of(10**6 - 1)) == (10**6, 2, size(10**6 - 1))
    assert reads == [0]
    assert float(data.read(31)[0][0, 0]) == 31
    assert reads == [0, 31]


@pytest.mark.parametrize("said", [0, -1, 2.5, "many", None])
def test_an_invalid_size_is_refused_with_the_clients_name(said: object) -> None:
    sizes: Callable[[Any], Any] = {**dict.fromkeys(range(9), 2), 4: said}.__getitem__
    data = FederatedData(ClientsOnDemand(range(9), make, sizes), classes=2)
    with pytest.raises(InvalidData, match=f"a number of samples, at least 1, got {said!r} for client 4"):
        data.size_of(4)


def test_sizes_are_asked_for_one_by_one() -> None:
    asked: list[int] = []

    def counted(client: int) -> int:
        asked.append(client)
        return size(client)

    data = FederatedData(ClientsOnDemand(MILLION, make, counted))
    assert (len(data.sizes), data.sizes[7], 10**6 in data.sizes) == (10**6, size(7), False)
    assert set(asked) == {0, 7}


def test_without_sizes_a_client_is_read_for_its_size() -> None:
    files = Files()
    data = FederatedData(files)
    assert (data.is_on_demand, data.clients, files.reads) == (True, (0, 1, 2, 3, 4), [0])
    assert (data.size_of(4), files.reads) == (3, [0, 4])
    assert data.sizes == {client: size(client) for client in range(5)}


@pytest.mark.parametrize("clients", [range(3, 1000, 2), ["a", "b"], (5, 3)])
def test_clients_are_a_mapping_in_their_order(clients: Any) -> None:
    train = ClientsOnDemand(clients, lambda client: client)
    assert list(train) == list(clients)
    assert all(client in train and train[client] == client for client in clients)
    assert all(wrong not in train for wrong in (4, -1, "3", "z", 3.5, None))
    assert "a" not in ClientsOnDemand(range(10**18), make)  # at once: it does not look at each number
    with pytest.raises(KeyError):
        train[4]


def test_numbers_of_numpy_are_numbers() -> None:
    data = FederatedData(ClientsOnDemand(range(5), make))
    assert len(data.read(np.random.default_rng(0).choice(data.clients))[1]) >= 2
    assert np.int64(5) not in data.train


@pytest.mark.parametrize(
    ("clients", "function", "size_of", "said"),
    [
        (7, make, None, r"clients must be a sequence of ids, such as range\(1000\) or a list of names, got 7"),
        ("ab", make, None, "clients must be a sequence of ids"),
        ({1, 2}, make, None, "clients must be a sequence of ids"),
        ([1, 2, 1], make, None, "clients must name each client once, got 3 ids of 2 clients"),
        ([1], {}, None, r"make must be a function of a client's id, got \{\}"),
        ([1], make, 3, "size must be a function of a client's id, got 3"),
    ],
)
def test_what_are_no_clients(clients: Any, function: Any, size_of: Any, said: str) -> None:
    with pytest.raises(InvalidData, match=said) as caught:
        ClientsOnDemand(clients, function, size_of)
    assert "\n" not in str(caught.value)


def test_there_must_be_a_client() -> None:
    with pytest.raises(InvalidData, match="at least one client"):
        FederatedData(ClientsOnDemand(range(0), make))


def of_two(second: Any, **more: Any) -> FederatedData:
    good = (torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    return FederatedData(ClientsOnDemand(["a", "b"], {"a": good, "b": second}.__getitem__), **more)


LABELS = torch.tensor([0, 1, 1])
WRONG = [
    ((torch.zeros(0, 2), LABELS[:0]), "client 'b' must hold at least one sample"),
    ((torch.zeros(3, 4), LABELS), "inputs of client 'b' must be like those of client 'a'"),
    ((torch.zeros(3, 2), torch.zeros(3)), "targets of client 'b' must be like those of client 'a'"),
    ((torch.full((3, 2), torch.inf), LABELS), r"inputs of client 'b' must be finite, got inf at index \(0, 0\)"),
    ([1, 2, 3], "client 'b' must hold a pair of tensors .*, got 3 parts"),
    (None, "client 'b' must hold a pair of tensors .*, got NoneType"),
    ((torch.zeros(3, 2), LABELS + 1), "targets of client 'b' must be in 0 … 1, as classes=2 says, got 2"),
]


@pytest.mark.parametrize(("second", "said"), WRONG)
def test_a_wrong_client_is_found_when_it_is_read(second: Any, said: str) -> None:
    data = of_two(second, classes=2)
    assert data.read("a") is not None
    for look in (data.read, data.size_of):
        with pytest.raises(InvalidData, match=said) as caught:
            look("b")
        assert "\n" not in str(caught.value)
    with pytest.raises(InvalidData, match=said):
        data.pooled()


@pytest.mark.parametrize("second", [WRONG[0][0], WRONG[-1][0]])
def test_first_client_and_test_set_are_checked_at_once(second: Any) -> None:
    with pytest.raises(InvalidData, match="client 'b'"):
        FederatedData(ClientsOnDemand(["b"], lambda client: second), classes=2)
    with pytest.raises(InvalidData, match="the test set"):
        of_two(None, test=second, classes=2)


def test_an_id_is_an_integer_or_a_text() -> None:
    data = FederatedData(ClientsOnDemand([1, (2, 3)], lambda client: make(1)))  # type: ignore[list-item]
    with pytest.raises(InvalidData, match=r"a client's id must be an integer or a text, .* got \(2, 3\)"):
        data.read(data.clients[1])


def test_a_size_is_what_reading_finds() -> None:
    data = FederatedData(ClientsOnDemand(range(9), make, lambda client: 2))
    assert data.size_of(1) == 2
    with pytest.raises(InvalidData, match=r"size must be the number of samples that make returns, got 2 and 3 .* 1:"):
        data.read(1)


def test_classes_are_said_for_they_are_not_looked_for() -> None:
    data = FederatedData(ClientsOnDemand(MILLION, make))
    with pytest.raises(InvalidData, match=r"must say how many classes .* got classes=None: give FederatedData\("):
        data.number_of_classes()
    regression = FederatedData(ClientsOnDemand(MILLION, lambda client: (torch.zeros(2, 1), torch.zeros(2))))
    assert regression.number_of_classes() is None


def test_classes_may_be_given_later_without_reading_all() -> None:
    reads: list[int] = []
    data = FederatedData(ClientsOnDemand(MILLION, partial(make, reads=reads)))
    assert replace(data, classes=2).read(5) is not None
    assert reads == [0, 0, 5], "the first client, once a construction"
    with pytest.raises(InvalidData, match="targets of client 0 must be in 0 … 0"):
        replace(data, classes=1)


def test_labels_are_never_negative_and_other_targets_may_be() -> None:
    pair = (torch.zeros(3, 2), torch.tensor([0, -1, 1]))
    data = of_two(pair, classes=3)
    assert data.read("b") is pair
    with pytest.raises(InvalidData, match=r"targets of client 'b' must be in 0 … 2, .* got -1"):
        data.labelled(5).read("b")  # 3: what the data say counts
    assert replace(data, classes=None).labelled(5).number_of_classes() == 5


def test_data_on_demand_travel_as_a_recipe() -> None:
    data = FederatedData(ClientsOnDemand(MILLION, make, size), make(3), classes=2)
    recipe = pickle.dumps(data)
    assert len(recipe) < 5000
    there = pickle.loads(recipe)
    assert there.clients == MILLION
    assert all(map(torch.equal, there.read(77), data.read(77)))
    assert there.sizes[77] == size(77)
    assert there.train == data.train, "the same recipe; no client is read to compare"


def test_pooled_data_are_read_whole() -> None:
    pooled = FederatedData(ClientsOnDemand(range(4), make)).pooled()
    assert (pooled.is_on_demand, pooled.sizes) == (False, {"all": sum(map(size, range(4)))})


@pytest.mark.parametrize("size_of", [size, None])
def test_holding_out_on_demand_equals_at_once(loaded: Load, named: Named, size_of: Any) -> None:
    """Two routes: of each client when it is read, and of all clients' samples in one place."""

    def large(client: int) -> Pair:
        return torch.arange(10.0 + client).reshape(-1, 1) + 100 * client, torch.zeros(10 + client, dtype=torch.long)

    sizes = (lambda client: 10 + client) if size_of else None
    train = ClientsOnDemand(range(20), large, sizes)
    on_demand = loaded(kind=named(lambda: FederatedData(train, classes=1)), test_fraction=0.3)
    at_once = loaded(kind=named(lambda: FederatedData(dict(train), classes=1)), test_fraction=0.3)
    assert (on_demand.is_on_demand, at_once.is_on_demand) == (True, False)
    assert on_demand.sizes == at_once.sizes
    assert on_demand.test is not None
    assert at_once.test is not None
    assert all(map(torch.equal, on_demand.test, at_once.test))
    for client in at_once.clients:
        assert all(map(torch.equal, on_demand.read(client), at_once.read(client)))
    assert on_demand.number_of_classes() == 1


def test_a_million_clients_are_read_for_the_test_set_alone(loaded: Load, named: Named) -> None:
    reads: list[int] = []
    train = ClientsOnDemand(MILLION, partial(make, reads=reads), size)
    data = loaded(kind=named(lambda: FederatedData(train, classes=2)), test_fraction=0.4)
    assert data.clients is MILLION
    assert set(reads) == set(range(1000))
    assert data.test is not None
    assert float(data.test[0].max()) == 999
    assert len(data.read(5)[1]) == data.size_of(5) == 2
    tested = FederatedData(train, make(1), classes=2)
    assert loaded(kind=named(lambda: tested)) is tested
    assert loaded(kind=named(lambda: tested), clients=10**6) is tested


def test_no_test_set_where_nothing_can_be_held_out(loaded: Load, named: Named) -> None:
    lonely = ClientsOnDemand(range(3), lambda client: (torch.zeros(1, 1), torch.zeros(1, dtype=torch.long)))
    assert loaded(kind=named(lambda: FederatedData(lonely))).test is None


def test_data_on_demand_can_be_dealt_anew(loaded: Load, named: Named) -> None:
    kind = named(lambda: FederatedData(ClientsOnDemand(range(9), make), classes=2))
    total = sum(map(size, range(9)))
    dealt = loaded(kind=kind, partition={"kind": "iid"}, clients=4, test_fraction=0.0)
    assert (dealt.is_on_demand, sum(dealt.sizes.values()), dealt.classes) == (False, total, 2)
    largest = loaded(kind=kind, clients=2, test_fraction=0.0)
    assert largest.sizes == {2: 4, 5: 4}
