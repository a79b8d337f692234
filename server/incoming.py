"""The way in of client updates: validated and decoded before they touch the model.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence

from fed.compression.codec import Draw
from fed.errors import InvalidPayload
from fed.protocol.protocol_pb2 import Answer as AnswerHeader
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, torch
from fed.wire.format import Format
from fed.wire.messages import LARGEST, Answer, Task, one_line, refusal_of_numbers
from fed.wire.payloads import check_tensors, type_name

__all__ = ["received"]


def received(task: Task, header: AnswerHeader, tensors: Sequence[Tensor], message: Format, streams: Streams) -> Answer:
    """Validate and decode what a client sent.

    A trained model stays as it came, so that no copy of it is made.

    Args:
        task: that it answers.
        header: the numbers that came with the tensors.
        tensors: the payload, integers last.
        message: the format of clients' messages.
        streams: the run's, for codecs.

    Returns:
        The update as it is counted.

    Raises:
        InvalidPayload: if it must not touch the model.
    """
    check_tensors([(type_name(tensor.dtype), tensor.numel()) for tensor in tensors], message.uplink)
    if reason := refusal_of_numbers(header.samples, header.weight, header.train_loss):
        raise InvalidPayload(reason)
    expected = header.samples if message.weighs_samples else 1
    if message.error_feedback.adds_up and header.weight != expected:
        raise InvalidPayload(f"under error_feedback ef21 the weight must be {expected}, got {header.weight:g}")
    *payload, integers_I = tensors
    for values in payload:
        _refuse_unusable(values)
    if message.fixed is not None:  # masked: there is nothing to be decoded, or to be known of one client
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        return Answer((task.id,), task.round, (task.client,), payload[0], integers_I=integers_I, size_bytes=size_bytes)
    draw = Draw(streams, [task.round], [task.client])
    try:
        update_M = message.decode(payload, draw)
    except Exception as error:  # a codec may trip over values that nobody would encode
        reason = f"the payload cannot be decoded: {type(error).__name__}: {one_line(str(error))}"
        raise InvalidPayload(reason) from error
    if message.encoder:
        _refuse_unusable(update_M)  # what a codec makes of finite numbers may not be finite
    return Answer(
        (task.id,),
        task.round,
        (task.client,),
        update_M,
        1.0 if message.votes else header.weight,
        integers_I,
        (header.samples,),
        (header.train_loss,),
        sum(tensor.nbytes for tensor in tensors),
        task.model.params_V if message.sends_models else None,
    )


def _refuse_unusable(values: Tensor) -> None:
    """Refuse values that must not touch the model."""
    if not values.numel() or not values.is_floating_point():
        return
    lowest, highest = torch.aminmax(values)  # both are NaN where one number is
    largest = max(-float(lowest), float(highest))
    if not largest <= LARGEST:  # so written, NaN is refused
        raise InvalidPayload(f"the vector must be finite and within ±{LARGEST:.0e}, got {largest}")
