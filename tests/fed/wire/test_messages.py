"""Numbers that come with an answer, and the bytes of a model."""

import math
from typing import Any

import pytest
import torch

from fed.clients.scoring.metrics import accuracy
from fed.clients.training.evaluation import Score
from fed.protocol.protocol_pb2 import Scores
from fed.server.evaluation import ClientScore, scores_over_clients
from fed.server.validation import refusal_of_scores
from fed.server.way_in import UpdateAccumulator
from fed.vectors.reduction import WeightedMean
from fed.wire.messages import GlobalModel, Task, refusal_of_numbers


@pytest.mark.parametrize(
    ("samples", "train_loss", "reason"),
    [
        (0, 0.5, "samples must be a whole number from 1 to 2^53, got 0"),
        (-3, 0.5, "samples must be a whole number from 1 to 2^53, got -3"),
        (2**53 + 1, 0.5, "samples must be a whole number from 1 to 2^53, got 9007199254740993"),
        (2.0, 0.5, "samples must be a whole number from 1 to 2^53, got 2.0"),
        (math.nan, 0.5, "samples must be a whole number from 1 to 2^53, got nan"),
        (True, 0.5, "samples must be a whole number from 1 to 2^53, got True"),
        (7, math.nan, "the training loss must be finite and within ±1e+200, got nan"),
        (7, -math.inf, "the training loss must be finite and within ±1e+200, got -inf"),
    ],
)
def test_numbers_beside_the_tensors_are_refused_with_the_reason(samples: Any, train_loss: float, reason: str) -> None:
    assert refusal_of_numbers(7, 1.0, 0.0) is None
    assert refusal_of_numbers(samples, 1.0, train_loss) == reason


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
    accumulator = UpdateAccumulator(4, torch.zeros(0), is_linear=True)
    if passes:
        accumulator.losses = [(loss, samples), (loss, samples), (-loss, samples), (0.5, 1)]
        assert accumulator.stats().train_loss == pytest.approx(loss / 3)


@pytest.mark.parametrize("number", [1e200, -1e200, 1.1e200, math.inf, math.nan])
def test_whatever_scores_pass_have_a_mean_and_a_spread(number: float) -> None:
    passes, samples = abs(number) <= 1e200, 2**53
    assert (refusal_of_scores(Scores(samples=samples, loss=number)) is None) == passes
    assert (refusal_of_scores(Scores(samples=samples, metrics=[0.5, number])) is None) == (passes or math.isnan(number))
    if passes:
        scores = [Score(number, (number,)), Score(0.5, (math.nan,)), Score(0.5, (number,))]
        sized = zip("abc", (samples, 1, samples), scores, strict=True)
        line = scores_over_clients([ClientScore(*one) for one in sized], {"accuracy": accuracy}).line
        assert line["test_loss"] == pytest.approx(number / 2)
        assert line["test_accuracy"] == line["client_accuracy_mean"] == pytest.approx(number)
        assert line["client_accuracy_std"] == 0.0


def test_bytes_are_those_of_the_tensors() -> None:
    model = GlobalModel(0, torch.zeros(4), torch.zeros(2, dtype=torch.int64))
    broadcast = (torch.zeros(4, dtype=torch.float64), torch.zeros(3, dtype=torch.int8))
    assert Task(0, 1, "ann", model).size_bytes() == 4 * 4 + 2 * 8
    assert Task(0, 1, "ann", model._replace(broadcast=broadcast)).size_bytes() == 4 * 4 + 2 * 8 + 4 * 8 + 3
