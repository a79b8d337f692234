"""What a node keeps between tasks, and what it says when that is lost."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fed.clients.node.training import NodeTask, NodeTraining, TaskDone
from fed.clients.training.work_items import Train
from fed.config.experiment import Experiment
from fed.errors import RunFailed
from fed.wire.payloads import read, written
from fed.wire.protocol_pb2 import Payload, Plan, Signature


class Node:
    """A node that is given one task after another, all with the same model."""

    def __init__(self, folder: Path, dtype: str = "float32", **keys: Any) -> None:
        self.kept = folder / "kept"
        self._file = folder / "task"
        inputs = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
        plan = Plan(signature=Signature(input_shape=[64], input_dtype=dtype, classes=10))
        experiment = Experiment(**{"model": {"kind": "logistic"}, "local": {"lr": 0.1}, **keys})
        self._training = NodeTraining(0, (inputs, torch.arange(20) % 10), experiment, plan, self.kept)
        self._tensors = [torch.ones(numbers, dtype=getattr(torch, dtype)) for dtype, numbers in self._training.spec()]

    def train(self, name: str, kept_after: str | None) -> tuple[TaskDone, list[float]]:
        payload = written(self._file, self._tensors).SerializeToString()
        train = Train((0,), 1, "payload", 0.1, (None,), len(self._tensors) - 2, 1, (), ((1,),))
        done = self._training.train(NodeTask(name, train, payload, self._file, kept_after))
        assert not done.problem
        return done, read(self._file, Payload.FromString(done.payload))[0].tolist()

    def score(self, kept_after: str | None) -> int:
        payload = written(self._file, self._tensors[:2]).SerializeToString()
        return self._training.score(payload, self._file, kept_after)[0]


def _leave(folder: Path) -> None:
    pass


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _damage(folder: Path) -> None:
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("lose", [_remove, _empty, _damage])
def test_client_without_its_state_starts_afresh_and_reports_it(lose: Callable[[Path], None], tmp_path: Path) -> None:
    node = Node(tmp_path, algorithm="scaffold")
    done, first = node.train("1-1", None)
    assert not done.began_anew
    done, second = node.train("1-2", "1-1")
    assert not done.began_anew
    assert second != first
    lose(node.kept / "1-1")
    done, again = node.train("1-3", "1-1")
    assert done.began_anew
    assert again == first
    assert not node.train("1-4", "1-3")[0].began_anew


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "qfedavg"])
def test_models_of_float64_and_float32_get_the_same_answer(algorithm: str, tmp_path: Path) -> None:
    narrow, wide = (Node(tmp_path, dtype, algorithm=algorithm).train("1", None)[1] for dtype in ("float32", "float64"))
    assert wide == pytest.approx(narrow, rel=1e-4, abs=1e-4)  # of numbers about 1, which float32 holds to 1e-7


def test_a_client_that_keeps_nothing_has_nothing_to_lose(tmp_path: Path) -> None:
    assert not Node(tmp_path, algorithm="fedavg").train("1-2", "1-1")[0].began_anew


@pytest.mark.parametrize("lose", [_leave, _remove, _damage])
def test_a_lost_model_of_its_own_has_no_score(lose: Callable[[Path], None], tmp_path: Path) -> None:
    node = Node(tmp_path, algorithm="ditto", evaluation="clients")
    held_out = node.score(None)
    assert held_out
    node.train("1-1", None)
    lose(node.kept / "1-1")
    if lose is _leave:
        assert node.score("1-1") == held_out
    else:
        with pytest.raises(RunFailed, match="its own model is lost, or damaged"):
            node.score("1-1")
