"""A client's message under secure aggregation, before it is masked."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fed.clients.data import FederatedData
from fed.clients.node.training import Hidden, NodeTraining
from fed.config.experiment import Experiment
from fed.processes.clock import SYSTEM_CLOCK
from fed.protocol.protocol_pb2 import Assignment, Plan, Signature, TaskId
from fed.secure_aggregation.agreement import model_digest
from fed.secure_aggregation.reasons import ClientRefusal
from fed.vectors.randomness import Streams
from fed.wire.payloads import written

SECURE = {"minimum_cohort": 2, "max_weight": 20, "max_drop_out": 0.0}


class Node:
    """A node that is asked for the same task again and again."""

    def __init__(self, folder: Path, *, randomness: str = "seed", **keys: Any) -> None:
        self.kept = folder / "kept"
        self.file = folder / "task"
        inputs = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
        plan = Plan(signature=Signature(input_shape=[64], input_dtype="float32", classes=10))
        section = {**SECURE, "randomness": randomness}
        local = {"lr": 0.1, "batch_size": 4}
        experiment = Experiment(
            **{"model": {"kind": "logistic"}, "local": local, "secure_aggregation": section, **keys}
        )
        self.training = NodeTraining(
            FederatedData({0: (inputs, torch.arange(20) % 10)}), experiment, plan, self.kept, SYSTEM_CLOCK
        )
        self.tensors = [torch.ones(part.numbers, dtype=part.dtype) for part in self.training._message.downlink]

    def train(self, number: int = 1, **changed: Any) -> Tensor:
        """The message of a task; the file of the model is gone afterwards."""
        assignment = Assignment(
            task=TaskId(start=1, number=number),
            round=1,
            population=1,
            payload=written(self.file, self.tensors),
            broadcast_count=len(self.tensors) - 2,
            model_sha256=model_digest(self.tensors),
            **changed,
        )
        done = self.training.train(assignment, self.file)
        assert isinstance(done, Hidden)
        self.began_anew = done.answer.began_anew
        assert (done.answer.samples, done.answer.weight, done.answer.train_loss) == (0, 0.0, 0.0)
        assert not self.file.exists()
        return done.lanes


def test_message_follows_from_the_seed_unless_the_system_draws(tmp_path: Path) -> None:
    known = Node(tmp_path)
    hidden = Node(tmp_path, randomness="system")
    assert torch.equal(known.train(), known.train())
    first, second = hidden.train(), Node(tmp_path, randomness="system").train()
    assert not torch.equal(first, second)
    assert not torch.equal(first, known.train())
    scale = known.training.fixed.levels / 8.0  # type: ignore[union-attr]
    close = (first[:640].double() - second[:640].double()).abs() / scale / 20
    assert close.max() < 0.2  # the same samples in another order: updates that differ by little


def test_system_draws_leave_the_common_streams_as_they_are(tmp_path: Path) -> None:
    """Messages can be added only where clients send the same coordinates: in one step on all samples they agree."""
    keys: dict[str, Any] = {"uplink": [{"kind": "randomk", "fraction": 0.1}], "local": {"lr": 0.1, "batch_size": 20}}
    known, hidden = (Node(tmp_path, randomness=of, **keys).train()[:65] for of in ("seed", "system"))
    apart = (known - hidden).abs()
    assert 0 < apart.max() <= 20 * 1000  # rounding by one level, times the weight, and sums in another order
    assert known.abs().max() > 1e6


def test_noise_of_stages_is_the_nodes_own_by_request(tmp_path: Path) -> None:
    """In one step on all samples, and next to no step at that, messages differ by their noise alone."""
    keys: dict[str, Any] = {
        "stages": [{"kind": "python:tests.trial_stages:Shakes"}],
        "local": {"lr": 1e-9, "batch_size": 20},
    }
    known = Node(tmp_path, **keys)
    first, second = (Node(tmp_path, randomness="system", **keys).train()[:640].double() for _ in range(2))
    scale = known.training.fixed.levels / 8.0 * 20  # type: ignore[union-attr]
    update = Node(tmp_path, local=keys["local"]).train()[:640].double() / scale
    drawn = Streams(0).generator("stage 0", 0, 1).normal(size=650)[:640]
    from_seed = update + 0.01 * torch.from_numpy(drawn)
    assert torch.allclose(known.train()[:640].double() / scale, from_seed, atol=1e-6)
    for message, other in ((first, second), (first, from_seed * scale), (second, from_seed * scale)):
        difference = (message - other) / scale
        assert difference.std() == pytest.approx(0.01 * 2**0.5, rel=0.2)  # 640 draws: within 7 standard deviations


def test_state_outlives_a_task_that_diverged_and_tells_nothing(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"uplink": [{"kind": "randomk", "fraction": 0.1}], "error_feedback": "ef"}
    node, calm = (Node(tmp_path / name, **keys) for name in ("diverges", "calm"))
    for each in (node, calm):
        each.kept.parent.mkdir(exist_ok=True)
        each.train(1)
    node.tensors[0].fill_(3e38)
    nothing = node.training.fixed.nothing(np.random.default_rng(0))  # type: ignore[union-attr]
    assert torch.equal(node.train(2, kept_after=TaskId(start=1, number=1)), nothing)
    assert not node.began_anew
    node.tensors[0].fill_(1.0)
    following = node.train(3, kept_after=TaskId(start=1, number=2))
    assert not node.began_anew
    assert torch.equal(following, calm.train(3, kept_after=TaskId(start=1, number=1)))


def test_training_that_fails_looks_like_any_other(tmp_path: Path) -> None:
    """A model for letters below 10 fails at the one sample that has another, which the server must not hear."""
    texts = torch.arange(24).reshape(6, 4) % 10
    fits, others = texts.clone(), texts.clone()
    others[5, 0] = 11
    signature = Signature(input_shape=[4], input_dtype="int64", classes=10, target_shape=[4], target_dtype="int64")
    experiment = Experiment(
        model={"kind": "char_gru"}, local={"lr": 0.1, "batch_size": 1}, secure_aggregation={**SECURE, "clip": 1.0}
    )
    made: dict[str, Any] = {}
    for name, inputs in (("fits", fits), ("others", others)):
        file = tmp_path / name
        data = FederatedData({0: (inputs, texts)})
        training = NodeTraining(data, experiment, Plan(signature=signature), tmp_path / f"kept-{name}", SYSTEM_CLOCK)
        tensors = [torch.zeros(part.numbers, dtype=part.dtype) for part in training._message.downlink]
        payload = written(file, tensors)
        assignment = Assignment(task=TaskId(start=1, number=1), round=1, population=1, payload=payload)
        assignment.model_sha256 = model_digest(tensors)
        made[name] = training.train(assignment, file)
        assert not file.exists()
    answer, lanes, problem = made["others"]
    assert (answer, problem[:36]) == (made["fits"].answer, "its training has failed: IndexError:")
    assert training.fixed is not None
    assert torch.equal(lanes, training.fixed.nothing(np.random.default_rng(0)))
    assert made["fits"].problem == ""
    assert made["fits"].lanes.any()


def test_noise_of_a_clients_own_leaves_under_masks_too(tmp_path: Path) -> None:
    """The sum of the weights would tell how many had nothing else to add, exactly and beyond all that ε says."""
    node = Node(tmp_path, privacy={"kind": "local", "clip": 1e-3, "noise_multiplier": 2.0})
    fixed = node.training.fixed
    assert fixed is not None
    usual = node.train(1)
    node.tensors[0].fill_(3e38)
    lanes = node.train(2)
    assert torch.equal(lanes[fixed.numbers :], usual[fixed.numbers :])
    deviation = lanes[: fixed.numbers].double().std() * 8.0 / fixed.levels
    assert deviation == pytest.approx(2e-3, rel=0.2)


def test_kept_models_are_private_files_until_the_run_ends(tmp_path: Path) -> None:
    node = Node(tmp_path, downlink=[{"kind": "qsgd", "bits": 4}])
    node.train(reference="first")
    (state,) = node.kept.iterdir()
    assert state.is_dir()
    assert node.kept.stat().st_mode & 0o777 == 0o700
    node.training.forget()
    assert not node.kept.exists()


def test_one_name_never_gives_two_tasks_one_state(tmp_path: Path) -> None:
    """A server that tells one task in two ways is refused, and the state that counted stays."""
    node = Node(tmp_path, algorithm="scaffold")
    first = node.train()
    (kept,) = (node.kept / "1-1").iterdir()
    before = kept.read_bytes()
    assert torch.equal(node.train(), first)  # again, as after a death of the process
    with pytest.raises(ClientRefusal, match="in two different ways"):
        node.train(lr=0.5)
    assert kept.read_bytes() == before
