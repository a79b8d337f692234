"""Reference that a node keeps in its folder, so that differences of models are enough for it.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Sequence
from pathlib import Path

from fed.errors import InvalidCheckpoint, InvalidPayload
from fed.protocol import protocol_pb2 as pb
from fed.storage.checkpoints import Checkpoints
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor
from fed.wire.format import Format
from fed.wire.messages import Difference
from fed.wire.payloads import check_tensors, type_name
from fed.wire.reference import Movement, Reference

__all__ = ["KeptReference"]


class KeptReference:
    """A client's side of :class:`fed.wire.reference.Reference`.

    Args:
        message: the format of messages.
        streams: random streams of the run.
        folder: folder of the reference.
        movement: function from factors to the movement that they stand for; None: none travels as factors.
    """

    def __init__(self, message: Format, streams: Streams, folder: Path, movement: Movement | None = None) -> None:
        self._message = message
        self._streams = streams
        self._movement = movement if message.is_factored else None
        self._folder = Checkpoints(folder, 1)

    def model(self, assignment: pb.Assignment, tensors: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """The model of a task, as the format's ``downlink`` lays it out; None if its differences start elsewhere.

        Args:
            assignment: the task, as the server told it.
            tensors: payload of the task.

        Raises:
            InvalidPayload: if the differences do not lead to the model that the server names.
        """
        message = self._message
        encoder = message.downlink_encoder
        differences = assignment.differences
        if not message.sends_differences and (assignment.since or assignment.reference):
            raise InvalidPayload("the server sends differences of models, which the plan's downlink does not name")
        if not message.sends_differences:
            return tensors
        if not assignment.since:
            numbers_KP, moved_J, _ = message.split_model(tensors)
            self._keep(Reference(assignment.reference, numbers_KP, moved_J))
            return tensors
        count = len(message.difference)
        messages = tensors[: count * len(differences)]
        beside = tensors[count * len(differences) :]
        check_tensors([(type_name(one.dtype), one.numel()) for one in messages], message.difference * len(differences))
        held = self._held()
        names = [assignment.since, *(one.after for one in differences)]
        # The node answers that it lacks the model, and the server sends all of it.
        if held is None or held.name not in names:
            return None
        missing = range(names.index(held.name), len(differences))
        for place in missing:
            said = differences[place]
            of_one = tuple(messages[place * count : (place + 1) * count])
            difference = Difference(number=said.number, before=held.name, after=said.after, messages=of_one)
            held = held.moved(difference, encoder, self._streams, self._movement)
        if missing:
            self._keep(held)
        return message.join_model(held.numbers_KP, held.moved_J, beside)

    def _held(self) -> Reference | None:
        try:
            newest = self._folder.newest()
        except InvalidCheckpoint:
            return None
        if newest is None or newest[1].keys() != set(Reference._fields):
            return None
        held = Reference(**newest[1])
        # What another experiment left in this folder is no reference.
        message = self._message
        numbers = message.followed, message.parameters
        moved = message.moved if message.is_factored else 0
        return held if (*held.numbers_KP.shape, *held.moved_J.shape) == (*numbers, moved) else None

    def _keep(self, reference: Reference) -> None:
        self._folder.write(0, reference._asdict())
