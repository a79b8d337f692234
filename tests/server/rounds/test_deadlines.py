"""Deadlines on real nodes: who cannot do all of a task in time does a part of it, as a simulated client would."""

import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from fed.clients.data import load
from fed.clients.node.training import Hidden
from fed.config.experiment import Experiment
from fed.protocol.protocol_pb2 import Answer, Assignment, Failed
from fed.server.grpc.deploy import serve
from fed.server.grpc.service import Patience
from fed.storage.run import Run
from fed.vectors.randomness import Streams
from tests.server.grpc.threaded import ThreadedNode, nodes_of

CLIENTS = 2
STEPS = 80
DEADLINE_S = 2.0
MODEL = f"python:{__name__}:Slow"
PATIENCE = Patience(heartbeat_s=0.3, silence_s=10.0, lease_s=30.0, stall_s=10.0)


class Slow(nn.Linear):
    """A model whose every training step takes a while."""

    pause_s = 0.05

    def __init__(self) -> None:
        super().__init__(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(Slow.pause_s)
        return super().forward(inputs)


def deployed(tmp_path: Path, **changed: Any) -> tuple[Run, list[ThreadedNode]]:
    """A run whose tasks take twice the deadline, once it is over for the nodes too."""
    experiment = Experiment(
        **{
            "data": {"kind": "digits", "clients": CLIENTS},
            "model": {"kind": MODEL},
            "local": {"lr": 0.1, "batch_size": 16, "steps": STEPS},
            "simulation": {"batching": "off"},
            **changed,
        }
    )
    assert experiment.data is not None
    data, nodes = load(experiment.data, Streams(experiment.seed)), list[ThreadedNode]()

    def begin(port: int) -> None:
        nodes.extend(nodes_of(data, port, tmp_path, [MODEL]))

    output = tmp_path / "run"
    run = serve(experiment, listen="127.0.0.1:0", output=output, min_nodes=CLIENTS, patience=PATIENCE, on_listen=begin)
    for node in nodes:
        node.end()
    return run, nodes


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slow, "pause_s", 0.0)


def _with_steps(node: ThreadedNode, number: int, steps: int, folder: Path) -> tuple[Answer | Failed | Hidden, bytes]:
    """The outcome of a node's task with this number of steps, in a process that has done nothing before."""
    assignment, _, content = node.training.orders[number]
    path = folder / "task"
    path.write_bytes(content)
    of_steps = Assignment()
    of_steps.CopyFrom(assignment)
    of_steps.steps = steps
    done = node.training.made_anew().train(of_steps, path)
    return done, path.read_bytes()


@pytest.mark.parametrize(
    "algorithm", ["fedavg", *(pytest.param(name, marks=pytest.mark.long) for name in ("scaffold", "fednova"))]
)
def test_an_answer_by_the_deadline_is_that_of_fewer_steps(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = {"count": 2, "deadline_s": DEADLINE_S}
    run, nodes = deployed(tmp_path, rounds=rounds, algorithm=algorithm)
    assert [(line["replied"], line["late"], line["failed"]) for line in run.metrics] == [(CLIENTS, 0, 0)] * 2
    monkeypatch.setattr(Slow, "pause_s", 0.0)
    for node in nodes:
        *trials, first, second = [train.steps[0] for train in node.training.worked]
        assert trials == [1, 1]
        for number, steps in enumerate((first, second)):
            assert steps is not None
            assert STEPS / 8 < steps < STEPS
            assert _with_steps(node, number, steps, tmp_path) == node.training.answers[number]


def test_who_may_not_answer_with_a_part_is_late(tmp_path: Path) -> None:
    run, nodes = deployed(tmp_path, rounds={"count": 1, "deadline_s": DEADLINE_S, "partial_work": "drop"})
    assert [(line["replied"], line["late"]) for line in run.metrics] == [(0, CLIENTS)]
    assert [until_s for node in nodes for _, until_s, _ in node.training.orders] == [None] * CLIENTS


@pytest.mark.usefixtures("_at_once")
def test_who_is_quick_enough_does_all(tmp_path: Path) -> None:
    run, nodes = deployed(tmp_path, rounds={"count": 2, "deadline_s": 30.0})
    assert [line["replied"] for line in run.metrics] == [CLIENTS] * 2
    for node in nodes:
        for number, (_, content) in enumerate(node.training.answers):
            assert _with_steps(node, number, STEPS, tmp_path)[1] == content


@pytest.mark.usefixtures("_at_once")
def test_several_phases_go_together(tmp_path: Path) -> None:
    _, (node, *_) = deployed(tmp_path, rounds={"count": 1}, algorithm="ditto")
    assignment, _, content = node.training.orders[0]
    path = tmp_path / "task"
    path.write_bytes(content)
    node.training.made_anew().train(assignment, path, time.monotonic())
    assert path.read_bytes() == node.training.answers[0][1]
