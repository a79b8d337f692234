"""Data sets whose samples are read as they are needed train as the same samples in memory do."""

import pickle
import resource
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

import fed
from fed.clients.data.datasets import DatasetSamples
from fed.clients.data.held import SamplesOnDemand, whole
from fed.errors import InvalidData

DRAW = np.random.default_rng(0)
INPUTS = DRAW.normal(size=(60, 4)).astype(np.float32)
LABELS = (INPUTS.sum(1) > 0).astype(np.int64)


class Pairs(Dataset[Any]):
    """Samples as arrays and numbers, not as tensors."""

    def __init__(self, inputs: Any = INPUTS, labels: Any = LABELS) -> None:
        self.inputs = inputs
        self.labels = labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, place: int) -> Any:
        return self.inputs[place], self.labels[place]


class Dictionaries(Pairs):
    """Samples as dictionaries."""

    def __getitem__(self, place: int) -> Any:
        return {"pixels": self.inputs[place], "label": self.labels[place]}


class Large(Dataset[Any]):
    """10 GB of samples that are made when they are read, and counted."""

    read = 0

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, place: int) -> Any:
        Large.read += 1
        return torch.full((250_000,), float(place)), place % 2


class Endless(IterableDataset[Any]):
    """Samples that only come one after another."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(INPUTS[0], 0)])


def experiment(**keys: Any) -> fed.Experiment:
    sections: dict[str, Any] = {"rounds": {"count": 2}, "local": {"batch_size": 4}, "model": {"kind": "logistic"}}
    return fed.Experiment(**sections | keys)


def states(run: fed.Run) -> list[Tensor]:
    return list(run.model.state_dict().values())


def assert_same(one: fed.Run, other: fed.Run) -> None:
    assert all(map(torch.equal, states(one), states(other)))
    assert [line["test_loss"] for line in one.metrics] == [line["test_loss"] for line in other.metrics]


def in_memory() -> fed.FederatedData:
    pair = torch.from_numpy(INPUTS), torch.from_numpy(LABELS)
    train = {client: (pair[0][part], pair[1][part]) for client, part in (("a", slice(0, 20)), ("b", slice(20, 60)))}
    return fed.FederatedData(train, pair)


@pytest.mark.parametrize("kind", [Pairs, Dictionaries])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_samples_read_as_needed_train_as_those_in_memory(kind: type[Pairs], workers: int) -> None:
    dataset = kind()
    train = {"a": Subset(dataset, range(20)), "b": Subset(dataset, range(20, 60))}
    data = fed.FederatedData(train, dataset, classes=2, targets="label" if kind is Dictionaries else None)
    assert all(isinstance(data.read(client), SamplesOnDemand) for client in data.clients)
    run = fed.simulate(experiment(simulation={"workers": workers}), data=data)
    assert_same(run, fed.simulate(experiment(), data=in_memory()))


def test_tensors_of_a_data_set_are_taken_as_they_are() -> None:
    dataset = TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(LABELS))
    data = fed.FederatedData({"a": dataset, "b": Subset(Subset(dataset, range(10, 60)), [0, 3])})
    assert data.read("a")[0].data_ptr() == dataset.tensors[0].data_ptr()
    assert data.read("b")[1].tolist() == LABELS[[10, 13]].tolist()
    assert data.number_of_classes() == 2


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "shards", "range", "natural"])
def test_a_data_set_is_dealt_as_its_samples_in_memory(kind: str) -> None:
    arguments: dict[str, Any] = {"kind": kind, "clients": None if kind == "natural" else 4, "seed": 1}
    columns = {"client": np.arange(60) % 3}
    expected = fed.partition(INPUTS, LABELS, columns=columns, **arguments)
    for dealt in (
        fed.partition(Pairs(), columns=columns, **arguments),
        fed.partition(Dictionaries(), "label", columns=columns, **arguments),
    ):
        assert list(dealt.clients) == list(expected.clients)
        assert dealt.number_of_classes() == 2
        pairs = [(dealt.read(client), expected.read(client)) for client in expected.clients]
        for held, pair in [*pairs, (dealt.test, expected.test)]:
            assert isinstance(held, SamplesOnDemand)
            assert pair is not None
            assert all(map(torch.equal, whole(held), pair))


def test_labels_that_a_data_set_keeps_apart_spare_its_inputs() -> None:
    dataset = Large()
    dataset.targets = [place % 2 for place in range(len(dataset))]  # type: ignore[attr-defined]  # as torchvision's
    Large.read = 0
    data = fed.partition(dataset, kind="shards", clients=100, classes_per_client=1, test_fraction=0.001)
    assert Large.read < 500  # the first sample of each client is checked
    assert data.number_of_classes() == 2


def test_a_data_set_larger_than_memory_is_never_held() -> None:
    clients = {client: Subset(Large(), range(100 * client, 100 * client + 100)) for client in range(100)}
    Large.read = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = fed.FederatedData(clients, classes=2)
    fed.simulate(experiment(rounds={"count": 2, "cohort": 2}, simulation={"workers": 0, "group": 1}), data=data)
    assert Large.read <= 2 * 2 * 100 + 500  # what is trained on, and a few of each client for the checks
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kilobytes, of 10 GB


def test_clients_of_one_data_set_send_it_once() -> None:
    dataset = Pairs()
    alone = len(pickle.dumps(DatasetSamples(dataset, "client 0")))
    data = fed.FederatedData({client: Subset(dataset, [client]) for client in range(20)}, classes=2)
    assert len(pickle.dumps(data.train)) < 2 * alone + 20 * 500


def test_what_cannot_be_read_by_number_is_refused() -> None:
    for given in ({"a": Endless()}, {"a": (INPUTS, LABELS), "b": Endless()}):
        with pytest.raises(InvalidData, match=r"found by their number, got Endless, .* map-style data set, or a list"):
            fed.FederatedData(given)
    with pytest.raises(InvalidData, match="found by their number, got Endless"):
        fed.partition(Endless())


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            ("x", 1),
            "inputs of sample 0 of client 'a' must be numbers, got 'x': make numbers of it",
        ),
        ((INPUTS[0], "cat"), "targets of sample 0 of client 'a' must be numbers, got 'cat': number the classes"),
        ((INPUTS[0], 1, 2), r"a pair \(inputs, target\), or a dictionary, got 3 parts"),
        (
            (INPUTS[0], np.datetime64("2026-01-01")),
            "targets of sample 0 of client 'a' must be numbers, got '2026-01-01'",
        ),
    ],
)
def test_samples_that_are_no_numbers_are_refused(sample: Any, message: str) -> None:
    with pytest.raises(InvalidData, match=message):
        fed.FederatedData({"a": ConcatDataset([[sample]])})  # type: ignore[list-item]  # a list is a data set, too


def test_targets_of_dictionaries_are_found_by_name() -> None:
    with pytest.raises(InvalidData, match="a value of the samples of client 'a', got 'lable'; did you mean label"):
        fed.FederatedData({"a": Dictionaries()}, targets="lable")
    data = fed.FederatedData({"a": Dictionaries()}, targets=["label"], classes=2)
    assert data.read("a").read(3)[1].tolist() == [LABELS[3]]


def test_keys_that_need_all_inputs_are_refused() -> None:
    for kind in ("hash", "rank"):
        with pytest.raises(InvalidData, match=r"^by must not be .* as they are needed, .* write by: index or"):
            fed.partition(Pairs(), kind=kind, clients=2)
    assert len(fed.partition(Pairs(), kind="hash", clients=2, by="index").clients) == 2


@pytest.mark.long
@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_hugging_face_data_sets_train_as_tensors_do(form: str | None) -> None:
    import datasets

    held = datasets.Dataset.from_dict({"pixels": INPUTS.tolist(), "label": LABELS.tolist()}).with_format(form)
    train = {"a": held.select(range(20)), "b": held.select(range(20, 60))}
    data = fed.FederatedData(train, held, classes=2, targets="label")
    expected = fed.simulate(experiment(), data=in_memory())
    for workers in (0, 2):
        assert_same(fed.simulate(experiment(simulation={"workers": workers}), data=data), expected)
    dealt = fed.partition(held, "label", kind="dirichlet", clients=3, alpha=1.0)
    in_arrays = fed.partition(INPUTS, LABELS, kind="dirichlet", clients=3, alpha=1.0)
    assert_same(fed.simulate(experiment(), data=dealt), fed.simulate(experiment(), data=in_arrays))
