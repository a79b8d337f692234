"""Nodes that bring their own test sets, and a coordinator with the data's, score as the simulation does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fed
from fed.clients.data import load
from fed.errors import InvalidData
from fed.server.grpc.deploy import serve
from fed.server.grpc.deployment import Deployment
from fed.vectors.randomness import Streams
from tests.server.grpc.threaded import ThreadedNode, nodes_of

COX: dict[str, Any] = {"model": "logistic", "loss": "cox", "rounds": {"count": 2}, "local": {"batch_size": 4}}


def survival(path: Path) -> dict[str, Any]:
    """Section of a table of three centres, of which the last has nobody to test on."""
    draw = np.random.default_rng(0)
    rows = ["x,y,centre,fold,time,event"]
    for number in range(36):
        fold = "test" if number % 4 == 0 and number % 3 < 2 else "train"
        values = [*draw.normal(size=2).tolist(), "abc"[number % 3], fold, draw.integers(1, 9), int(draw.random() < 0.7)]
        rows.append(",".join(map(str, values)))
    path.write_text("\n".join(rows), encoding="utf-8")
    return {"kind": "csv", "path": str(path), "targets": ["time", "event"], "client": "centre", "split": "fold"}


@pytest.mark.parametrize("kind", ["both", "clients", "coordinator"])
def test_scores_on_test_sets_are_the_simulations(kind: str, tmp_path: Path) -> None:
    keys = fed.Experiment(data=survival(tmp_path / "t.csv"), evaluation=kind, simulation={"workers": 0}, **COX)
    assert keys.data is not None
    data, nodes = load(keys.data, Streams(0)), list[ThreadedNode]()
    begin = lambda port: nodes.extend(nodes_of(data, port, tmp_path))  # noqa: E731
    where: dict[str, Any] = {"listen": "127.0.0.1:0", "output": tmp_path / "run", "min_nodes": 3}
    deployed = serve(keys, **where, on_listen=begin)
    for node in nodes:
        node.end()
    simulated = fed.simulate(keys.override({"simulation.batching": "off"}), output=tmp_path / "simulated")
    for ours, theirs in zip(deployed.model.parameters(), simulated.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    mine, other = ([scores_of(line) for line in run.metrics] for run in (deployed, simulated))
    assert mine == other
    assert mine[-1]["test_c_index"] is not None
    assert ("client_c_index_mean" in mine[-1]) == (kind != "coordinator")
    if kind != "coordinator":
        rows = [(tmp_path / name / "clients.jsonl").read_text() for name in ("run", "simulated")]
        assert rows[0] == rows[1]
        assert len(rows[0].splitlines()) == 2 * 2


def scores_of(line: Any) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key.startswith(("test_", "client_"))}


def test_a_server_without_a_test_set_refuses_both(tmp_path: Path) -> None:
    for data in (None, {**survival(tmp_path / "t.csv"), "split": None, "metadata": ["fold"], "test_fraction": 0}):
        with pytest.raises(InvalidData, match="evaluation: both needs a test set for the coordinator"):
            Deployment(fed.Experiment(data=data, evaluation="both", **COX))
