"""Algorithms that number the clients, on real nodes: those that were there when the run began, and nobody else."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fed
from fed.clients.data import FederatedData, load
from fed.config.experiment import Experiment
from fed.server.grpc.deploy import serve
from fed.server.grpc.service import Patience
from fed.storage.run import Run
from fed.vectors.randomness import Streams
from tests.observing import after_round
from tests.server.deployed import free_port, wait_for
from tests.server.grpc.threaded import ThreadedNode, nodes_of

CLIENTS = 3
PATIENCE = Patience(heartbeat_s=0.3, silence_s=10.0, lease_s=30.0, stall_s=10.0)


def experiment(**changed: Any) -> Experiment:
    keys = {
        "data": {"kind": "digits", "clients": CLIENTS, "partition": {"kind": "dirichlet", "alpha": 1.0}},
        "model": {"kind": "logistic"},
        "algorithm": {"kind": "afl", "mixture_lr": 0.5},
        "local": {"lr": 0.1, "batch_size": 64},
        "rounds": {"count": 4},
        "checkpoints": {"every": 1},
        "simulation": {"batching": "off", "workers": 0},
    }
    return Experiment(**{**keys, **changed})


def data_of(experiment: Experiment) -> FederatedData:
    assert experiment.data is not None
    return load(experiment.data, Streams(experiment.seed))


def assert_same(run: Run, simulated: Run) -> None:
    state = simulated.model.state_dict()
    assert all(torch.equal(part, state[name]) for name, part in run.model.state_dict().items())


class Stage:
    """A port, and the nodes that have it, with a fourth that comes after the first round."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self.experiment, self.port, self.nodes = experiment(), free_port(), list[ThreadedNode]()
        self._data, self._folder, self._caplog = data_of(self.experiment), folder, caplog

    def begin(self, _: int) -> None:
        self.nodes = self.nodes or nodes_of(self._data, self.port, self._folder)

    def join(self, line: Mapping[str, Any]) -> None:
        if line["round"] == 1:
            self.nodes.append(ThreadedNode(self.port, 1000, self._data.read(0), self._folder / "late"))
            wait_for(lambda: "client 1000 has joined" in self._caplog.text, "the fourth")

    def serve(self, *, resume: bool = False, min_nodes: int = CLIENTS, then: Any = None) -> Run:
        return serve(
            self.experiment,
            listen=f"127.0.0.1:{self.port}",
            output=self._folder / "run",
            min_nodes=min_nodes,
            resume=resume,
            patience=PATIENCE,
            on_listen=self.begin,
            observers=[after_round(then or self.join)],
        )

    def hold_to_simulation(self, run: Run) -> None:
        """The late one has changed nothing, and goes home with the others."""
        assert_same(run, fed.simulate(self.experiment))
        assert_same(fed.Run.load(self._folder / "run"), run)
        assert [(line["asked"], line["replied"]) for line in run.participation] == 4 * [([0, 1, 2], [0, 1, 2])]
        assert run.summary["clients"] == CLIENTS
        assert [line["selected"] for line in run.metrics] == [CLIENTS] * len(run.metrics)
        for node in self.nodes:
            node.end()
        assert [node.node.tasks_done for node in self.nodes[CLIENTS:]] == [0]


def test_who_joins_after_the_run_has_begun_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(tmp_path, caplog)
    stage.hold_to_simulation(stage.serve())
    assert len(re.findall("client 1000 is not asked in this run: ", caplog.text)) == 1


def test_a_resumed_run_has_its_first_clients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(tmp_path, caplog)

    def end_in_the_second(line: Mapping[str, Any]) -> None:
        stage.join(line)
        if line["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage.serve(then=end_in_the_second)
    stage.hold_to_simulation(stage.serve(resume=True, min_nodes=CLIENTS + 1, then=lambda line: None))


def test_clients_are_asked_in_whatever_number_where_nobody_numbers_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(tmp_path, caplog)
    stage.experiment = experiment(algorithm={"kind": "fedavg"}, rounds={"count": 4, "cohort": "all"})
    run = stage.serve()
    assert [line["selected"] for line in run.metrics][:1] == [CLIENTS]
    assert run.metrics[-1]["selected"] == CLIENTS + 1
    for node in stage.nodes:
        node.end()
