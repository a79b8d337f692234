"""What a reply must be before it may touch the model."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fed.reduction import WeightedMean
from fed.server.accumulator import UpdateAccumulator
from fed.server.evaluation import scores_over_clients
from fed.server.validation import refusal_of_scores
from fed.wire.messages import Reply, Task, refusal, refusal_of_numbers
from fed.wire.protocol_pb2 import Scores

TASK = Task(id=5, round=3, client="ann", vector_V=torch.zeros(4), integers_I=torch.zeros(2, dtype=torch.int64))
REPLY = Reply(5, 3, "ann", torch.ones(4), torch.ones(2, dtype=torch.int64), samples=7, train_loss=0.5)


def vector(number: float) -> dict[str, Any]:
    """A vector whose last number is this."""
    return {"vector_V": torch.tensor([1.0, 2, 3, number])}


def test_a_good_reply_passes() -> None:
    assert refusal(REPLY, TASK) is None
    assert refusal(replace(REPLY, train_loss=0.0, samples=1), TASK) is None
    assert refusal(replace(REPLY, vector_V=torch.full((4,), -3.0e38)), TASK) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"client": "bob"}, "task 5 is client 'ann''s of round 3, got 'bob' and round 3"),
        ({"client": 0}, "task 5 is client 'ann''s of round 3, got 0 and round 3"),
        ({"round": 2}, "task 5 is client 'ann''s of round 3, got 'ann' and round 2"),
        ({"vector_V": torch.ones(5)}, "the vector must be torch.float32 (4,), got torch.float32 (5,)"),
        ({"vector_V": torch.ones(4, 1)}, "the vector must be torch.float32 (4,), got torch.float32 (4, 1)"),
        ({"vector_V": torch.ones(4).double()}, "the vector must be torch.float32 (4,), got torch.float64 (4,)"),
        ({"integers_I": torch.ones(0).long()}, "the integers must be torch.int64 (2,), got torch.int64 (0,)"),
        ({"integers_I": torch.ones(2)}, "the integers must be torch.int64 (2,), got torch.float32 (2,)"),
        ({"samples": 0}, "samples must be a whole number from 1 to 2^53, got 0"),
        ({"samples": -3}, "samples must be a whole number from 1 to 2^53, got -3"),
        ({"samples": 2**53 + 1}, "samples must be a whole number from 1 to 2^53, got 9007199254740993"),
        ({"samples": 2.0}, "samples must be a whole number from 1 to 2^53, got 2.0"),
        ({"samples": math.nan}, "samples must be a whole number from 1 to 2^53, got nan"),
        ({"samples": True}, "samples must be a whole number from 1 to 2^53, got True"),
        ({"train_loss": math.nan}, "the training loss must be finite and within ±1e+200, got nan"),
        ({"train_loss": -math.inf}, "the training loss must be finite and within ±1e+200, got -inf"),
        (vector(math.nan), "the vector must be finite and within ±1e+200, got nan"),
        (vector(math.inf), "the vector must be finite and within ±1e+200, got inf"),
        (vector(-math.inf), "the vector must be finite and within ±1e+200, got inf"),
    ],
)
def test_reply_that_does_not_fit_its_task_is_refused(changed: dict[str, Any], reason: str) -> None:
    assert refusal(replace(REPLY, **changed), TASK) == reason


def test_a_reply_to_no_task_is_refused() -> None:
    assert refusal(REPLY, None) == "task 5 is not in flight"


@pytest.mark.parametrize(("number", "passes"), [(1e200, True), (-1e200, True), (1.1e200, False), (-1.1e200, False)])
def test_whatever_passes_fits_into_the_mean(number: float, passes: bool) -> None:
    """Finite numbers and counts too, that would not: a single client must not be able to end the run."""
    task = TASK._replace(vector_V=torch.full((4,), -number, dtype=torch.float64))
    reply = replace(REPLY, vector_V=torch.full((4,), number, dtype=torch.float64), samples=2**53)
    assert (refusal(reply, task) is None) == passes
    mean = WeightedMean(4)
    if passes:
        mean.add(reply.vector_V - task.vector_V, reply.samples)
        assert float(mean.finish()[0]) == pytest.approx(2 * number)


@pytest.mark.parametrize(("weight", "passes"), [(1e40, True), (1.1e40, False)])
def test_whatever_weight_passes_fits_into_the_mean(weight: float, passes: bool) -> None:
    assert (refusal_of_numbers(1, weight, 0.5) is None) == passes
    mean = WeightedMean(1)
    if passes:
        mean.add(torch.tensor([1e200], dtype=torch.float64), weight)
        assert float(mean.finish()) == pytest.approx(1e200)


@pytest.mark.parametrize(("loss", "passes"), [(1e200, True), (-1e200, True), (1.1e200, False), (-1.1e200, False)])
def test_whatever_losses_pass_have_a_mean(loss: float, passes: bool) -> None:
    samples = 2**53
    assert (refusal_of_numbers(samples, 1.0, loss) is None) == passes
    accumulator = UpdateAccumulator(4, torch.zeros(0), 0, True)
    if passes:
        accumulator.losses = [(loss, samples), (loss, samples), (-loss, samples), (0.5, 1)]
        assert accumulator.train_loss() == pytest.approx(loss / 3)


@pytest.mark.parametrize("number", [1e200, -1e200, 1.1e200, math.inf, math.nan])
def test_whatever_scores_pass_have_a_mean_and_a_spread(number: float) -> None:
    passes, samples = abs(number) <= 1e200, 2**53
    assert (refusal_of_scores(Scores(samples=samples, loss=number)) is None) == passes
    assert (refusal_of_scores(Scores(samples=samples, metric=number)) is None) == passes
    if passes:
        line = scores_over_clients([number, 0.5, 0.5], [number, None, number], [samples, 1, samples])
        assert line["test_loss"] == pytest.approx(number / 2)
        assert line["test_accuracy"] == line["client_accuracy_mean"] == pytest.approx(number)
        assert line["client_accuracy_std"] == 0.0


def test_bytes_are_those_of_the_tensors() -> None:
    broadcast = (torch.zeros(4, dtype=torch.float64), torch.zeros(3, dtype=torch.int8))
    assert TASK.size_bytes() == 4 * 4 + 2 * 8
    assert TASK._replace(broadcast=broadcast).size_bytes() == 4 * 4 + 2 * 8 + 4 * 8 + 3
    assert REPLY.size_bytes() == 4 * 4 + 2 * 8
