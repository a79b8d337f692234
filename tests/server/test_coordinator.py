"""A coordinator over a fleet that misbehaves: what may move the model, and what is only counted."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fed.aggregators.base import Aggregator
from fed.aggregators.client_side import format_of
from fed.aggregators.easgd import EASGD
from fed.aggregators.fedavg import FedAvg
from fed.aggregators.robust.algorithms import FedTrimmedMean
from fed.compression.codec import Draw
from fed.compression.stage import Stage
from fed.errors import Diverged, InvalidPayload
from fed.protocol.protocol_pb2 import Answer as Header
from fed.server.coordinator import Coordinator
from fed.server.observer import Essential
from fed.server.recording import RunLog
from fed.server.telling import Observers
from fed.server.way_in import received
from fed.vectors.layout import Layout
from fed.vectors.randomness import Streams
from fed.wire.messages import Answer, Task, Update
from tests.scripted_fleet import ScriptedFleet, one_round
from tests.trial_stages import Drifts

Script = Callable[[Task], Iterable[Answer]]
LAYOUT = Layout.of(nn.Linear(2, 1))
COUNTING = Layout.of(nn.BatchNorm1d(2))
COUNTING_BYTES = 8 * 4 + 8  # four parameters and four float buffers in float32, one integer of 8 bytes
FORMATS = {layout.size: format_of(FedAvg(), layout, 2) for layout in (LAYOUT, COUNTING)}


def sent(task: Task, vector_V: Tensor, samples: int = 1, batches: int = 0) -> Answer:
    """What a fleet of nodes makes of a trained model that a client sends."""
    header = Header(samples=samples % 2**64, weight=samples, train_loss=0.5)  # a number below 0 on the wire
    tensors = [vector_V, task.model.integers_I + batches]
    try:
        return received(task, header, tensors, FORMATS[task.model.params_V.numel()], Streams(0))
    except InvalidPayload as error:
        return Answer.failure(task, f"its answer was refused: {error}")


def reply(task: Task, move: float = 1.0, samples: int = 1, **forged: Any) -> Answer:
    return sent(task, task.model.params_V + move, samples)._replace(**forged)


class Scripted(ScriptedFleet):
    """Answers each task as it is told to; client i's script is scripts[i]."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        super().__init__(range(len(scripts)))
        self._scripts = scripts

    def collect(self, until: float = math.inf, enough: int | None = None) -> Iterator[Answer]:
        for task in self._taken():
            yield from self._scripts[int(task.client)](task)


def over(
    fleet: Scripted,
    aggregator: Aggregator | None = None,
    module: nn.Module | None = None,
    stages: tuple[Stage, ...] = (),
) -> Coordinator:
    """Of a module's first model, or of zeros."""
    layout = COUNTING if module else LAYOUT
    start = layout.pack(module) if module else (torch.zeros(LAYOUT.size), torch.zeros(0, dtype=torch.int64))
    return Coordinator(aggregator or FedAvg(), fleet, layout, FORMATS[layout.size], *start, Streams(0), stages=stages)


def coordinator(*scripts: Script) -> Coordinator:
    return over(Scripted(scripts))


def test_the_model_moves_by_the_mean_weighted_by_samples() -> None:
    moves = coordinator(lambda task: [reply(task, 1.0, samples=3)], lambda task: [reply(task, -1.0, samples=1)])
    stats = one_round(moves, 1, [0, 1])
    assert torch.equal(moves.model()[0], torch.full((3,), 0.5))
    assert (stats.selected, stats.replied, stats.failed, stats.late) == (2, 2, 0, 0)
    assert stats.bytes_down == stats.bytes_up == 2 * 3 * 4
    assert stats.train_loss == 0.5


def test_shares_turn_a_cohorts_mean_into_all_members_mean() -> None:
    """EASGD moves by the sum of the pulls: of one of two clients, that one's."""
    moves = over(Scripted([lambda task: [reply(task, 1.0)], silent]), EASGD())
    accumulator = moves.new_accumulator()
    moves.dispatch(accumulator, 1, [0])
    moves.collect(accumulator)
    moves.step(accumulator, 1, share=0.5)
    assert torch.equal(moves.model()[0], torch.ones(3))


def test_cohort_is_forgotten_when_its_round_is_over() -> None:
    seen: list[tuple[int, int]] = []

    def noted(task: Task) -> list[Answer]:
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


@pytest.mark.parametrize(
    "bad",
    [
        lambda task: [sent(task, torch.full((3,), math.nan))],
        lambda task: [sent(task, torch.full((3,), math.inf))],
        lambda task: [sent(task, torch.zeros(4))],
        lambda task: [sent(task, torch.zeros(3, dtype=torch.float64))],
        lambda task: [reply(task, 9.0, samples=0)],
        lambda task: [reply(task, 9.0, samples=-5)],
        lambda task: [reply(task, 9.0, clients=(0,))],
        lambda task: [reply(task, 9.0, tasks=(task.id + 7,))],
        lambda task: [reply(task, 9.0, round=task.round + 1)],
        lambda task: [Answer.failure(task, "out of memory")],
        lambda task: [],
    ],
    ids=["nan", "infinity", "shape", "type", "no samples", "negative", "name", "task", "round", "failure", "silence"],
)
def test_what_must_not_count_changes_nothing_and_is_counted(bad: Script) -> None:
    fleet = Scripted([lambda task: [reply(task, 1.0)], bad])
    moves = over(fleet)
    stats = one_round(moves, 1, [0, 1])
    assert torch.equal(moves.model()[0], torch.ones(3))
    assert (stats.selected, stats.replied, stats.failed) == (2, 1, 1)
    assert stats.participation == ([0, 1], [0], [], [1])
    assert fleet.verdicts == [{0: 1.0}]


def test_the_fleet_is_told_how_much_each_task_counted() -> None:
    """Three answer after the model has moved once more, the last of them when it is too late."""
    held: list[Task] = []

    def later(task: Task) -> list[Answer]:
        held.append(task)
        return []

    fleet = Scripted([later, lambda task: [reply(task)], lambda task: [reply(one) for one in (task, *held)]])
    moves = over(fleet)
    accumulator = moves.new_accumulator()
    moves.dispatch(accumulator, 1, [0, 1])
    moves.collect(accumulator)
    moves.step(accumulator, 1)
    for factor, number in ((0.25, 2), (None, 3)):
        accumulator = moves.new_accumulator()
        moves.dispatch(accumulator, number, [2, 0])
        moves.collect(accumulator, weigh=lambda staleness, factor=factor: factor if staleness else 1.0)  # type: ignore[misc]
        moves.step(accumulator, number)
        held[:] = held[1:]
    assert fleet.verdicts == [{1: 1.0}, {2: 1.0, 0: 0.25}, {4: 1.0}]


def test_an_answer_counts_once() -> None:
    moves = coordinator(lambda task: [reply(task, 1.0), reply(task, 1.0)], lambda task: [reply(task, 4.0)])
    stats = one_round(moves, 1, [0, 1])
    assert torch.equal(moves.model()[0], torch.full((3,), 2.5))
    assert stats.replied == 2


def test_a_round_without_replies_leaves_the_model() -> None:
    moves = coordinator(lambda task: [])
    stats = one_round(moves, 1, [0])
    assert torch.equal(moves.model()[0], torch.zeros(3))
    assert (stats.replied, stats.failed, stats.late, stats.train_loss) == (0, 1, 0, None)


def test_round_with_too_few_replies_leaves_the_model(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Scripted([lambda task: [reply(task, 1.0)]] * 3)
    moves = over(fleet, FedTrimmedMean())
    stats = one_round(moves, 1, [0, 1])
    assert torch.equal(moves.model()[0], torch.zeros(3))
    assert (stats.selected, stats.replied, stats.train_loss) == (2, 2, 0.5)
    assert (
        "round 1: no update moves the model: trimmed_mean needs n ≥ 2f + 1 messages in a round, got n=2" in caplog.text
    )
    one_round(moves, 2, [0, 1, 2])
    assert torch.equal(moves.model()[0], torch.ones(3))
    assert fleet.verdicts == [{}, {2: 1.0, 3: 1.0, 4: 1.0}]


def test_too_few_replies_are_said_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    moves = over(Scripted([lambda task: [reply(task, 1.0)]] * 3), FedTrimmedMean())
    for number in range(1, 103):
        one_round(moves, number, [0])
    said = [line.split(": trimmed_mean")[0] for line in caplog.messages]
    assert said == [
        "round 1: no update moves the model",
        "round 10: no update moves the model, for the 10th time",
        "round 100: no update moves the model, for the 100th time",
    ]


def test_a_diverged_client_stops_the_round_and_the_model_stays() -> None:
    moves = coordinator(
        lambda task: [reply(task, 1.0)],
        lambda task: [Answer.failure(task, "the training loss became nan", has_diverged=True)],
    )
    with pytest.raises(Diverged, match="round 4, client 1: the training loss became nan"):
        one_round(moves, 4, [0, 1])
    assert torch.equal(moves.model()[0], torch.zeros(3))


def test_a_refusal_is_logged_with_sender_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    moves = coordinator(lambda task: [sent(task, torch.full((3,), math.nan))])
    moves.observers = Observers([Essential(RunLog())])
    one_round(moves, 2, [0])
    assert "round 2: client 0 failed: its answer was refused: the vector must be finite" in caplog.text


def test_integer_buffers_take_the_largest() -> None:
    def counted(batches: int) -> Script:
        return lambda task: [sent(task, task.model.params_V, batches=batches)]

    moves = over(Scripted([counted(5), counted(2)]), module=nn.BatchNorm1d(2))
    stats = one_round(moves, 1, [0, 1])
    assert stats.bytes_up == stats.bytes_down == 2 * COUNTING_BYTES
    one_round(moves, 2, [1])
    assert moves.model()[1].tolist() == [7]


@dataclass(frozen=True, kw_only=True)
class _Divides(Stage):
    """Divides the mean of the last number, a float buffer's, by 0."""

    def change_mean(self, mean_M: Tensor, clients: int, draw: Draw) -> Tensor:
        return torch.cat([mean_M[:-1], mean_M[-1:] / 0])


@pytest.mark.parametrize(("move", "becomes"), [(0.0, "nan"), (1.0, "inf")])
def test_float_buffers_that_a_stage_makes_infinite_end_the_run(move: float, becomes: str) -> None:
    moves = over(Scripted([lambda task: [reply(task, move)]]), module=nn.BatchNorm1d(2), stages=(_Divides(),))
    before_V = moves.model()[0]
    with pytest.raises(Diverged, match=f"round 1: the model's float buffers become {becomes}; the last good model"):
        one_round(moves, 1, [0])
    assert torch.equal(moves.model()[0], before_V)


def together(
    *moves: float, samples: Sequence[int] | None = None, first: int = 0, number: int = 1, **changes: Any
) -> Script:
    """The answer of clients whose tasks are numbered from ``first`` on, to the task of one of them."""

    def answer(task: Task) -> Iterator[Answer]:
        held = tuple(samples or [1] * len(moves))
        mean = sum(move * count for move, count in zip(moves, held, strict=True)) / sum(held)
        update_M = torch.full((LAYOUT.size,), mean, dtype=torch.float64)
        members = tuple(range(first, first + len(moves)))
        yield Answer(
            round=number,
            content=Update(update_M, float(sum(held))),
            integers_I=task.model.integers_I,
            samples=held,
            train_losses=tuple(0.1 * (index + 1) for index in range(len(moves))),
            size_bytes=len(moves) * FORMATS[LAYOUT.size].uplink_bytes,
            **{"tasks": members, "clients": members, **changes},
        )

    return answer


def silent(task: Task) -> Iterator[Answer]:
    return iter(())


def test_a_group_counts_as_its_clients_do() -> None:
    groups = coordinator(silent, together(1.0, 3.0, samples=[3, 1]), lambda task: [reply(task, -2.0, samples=2)])
    alone = coordinator(
        *(
            lambda task, move=move, held=held: [reply(task, move, held)]
            for move, held in ((1.0, 3), (3.0, 1), (-2.0, 2))
        )
    )
    ours, theirs = (one_round(moves, 1, [0, 1, 2]) for moves in (groups, alone))
    assert torch.equal(groups.model()[0], alone.model()[0])
    assert float(groups.model()[0][0]) == pytest.approx((3 + 3 - 4) / 6)
    assert (ours.selected, ours.replied, ours.failed) == (theirs.selected, theirs.replied, theirs.failed) == (3, 3, 0)
    assert ours.bytes_up == theirs.bytes_up == 3 * 3 * 4
    assert ours.train_loss == pytest.approx((0.1 * 3 + 0.2 * 1 + 0.5 * 2) / 6)


def test_last_loss_of_each_client_is_known() -> None:
    moves = coordinator(silent, together(1.0, 3.0), lambda task: [reply(task, -2.0)])
    one_round(moves, 1, [0, 1, 2])
    assert moves.losses == {0: 0.1, 1: 0.2, 2: 0.5}


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
def test_uncounted_group_changes_nothing_and_is_recorded(bad: Script, caplog: pytest.LogCaptureFixture) -> None:
    moves = coordinator(lambda task: [reply(task, 1.0)], bad)
    stats = one_round(moves, 1, [0, 1])
    assert torch.equal(moves.model()[0], torch.ones(3))
    assert (stats.selected, stats.replied, stats.failed) == (2, 1, 1)
    assert stats.train_loss == 0.5
    assert "their tasks are not in flight" in caplog.text


def test_a_group_counts_once() -> None:
    twice = together(1.0, 3.0)
    moves = coordinator(silent, lambda task: [*twice(task), *twice(task), reply(task, 50.0)])
    stats = one_round(moves, 1, [0, 1])
    assert torch.equal(moves.model()[0], torch.full((3,), 2.0))
    assert (stats.replied, stats.failed) == (2, 0)


def test_bytes_are_counted_whether_or_not_the_answer_counts() -> None:
    moves = coordinator(silent, together(1.0, 1.0, 1.0))
    assert one_round(moves, 1, [0, 1]).bytes_up == 3 * 3 * 4


@pytest.mark.parametrize("step", [1, -1])
def test_first_diverged_client_is_named_in_any_order(step: int) -> None:
    def diverged(task: Task) -> Iterator[Answer]:
        yield Answer.failure(task, "no number", has_diverged=True)

    class Shuffled(Scripted):
        def collect(self, until: float = math.inf, enough: int | None = None) -> Iterator[Answer]:
            return iter([*super().collect(until)][::step])

    moves = over(Shuffled([silent, diverged, diverged]))
    with pytest.raises(Diverged, match="round 1, client 1: no number"):
        one_round(moves, 1, [0, 1, 2])
    assert torch.equal(moves.model()[0], torch.zeros(3))


@pytest.mark.parametrize(("quorum", "moves_by"), [(0, 1.0), (2, 0.0)])
def test_noise_alone_moves_a_model_that_nobody_does(quorum: int, moves_by: float) -> None:
    """Whether nobody has answered or too few have, whose updates then do not count."""
    fleet = Scripted([lambda task: [reply(task, 1.0)], lambda task: [Answer.failure(task, "it is away")]])
    plain, drifting = (over(fleet, stages=stages) for stages in ((), (Drifts(),)))
    for moves in (plain, drifting):
        for number in (1, 2):
            accumulator = moves.new_accumulator()
            moves.dispatch(accumulator, number, [1] if number == 2 else [0, 1])
            moves.collect(accumulator)
            moves.step(accumulator, number, quorum=quorum)
    drawn = [Streams(0).generator("stage 0 of the mean", 0, number).normal(size=3) for number in (1, 2)]
    expected_P = moves_by + torch.from_numpy(drawn[0] + drawn[1])
    torch.testing.assert_close(drifting.model()[0].double(), expected_P, rtol=0, atol=1e-6)
    torch.testing.assert_close(plain.model()[0], torch.full((3,), moves_by))
    assert (plain.version, drifting.version) == (int(moves_by), 2)
    assert [verdict for verdict in fleet.verdicts if verdict] == ([{0: 1.0}] * 2 if moves_by else [])
