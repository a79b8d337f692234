"""A fleet over a scripted grid of Flower's: what is sent when, what is sent again, and what may count."""

import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fed.errors import InvalidInput, InvalidPayload
from fed.protocol.protocol_pb2 import Answer as AnswerMessage
from fed.protocol.protocol_pb2 import (
    Failed,
    Joining,
    Payload,
    Plan,
    Request,
    Response,
    Scores,
    Signature,
)
from fed.server.flower.fleet import FlowerFleet, flat_payload
from fed.server.observer import Essential, MessageRefused, NodeCame, NodeWent
from fed.server.telling import Observers
from fed.vectors.randomness import Streams
from fed.wire.agreed_format import agreed
from fed.wire.flower_records import packed, unpacked
from fed.wire.format import Format
from fed.wire.messages import Answer, Difference, GlobalModel, Task
from fed.wire.payloads import hold_to_payload, split
from tests.clocks import PatientClock
from tests.flower_stand_ins import Array, Message, StandInGrid, install
from tests.observing import Trial

SIZE = 3
INTEGERS = torch.zeros(0, dtype=torch.int64)
FORMAT = Format(torch.float64, (SIZE,), parameters=SIZE)


Script = Callable[[Message], Any]
"""What a node answers: content, a number for an error of Flower's, or None for nothing."""


ONES = torch.ones(SIZE, dtype=torch.float64)
SIGNATURE = Signature(input_shape=[4], input_dtype="float32", classes=3)


def trained(message: Message, tensors: Sequence[Tensor] = (ONES, INTEGERS), **changed: Any) -> Any:
    """What an honest node answers to a task: a message of ones."""
    payload, array = flat_payload(tensors)
    said: dict[str, Any] = {"samples": 2, "weight": 2.0, "train_loss": 0.5, "payload": payload}
    return packed(Response(answer=AnswerMessage(**said | changed)), array)


def failed(reason: str, **changed: Any) -> Any:
    return packed(Response(failed=Failed(reason=reason, **changed)))


def scored(**said: Any) -> Any:
    return packed(Response(scores=Scores(**said)))


@pytest.fixture(autouse=True)
def _flower(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@dataclass
class Grid(StandInGrid):
    """Nodes that do as they are told; one that has no script is silent."""

    names: dict[int, int | str]
    scripts: dict[int, Script] = field(default_factory=dict)
    changed: Mapping[str, Any] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.names)

    def tasks(self, node: int) -> list[str]:
        """The messages with tasks that a node has had."""
        sent = [f"message-{place}" for place, one in enumerate(self.pushed) if one.metadata.message_type == "train"]
        return [found for found in sent if self.pushed[int(found[8:])].metadata.dst_node_id == node]

    def content_of_answer(self, message: Message) -> Any:
        node = message.metadata.dst_node_id
        if node in self.silent:
            return 5
        if message.metadata.message_type == "query":
            said: dict[str, Any] = {"protocol": 1, "samples": 2, "signature": SIGNATURE, "name": str(self.names[node])}
            return packed(Response(joining=Joining(**{**said, **self.changed})))
        script = self.scripts.get(node)
        return script(message) if script else None


def fleet_over(grid: Grid, reason: str | None = None, **patience: float) -> FlowerFleet:
    fleet = FlowerFleet(grid, accepts=lambda joining: reason, clock=PatientClock())
    vars(fleet).update(patience)
    fleet.begin(Plan(signature=SIGNATURE), FORMAT, Streams(0))
    return fleet


def task(number: int, client: int | str, deadline_s: float | None = None) -> Task:
    return Task(number, 1, client, GlobalModel(0, torch.zeros(SIZE), INTEGERS), deadline_s=deadline_s)


def test_nodes_say_who_they_are() -> None:
    grid = Grid({91: "ann", 17: 1})
    fleet = fleet_over(grid)
    fleet.await_nodes(2)
    assert fleet.registered() == [1, "ann"] == fleet.available()
    assert fleet.size_of("ann") == 2
    del grid.names[91]
    assert fleet.wait(fleet.clock + 10)
    assert (fleet.registered(), fleet.available()) == ([1, "ann"], [1])


def test_task_is_sent_as_one_array_and_answered() -> None:
    grid = Grid({5: 0}, {5: trained})
    fleet = fleet_over(grid)
    fleet.await_nodes(1)
    model = GlobalModel(1, torch.arange(3.0), INTEGERS, (torch.ones(2),))
    sent = task(7, 0)._replace(model=model, lr=0.5, repeats=2)
    fleet.dispatch([sent])
    (reply,) = fleet.collect()
    content = grid.pushed[-1].content
    assert {name: list(part) for name, part in content.items() if name == "arrays"} == {"arrays": ["flat"]}
    request, data = unpacked(content, Request)
    assignment = request.assignment
    assert [part.tolist() for part in split(data, assignment.payload)] == [[0, 1, 2], [], [1, 1]]
    assert (assignment.lr, assignment.repeats, assignment.broadcast_count) == (0.5, 2, 1)
    assert (assignment.HasField("steps"), assignment.HasField("kept_after")) == (False, False)
    assert request.plan.signature == SIGNATURE
    assert agreed(request.plan.format, FORMAT) == FORMAT
    assert not reply.problem
    assert (reply.tasks, reply.clients, reply.update.weight, reply.samples) == ((7,), (0,), 2.0, (2,))
    assert torch.equal(reply.update.update_M, torch.ones(SIZE, dtype=torch.float64))
    assert reply.size_bytes == SIZE * 8


@pytest.mark.parametrize("code", [3, 5])
def test_what_flower_did_not_deliver_is_sent_again(code: int) -> None:
    answers: list[Any] = [code, code, None]
    grid = Grid({5: 0}, {5: lambda message: answers.pop(0) or trained(message)})
    fleet = fleet_over(grid)
    fleet.await_nodes(1)
    fleet.dispatch([task(0, 0)])
    (reply,) = fleet.collect()
    assert not reply.problem
    assert len(grid.tasks(5)) == 3


@pytest.mark.parametrize(("code", "sends"), [(3, 3), (5, 3), (2, 1), (8, 1)])
def test_a_task_that_never_comes_through_has_failed(code: int, sends: int) -> None:
    grid = Grid({5: 0}, {5: lambda message: code})
    fleet = fleet_over(grid)
    fleet.await_nodes(1)
    fleet.dispatch([task(0, 0)])
    (failure,) = fleet.collect()
    assert failure.problem
    assert f"error {code}" in failure.problem
    assert len(grid.tasks(5)) == sends


@pytest.mark.parametrize("is_listed", [False, True])
def test_lost_nodes_task_goes_to_the_returning_node(is_listed: bool) -> None:
    """Also where Flower lists the lost one still, which gets no task until it speaks."""
    grid = Grid({5: 0})
    fleet = fleet_over(grid)
    fleet.await_nodes(1)
    fleet.dispatch([task(0, 0)])
    if is_listed:
        grid.silent = {5}
    else:
        del grid.names[5]
    grid.answer(grid.tasks(5)[0], 5)
    assert list(fleet.collect(until=fleet.clock + 20.0)) == []
    grid.names[6], grid.scripts[6] = 0, trained
    (reply,) = fleet.collect()
    assert not reply.problem
    assert (len(grid.tasks(5)), len(grid.tasks(6))) == (1, 1)


def test_a_node_has_at_most_one_message_in_flight() -> None:
    grid = Grid({5: 0, 6: 1}, {6: trained})
    fleet = fleet_over(grid)
    fleet.await_nodes(2)
    fleet.dispatch([task(0, 0)])
    fleet.cancel([0])
    assert fleet.available() == [1]  # client 0 trains on for a round that is over
    fleet.dispatch([task(1, 0), task(2, 1)])
    assert [reply.tasks for reply in fleet.collect(enough=1) if not reply.problem] == [(2,)]
    assert len(grid.tasks(5)) == 1
    grid.scripts[5] = trained
    grid.answer(grid.tasks(5)[0], trained(grid.pushed[0]))
    (reply,) = fleet.collect()
    assert not reply.problem
    assert reply.tasks == (1,)
    assert len(grid.tasks(5)) == 2


def test_deadline_is_the_messages_lifetime_then_the_task_fails() -> None:
    grid = Grid({5: 0}, {5: lambda message: 3})
    fleet = fleet_over(grid, sends=10**6)
    fleet.await_nodes(1)
    fleet.dispatch([task(0, 0, deadline_s=5.0)])
    (failure,) = fleet.collect()
    assert failure.problem
    assert "in time" in failure.problem
    grid.scripts[5] = trained
    fleet.dispatch([task(1, 0, deadline_s=100.0), task(2, 0)])
    assert len(list(fleet.collect())) == 2
    assert 99 < (grid.pushed[-2].metadata.ttl or math.inf) <= 100
    assert grid.pushed[-1].metadata.ttl is None


GARBAGE: Mapping[str, Script] = {
    "nothing": lambda message: {},
    "no record": lambda message: {"config": 3},
    "no header": lambda message: {"config": {"samples": 2}},
    "a header of text": lambda message: {"config": {"header": "joining"}},
    "a header that is no message": lambda message: {"config": {"header": b"\xff\xff"}},
    "an empty header": lambda message: packed(Response()),
    "something else": lambda message: scored(samples=1),
    "many arrays": lambda message: trained(message, (torch.ones(1),) * 3),
    "no array": lambda message: {"config": trained(message)["config"]},
    "a short array": lambda message: trained(message) | {"arrays": {"flat": Array("uint8", (1,), "bytes", b"1")}},
    "other bytes": lambda message: trained(message) | {"arrays": {"flat": Array("uint8", (1,), "bytes", bytes(24))}},
    "no bytes": lambda message: trained(message) | {"arrays": {"flat": Array("uint8", (1,), "bytes", [1])}},
    "arrays that are none": lambda message: trained(message) | {"arrays": 3},
    "a huge size": lambda message: trained(message, payload=Payload(size_bytes=2**62)),
    "another shape": lambda message: trained(message, (ONES[:2], INTEGERS)),
    "another type": lambda message: trained(message, (torch.ones(SIZE), INTEGERS)),
    "a number that is none": lambda message: trained(message, (ONES * torch.nan, INTEGERS)),
    "a weight of infinity": lambda message: trained(message, weight=math.inf),
    "a negative weight": lambda message: trained(message, weight=-1.0),
    "no samples": lambda message: trained(message, samples=0),
    "no loss": lambda message: trained(message, train_loss=math.nan),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused_and_counted(name: str) -> None:
    grid = Grid({5: 0, 6: 1}, {5: GARBAGE[name], 6: trained})
    fleet = fleet_over(grid)
    fleet.await_nodes(2)
    fleet.dispatch([task(0, 0), task(1, 1)])
    failure, reply = sorted(fleet.collect(), key=lambda answer: not answer.problem)
    assert failure.problem
    assert not reply.problem
    assert "refused" in failure.problem
    assert not failure.has_diverged
    assert fleet.counts.refused == 1


def test_observers_hear_who_comes_goes_and_is_refused() -> None:
    grid = Grid({5: 0, 6: 1}, {5: GARBAGE["a short array"], 6: trained})
    fleet, trial = fleet_over(grid), Trial()
    fleet.observers = Observers([Essential(trial)])
    fleet.await_nodes(2)
    fleet.dispatch([task(0, 0), task(1, 1)])
    assert len(list(fleet.collect())) == 2
    fleet.settle({1: 1.0})
    assert trial.events[:2] == [NodeCame(0), NodeCame(1)]
    (refused,) = trial.events[2:]
    assert isinstance(refused, MessageRefused)
    assert refused.client == 0
    assert fleet.available() == [0, 1]
    del grid.names[6]
    assert fleet.wait(fleet.clock + 10)
    assert fleet.available() == [0]
    assert trial.events[3:] == [NodeWent(1)]


def test_an_answer_in_another_nodes_name_is_refused() -> None:
    grid = Grid({5: 0}, {5: trained})
    fleet = fleet_over(grid)
    fleet.await_nodes(1)
    grid.sender = 6
    fleet.dispatch([task(0, 0)])
    (failure,) = fleet.collect()
    assert failure.problem
    assert fleet.counts.refused == 1


def test_a_nodes_problem_is_told() -> None:
    problem = failed("client 0's loss is no longer finite", diverged=True)
    fleet = fleet_over(Grid({5: 0}, {5: lambda message: problem}))
    fleet.await_nodes(1)
    fleet.dispatch([task(0, 0)])
    (failure,) = fleet.collect()
    assert failure == Answer.failure(task(0, 0), "its training diverged: client 0's loss is no longer finite")
    assert fleet.counts.refused == 0


@pytest.mark.parametrize(
    "description",
    [
        {"name": ""},
        {"name": "a" * 201},
        {"protocol": 2},
        {"samples": 0},
        {"samples": 2**62},
        {"signature": Signature(input_shape=[2**20, 2**20], input_dtype="float32")},
        {"signature": Signature(input_shape=[1] * 17, input_dtype="float32")},
        {"signature": Signature(input_shape=[4], input_dtype="float32", classes=2**40)},
        {"signature": Signature(input_shape=[4], input_dtype="float32", columns=["a" * 100] * 1000)},
    ],
)
def test_a_description_that_makes_no_sense_admits_nobody(description: Mapping[str, object]) -> None:
    fleet = fleet_over(Grid({5: 0}, changed=description))
    fleet.available()
    assert (fleet.registered(), fleet.counts.refused) == ([], 1)


def test_a_node_whose_data_do_not_fit_takes_no_part() -> None:
    fleet = fleet_over(Grid({5: 0}), reason="the model is made for other inputs")
    fleet.available()
    assert (fleet.available(), fleet.counts.refused) == ([], 1)


def test_of_two_nodes_with_one_name_the_first_counts() -> None:
    grid = Grid({5: "ann", 6: "ann"}, {5: trained, 6: trained})
    fleet = fleet_over(grid, look_every_s=0.0)
    fleet.await_nodes(1)
    fleet.dispatch([task(0, "ann")])
    assert len(list(fleet.collect())) == 1
    assert (len(grid.tasks(5)), len(grid.tasks(6))) == (1, 0)
    del grid.names[5]
    assert fleet.wait(fleet.clock + 10)
    assert fleet.available() == ["ann"]
    fleet.dispatch([task(1, "ann")])
    assert len(list(fleet.collect())) == 1
    assert (len(grid.tasks(5)), len(grid.tasks(6))) == (1, 1)


def test_counts_by_node_go_on_after_a_resume() -> None:
    grid = Grid({5: 0, 6: 1}, {5: trained, 6: lambda message: failed("the disk is full")})
    fleet = fleet_over(grid)
    fleet.await_nodes(2)
    fleet.dispatch([task(0, 0), task(1, 1)])
    assert len(list(fleet.collect())) == 2
    grid.scripts = {5: GARBAGE["no loss"]}
    fleet.dispatch([task(2, 0), task(3, 1)])
    assert len(list(fleet.collect(enough=None, until=fleet.clock + 0.01))) == 1
    fleet.cancel([3])
    again = fleet_over(grid)
    for _ in range(2):
        again.restore(fleet.state())
    assert again.counts.refused == fleet.counts.refused == 1
    assert again.counts.lines() == fleet.counts.lines()
    reason = "its answer was refused: the training loss must be finite and within ±1e+200, got nan"
    assert again.counts.lines() == {
        "0": {"answered": 1, "late": 0, "failed": 1, "refused": 1, "last_reason": reason},
        "1": {"answered": 0, "late": 1, "failed": 1, "refused": 0, "last_reason": "the disk is full"},
    }


def test_who_comes_after_the_members_are_fixed_is_asked_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    grid = Grid({5: 7, 6: "ann"}, {5: trained, 6: trained})
    fleet = fleet_over(grid, look_every_s=0.0)
    fleet.await_nodes(2)
    kept = fleet.state()
    fleet.fix_registered()
    grid.names |= {8: 3}
    for _ in range(5):
        assert (fleet.registered(), fleet.available()) == ([7, "ann"], [7, "ann"])
    assert caplog.text.count("client 3 is not asked in this run") == 1
    again = fleet_over(grid)
    again.await_nodes(3)
    again.restore(kept)
    again.fix_registered()
    assert (again.registered(), again.available()) == ([7, "ann"], [7, "ann"])


@pytest.mark.parametrize(
    "forged",
    [
        {"samples": 2**60},
        {"loss": math.nan},
        {"metrics": [math.inf]},
    ],
)
def test_nodes_that_have_no_task_score_a_model(forged: Mapping[str, Any]) -> None:
    found = {"samples": 4, "loss": 0.25, "metrics": [0.75]}

    def script(message: Message) -> Any:
        return scored(**found) if message.metadata.message_type == "evaluate" else None

    grid = Grid({5: 0, 6: 1, 7: 2}, {5: script, 6: script, 7: lambda message: scored(**{**found, **forged})})
    fleet = fleet_over(grid)
    fleet.await_nodes(3)
    fleet.dispatch([task(0, 1)])
    scores = fleet.scores((torch.zeros(SIZE), INTEGERS), 10.0)
    assert [(one.samples, one.loss, *one.metrics) for one in scores.values() if not one.problem] == [(4, 0.25, 0.75)]
    assert fleet.counts.refused == 1


def test_late_scores_are_dropped_and_no_longer_awaited(caplog: pytest.LogCaptureFixture) -> None:
    grid = Grid({5: 0})
    fleet = fleet_over(grid)
    fleet.await_nodes(1)
    model = torch.zeros(SIZE), INTEGERS
    assert fleet.scores(model, 0.01) == {}
    assert fleet.scores(model, 600.0) == {}
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "1 client has not scored the model within 0.01 s, and must do so before the next is sent: 0"
    ]
    (late,) = grid.open
    grid.answer(late, scored(samples=4, loss=0.25))
    assert fleet.wait(fleet.clock + 10)
    assert fleet.scores(model, 0.01) == {}


def test_what_is_packed_comes_back() -> None:
    tensors: Sequence[Tensor] = [
        torch.randn(5, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    ]
    for count in itertools.chain(range(5), [4]):
        given = [*tensors[:count], torch.arange(3), INTEGERS]
        payload, array = flat_payload(given)
        response, data = unpacked(packed(Response(answer=AnswerMessage(payload=payload)), array), Response)
        hold_to_payload(data, response.answer.payload)
        assert all(torch.equal(one, other) for one, other in zip(given, split(data, payload), strict=True))
    with pytest.raises(InvalidPayload, match="travel"):
        flat_payload([torch.zeros(1, dtype=torch.complex64)])


def test_without_flower_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    with pytest.raises(InvalidInput, match=r"pip install \"flwr>=1.41,<1.43\""):
        packed(Request())


def test_only_who_has_the_task_may_lack_its_model() -> None:
    """A stranger that is asked who it is says so, too, and nothing comes of it."""
    grid = Grid({91: "ann"}, {91: trained})
    content_of_answer = grid.content_of_answer
    lacks = failed("no", lacks_model=True)
    vars(grid)["content_of_answer"] = lambda message: (
        lacks if message.metadata.dst_node_id == 66 else content_of_answer(message)
    )
    fleet = fleet_over(grid)
    fleet.await_nodes(1)
    difference = Difference(1, "a", "b", (torch.zeros(4, dtype=torch.uint8),))
    model = GlobalModel(1, torch.zeros(SIZE), INTEGERS, reference="b", beside=(torch.zeros(0), INTEGERS))
    fleet.dispatch([task(0, "ann")._replace(model=model, differences=(difference,))])
    grid.names[66] = "eve"
    fleet._look_s = 0.0
    for _ in range(5):
        fleet._poll()
    (reply,) = fleet.collect()
    assert (reply.problem, reply.more_bytes_down) == ("", 0)
