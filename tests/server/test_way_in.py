"""The way in of updates: what must hold of an answer before it may touch the model."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fed.compression.blocks import as_bytes, from_bytes
from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values
from fed.compression.feedback import EF21, NoFeedback
from fed.errors import InvalidPayload
from fed.protocol.protocol_pb2 import Answer as Header
from fed.protocol.protocol_pb2 import Plan
from fed.server.flower.fleet import FlowerFleet
from fed.server.way_in import received
from fed.vectors.randomness import Streams
from fed.vectors.reduction import WeightedMean
from fed.wire.format import Format
from fed.wire.messages import Answer, GlobalModel, Task, TrainedModel, Update

MODEL = GlobalModel(2, torch.zeros(4), torch.zeros(2, dtype=torch.int64))
TASK = Task(id=5, round=3, client="ann", model=MODEL)
MODELS = Format(torch.float32, (3,), buffers=1, integers=2, parameters=3, sends_models=True)
UPDATES = Format(torch.float32, (3,), buffers=1, integers=2, parameters=3)
GOOD: dict[str, Any] = {
    "tensors": [torch.ones(4), torch.ones(2, dtype=torch.int64)],
    "samples": 7,
    "weight": 7.0,
    "train_loss": 0.5,
}
both = pytest.mark.parametrize("message", [MODELS, UPDATES], ids=["models", "updates"])


def arrived(message: Format, task: Task = TASK, **changed: Any) -> Answer | str:
    """What is made of a good answer, but for what has changed, or the reason to refuse it."""
    said = {**GOOD, **changed}
    tensors = said.pop("tensors")
    try:
        return received(task, Header(**said), tensors, message, Streams(0))
    except InvalidPayload as error:
        return str(error)


def vector(number: float, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Tensors, of which the last of the values is this."""
    return {"tensors": [torch.tensor([1.0, 2, 3, number], dtype=dtype), GOOD["tensors"][1]]}


@pytest.mark.parametrize("changed", [{}, {"train_loss": 0.0, "samples": 1, "weight": 1.0}, vector(-3.0e38)])
@both
def test_a_good_answer_is_taken_as_it_is(message: Format, changed: dict[str, Any]) -> None:
    answer, said = arrived(message, **changed), {**GOOD, **changed}
    assert isinstance(answer, Answer)
    assert (answer.tasks, answer.round, answer.clients, answer.problem) == ((5,), 3, ("ann",), "")
    content = answer.content
    assert isinstance(content, TrainedModel if message.sends_models else Update)
    assert (content.weight, answer.samples, answer.train_losses) == (
        said["weight"],
        (said["samples"],),
        (said["train_loss"],),
    )
    assert torch.equal(content[0], said["tensors"][0])
    assert torch.equal(answer.integers_I, said["tensors"][1])
    assert answer.size_bytes == 4 * 4 + 2 * 8
    if isinstance(content, TrainedModel):
        assert content.start_V is MODEL.params_V


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"tensors": [torch.ones(5), torch.ones(2).long()]}, "got [('float32', 5), ('int64', 2)]"),
        ({"tensors": [torch.ones(4).double(), torch.ones(2).long()]}, "got [('float64', 4), ('int64', 2)]"),
        ({"tensors": [torch.ones(4), torch.ones(0).long()]}, "got [('float32', 4), ('int64', 0)]"),
        ({"tensors": [torch.ones(4), torch.ones(2)]}, "got [('float32', 4), ('float32', 2)]"),
        ({"tensors": [torch.ones(4)]}, "got [('float32', 4)]"),
        ({"tensors": [torch.ones(2).long(), torch.ones(4)]}, "got [('int64', 2), ('float32', 4)]"),
        ({"tensors": []}, "got []"),
        ({"tensors": [torch.ones(1)] * 500}, "got [('float32', 1), ('float32', 1), ('float32', 1), ('float32', 1)]"),
    ],
)
@both
def test_tensors_must_be_those_of_the_format(message: Format, changed: dict[str, Any], reason: str) -> None:
    assert arrived(message, **changed) == f"the tensors must be [('float32', 4), ('int64', 2)], {reason}"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"samples": 0}, "samples must be a whole number from 1 to 2^53, got 0"),
        ({"samples": 2**53 + 1}, "samples must be a whole number from 1 to 2^53, got 9007199254740993"),
        ({"weight": 0.0}, "the weight must be positive and at most 1e+40, got 0.0"),
        ({"weight": -1.0}, "the weight must be positive and at most 1e+40, got -1.0"),
        ({"weight": math.inf}, "the weight must be positive and at most 1e+40, got inf"),
        ({"weight": math.nan}, "the weight must be positive and at most 1e+40, got nan"),
        ({"train_loss": math.nan}, "the training loss must be finite and within ±1e+200, got nan"),
        ({"train_loss": -math.inf}, "the training loss must be finite and within ±1e+200, got -inf"),
        (vector(math.nan), "the vector must be finite and within ±1e+200, got nan"),
        (vector(math.inf), "the vector must be finite and within ±1e+200, got inf"),
        (vector(-math.inf), "the vector must be finite and within ±1e+200, got inf"),
    ],
)
@both
def test_numbers_that_no_mean_can_hold_are_refused(message: Format, changed: dict[str, Any], reason: str) -> None:
    assert arrived(message, **changed) == reason


@pytest.mark.parametrize(("number", "passes"), [(1e200, True), (-1e200, True), (1.1e200, False), (-1.1e200, False)])
def test_whatever_passes_fits_into_the_mean(number: float, passes: bool) -> None:
    """Finite numbers and counts too, that would not: a single client must not be able to end the run."""
    start_V = torch.full((4,), -number, dtype=torch.float64)
    task = TASK._replace(model=MODEL._replace(params_V=start_V))
    wide = Format(torch.float64, (4,), integers=2, parameters=4, sends_models=True)
    tensors = [torch.full((4,), number, dtype=torch.float64), GOOD["tensors"][1]]
    answer = arrived(wide, task, tensors=tensors, samples=2**53, weight=2.0**53)
    assert isinstance(answer, Answer) == passes
    if isinstance(answer, Answer):
        mean = WeightedMean(4)
        assert isinstance(answer.content, TrainedModel)
        mean.add(answer.content.params_V, float(answer.samples[0]), less_P=answer.content.start_V)
        assert float(mean.finish()[0]) == pytest.approx(2 * number)


@dataclass(frozen=True, kw_only=True)
class Tenfold(Codec):
    """Sends a tenth of each value."""

    def size_bytes(self, values: Values) -> int:
        return values.size_bytes

    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        return Encoded(as_bytes(rows_KM / 10))

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        return from_bytes(torch.stack([*content]), values.dtype) * 10


def coded_tensors(numbers: Tensor) -> list[Tensor]:
    """A message with one part of these numbers, a value beside, and integers."""
    message = torch.cat([torch.ones(1, dtype=torch.uint8), as_bytes(numbers[None])[0]])
    return [message, torch.ones(1, dtype=numbers.dtype), GOOD["tensors"][1]]


@pytest.mark.parametrize(("number", "passes"), [(0.9e199, True), (1.1e199, False), (-1e300, False), (math.nan, False)])
def test_values_are_held_to_bounds_after_decoding(number: float, passes: bool) -> None:
    coded = Format(torch.float64, (3,), buffers=1, integers=2, parameters=3, codecs=(Tenfold(),))
    answer = arrived(coded, tensors=coded_tensors(torch.tensor([1.0, 2.0, number], dtype=torch.float64)))
    assert isinstance(answer, Answer) == passes
    if isinstance(answer, Answer):
        assert answer.update.update_M.tolist() == [10.0, 20.0, 10 * number, 1.0]
        assert answer.size_bytes == 1 + 3 * 8 + 8 + 2 * 8
    else:
        assert "the vector must be finite" in answer


@dataclass(frozen=True, kw_only=True)
class Places(Tenfold):
    """Sends the place of the one value that is kept."""

    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        return torch.eye(values.numbers)[int(content[0][0])][None]


@pytest.mark.parametrize(("place", "passes"), [(2, True), (3, False), (255, False)])
def test_a_payload_that_cannot_be_decoded_is_refused(place: int, passes: bool) -> None:
    coded = Format(torch.float32, (3,), buffers=1, integers=2, parameters=3, codecs=(Places(),))
    tensors = coded_tensors(torch.ones(3))
    tensors[0][1] = place
    answer = arrived(coded, tensors=tensors)
    assert isinstance(answer, Answer) == passes
    assert passes or "the payload cannot be decoded: IndexError" in str(answer)


@pytest.mark.parametrize("cut", [0, 1, 5, 12])
def test_a_message_of_another_length_is_refused(cut: int) -> None:
    coded = Format(torch.float32, (3,), buffers=1, integers=2, parameters=3, codecs=(Tenfold(),))
    tensors = coded_tensors(torch.ones(3))
    tensors[0] = tensors[0][:cut]
    assert "the payload cannot be decoded: InvalidPayload" in str(arrived(coded, tensors=tensors))
    tensors[0] = torch.ones(14, dtype=torch.uint8)
    assert "got [('uint8', 14), " in str(arrived(coded, tensors=tensors))


def test_who_has_lost_what_the_sum_holds_is_refused() -> None:
    fleet = FlowerFleet(None, accepts=lambda joining: None)
    header = Header(**{name: value for name, value in GOOD.items() if name != "tensors"}, began_anew=True)
    for feedback in (NoFeedback(), EF21()):
        fleet.begin(Plan(), replace(UPDATES, error_feedback=feedback), Streams(0))
        if feedback.adds_up:
            with pytest.raises(InvalidPayload, match=r"'ann' has lost what it had sent .* the coordinator's sum still"):
                fleet._received(TASK, header, GOOD["tensors"])
        else:
            assert fleet._received(TASK, header, GOOD["tensors"]).clients == ("ann",)


@both
def test_weights_are_what_the_algorithm_gives_and_no_claim(message: Format) -> None:
    """Else one client's word would outweigh all others, under robust rules, too."""
    for weight in (6.0, 8.0, 1e40):
        assert "the weight must be its number of samples, 7, got" in str(arrived(message, weight=weight))
    alike = replace(message, weighs_samples=False, weighs_alike=True)
    assert isinstance(arrived(alike, weight=1.0), Answer)
    for weight in (7.0, 1e40):
        assert "the weight must be that of all clients, 1, got" in str(arrived(alike, weight=weight))
    of_its_own = replace(message, weighs_samples=False)
    assert isinstance(arrived(of_its_own, weight=0.25), Answer)


def test_under_ef21_weights_are_what_the_sum_holds() -> None:
    """Else one client's word would move the mean of all, or end the run."""
    keeps_sum = replace(UPDATES, error_feedback=EF21())
    assert isinstance(arrived(keeps_sum), Answer)
    assert "the weight must be its number of samples, 7, got 1000" in str(arrived(keeps_sum, weight=1000.0))
    alike = replace(keeps_sum, weighs_samples=False)
    assert "must be that of all clients, 1, got 7" in str(arrived(alike))
    fleet = FlowerFleet(None, accepts=lambda joining: None)
    fleet.begin(Plan(), keeps_sum, Streams(0))
    fleet._members.come("ann", 7)
    said = {name: value for name, value in GOOD.items() if name != "tensors"}
    assert fleet._received(TASK, Header(**said), GOOD["tensors"]).samples == (7,)
    with pytest.raises(InvalidPayload, match="'ann' joined with 7 samples, got 8"):
        fleet._received(TASK, Header(**{**said, "samples": 8, "weight": 8.0}), GOOD["tensors"])


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ([0.6, 0.0, -0.6, 0.5], None),
        ([0.0, 0.0, 0.0, -0.5], None),
        ([0.8, 0.0, -0.8, 0.5], "must be clipped to 1, got a longer one"),
        ([0.6, 0.0, -0.6, 4.0], "must be ½ or −½, got 4"),
        ([0.6, 0.0, -0.6, 0.0], "must be ½ or −½, got 0"),
    ],
)
def test_private_messages_are_held_to_clip_and_bit(numbers: list[float], reason: str | None) -> None:
    """Else one client could outweigh the noise, or move the clip as it likes."""
    message = Format(torch.float32, (3,), has_bits=True, clip=1.0, hides_numbers=True, weighs_alike=True)
    message = replace(message, parameters=3, weighs_samples=False)
    tensors = [torch.tensor(numbers), torch.zeros(0, dtype=torch.int64)]
    found = arrived(message, tensors=tensors, samples=1, weight=1.0, train_loss=0.0)
    assert isinstance(found, Answer) if reason is None else reason in str(found)


def test_of_votes_the_signs_count_and_no_weights() -> None:
    forged = [torch.tensor([-1e9, 0.0, 1e-30, 5.0]), GOOD["tensors"][1]]
    answer = arrived(replace(UPDATES, votes=True, weighs_samples=False), tensors=forged, weight=1e6)
    assert isinstance(answer, Answer)
    assert answer.update.weight == 1
    # the last is a buffer's
    assert answer.update.update_M.tolist() == [-1, 1, 1, 5]
