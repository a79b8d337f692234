"""A coordinator over a fleet that misbehaves: what may move the model, and what is only counted."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fed.aggregators.easgd import EASGD
from fed.aggregators.fedavg import FedAvg
from fed.aggregators.robust.algorithms import FedTrimmedMean
from fed.errors import Diverged
from fed.layout import Layout
from fed.randomness import Streams
from fed.server.coordinator import Coordinator
from fed.server.rounds.bounded_staleness import Held
from fed.wire.messages import Failure, GroupReply, Reply, Task
from tests.scripted_fleet import ScriptedFleet

Answer = Callable[[Task], Iterable[Reply | GroupReply | Failure]]
LAYOUT = Layout.of(nn.Linear(2, 1))


def reply(task: Task, move: float = 1.0, samples: int = 1, client: int | str | None = None) -> Reply:
    moved_V = task.vector_V + move
    return Reply(task.id, task.round, task.client if client is None else client, moved_V, task.integers_I, samples, 0.5)


class Scripted(ScriptedFleet):
    """Answers each task as it is told to; client i's script is scripts[i]."""

    def __init__(self, scripts: Sequence[Answer]) -> None:
        super().__init__(range(len(scripts)))
        self._scripts = scripts

    def collect(self, until: float = math.inf, enough: int | None = None) -> Iterator[Reply | GroupReply | Failure]:
        for task in self._taken():
            yield from self._scripts[int(task.client)](task)


def coordinator(*scripts: Answer) -> Coordinator:
    start_V = torch.zeros(LAYOUT.size)
    return Coordinator(FedAvg(), Scripted(scripts), LAYOUT, start_V, torch.zeros(0, dtype=torch.int64), Streams(0))


def test_the_model_moves_by_the_mean_weighted_by_samples() -> None:
    moves = coordinator(lambda task: [reply(task, 1.0, samples=3)], lambda task: [reply(task, -1.0, samples=1)])
    exchange = moves.exchange(1, [0, 1])
    assert torch.equal(moves.model()[0], torch.full((3,), 0.5))
    assert (exchange.selected, exchange.replied, exchange.failed, exchange.late) == (2, 2, 0, 0)
    assert exchange.bytes_down == exchange.bytes_up == 2 * 3 * 4
    assert exchange.train_loss == 0.5


def test_shares_turn_a_cohorts_mean_into_all_members_mean() -> None:
    """EASGD moves by the sum of the pulls: of one of two clients, that one's."""
    start_V, integers_I = torch.zeros(LAYOUT.size), torch.zeros(0, dtype=torch.int64)
    scripts = [lambda task: [reply(task, 1.0)], silent]
    moves = Coordinator(EASGD(), Scripted(scripts), LAYOUT, start_V, integers_I, Streams(0))
    accumulator = moves.new_accumulator()
    moves.dispatch(accumulator, 1, [0])
    moves.collect(accumulator)
    moves.step(accumulator, 1, share=0.5)
    assert torch.equal(moves.model()[0], torch.ones(3))


class Hall(Scripted):
    """Members come and leave, each with as many samples as its number says."""

    def __init__(self, members: list[int]) -> None:
        super().__init__([])
        self.there = members
        self.looks = 0

    def registered(self) -> Sequence[int]:
        return self.there

    def size_of(self, client: int | str) -> int:
        self.looks += 1
        return int(client)


def test_member_totals_are_recounted_only_when_members_change() -> None:
    fleet, held = Hall([1, 2, 3]), Held()
    assert [held.by_all(fleet) for _ in range(5)] == [6] * 5
    assert fleet.looks == 3
    fleet.there = [1, 2, 4]
    assert held.by_all(fleet) == 7
    fleet.there = [1, 2]
    assert held.by_all(fleet) == 3


def test_cohort_is_forgotten_when_its_round_is_over() -> None:
    seen: list[tuple[int, int]] = []

    def noted(task: Task) -> list[Reply]:
        seen.append((task.round, task.repeats))
        return [reply(task)]

    moves = coordinator(*[noted] * 40)
    sizes = []
    for number in range(1, 41):
        accumulator = moves.new_accumulator()
        for client in (number - 1, number - 1, number % 40):
            moves.dispatch(accumulator, number, [client])
            moves.collect(accumulator)
        moves.step(accumulator, number)
        sizes.append(sum(map(len, moves.state()["asked"].values())))
    assert seen == [(number, repeats) for number in range(1, 41) for repeats in (0, 1, 0)]
    assert max(sizes) == 2


def spoiled(task: Task, vector_V: Tensor) -> Reply:
    return Reply(task.id, task.round, task.client, vector_V, task.integers_I, 1, 0.5)


@pytest.mark.parametrize(
    "bad",
    [
        lambda task: [spoiled(task, torch.full((3,), math.nan))],
        lambda task: [spoiled(task, torch.full((3,), math.inf))],
        lambda task: [spoiled(task, torch.zeros(4))],
        lambda task: [spoiled(task, torch.zeros(3, dtype=torch.float64))],
        lambda task: [reply(task, 9.0, samples=0)],
        lambda task: [reply(task, 9.0, samples=-5)],
        lambda task: [reply(task, 9.0, client=0)],
        lambda task: [Reply(task.id + 7, task.round, task.client, task.vector_V, task.integers_I, 1, 0.5)],
        lambda task: [Reply(task.id, task.round + 1, task.client, task.vector_V, task.integers_I, 1, 0.5)],
        lambda task: [Failure(task.id, task.round, task.client, "out of memory")],
        lambda task: [],
    ],
    ids=["nan", "infinity", "shape", "type", "no samples", "negative", "name", "task", "round", "failure", "silence"],
)
def test_what_must_not_count_changes_nothing_and_is_counted(bad: Answer) -> None:
    moves = coordinator(lambda task: [reply(task, 1.0)], bad)
    exchange = moves.exchange(1, [0, 1])
    assert torch.equal(moves.model()[0], torch.ones(3))
    assert (exchange.selected, exchange.replied, exchange.failed) == (2, 1, 1)


def test_an_answer_counts_once() -> None:
    moves = coordinator(lambda task: [reply(task, 1.0), reply(task, 1.0)], lambda task: [reply(task, 4.0)])
    exchange = moves.exchange(1, [0, 1])
    assert torch.equal(moves.model()[0], torch.full((3,), 2.5))
    assert exchange.replied == 2


def test_a_round_without_replies_leaves_the_model() -> None:
    moves = coordinator(lambda task: [])
    exchange = moves.exchange(1, [0])
    assert torch.equal(moves.model()[0], torch.zeros(3))
    assert (exchange.replied, exchange.failed, exchange.late, exchange.train_loss) == (0, 1, 0, None)


def test_round_with_too_few_replies_leaves_the_model(caplog: pytest.LogCaptureFixture) -> None:
    start_V, integers_I = torch.zeros(LAYOUT.size), torch.zeros(0, dtype=torch.int64)
    scripts = [lambda task: [reply(task, 1.0)], lambda task: [reply(task, 1.0)], lambda task: [reply(task, 1.0)]]
    moves = Coordinator(FedTrimmedMean(), Scripted(scripts), LAYOUT, start_V, integers_I, Streams(0))
    exchange = moves.exchange(1, [0, 1])
    assert torch.equal(moves.model()[0], torch.zeros(3))
    assert (exchange.selected, exchange.replied, exchange.train_loss) == (2, 2, 0.5)
    assert (
        "round 1: the model stays as it was: trimmed_mean needs n ≥ 2f + 1 messages in a round, got n=2" in caplog.text
    )
    moves.exchange(2, [0, 1, 2])
    assert torch.equal(moves.model()[0], torch.ones(3))


def test_a_diverged_client_stops_the_round_and_the_model_stays() -> None:
    moves = coordinator(
        lambda task: [reply(task, 1.0)],
        lambda task: [Failure(task.id, task.round, task.client, "the training loss became nan", diverged=True)],
    )
    with pytest.raises(Diverged, match="round 4, client 1: the training loss became nan"):
        moves.exchange(4, [0, 1])
    assert torch.equal(moves.model()[0], torch.zeros(3))


def test_a_refusal_is_logged_with_sender_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    moves = coordinator(lambda task: [spoiled(task, torch.full((3,), math.nan))])
    moves.exchange(2, [0])
    assert "round 2: refused client 0: the vector must be finite" in caplog.text


def test_integer_buffers_take_the_largest() -> None:
    counting = Layout.of(nn.BatchNorm1d(2))
    start_V, integers_I = counting.pack(nn.BatchNorm1d(2))

    def counted(batches: int) -> Answer:
        return lambda task: [Reply(task.id, task.round, task.client, task.vector_V, task.integers_I + batches, 1, 0.5)]

    moves = Coordinator(FedAvg(), Scripted([counted(2), counted(5)]), counting, start_V, integers_I, Streams(0))
    moves.exchange(1, [0, 1])
    moves.exchange(2, [0])
    assert moves.model()[1].tolist() == [7]


def together(
    *moves: float, samples: Sequence[int] | None = None, first: int = 0, number: int = 1, **changes: Any
) -> Answer:
    """The answer of clients whose tasks are numbered from ``first`` on, to the task of one of them."""

    def answer(task: Task) -> Iterator[GroupReply]:
        held = tuple(samples or [1] * len(moves))
        mean = sum(move * count for move, count in zip(moves, held, strict=True)) / sum(held)
        mean_M = torch.full((LAYOUT.size,), mean, dtype=torch.float64)
        members = tuple(range(first, first + len(moves)))
        given = {"tasks": members, "clients": members, "integers_I": task.integers_I, **changes}
        losses = tuple(0.1 * (index + 1) for index in range(len(moves)))
        yield GroupReply(
            round=number, mean_M=mean_M, weight=float(sum(held)), samples=held, train_losses=losses, **given
        )

    return answer


def silent(task: Task) -> Iterator[Reply]:
    return iter(())


def test_a_group_counts_as_its_clients_do() -> None:
    groups = coordinator(silent, together(1.0, 3.0, samples=[3, 1]), lambda task: [reply(task, -2.0, samples=2)])
    alone = coordinator(
        *(
            lambda task, move=move, held=held: [reply(task, move, held)]
            for move, held in ((1.0, 3), (3.0, 1), (-2.0, 2))
        )
    )
    ours, theirs = (moves.exchange(1, [0, 1, 2]) for moves in (groups, alone))
    assert torch.equal(groups.model()[0], alone.model()[0])
    assert float(groups.model()[0][0]) == pytest.approx((3 + 3 - 4) / 6)
    assert (ours.selected, ours.replied, ours.failed) == (theirs.selected, theirs.replied, theirs.failed) == (3, 3, 0)
    assert ours.bytes_up == theirs.bytes_up == 3 * 3 * 4
    assert ours.train_loss == pytest.approx((0.1 * 3 + 0.2 * 1 + 0.5 * 2) / 6)


def test_last_loss_of_each_client_is_known() -> None:
    moves = coordinator(silent, together(1.0, 3.0), lambda task: [reply(task, -2.0)])
    moves.exchange(1, [0, 1, 2])
    assert moves.losses == {0: 0.1, 1: 0.2, 2: 0.5}


def test_the_order_of_groups_does_not_matter() -> None:
    scripts = [together(0.1, 0.7, samples=[3, 5]), together(1e-9, -0.3, samples=[1, 7], first=2)]
    one, other = (coordinator(*ordered, silent, silent) for ordered in (scripts, scripts[::-1]))
    losses = [moves.exchange(1, [0, 1, 2, 3]).train_loss for moves in (one, other)]
    assert torch.equal(one.model()[0], other.model()[0])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "bad",
    [
        together(9.0, 9.0, first=1),
        together(9.0, first=7),
        together(9.0, 9.0, tasks=(1, 1)),
        together(9.0, clients=(0,), tasks=(1,)),
        together(9.0, clients=("1",), tasks=(1,)),
        together(9.0, first=1, number=2),
        together(9.0, tasks=(), clients=()),
        together(9.0, 9.0, tasks=(0, 1), clients=(0, 1)),
    ],
    ids=["of nobody's too", "not asked", "twice", "another's", "name", "round", "nobody", "answered"],
)
def test_uncounted_group_changes_nothing_and_is_recorded(bad: Answer, caplog: pytest.LogCaptureFixture) -> None:
    moves = coordinator(lambda task: [reply(task, 1.0)], bad)
    exchange = moves.exchange(1, [0, 1])
    assert torch.equal(moves.model()[0], torch.ones(3))
    assert (exchange.selected, exchange.replied, exchange.failed) == (2, 1, 1)
    assert exchange.train_loss == 0.5
    assert "their tasks are not in flight" in caplog.text


def test_a_group_counts_once() -> None:
    twice = together(1.0, 3.0)
    moves = coordinator(silent, lambda task: [*twice(task), *twice(task), reply(task, 50.0)])
    exchange = moves.exchange(1, [0, 1])
    assert torch.equal(moves.model()[0], torch.full((3,), 2.0))
    assert (exchange.replied, exchange.failed) == (2, 0)


def test_bytes_are_counted_whether_or_not_the_answer_counts() -> None:
    moves = coordinator(silent, together(1.0, 1.0, 1.0))
    assert moves.exchange(1, [0, 1]).bytes_up == 3 * 3 * 4


def test_of_groups_integer_buffers_the_largest_is_taken() -> None:
    counting = Layout.of(nn.BatchNorm1d(2))
    start_V, integers_I = counting.pack(nn.BatchNorm1d(2))
    mean_M = torch.zeros(counting.size, dtype=torch.float64)

    def counted(first: int, batches: int) -> Answer:
        ids = (first, first + 1)
        return lambda task: [GroupReply(ids, 1, ids, mean_M, 2.0, integers_I + batches, (1, 1), (0.1, 0.1))]

    scripts = [counted(0, 9), counted(2, 4), silent, silent]
    moves = Coordinator(FedAvg(), Scripted(scripts), counting, start_V, integers_I, Streams(0))
    exchange = moves.exchange(1, [0, 1, 2, 3])
    assert moves.model()[1].tolist() == [9]
    assert exchange.bytes_up == exchange.bytes_down == 4 * counting.size_bytes()


@pytest.mark.parametrize("step", [1, -1])
def test_first_diverged_client_is_named_in_any_order(step: int) -> None:
    def diverged(task: Task) -> Iterator[Failure]:
        yield Failure(task.id, task.round, task.client, "no number", diverged=True)

    class Shuffled(Scripted):
        def collect(self, until: float = math.inf, enough: int | None = None) -> Iterator[Reply | GroupReply | Failure]:
            return iter([*super().collect(until)][::step])

    start_V, integers_I = torch.zeros(LAYOUT.size), torch.zeros(0, dtype=torch.int64)
    fleet = Shuffled([silent, diverged, diverged])
    moves = Coordinator(FedAvg(), fleet, LAYOUT, start_V, integers_I, Streams(0))
    with pytest.raises(Diverged, match="round 1, client 1: no number"):
        moves.exchange(1, [0, 1, 2])
    assert torch.equal(moves.model()[0], torch.zeros(3))
