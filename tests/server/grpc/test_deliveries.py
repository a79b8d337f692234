"""A fleet and its nodes over real connections: what is sent, taken, called off and lost on the way."""

import asyncio
import math
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import nn

from fed.aggregators.client_side import format_of
from fed.aggregators.fedavg import FedAvg
from fed.processes.clock import SYSTEM_CLOCK
from fed.protocol.protocol_pb2 import Assignment, Failed, FromNode, Part, Payload, Plan, TaskId
from fed.server.coordinator import Coordinator
from fed.server.grpc.fleet import NodeFleet
from fed.server.grpc.service import Patience
from fed.vectors.layout import Layout
from fed.vectors.randomness import Streams
from fed.wire.messages import Difference, GlobalModel, Task
from tests.server.deployed import wait_for
from tests.server.grpc.hostile_wire import BOUND_S, Wire, answer, chunk

MODULE = nn.Linear(2, 2)
LAYOUT = Layout.of(MODULE)
FORMAT = format_of(FedAvg(), LAYOUT, 2)
MODEL = torch.arange(6, dtype=torch.float32), torch.zeros(0, dtype=torch.int64)
CLIENTS = ("ann", "bob")


@pytest.fixture
def begun() -> Iterator[Callable[..., NodeFleet]]:
    """Makes fleets with such a spool, which are closed at last."""
    made: list[NodeFleet] = []

    def begin(spool: Path, *, knows_run: bool = True) -> NodeFleet:
        patience = Patience(heartbeat_s=0.1)
        fleet = NodeFleet(
            "127.0.0.1:0", spool, credentials=None, accepts=lambda joining: None, clock=SYSTEM_CLOCK, patience=patience
        )
        if knows_run:
            fleet.begin(Plan(), FORMAT, Streams(0))
        made.append(fleet)
        return fleet

    yield begin
    for fleet in made:
        fleet.close("the run is over", is_final=True)


@pytest.fixture
def fleet(begun: Callable[..., NodeFleet], tmp_path: Path) -> NodeFleet:
    return begun(tmp_path / "spool")


class Attending:
    """A client that attends, and does what a test says."""

    def __init__(self, fleet: NodeFleet, name: str) -> None:
        self.wire = Wire(fleet.port, name)
        self.heard = self.wire.attend()

    def next(self, kind: str) -> Any:
        """What the server says next of a kind."""
        return getattr(next(message for message in self.heard if message.HasField(kind)), kind)

    def leave(self) -> None:
        self.wire.outbox.put(None)
        self.wire.channel.close()


@pytest.fixture
def nodes(fleet: NodeFleet) -> Iterator[list[Attending]]:
    attending = [Attending(fleet, name) for name in CLIENTS]
    fleet.await_nodes(2)
    yield attending
    for node in attending:
        node.leave()


def task(number: int, client: str, vector_V: torch.Tensor = MODEL[0], version: int = 0) -> Task:
    return Task(number, 1, client, GlobalModel(version, vector_V, MODEL[1]))


def deliver(node: Attending, assignment: Any) -> bool:
    content = bytes(24)
    return node.wire.deliver([Part(answer=answer(assignment, content)), chunk(content)]).accepted


def test_payload_stays_while_another_task_needs_its_bits(fleet: NodeFleet, nodes: list[Attending]) -> None:
    fleet.dispatch([task(0, "ann")])
    fleet.dispatch([task(1, "bob", MODEL[0].clone(), version=1)])
    fleet.cancel([1])
    fleet.dispatch([task(2, "bob", MODEL[0] + 1, version=2)])
    wanted = nodes[0].next("assignment").payload.sha256
    assert nodes[0].wire.download(wanted) == MODEL[0].numpy().tobytes()
    fleet.cancel([0, 2])
    fleet.dispatch([task(3, "bob", MODEL[0] + 2, version=3)])
    with pytest.raises(grpc.RpcError, match="no such payload any more"):
        nodes[0].wire.download(wanted)


def coordinator_of(fleet: NodeFleet) -> Coordinator:
    return Coordinator(FedAvg(), fleet, LAYOUT, FORMAT, *LAYOUT.pack(MODULE), Streams(0))


def test_a_confirmed_answer_counts_at_the_deadline(fleet: NodeFleet, nodes: list[Attending], tmp_path: Path) -> None:
    ann, bob = nodes
    coordinator = coordinator_of(fleet)
    accumulator = coordinator.new_accumulator()
    coordinator.dispatch(accumulator, 1, CLIENTS)
    assert deliver(ann, ann.next("assignment"))
    assigned = bob.next("assignment")
    coordinator.cancel(accumulator, are_late=True)
    assert (accumulator.replied, accumulator.late, accumulator.failed) == (["ann"], ["bob"], [])
    assert bob.next("withdrawal").task == assigned.task
    assert not deliver(bob, assigned)
    coordinator.step(accumulator, 1)
    assert fleet.available() == ["ann", "bob"]
    assert [path.suffix for path in (tmp_path / "spool").iterdir()] == [".out"]


def test_a_failure_before_the_deadline_is_not_late(fleet: NodeFleet, nodes: list[Attending]) -> None:
    ann, _ = nodes
    coordinator = coordinator_of(fleet)
    accumulator = coordinator.new_accumulator()
    coordinator.dispatch(accumulator, 1, CLIENTS)
    ann.wire.say(failed={"task": ann.next("assignment").task, "reason": "no"})
    wait_for(fleet._has_answer, "the failure")
    coordinator.cancel(accumulator, are_late=True)
    assert (accumulator.replied, accumulator.late, accumulator.failed) == ([], ["bob"], ["ann"])


def test_answers_that_come_while_clients_score_count(fleet: NodeFleet, nodes: list[Attending]) -> None:
    ann, bob = nodes
    coordinator = coordinator_of(fleet)
    accumulator = coordinator.new_accumulator()
    coordinator.dispatch(accumulator, 1, CLIENTS[:1])
    assigned = ann.next("assignment")

    def answer_and_score() -> None:
        asked = bob.next("examination")
        assert deliver(ann, assigned)
        ann.wire.say(scores={"id": ann.next("examination").id, "samples": 2, "loss": 0.5})
        bob.wire.say(scores={"id": asked.id, "samples": 3, "loss": 0.25, "metrics": [1.0]})

    answering = threading.Thread(target=answer_and_score)
    answering.start()
    scores = fleet.scores(MODEL, BOUND_S)
    answering.join(BOUND_S)
    assert sorted((one.samples, one.loss) for one in scores.values()) == [(2, 0.5), (3, 0.25)]
    coordinator.collect(accumulator)
    assert accumulator.replied == ["ann"]


@pytest.mark.parametrize("comes_back", [False, True])
def test_who_is_lost_while_it_scores_is_not_waited_for(
    fleet: NodeFleet, nodes: list[Attending], comes_back: bool
) -> None:
    ann, bob = nodes

    def score_and_leave() -> None:
        ann.wire.say(scores={"id": ann.next("examination").id, "samples": 2, "loss": 0.5})
        bob.next("examination")
        if comes_back:
            nodes.append(Attending(fleet, "bob"))
        else:
            bob.leave()

    leaving = threading.Thread(target=score_and_leave)
    leaving.start()
    began_s = time.monotonic()
    scores = fleet.scores(MODEL, BOUND_S)
    assert time.monotonic() < began_s + BOUND_S / 2
    leaving.join(BOUND_S)
    assert sorted((one.samples, one.problem) for one in scores.values()) == [(0, "its connection was lost"), (2, "")]
    if comes_back:
        heard = nodes[-1].next("heartbeat")
        assert heard is not None
        nodes[-1].wire.say(scores={"id": 1, "samples": 9, "loss": 0.1})
        wait_for(lambda: fleet.counts.refused == 1, "scores that nobody asked for on that connection")


def test_scores_of_an_earlier_model_do_not_count(fleet: NodeFleet, nodes: list[Attending]) -> None:
    ann, bob = nodes
    first: list[Any] = []

    def score(late: bool) -> None:
        first.extend([ann.next("examination"), bob.next("examination")])
        bob.wire.say(scores={"id": first[1].id, "samples": 1, "loss": 0.5})
        if late:
            ann.wire.say(scores={"id": first[0].id, "samples": 2, "loss": 0.5})

    scoring = threading.Thread(target=score, args=(False,))
    scoring.start()
    assert [one.samples for one in fleet.scores(MODEL, 1.0).values()] == [1]
    scoring.join(BOUND_S)
    ann.wire.say(scores={"id": first[0].id, "samples": 7, "loss": 0.5})
    scoring = threading.Thread(target=score, args=(True,))
    wait_for(lambda: not fleet._arrivals.empty(), "late scores")
    first.clear()
    scoring.start()
    scores = fleet.scores((MODEL[0] + 1, MODEL[1]), BOUND_S)
    scoring.join(BOUND_S)
    assert sorted(one.samples for one in scores.values()) == [1, 2]


def answered(fleet: NodeFleet, node: Attending, number: int, content: bytes = bytes(24), discount: float = 1.0) -> Any:
    """A task for ann, answered, taken, and counted at a discount if it may be; what was assigned."""
    fleet.dispatch([task(number, "ann")])
    assigned = node.next("assignment")
    assert node.wire.deliver([Part(answer=answer(assigned, content)), chunk(content)]).accepted
    (collected,) = fleet.collect()
    fleet.settle({number: discount} if discount and not collected.problem else {})
    return assigned


def test_a_node_is_told_after_which_task_it_goes_on(fleet: NodeFleet, nodes: list[Attending]) -> None:
    ann, bob = nodes
    first = answered(fleet, ann, 0)
    assert not first.HasField("kept_after")
    second = answered(fleet, ann, 1, struct.pack("<6f", *[math.nan] * 6))
    assert second.kept_after == first.task
    third = answered(fleet, ann, 2)
    assert third.kept_after == first.task  # what was refused does not count
    assert third.kept_discount == 1
    fleet.dispatch([task(3, "bob")])
    assert not bob.next("assignment").HasField("kept_after")
    fleet.scores(MODEL, 0.01)
    assert ann.next("examination").kept_after == third.task
    assert not bob.next("examination").HasField("kept_after")


def test_a_node_is_told_how_much_its_update_counted(fleet: NodeFleet, nodes: list[Attending]) -> None:
    ann, _ = nodes
    first = answered(fleet, ann, 0, discount=0.25)
    lost = answered(fleet, ann, 1, discount=0.0)
    fleet.settle({0: 1.0, 1: 1.0})  # the verdict on both is known
    fleet.scores(MODEL, 0.01)
    for asked in (lost, ann.next("examination"), answered(fleet, ann, 2)):
        assert (asked.kept_after, asked.kept_discount) == (first.task, 0.25)


def test_what_checkpoints_may_go_back_to_stays(fleet: NodeFleet, nodes: list[Attending]) -> None:
    ann, _ = nodes
    assigned = []
    for number in range(12):
        assigned.append(answered(fleet, ann, number))
        fleet.state()
    durable = [one.durable_after.number if one.HasField("durable_after") else None for one in assigned]
    assert durable == [None] * 10 + [0, 1]
    assert [one.kept_after.number for one in assigned[1:]] == list(range(11))


def test_without_checkpoints_nothing_is_gone_back_to(fleet: NodeFleet, nodes: list[Attending]) -> None:
    fleet.begin(Plan(), FORMAT, Streams(0), keeps_checkpoints=False)
    ann, _ = nodes
    first = answered(fleet, ann, 0)
    second = answered(fleet, ann, 1)
    assert second.durable_after == second.kept_after == first.task


def test_a_fleet_goes_on_as_a_checkpoint_says(
    fleet: NodeFleet, nodes: list[Attending], begun: Callable[..., NodeFleet], tmp_path: Path
) -> None:
    ann, _ = nodes
    first = answered(fleet, ann, 0)
    state = fleet.state()
    answered(fleet, ann, 1)
    again = begun(tmp_path / "again")
    again.restore({**state, "clock": 1000.0})
    assert again.clock == pytest.approx(1000.0, abs=10.0)
    assert list(again.registered()) == ["ann", "bob"]
    assert list(again.available()) == []
    assert again.size_of("bob") == 10
    assert not again.wait(1000.0)
    node = Attending(again, "ann")
    again.await_nodes(1)
    assigned = answered(again, node, 1)
    assert assigned.kept_after == first.task
    assert assigned.task.start != first.task.start
    assert assigned.population == 2
    node.leave()


def test_a_node_gets_a_task_as_it_was_made(fleet: NodeFleet, nodes: list[Attending]) -> None:
    assert fleet.registered() == [*CLIENTS]
    fleet.fix_registered()
    broadcast = (torch.ones(3), torch.ones(1))
    fleet.dispatch([Task(4, 7, "bob", GlobalModel(0, *MODEL, broadcast), 0.25, 12, repeats=3)])
    said = nodes[1].next("assignment")
    assert (said.task.number, said.round, said.repeats, said.lr, said.steps) == (4, 7, 3, 0.25, 12)
    assert (said.broadcast_count, said.population, said.place) == (2, 2, 1)
    assert [(part.dtype, part.numbers) for part in said.payload.tensors] == [
        ("float32", 6),
        ("int64", 0),
        ("float32", 3),
        ("float32", 1),
    ]
    assert nodes[1].wire.download(said.payload.sha256) == b"".join(
        part.numpy().tobytes() for part in (*MODEL, *broadcast)
    )
    assert list(fleet.available()) == ["ann"]


def test_a_fleet_begins_with_an_empty_spool(begun: Callable[..., NodeFleet], tmp_path: Path) -> None:
    spool = tmp_path / "again"
    spool.mkdir()
    (spool / "3.in").write_bytes(bytes(9))
    begun(spool)
    assert list(spool.iterdir()) == []


def test_a_fleet_that_is_closed_twice_is_closed(fleet: NodeFleet) -> None:
    def close() -> None:
        fleet.close("the server stops", is_final=False)
        fleet.close("the run is over", is_final=True)

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(BOUND_S)
    assert not closing.is_alive()
    assert not fleet._thread._thread.is_alive()


def test_a_fleet_is_closed_when_its_calls_have_ended(fleet: NodeFleet) -> None:
    call = asyncio.run_coroutine_threadsafe(asyncio.sleep(0.2), fleet._thread._loop)
    fleet.close("the run is over", is_final=True)
    assert call.done()


def test_node_gets_heartbeats_before_the_run_is_known(begun: Callable[..., NodeFleet], tmp_path: Path) -> None:
    fleet = begun(tmp_path / "spool", knows_run=False)
    wire = Wire(fleet.port, "ann")
    said = wire.attend()
    assert next(said).HasField("heartbeat")
    fleet.close("nobody else has come", is_final=True)
    last = [message for message in said if not message.HasField("heartbeat")]
    assert [message.farewell.reason for message in last] == ["nobody else has come"]
    wire.outbox.put(None)


def test_a_task_sent_late_carries_its_remaining_time(fleet: NodeFleet) -> None:
    timed = Assignment(task=TaskId(number=1), payload=Payload(), deadline_s=100.0, takes_parts=True)
    over = Assignment(task=TaskId(number=2), payload=Payload(), deadline_s=0.0)
    without = Assignment(task=TaskId(number=3), payload=Payload())
    fleet._thread.call(fleet._service.assign, [("ann", one) for one in (timed, over, without)])
    node = Attending(fleet, "ann")
    first, second, third = (node.next("assignment") for _ in range(3))
    assert 50 < first.deadline_s < 100
    assert first.takes_parts
    assert (second.HasField("deadline_s"), second.deadline_s) == (True, 0.0)
    assert not third.HasField("deadline_s")
    node.leave()


def differing(number: int, client: str, deadline_s: float | None = None) -> Task:
    """A task of one difference of four bytes, of a model of six numbers."""
    difference = Difference(1, "a", "b", (torch.zeros(4, dtype=torch.uint8),))
    model = GlobalModel(1, *MODEL, reference="b", beside=(torch.zeros(0), MODEL[1]))
    return Task(number, 1, client, model, deadline_s=deadline_s, differences=(difference,))


def test_whoever_lacks_the_model_is_sent_it_within_the_deadline(fleet: NodeFleet, nodes: list[Attending]) -> None:
    """Once; whatever then becomes of the task, its bytes count."""
    fleet.dispatch([differing(0, "ann", deadline_s=60.0)])
    first = nodes[0].next("assignment")
    assert (first.since, first.reference, first.payload.size_bytes) == ("a", "b", 4)
    time.sleep(0.5)
    lacks = Failed(task=first.task, reason="it is gone", lacks_model=True)
    nodes[0].wire.outbox.put(FromNode(failed=lacks))

    def is_sent_again() -> bool:
        fleet._poll()
        return fleet._open[0].differences is None

    wait_for(is_sent_again, "the task to be sent again")
    again = nodes[0].next("assignment")
    assert (again.task, again.since, again.payload.size_bytes) == (first.task, "", 24)
    assert again.deadline_s < 59.6
    nodes[0].wire.outbox.put(FromNode(failed=lacks))
    (answered,) = fleet.collect()
    assert answered.problem == "it is gone"
    assert answered.more_bytes_down == 24
