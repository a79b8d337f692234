"""Messages of real nodes that come too late, or count in part: nothing of any update is lost."""

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fed
from fed.clients.node.training import NodeTraining
from fed.clients.training.client_states import codec_state
from fed.compression.codec import CodecState, Draw
from fed.compression.feedback import Encoder, Sent
from fed.protocol.protocol_pb2 import Assignment, TaskId
from fed.server.grpc.deploy import serve
from fed.server.real_fleet import RealFleet
from fed.wire.messages import Answer
from tests.server.deployed import wait_for
from tests.server.grpc.threaded import ThreadedNode, nodes_of

CLIENTS = 3
ROUNDS: dict[str, dict[str, Any]] = {
    "deadline": {"count": 6, "deadline_s": 0.8, "partial_work": "drop"},
    "two of three": {"count": 6, "cohort": 2, "over_selection": 1.5},
    "buffered": {"kind": "buffered", "count": 10, "buffer": 1, "concurrency": 3, "most_stale": 1},
}


class Ledger:
    """All that nodes encoded, some of them slowly, and all that the server counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.updates: list[Tensor] = []
        self.counted = torch.zeros(())
        self.lost = self.training = 0
        answers: dict[int, Answer] = {}
        encode, collect, settle = Encoder.encode, RealFleet.collect, RealFleet.settle
        train = NodeTraining.train
        lock, generator = threading.Lock(), np.random.default_rng(0)

        def encoded(encoder: Encoder, update_KM: Tensor, state: CodecState, draw: Draw) -> Sent:
            with lock:
                self.updates += [*update_KM.clone()]
                takes_s = float(generator.choice([0.0, 0.0, 1.2]))
            time.sleep(takes_s)
            return encode(encoder, update_KM, state, draw)

        def collected(fleet: RealFleet, *arguments: Any, **named: Any) -> Iterator[Answer]:
            self.fleet = fleet
            for answer in collect(fleet, *arguments, **named):
                if not answer.problem:
                    answers[answer.tasks[0]] = answer
                yield answer

        def settled(fleet: RealFleet, counted: Mapping[int, float]) -> None:
            for task, answer in answers.items():
                self.counted = self.counted + counted.get(task, 0.0) * answer.update.update_M
            answers.clear()
            settle(fleet, counted)
            self.lost += bool(fleet._kept.lost_after)

        def trained(training: NodeTraining, *arguments: Any) -> Any:
            with lock:
                self.training += 1
            done = train(training, *arguments)
            with lock:
                self.training -= 1
            return done

        # facts_of encodes a vector of nobody
        monkeypatch.setattr("fed.server.grpc.deployment.facts_of", lambda encoder: {})
        monkeypatch.setattr(NodeTraining, "train", trained)
        monkeypatch.setattr(Encoder, "encode", encoded)
        monkeypatch.setattr(RealFleet, "collect", collected)
        monkeypatch.setattr(RealFleet, "settle", settled)

    def residual_of(self, node: ThreadedNode) -> Tensor:
        """What a node would go on from in its next task."""
        client, training = node.node.client, node.training.training
        assert training is not None
        lost = [TaskId(start=start, number=number) for start, number in self.fleet._kept.lost_after.get(client, ())]
        states, are_lost = training._states.resumed(Assignment(**self.fleet._kept_state(client), lost_after=lost))
        assert not are_lost
        return codec_state(states.of(client, (torch.empty(0), torch.empty(0))))["residual"]


@pytest.mark.parametrize(
    "rounds", ["deadline", *(pytest.param(name, marks=pytest.mark.long) for name in [*ROUNDS][1:])]
)
def test_late_nodes_keep_what_did_not_count(rounds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, to 1e-9: the sum of what nodes encoded is that of what counted and of what they still have."""
    ledger, nodes = Ledger(monkeypatch), list[ThreadedNode]()
    generator = torch.Generator().manual_seed(0)
    train = {
        client: (torch.randn(8, 4, generator=generator, dtype=torch.float64), torch.arange(8) % 3)
        for client in range(CLIENTS)
    }
    experiment = fed.Experiment(
        data=None,
        model={"kind": "mlp", "hidden": [6]},
        local={"lr": 0.1, "batch_size": 4},
        rounds=ROUNDS[rounds],
        evaluation={"kind": "clients", "fraction": 0.25},
        uplink=[{"kind": "topk", "fraction": 0.1}],
        error_feedback="ef",
        checkpoints={"every": None},
    )

    def begin(port: int) -> None:
        nodes.extend(nodes_of(fed.FederatedData(train, None, classes=3), port, tmp_path))

    serve(experiment, listen="127.0.0.1:0", output=tmp_path / "run", min_nodes=CLIENTS, on_listen=begin)
    for node in nodes:
        node.end()
    wait_for(lambda: not ledger.training, "what is under way when the run ends, and is encoded all the same")
    for task in ledger.fleet._open.values():
        ledger.fleet._lose(task.id, task.client)
    kept = torch.stack([ledger.residual_of(node) for node in nodes]).sum(0)
    assert ledger.lost
    assert float(ledger.counted.abs().max()) > 0
    assert float((torch.stack(ledger.updates).sum(0) - ledger.counted - kept).abs().max()) < 1e-9
