"""A node's samples: a client's of some source, or all of a source."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from fed.clients.node.own_data import samples_of
from fed.config.node_data import NodeData
from fed.errors import InvalidExperiment


def test_source_without_client_names_is_wholly_the_nodes_own(tmp_path: Path) -> None:
    inputs, labels = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6) % 3
    np.savez(tmp_path / "samples.npz", inputs=inputs, label=labels)
    description = NodeData(data=cast(Any, {"kind": "npz", "path": str(tmp_path / "samples.npz")}))
    data = samples_of(description, "ann")
    assert data.clients == ("ann",)
    found, targets = data.read("ann")
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, inputs.tolist()))
    assert sorted(targets.tolist()) == sorted(labels.tolist())
    assert targets.dtype == torch.int64


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"clients": 3}, "data.clients"),
        ({"partition": "iid"}, "data.partition"),
        ({"clients": 2, "partition": "iid"}, "data.clients and data.partition"),
    ],
)
def test_a_dealt_source_without_a_client_is_refused(keys: dict[str, Any], named: str) -> None:
    source = cast(Any, {"kind": "digits", **keys})
    with pytest.raises(InvalidExperiment, match=rf"{named}: the source is dealt .*: add one such as client: 0, or rem"):
        NodeData(data=source)
    assert NodeData(data=source, client=1).client == 1
    assert NodeData(data=cast(Any, {"kind": "digits", "clients": 1, "partition": "iid"})).client is None


@pytest.mark.parametrize(
    ("privacy", "refusal"),
    [
        ({"kinds": ["locall"]}, "each must be one of central, local, distributed, dp_ftrl, got locall"),
        ({"kinds": []}, "privacy.kinds"),
        ({"delta": 1e-6}, "got delta 1e-06 and no budget: give both or neither"),
        ({"least_noise_multiplier": 0}, "privacy.least_noise_multiplier"),
    ],
)
def test_limits_that_mean_nothing_are_refused(privacy: dict[str, Any], refusal: str) -> None:
    keys: dict[str, Any] = {"data": {"kind": "digits"}, "client": 0, "privacy": privacy}
    with pytest.raises(InvalidExperiment, match=refusal):
        NodeData(**keys)


def test_a_fold_of_the_nodes_own_source_is_tested(tmp_path: Path) -> None:
    inputs, labels = np.arange(18, dtype=np.float32).reshape(9, 2), np.arange(9) % 3
    np.savez(tmp_path / "samples.npz", inputs=inputs, label=labels)
    source = {"kind": "npz", "path": str(tmp_path / "samples.npz"), "fold": {"number": 2, "of": 3}}
    data = samples_of(NodeData(data=cast(Any, source)), "ann")
    assert data.client_tests is not None
    parts = data.read("ann")[0].tolist(), data.read_test("ann")[0].tolist()
    assert [len(part) for part in parts] == [6, 3]
    assert sorted([*parts[0], *parts[1]]) == inputs.tolist()


def test_a_node_whose_app_cannot_be_imported_says_so_first() -> None:
    with pytest.raises(InvalidExperiment, match="has no Nope"):
        samples_of(NodeData(app="python:tests.clients.apps.arrays_only:Nope"), 0)
    assert samples_of(NodeData(app="python:tests.clients.apps.arrays_only:Regression"), 0).clients == (0,)
