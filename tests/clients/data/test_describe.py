"""Who holds what, counted and shown."""

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from rich.console import Console

from fed.clients.data import ClientsOnDemand, FederatedData, Pair
from fed.clients.data.describe import class_counts, heat_map, looked_at
from fed.clients.data.samples import Names


def shown(data: FederatedData, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(heat_map(data))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def of_labels(clients: dict[int | str, list[int]]) -> FederatedData:
    return FederatedData(
        {client: (torch.zeros(len(labels), 1), torch.tensor(labels)) for client, labels in clients.items()}
    )


def test_counts_are_those_of_each_client_and_class(loaded: Callable[..., FederatedData]) -> None:
    data = loaded(kind="digits", partition={"kind": "dirichlet", "alpha": 0.3})
    clients, counts_KC = class_counts(data)
    assert clients == list(data.train)
    assert counts_KC.shape == (100, 10)
    assert counts_KC.sum(axis=1).tolist() == list(data.sizes.values())
    _, labels = data.train[17]
    assert counts_KC[17].tolist() == [int((labels == label).sum()) for label in range(10)]


@pytest.mark.parametrize(
    "targets", [torch.rand(4), torch.zeros(4, 3, dtype=torch.long), torch.tensor([0, -1, 0, 10**9])]
)
def test_without_labels_sizes_are_counted(targets: torch.Tensor) -> None:
    data = FederatedData({"a": (torch.zeros(4, 1), targets), "b": (torch.zeros(2, 1), targets[:2])})
    clients, counts_KC = class_counts(data)
    assert (clients, counts_KC.tolist()) == (["a", "b"], [[4], [2]])
    assert "samples of each of 2 clients: 2 to 4, median 3" in shown(data)


def test_the_picture_holds_every_number_where_it_fits() -> None:
    lines = shown(of_labels({"ann": [0, 0, 2], "[bold]bob": [1]})).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["client", "0", "1", "2", "samples"],
        ["ann", "2", "·", "1", "3"],
        ["[bold]bob", "·", "1", "·", "1"],
    ]


@pytest.mark.parametrize(
    ("names", "headings"),
    [
        (("barolo", "[red]", "white"), ["barolo", "[red]", "white"]),
        (("a name of a class that has no end", "another that has none", "c"), ["0", "1", "2"]),
    ],
)
def test_the_picture_names_classes_where_names_fit(names: tuple[str, ...], headings: list[str]) -> None:
    data = of_labels({"ann": [0, 0, 2], "bob": [1]})
    named = FederatedData(data.train, names=Names(labels=names))
    assert shown(named).splitlines()[0].split() == ["client", *headings, "samples"]


def test_the_picture_stays_small_and_says_what_it_leaves_out() -> None:
    generator = np.random.default_rng(0)
    data = of_labels(
        {f"a client with a long name {k}": generator.integers(1000, size=500).tolist() for k in range(400)}
    )
    picture = shown(data)
    assert len(picture.splitlines()) == 1 + 30 + 4
    assert max(map(len, picture.splitlines())) <= 80
    assert "shown: 30 of 400 clients, evenly spaced" in picture
    assert "shown: 100 classes in a column, which is named by the first" in picture
    assert "…" not in picture.splitlines()[0]


def test_large_numbers_are_shortened() -> None:
    assert "60k" in shown(of_labels({"a": [0] * 60_000}))


@pytest.mark.parametrize("classes", [3, None])
def test_a_million_clients_are_described_by_a_sample(classes: int | None) -> None:
    reads = []

    def make(client: int) -> Pair:
        reads.append(client)
        return torch.zeros(3, 1), torch.tensor([0, client % 2, 2])

    data = FederatedData(ClientsOnDemand(range(10**6), make), classes=classes)
    clients, counts_KC = class_counts(data)
    assert (clients, counts_KC.shape) == (looked_at(data), (200, 3))
    assert (clients[0], clients[-1]) == (0, 999_999)
    assert max(np.diff(clients)) - min(np.diff(clients)) <= 1
    picture = shown(data)
    assert len(reads) <= 401
    assert "looked at: 200 of 1000000 clients, evenly spaced" in picture
    assert "samples of each of 200 clients: 3 to 3, median 3" in picture
    assert "shown: 30 of 200 clients, evenly spaced" in picture


def test_of_a_few_clients_on_demand_all_are_looked_at() -> None:
    data = FederatedData(ClientsOnDemand(range(200), lambda client: (torch.zeros(1, 1), torch.tensor([client % 2]))))
    assert looked_at(data) == list(range(200))
    assert "looked at" not in shown(data)
