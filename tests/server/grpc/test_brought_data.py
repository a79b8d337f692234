"""Nodes whose samples are arrays, frames or data sets end with the bits of the simulation, and of tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset

import fed
from fed.server.grpc.deploy import serve
from tests.server.grpc.threaded import ThreadedNode, nodes_of

CLIENTS = 3


class Pairs(Dataset[Any]):
    """Samples of float64 that are read as they are needed."""

    def __init__(self, inputs: Any, labels: Any) -> None:
        self.inputs = inputs
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> Any:
        return self.inputs[place], self.labels[place]


def brought(form: str) -> fed.FederatedData:
    """Samples of three clients in some form."""
    draw = np.random.default_rng(0)
    train: dict[int, Any] = {}
    for client in range(CLIENTS):
        inputs = draw.normal(size=(12 + 3 * client, 4))
        labels = (inputs.sum(1) > 0).astype(np.int64)
        match form:
            case "tensors":
                train[client] = torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(labels)
            case "arrays":
                train[client] = inputs, labels.astype(np.uint8)
            case "frames":
                train[client] = pd.DataFrame(inputs, columns=list("abcd")).assign(label=labels)
            case _:
                train[client] = Pairs(inputs, labels)
    return fed.FederatedData(train, classes=2, targets="label" if form == "frames" else None)


def experiment() -> fed.Experiment:
    return fed.Experiment(
        data=None,
        model={"kind": "mlp", "hidden": [5]},
        local={"lr": 0.05, "batch_size": 4},
        rounds={"count": 2},
        evaluation={"kind": "clients", "fraction": 0.3},
        simulation={"batching": "off", "workers": 0},
    )


LONG = pytest.mark.long


@pytest.mark.parametrize("form", [pytest.param("arrays", marks=LONG), pytest.param("frames", marks=LONG), "data sets"])
def test_deployed_samples_of_any_form_train_as_simulated_tensors(form: str, tmp_path: Path) -> None:
    nodes: list[ThreadedNode] = []
    begin = lambda port: nodes.extend(nodes_of(brought(form), port, tmp_path))  # noqa: E731
    where: dict[str, Any] = {"listen": "127.0.0.1:0", "output": tmp_path / "run", "min_nodes": CLIENTS}
    deployed = serve(experiment(), **where, on_listen=begin)
    for node in nodes:
        node.end()
    for data in (brought(form), brought("tensors")):
        simulated = fed.simulate(experiment(), data=data)
        for ours, theirs in zip(deployed.model.parameters(), simulated.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert deployed.metrics[-1]["test_loss"] == simulated.metrics[-1]["test_loss"]
