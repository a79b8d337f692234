"""``fed.partition`` deals samples of a program as the section ``data`` of an experiment does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import fed
from fed.clients.data import FederatedData, Samples
from fed.clients.data.samples import Names
from fed.config.registry import PARTITIONS
from fed.errors import InvalidData, InvalidExperiment

DRAW = np.random.default_rng(0)
INPUTS = DRAW.normal(size=(120, 3)).astype(np.float32)
TARGETS = DRAW.integers(4, size=120)
COLUMNS = {"client": DRAW.choice(["a", "b"], 120), "file": DRAW.choice(["x", "y"], 120), "score": DRAW.normal(size=120)}
KEYS: dict[str, dict[str, Any]] = {
    "dirichlet": {"alpha": 1.0, "overlap": 0.5},
    "shards": {"classes_per_client": 2},
    "similarity": {"percent": 30.0},
    "quantity": {"alpha": 0.3},
    "range": {"by": "score"},
    "hash": {"by": "content"},
    "rank": {"by": "score"},
}


def brought() -> Samples:
    return Samples(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS), columns=COLUMNS)


def assert_same(one: FederatedData, other: FederatedData) -> None:
    assert list(one.clients) == list(other.clients)
    pairs = [(one.read(client), other.read(client)) for client in one.clients]
    for pair, expected in [*pairs, (one.test, other.test)]:
        assert pair is not None
        assert expected is not None
        assert all(map(torch.equal, pair, expected))


@pytest.mark.parametrize("kind", PARTITIONS.builtin)
def test_every_kind_deals_as_an_experiment_does(
    kind: str, loaded: Callable[..., FederatedData], named: Callable[[Callable[..., Any]], str]
) -> None:
    keys = KEYS.get(kind, {})
    clients = None if kind in ("natural", "file") else 4
    partition = {"kind": kind, **keys}
    expected = loaded(seed=3, kind=named(brought), clients=clients, partition=partition, test_fraction=0.25)
    arguments = {"kind": kind, "clients": clients, "seed": 3, "test_fraction": 0.25, "columns": COLUMNS, **keys}
    assert_same(fed.partition(INPUTS, TARGETS, **arguments), expected)


def test_arrays_tensors_lists_and_frames_are_dealt_alike() -> None:
    frame = pd.DataFrame(INPUTS, columns=["a", "b", "c"]).assign(label=TARGETS)
    arguments: dict[str, Any] = {"kind": "dirichlet", "clients": 4, "alpha": 1.0}
    expected = fed.partition(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS), **arguments)
    for dealt in (
        fed.partition(INPUTS, TARGETS.tolist(), **arguments),
        fed.partition(frame, "label", **arguments),
        fed.partition(frame[["a", "b", "c"]], frame["label"], **arguments),
        fed.partition(pa.Table.from_pandas(frame), "label", **arguments),
    ):
        assert_same(dealt, expected)


def test_frames_name_features_and_categories_name_classes() -> None:
    frame = pd.DataFrame({"a": INPUTS[:, 0], "kind": pd.Categorical.from_codes(TARGETS, list("wxyz"))})
    data = fed.partition(frame, "kind", clients=3)
    assert data.names == Names(("a", "kind"), ("w", "x", "y", "z"))
    assert data.number_of_classes() == 4
    without_the_last = frame[frame["kind"] != "z"]
    assert fed.partition(without_the_last, "kind", clients=3).number_of_classes() == 4


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "nope"}, "^kind: no such partition; known: iid, dirichlet"),
        ({"alpha": 3}, "^alpha: unknown key"),
        ({"kind": "dirichlet", "alpha": -1}, "^alpha must be greater than 0, got -1"),
        ({"clients": 0}, "^clients must be greater than 0, got 0"),
        (
            {"clients": 1000},
            "^clients must be at most the number of training samples, got clients=1000.*lower clients",
        ),
        (
            {"kind": "range", "by": "scores", "clients": 2},
            "^by must name a column of the source, got 'scores'; known: index",
        ),
        ({"seed": -1}, "^seed must be greater than or equal to 0, got -1"),
        ({"test_fraction": 1}, "^test_fraction must be less than 1, got 1"),
    ],
)
def test_mistakes_are_told_by_the_names_of_arguments(keys: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidExperiment, InvalidData), match=message):
        fed.partition(INPUTS, TARGETS, **keys)


def test_partition_passes_the_collate_on() -> None:
    def stacked(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([inputs for inputs, _ in samples]), torch.tensor([target for _, target in samples])

    dealt = fed.partition(INPUTS, TARGETS, clients=3, collate=stacked)
    assert dealt.collate is stacked
    assert_same(dealt, fed.partition(INPUTS, TARGETS, clients=3))


def test_frames_of_clients_share_classes_as_the_error_says() -> None:
    texts = {client: pd.DataFrame({"dose": [0.0, 1.0], "end": [end, "worse"]}) for client, end in enumerate("ab")}
    with pytest.raises(InvalidData, match="with the same classes on the table of each client"):
        fed.FederatedData(texts, targets="end")
    classes = pd.CategoricalDtype(["a", "b", "worse"])
    data = fed.FederatedData({key: table.astype({"end": classes}) for key, table in texts.items()}, targets="end")
    assert [data.read(client)[1].tolist() for client in data.clients] == [[0, 2], [1, 2]]
