"""A coordinator over a fleet that misbehaves: what may move the model, and what is only counted."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from fed.aggregators.fedavg import FedAvg
from fed.errors import Diverged
from fed.layout import Layout
from fed.messages import Failure, Reply, Task
from fed.randomness import Streams
from fed.server.coordinator import Coordinator

Answer = Callable[[Task], Iterable[Reply | Failure]]
LAYOUT = Layout.of(nn.Linear(2, 1))


def reply(task: Task, move: float = 1.0, samples: int = 1, client: int | str | None = None) -> Reply:
    moved_V = task.vector_V + move
    return Reply(task.id, task.round, task.client if client is None else client, moved_V, task.integers_I, samples, 0.5)


class Scripted:
    """Answers each task as it is told to; client i's script is scripts[i]."""

    clock = 0.0

    def __init__(self, scripts: Sequence[Answer]) -> None:
        self._scripts = scripts
        self._tasks: list[Task] = []

    def nodes(self) -> Sequence[int]:
        return range(len(self._scripts))

    def dispatch(self, tasks: Iterable[Task]) -> None:
        self._tasks.extend(tasks)

    def collect(self, until: float = math.inf) -> Iterator[Reply | Failure]:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
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
    assert (exchange.replied, exchange.failed, exchange.train_loss) == (0, 1, None)


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


def test_cohorts_are_uniform_without_replacement() -> None:
    crowd = coordinator(*[lambda task: []] * 10)
    cohorts = [crowd.sample(number, 3) for number in range(1, 2001)]
    assert all(len(set(cohort)) == 3 for cohort in cohorts)
    counts = torch.bincount(torch.tensor(cohorts).reshape(-1), minlength=10)
    # Each client is in a cohort with p = 0.3; five standard deviations of 2,000 such draws.
    assert float((counts - 600).abs().max()) < 5 * math.sqrt(2000 * 0.3 * 0.7)
    assert len({tuple(cohort) for cohort in cohorts}) > 100


def test_integer_buffers_take_the_largest() -> None:
    counting = Layout.of(nn.BatchNorm1d(2))
    start_V, integers_I = counting.pack(nn.BatchNorm1d(2))

    def counted(batches: int) -> Answer:
        return lambda task: [Reply(task.id, task.round, task.client, task.vector_V, task.integers_I + batches, 1, 0.5)]

    moves = Coordinator(FedAvg(), Scripted([counted(2), counted(5)]), counting, start_V, integers_I, Streams(0))
    moves.exchange(1, [0, 1])
    moves.exchange(2, [0])
    assert moves.model()[1].tolist() == [7]
