"""What a node keeps between tasks, and what it says when that is lost."""

import math
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fed.clients.data import FederatedData
from fed.clients.node.reference import KeptReference
from fed.clients.node.training import NodeTraining
from fed.clients.training.work_items import Train
from fed.compression.chain import CodecChain
from fed.compression.codec import Values
from fed.compression.feedback import EF21, Encoder
from fed.compression.quantisers import Int8
from fed.config.experiment import Experiment
from fed.errors import InvalidExperiment, InvalidPayload, RunFailed
from fed.processes.clock import SYSTEM_CLOCK
from fed.protocol.protocol_pb2 import Answer, Assignment, Examination, Failed, Plan, Signature, TaskId
from fed.protocol.protocol_pb2 import Difference as Difference_
from fed.storage.checkpoints import Checkpoints
from fed.vectors.randomness import Streams
from fed.wire.format import Format
from fed.wire.messages import Difference
from fed.wire.payloads import read, written
from fed.wire.reference import Reference


class Node:
    """A node that is given one task after another, all with the same model."""

    def __init__(self, folder: Path, dtype: str = "float32", **keys: Any) -> None:
        self.kept = folder / "kept"
        self._file = folder / "task"
        inputs = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
        plan = Plan(signature=Signature(input_shape=[64], input_dtype=dtype, classes=10))
        experiment = Experiment(**{"model": {"kind": "logistic"}, "local": {"lr": 0.1}, **keys})
        data = FederatedData({0: (inputs, torch.arange(20) % 10)})
        self._training = NodeTraining(data, experiment, plan, self.kept, SYSTEM_CLOCK)
        message = self._training._message
        self._tensors = [torch.ones(part.numbers, dtype=part.dtype) for part in message.downlink]

    def train(
        self, number: int, kept_after: int | None, until_s: float | None = None, **changed: Any
    ) -> tuple[Answer, list[float]]:
        payload, broadcast = written(self._file, self._tensors), len(self._tensors) - 2
        keys: Any = {"payload": payload, "broadcast_count": broadcast, "kept_after": _task(kept_after)}
        assignment = Assignment(task=_task(number), **{"round": 1, "population": 1, **keys, **changed})
        done = self._training.train(assignment, self._file, until_s)
        assert isinstance(done, Answer)
        return done, read(self._file, done.payload)[0].tolist()

    def score(self, kept_after: int | None, **changed: Any) -> int:
        payload = written(self._file, self._tensors[:2])
        examination = Examination(payload=payload, kept_after=_task(kept_after), **changed)
        return self._training.score(examination, self._file)[0].samples


def _task(number: int | None) -> TaskId | None:
    return None if number is None else TaskId(start=1, number=number)


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
    done, first = node.train(1, None)
    assert not done.began_anew
    done, second = node.train(2, 1)
    assert not done.began_anew
    assert second != first
    lose(node.kept / "1-1")
    done, again = node.train(3, 1)
    assert done.began_anew
    assert again == first
    assert not node.train(4, 3)[0].began_anew


@pytest.mark.parametrize("lose", [_remove, _damage])
def test_a_lost_message_hides_no_lost_state(lose: Callable[[Path], None], tmp_path: Path) -> None:
    """Where the coordinator keeps a sum, it refuses the client until its state is back."""
    node = Node(tmp_path, uplink=["topk"], error_feedback="ef21")
    assert not node.train(1, None)[0].began_anew
    assert not node.train(2, 1)[0].began_anew
    lose(node.kept / "1-2")
    lost = [_task(3)]
    assert node.train(3, 2)[0].began_anew
    assert node.train(4, 2, lost_after=lost)[0].began_anew
    assert node.train(5, 2, lost_after=[*lost, _task(4)])[0].began_anew


@pytest.mark.parametrize("count", [0, 2])
def test_task_with_other_tensors_than_it_names_is_refused(count: int, tmp_path: Path) -> None:
    node = Node(tmp_path, algorithm="scaffold")
    with pytest.raises(InvalidPayload, match=f"the {count} tensors beside the model that it names, got 1"):
        node.train(1, None, broadcast_count=count)


@pytest.mark.parametrize("discount", [0.0, -0.5, 1.5, math.nan, math.inf])
def test_a_state_moves_no_further_than_its_task_left_it(discount: float, tmp_path: Path) -> None:
    node = Node(tmp_path, algorithm="fedavg", evaluation={"kind": "clients", "fraction": 0.25})
    for asked in (partial(node.train, 2), node.score):
        with pytest.raises(InvalidPayload, match=r"must be in \(0, 1\], got"):
            asked(1, kept_discount=discount)


def test_training_is_what_was_assigned(tmp_path: Path) -> None:
    node, found = Node(tmp_path, algorithm="fedavg"), list[Train]()
    work = node._training._work.train

    def noting(train: Train, tensors: Sequence[Tensor]) -> Any:
        found.append(train)
        return work(train, tensors)

    node._training._work.train = noting  # type: ignore[assignment]  # what is called is the same
    node.train(1, None)
    node.train(2, None, repeats=3, lr=0.25, steps=5, population=9, place=0)
    assert [(one.lr, one.steps, one.places, one.keys, one.population) for one in found] == [
        (None, (None,), (), ((1,),), 1),
        (0.25, (5,), (0,), ((1, 3),), 9),
    ]


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "qfedavg"])
def test_models_of_float64_and_float32_get_the_same_answer(algorithm: str, tmp_path: Path) -> None:
    narrow, wide = (Node(tmp_path, dtype, algorithm=algorithm).train(1, None)[1] for dtype in ("float32", "float64"))
    assert wide == pytest.approx(narrow, rel=1e-4, abs=1e-4)  # of numbers about 1, which float32 holds to 1e-7


@pytest.mark.parametrize("keys", [{"since": "a"}, {"reference": "b"}])
def test_differences_that_no_plan_names_are_refused(keys: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidPayload, match="sends differences of models, which the plan's downlink does not name"):
        Node(tmp_path, algorithm="fedavg").train(1, None, **keys)


@pytest.mark.parametrize(
    "kept", [{"other": 1}, {"name": "a", "numbers_KP": torch.zeros(1, 3)}], ids=["other keys", "another model's"]
)
def test_a_reference_of_another_kind_is_none(kept: dict[str, Any], tmp_path: Path) -> None:
    node = Node(tmp_path, algorithm="fedavg", downlink=["int8"])
    Checkpoints(node.kept / "reference", 1).write(0, kept)
    node._tensors = [torch.zeros(0), torch.zeros(0, dtype=torch.int64)]
    payload = written(node._file, node._tensors)
    done = node._training.train(Assignment(task=_task(1), payload=payload, reference="b", since="a"), node._file)
    assert isinstance(done, Failed)
    assert done.lacks_model


@pytest.mark.parametrize("has", [0, 1, 2])
def test_a_node_adds_the_differences_that_it_lacks(has: int, tmp_path: Path) -> None:
    """Where it has done a task that the server does not know of, it has a later version than is said."""
    encoder, streams = Encoder(CodecChain((Int8(),), Values(6, torch.float32)), EF21()), Streams(0)
    versions, differences, state = [Reference.first(torch.zeros(1, 6))], list[Difference](), dict[str, Tensor]()
    for number in (1, 2):
        moved, one, _ = versions[-1].towards(torch.randn(1, 6), number, encoder, state, streams)
        versions.append(moved)
        differences.append(one)
    message = Format(torch.float32, (6,), parameters=6, downlink_codecs=(Int8(),))
    Checkpoints(tmp_path, 1).write(0, versions[has]._asdict())
    said = [Difference_(number=one.number, after=one.after) for one in differences]
    assignment = Assignment(reference=versions[2].name, since=versions[0].name, differences=said)
    tensors = [*(one.messages[0] for one in differences), torch.zeros(0), torch.zeros(0, dtype=torch.int64)]
    model = KeptReference(message, streams, tmp_path).model(assignment, tensors)
    assert model is not None
    assert torch.equal(model[0], versions[2].numbers_KP[0])
    kept = Checkpoints(tmp_path, 1).newest()
    assert kept is not None
    assert kept[1]["name"] == versions[2].name


def test_a_client_that_keeps_nothing_has_nothing_to_lose(tmp_path: Path) -> None:
    assert not Node(tmp_path, algorithm="fedavg").train(2, 1)[0].began_anew


@pytest.mark.parametrize("lose", [_leave, _remove, _damage])
def test_a_lost_model_of_its_own_has_no_score(lose: Callable[[Path], None], tmp_path: Path) -> None:
    node = Node(tmp_path, algorithm="ditto", evaluation="clients")
    held_out = node.score(None)
    assert held_out
    node.train(1, None)
    lose(node.kept / "1-1")
    if lose is _leave:
        assert node.score(1) == held_out
    else:
        with pytest.raises(RunFailed, match="own model is lost or damaged"):
            node.score(1)


def test_a_lost_message_goes_back_into_the_residual(tmp_path: Path) -> None:
    """The same task once more gives the same update: with the residual of the lost one it is twice as much."""
    node = Node(tmp_path, uplink=[{"kind": "topk", "fraction": 0.1}], error_feedback="ef")

    def lost(number: int) -> torch.Tensor:
        newest = Checkpoints(node.kept / f"1-{number}", 1).newest()
        assert newest is not None
        residual: torch.Tensor = newest[1]["before"]["codec.residual"]
        return residual

    node.train(1, None)
    # task 7 never reached the node
    node.train(2, None, lost_after=[_task(1), _task(7)])
    assert torch.equal(lost(2), 2 * lost(1))
    node.train(3, None)
    assert torch.equal(lost(3), lost(1))
    assert bool(lost(1).any())


ADAPTIVE = {"kind": "local", "clip": "adaptive", "noise_multiplier": 2.0, "bit_weight": 2.0}


@pytest.mark.parametrize(
    ("uplink", "feedback", "clip"),
    [
        ([], "none", None),
        (["int8"], "none", None),
        (["int8"], "ef", None),
        ([], "none", 1e-3),
        (["int8"], "none", 1e-3),
    ],
    ids=["as it is", "by a codec", "with feedback", "adaptive", "adaptive by a codec"],
)
@pytest.mark.parametrize("until_s", [None, 1e9], ids=["in any time", "by a deadline"])
def test_noise_alone_leaves_where_training_diverges_or_fails(
    uplink: list[str],
    feedback: str,
    clip: float | None,
    until_s: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it does may follow from the samples, and a server may design models for that.

    In the first task with a deadline a step is tried, to know how many there is time for.
    """
    privacy = {"kind": "local", "clip": 1e-3, "noise_multiplier": 2.0} if clip is None else ADAPTIVE
    node = Node(tmp_path, privacy=privacy, uplink=uplink, error_feedback=feedback)
    deviation = 2e-3 if clip is None else 2.0 * math.sqrt(2)  # in units of the clip, with the bit
    answers = []
    with monkeypatch.context() as failing:
        failing.setattr(node._training._work, "train", _failing)
        answers.append(node.train(2, None, until_s=until_s, clip=clip))
    answers.append(node.train(1, None, until_s=until_s, clip=clip))
    node._tensors[0].fill_(3e38)
    answers.append(node.train(3, None, until_s=until_s, clip=clip))
    if feedback == "ef":
        for number in (1, 2, 3):
            newest = Checkpoints(node.kept / f"1-{number}", 1).newest()
            assert newest is not None
            # What the codec leaves of the message, and all of it where it is lost.
            counted, lost = (newest[1][state]["codec.residual"].std() for state in ("after", "before"))
            assert 0 < counted < 0.1 * lost
            assert lost == pytest.approx(2e-3, rel=0.2)
    for answer, numbers in answers:
        assert (answer.samples, answer.weight, answer.train_loss, len(answer.metrics)) == (1, 1.0, 0.0, 0)
        assert answer.payload.size_bytes == answers[0][0].payload.size_bytes
        assert uplink or np.std(numbers) == pytest.approx(deviation, rel=0.2)
        assert uplink or len(numbers) == 650 + (clip is not None)


@pytest.mark.parametrize("clip", [None, 0.0, -1.0, math.inf, math.nan])
def test_a_task_whose_clip_is_none_is_refused(clip: float | None, tmp_path: Path) -> None:
    """It is refused before it is done: later the client would send its noise alone."""
    with pytest.raises(InvalidPayload, match="must say the round's clip"):
        Node(tmp_path, privacy=ADAPTIVE).train(1, None, clip=clip)


def test_a_plan_without_the_weight_of_the_bit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperiment, match="needs bit_weight"):
        Node(tmp_path, privacy={**ADAPTIVE, "bit_weight": None})


def _failing(*_: Any) -> Any:
    raise IndexError("target 11 is out of bounds")
