"""The way in at the server: what becomes of clients' messages until they move the model, as one pipeline.

    validate → decode, or unmask → mean → stages → apply

It is the mirror of :mod:`fed.clients.way_out`.

- *validate*, *decode*: what real nodes send (:func:`received`); simulated messages are decoded where they are encoded.
- *unmask*: under secure aggregation a session gives the sum alone (:class:`fed.server.secure_fleet.SecureFleet`).
- *mean*: of the updates that count (:class:`fed.server.accumulator.UpdateAccumulator`), or what a rule that sees each
  of them makes of them; codecs that leave it to the end read it.
- *stages*: the experiment's ``stages``, such as noise, change the mean. Those that act alone do so in rounds in which
  no update counts, too.
- *apply*: the algorithm moves the model.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fed.aggregators.base import Aggregator, Reduced
from fed.compression.codec import Draw
from fed.compression.stage import Stage
from fed.errors import InvalidPayload
from fed.protocol.protocol_pb2 import Answer as AnswerHeader
from fed.server.accumulator import UpdateAccumulator
from fed.server.fleet import Fleet
from fed.server.sent_sum import SentSum
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, torch
from fed.wire.format import Format
from fed.wire.messages import LARGEST, Answer, Lanes, Task, TrainedModel, Update, one_line, refusal_of_numbers
from fed.wire.payloads import check_tensors, type_name

__all__ = ["WayIn", "received"]


def received(task: Task, header: AnswerHeader, tensors: Sequence[Tensor], message: Format, streams: Streams) -> Answer:
    """Validate and decode what a client sent.

    A trained model stays as it came, so that no copy of it is made.

    Args:
        task: task that the message answers.
        header: numbers that came with the tensors.
        tensors: tensors of the message, integers last.
        message: format of clients' messages.
        streams: random streams of the run, for codecs.

    Returns:
        The update as it is counted.

    Raises:
        InvalidPayload: if it must not touch the model.
    """
    check_tensors([(type_name(tensor.dtype), tensor.numel()) for tensor in tensors], message.uplink)
    # before any tensor is looked at: numbers cost nothing to check
    if reason := refusal_of_numbers(header.samples, header.weight, header.train_loss):
        raise InvalidPayload(reason)
    expected = header.samples if message.weighs_samples else 1
    if message.error_feedback.adds_up and header.weight != expected:
        raise InvalidPayload(f"under error_feedback ef21 the weight must be {expected}, got {header.weight:g}")
    *payload, integers_I = tensors
    # before anything is decoded: codecs rely on finite numbers
    for values in payload:
        _refuse_unusable(values)
    if message.fixed is not None:  # masked: there is nothing to be decoded, or to be known of one client
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        return Answer(
            tasks=(task.id,),
            round=task.round,
            clients=(task.client,),
            content=Lanes(payload[0]),
            integers_I=integers_I,
            size_bytes=size_bytes,
        )
    draw = Draw(streams, [task.round], [task.client])
    try:
        update_M = message.decode(payload, draw)
    except Exception as error:  # a codec may trip over values that nobody would encode
        reason = f"the payload cannot be decoded: {type(error).__name__}: {one_line(str(error))}"
        raise InvalidPayload(reason) from error
    if message.encoder:
        _refuse_unusable(update_M)  # what a codec makes of finite numbers may not be finite
    weight = 1.0 if message.votes else header.weight
    sends_model = message.sends_models
    return Answer(
        tasks=(task.id,),
        round=task.round,
        clients=(task.client,),
        content=TrainedModel(update_M, task.model.params_V, weight) if sends_model else Update(update_M, weight),
        integers_I=integers_I,
        samples=(header.samples,),
        train_losses=(header.train_loss,),
        size_bytes=sum(tensor.nbytes for tensor in tensors),
    )


def _refuse_unusable(values: Tensor) -> None:
    """Refuse values that must not touch the model."""
    if not values.numel() or not values.is_floating_point():
        return
    lowest, highest = torch.aminmax(values)  # both are NaN where one number is
    largest = max(-float(lowest), float(highest))
    if not largest <= LARGEST:  # so written, NaN is refused
        raise InvalidPayload(f"the vector must be finite and within ±{LARGEST:.0e}, got {largest}")


@dataclass(eq=False)
class WayIn:
    """The way in from the updates that count to the model, composed once when a run is prepared.

    Attributes:
        sent_sum: sum of all that clients have sent, where messages say how updates have changed; else None.

    Args:
        aggregator: algorithm, which moves the model.
        fleet: fleet of the clients.
        message: format of clients' messages.
        streams: random streams of the run.
        stages: changes of the mean; stages that change updates alone are left out.
    """

    aggregator: Aggregator
    fleet: Fleet
    message: Format
    streams: Streams
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        """Begin before the first round."""
        self.stages = tuple(stage for stage in self.stages if stage.changes_mean)
        self.sent_sum = SentSum(self.message) if self.message.error_feedback.adds_up else None

    @property
    def acts_alone(self) -> bool:
        """True if the model moves in rounds in which no update counts, too."""
        return any(stage.acts_alone for stage in self.stages)

    def apply(
        self, state: Any, accumulator: UpdateAccumulator | None, number: int, population: int, share: float | None
    ) -> tuple[Any, Tensor]:
        """Make the mean of the updates that count, change it, and apply it.

        Args:
            state: state of the algorithm.
            accumulator: accumulator of the updates; None where none counts: their mean is 0.
            number: number of the round, from 1.
            population: number N of clients that have ever registered.
            share: share of all clients that the updates come from, where the mean over all is wanted, in which the
                updates of the others are 0; None: the mean of the updates that came.

        Returns:
            The algorithm's next state, and the mean update of the float buffers, of which there may be none.
        """
        if accumulator is None:
            mean_M = torch.zeros(self.message.numbers, dtype=torch.float64)
            replied = 0
        else:
            state, mean_M = self._mean(state, accumulator, number=number, share=share)
            replied = len(accumulator.replied)
        clients = replied if share is None else len(self.fleet.registered())  # that the mean is over
        for place, stage in enumerate(self.stages):
            draw = Draw(self.streams, rounds=[number], clients=[0], purpose=f"stage {place} of the mean")
            mean_M = stage.change_mean(mean_M, clients, draw)
        parts = len(self.message.parts)
        is_one = parts == 1 and not self.message.buffers
        mean = (mean_M,) if is_one else mean_M.split_with_sizes(self.message.sizes)
        reduced = Reduced(mean[:parts], clients=clients, population=population, stream=partial(self._stream, number))
        return self.aggregator.apply(state, reduced), mean[-1]

    def _mean(self, state: Any, accumulator: UpdateAccumulator, number: int, share: float | None) -> tuple[Any, Tensor]:
        """The state that a rule which sees each update leaves, and the mean update [M]."""
        if self.aggregator.linear:
            mean_M = accumulator.mean()
        else:
            state, mean_M = self.aggregator.combine(state, *accumulator.rows(), self._stream(number))
        if share is not None and share != 1.0:  # a product with 1 would be a copy of the model
            mean_M = mean_M * share
        if self.sent_sum is not None:
            mean_M = self.sent_sum.add(mean_M, accumulator, self.fleet)
        return state, self.message.read(mean_M, self.streams, number)

    def _stream(self, number: int) -> np.random.Generator:
        return self.streams.generator("combine", number)
