"""Tables with real targets, and with a column that says which rows are for testing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from fed.clients.data import ClientsOnDemand, FederatedData, Names, Pair, Samples
from fed.clients.data.sources.archives import npz
from fed.clients.data.sources.tables import csv
from fed.clients.node.own_data import described, samples_of
from fed.config.node_data import NodeData
from fed.errors import InvalidData

Load = Callable[..., FederatedData]

TABLE = """age,centre,fold,event,time
50,a,train,1,2.5
51,b,train,0,4
52,a,test,1,1e3
53,a,train,0,0.5
54,b,train,1,7
55,c,train,1,8
56,a,test,0,9
57,d,test,0,10
"""
KEYS: dict[str, Any] = {"kind": "csv", "targets": ["time", "event"], "client": "centre", "split": "fold"}
TIMES = {"a": [2.5, 0.5], "b": [4, 7], "c": [8]}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return written(tmp_path)


def written(folder: Path, content: str = TABLE) -> str:
    (folder / "table.csv").write_text(content, encoding="utf-8")
    return str(folder / "table.csv")


def saved(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "table.npz", **arrays)
    return str(folder / "table.npz")


def refused(source: Callable[..., Any], *args: Any, **keys: Any) -> str:
    with pytest.raises(InvalidData) as caught:
        source(*args, **keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def first_targets(pairs: Any) -> dict[Any, list[float]]:
    return {client: targets[:, 0].tolist() for client, (_, targets) in pairs.items()}


def test_target_columns_are_float32_in_the_order_of_the_list(path: str) -> None:
    samples = csv(path, targets=["time", "event"], metadata=["centre", "fold"])
    assert samples.targets.dtype == torch.float32
    assert samples.targets[:3].tolist() == [[2.5, 1], [4, 0], [1000, 1]]
    assert samples.inputs[:, 0].tolist() == [50, 51, 52, 53, 54, 55, 56, 57]
    assert samples.names == Names(("age", "time", "event"))
    assert csv(path, targets=["event"], metadata=["centre", "fold", "time"]).targets.shape == (8, 1)
    single = csv(path, targets="time", metadata=["centre", "fold"])
    assert (single.targets.shape, single.inputs.shape) == ((8,), (8, 2))


def test_arrays_of_targets_are_float32_of_their_shape(tmp_path: Path) -> None:
    for shape in ((4,), (4, 1), (4, 3)):
        times = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
        targets = npz(saved(tmp_path, x=np.zeros((4, 2)), times=times), targets="times").targets
        assert (targets.dtype, targets.tolist()) == (torch.float32, times.tolist())


def test_rows_for_testing_are_the_test_set_and_their_clients(path: str, loaded: Load) -> None:
    data = loaded(**KEYS, path=path)
    assert data.test is not None
    assert data.test[1].tolist() == [[1000, 1], [9, 0], [10, 0]], "in the table's order, whoever holds them"
    assert first_targets(data.train) == TIMES
    assert first_targets(data.client_tests) == {"a": [1000, 9]}, "d trains on nothing and is no client"
    largest = loaded(**KEYS, path=path, clients=1)
    assert (first_targets(largest.train), first_targets(largest.client_tests)) == ({"a": TIMES["a"]}, {"a": [1000, 9]})
    assert largest.test is not None
    assert len(largest.test[1]) == 3


def test_clients_by_number_have_no_test_sets(path: str, loaded: Load) -> None:
    data = loaded(**KEYS, path=path, partition="iid", clients=5)
    assert data.client_tests is None
    assert data.test is not None
    assert data.test[1][:, 0].tolist() == [1000, 9, 10]
    assert sorted(time for times in first_targets(data.train).values() for time in times) == [0.5, 2.5, 4, 7, 8]


def test_an_archive_and_a_table_give_the_same_data(tmp_path: Path, path: str, loaded: Load) -> None:
    rows = [row.split(",") for row in TABLE.splitlines()[1:]]
    age, centre, fold, event, time = map(np.array, zip(*rows, strict=True))
    aims = np.stack([time, event], axis=1).astype(np.float64)
    archive = saved(tmp_path, age=age.astype(int), centre=centre, fold=fold, aims=aims)
    one = loaded(**KEYS, path=path)
    other = loaded(kind="npz", path=archive, targets="aims", client="centre", split="fold")
    for mine, theirs in ((one.train, other.train), (one.client_tests, other.client_tests)):
        assert mine is not None
        assert theirs is not None
        assert list(mine) == list(theirs)
        assert all(torch.equal(*parts) for client in mine for parts in zip(mine[client], theirs[client], strict=True))


def test_files_of_a_folder_bring_their_test_sets(tmp_path: Path, loaded: Load) -> None:
    for name in ("north", "south"):
        (tmp_path / f"{name}.csv").write_text(TABLE, encoding="utf-8")
    data = loaded(kind="csv", path=str(tmp_path), targets="time", metadata=["centre"], split="fold", partition="file")
    assert data.client_tests is not None
    assert {client: len(targets) for client, (_, targets) in data.client_tests.items()} == {"north": 3, "south": 3}


def test_overlap_copies_no_samples_for_testing(path: str, loaded: Load) -> None:
    data = loaded(**KEYS, path=path, partition={"kind": "natural", "overlap": 1})
    assert sum(len(times) for times in first_targets(data.train).values()) == 10
    assert first_targets(data.client_tests) == {"a": [1000, 9]}


@pytest.mark.parametrize("wrong", ["valid", "Train", "1"])
def test_a_split_says_train_or_test_alone(tmp_path: Path, wrong: str) -> None:
    table = written(tmp_path, TABLE.replace("52,a,test", f"52,a,{wrong}"))
    message = refused(csv, table, targets="time", client="centre", split="fold")
    assert f"row 3, column fold must say train or test, got '{wrong}'" in message
    archive = saved(tmp_path, x=np.zeros(3), label=np.zeros(3, int), fold=np.array(["train", "test", wrong]))
    assert f"array 'fold' must say train or test, got '{wrong}' in row 3" in refused(npz, archive, split="fold")


@pytest.mark.parametrize("only", ["train", "test"])
def test_a_split_leaves_samples_of_both_kinds(tmp_path: Path, only: str) -> None:
    table = written(tmp_path, TABLE.replace("test", only).replace("train", only))
    message = refused(csv, table, targets="time", client="centre", split="fold")
    assert f"fold must leave samples to train on and samples to test on, got {only} in all 8 rows" in message


@pytest.mark.parametrize(
    ("content", "keys", "said"),
    [
        (TABLE.replace("1e3", "late"), {}, "row 3, column time must be a number, got 'late'"),
        (
            TABLE,
            {"targets": "centre", "client": None},
            "of numbers; where texts are names of classes, list these in the experiment's section",
        ),
        (TABLE.replace("1e3", "inf"), {}, "row 3, column time must be finite in float32, got 'inf'"),
        (TABLE.replace(",1,1e3", ",,1e3"), {}, "row 3, column event must not be empty"),
        (TABLE, {"targets": ["time", "death"]}, "has no column 'death', which data.targets names; known: age"),
        (TABLE, {"split": "folds"}, "has no column 'folds', which data.split names; did you mean fold?"),
        (TABLE, {"label": "event"}, "which have no classes, got data.label: event beside it: give the labels or"),
        (TABLE, {"classes": 2}, "which have no classes, got data.classes: 2 beside it"),
        (TABLE, {"targets": ["time", "time"]}, "must name a column or several, each once, got ['time', 'time']"),
        (TABLE, {"targets": []}, "must name a column or several, each once, got []"),
    ],
)
def test_wrong_targets_are_refused_in_one_sentence(tmp_path: Path, content: str, keys: Any, said: str) -> None:
    keys = {"targets": ["time", "event"], "client": "centre", "split": "fold", **keys}
    assert said in refused(csv, written(tmp_path, content), **keys)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (np.zeros((4, 2, 2)), "array 'times' must be one number or one row of numbers a sample, got shape (4, 2, 2)"),
        (np.array([0, 1, np.nan, 2]), "array 'times' must be finite in float32, got nan in row 3"),
        (np.zeros(3), "arrays must be of one length, got {'x': 4, 'times': 3}"),
    ],
)
def test_wrong_arrays_of_targets_are_refused_in_one_sentence(tmp_path: Path, times: Any, said: str) -> None:
    assert said in refused(npz, saved(tmp_path, x=np.zeros((4, 1)), times=times), targets="times")


def test_a_nodes_table_keeps_its_split(path: str) -> None:
    whole, client, lacks = (
        samples_of(NodeData(data=cast("Any", {**KEYS, "path": path, **keys}), client=name), "ann")
        for name, keys in ((None, {}), ("a", {}), ("b", {}))
    )
    assert [data.clients for data in (whole, client, lacks)] == [("ann",)] * 3
    assert first_targets(whole.client_tests) == {"ann": [1000, 9, 10]}
    assert first_targets(client.client_tests) == {"ann": [1000, 9]}
    assert lacks.client_tests == {}
    joining = described(client)
    assert (joining.samples, joining.signature.classes) == (2, 0)
    assert list(joining.signature.columns) == ["age", "time", "event"]


def pair(number: int, samples: int = 2, label: int = 1) -> Pair:
    return torch.full((samples, 1), float(number)), torch.full((samples,), label)


def test_client_tests_are_checked_like_what_is_trained_on() -> None:
    train = {"a": pair(0), "b": pair(1)}
    for tests, said in (
        ({"c": pair(0)}, "client_tests must be of clients that train, got one of client 'c'"),
        ({"b": pair(0, 0)}, "the test set of client 'b' must hold at least one sample"),
        ({"b": (torch.zeros(2, 2), torch.ones(2).long())}, "inputs of the test set of client 'b' must be like those"),
        ({"b": pair(0, label=3)}, "targets of the test set of client 'b' must be in 0 … 2"),
        ([pair(0)], "client_tests must be a mapping from a client's id to its test set"),
    ):
        assert said in refused(FederatedData, train, classes=3, client_tests=tests)
    on_demand = FederatedData(
        ClientsOnDemand(range(3), pair),
        classes=3,
        client_tests=ClientsOnDemand(range(3), lambda k: pair(k, label=k * 2)),
    )
    assert on_demand.read_test(1)[1].tolist() == [2, 2]
    assert "targets of the test set of client 2 must be in 0 … 2" in refused(on_demand.read_test, 2)


def test_labels_of_client_tests_count_as_classes() -> None:
    data = FederatedData({"a": pair(0)}, client_tests={"a": pair(0, label=6)})
    assert data.number_of_classes() == 7
    assert data.labelled(7).client_tests == data.client_tests


def test_client_tests_together_are_the_missing_test_set() -> None:
    tests = {"a": pair(3), "b": pair(4, 1)}
    data = FederatedData({"b": pair(1), "a": pair(0)}, client_tests=tests)
    test = data.with_test_set().test
    assert test is not None
    assert test[0].flatten().tolist() == [3, 3, 4]
    given = FederatedData({"a": pair(0)}, pair(9), client_tests={"a": pair(3)})
    assert given.with_test_set() is given
    pooled = data.pooled()
    assert pooled.client_tests is not None
    assert pooled.client_tests["all"][0].flatten().tolist() == [3, 3, 4]


def test_a_users_source_keeps_its_client_tests_when_dealt_anew(loaded: Load, named: Callable[..., str]) -> None:
    train, tests = {"a": pair(0, 3), "b": pair(1), "c": pair(2)}, {"a": pair(3), "c": pair(5, 1)}
    kind = named(lambda: FederatedData(train, client_tests=tests))
    as_it_is, largest, mixed = (
        loaded(kind=kind),
        loaded(kind=kind, clients=1),
        loaded(kind=kind, partition="iid", clients=4),
    )
    assert as_it_is.client_tests is tests
    assert largest.client_tests is not None
    assert {client: inputs.flatten().tolist() for client, (inputs, _) in largest.client_tests.items()} == {"a": [3, 3]}
    assert mixed.client_tests is None
    assert mixed.test is not None
    assert mixed.test[0].flatten().tolist() == [3, 3, 5]


def test_marked_samples_are_as_many_as_the_others() -> None:
    message = refused(Samples, torch.zeros(3, 1), torch.zeros(3), is_test=np.array([True]))
    assert "is_test of shape (1,)" in message
