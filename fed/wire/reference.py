"""Public reference of a run: the model as coordinator and clients hold it, moved on both sides by the same bytes.

.. math::
    x̂ ← x̂ + C(x - x̂), Ŵ ← Ŵ + M(F)

x are the parameters, encoded by C where the run has codecs of differences. W are matrices that the coordinator alone
moves, by a movement M of which factors F travel. The reference has a name that follows from its first numbers and from
all differences since, so that equal names mean equal numbers, whichever server or node they come from.

Shapes: see :mod:`fed.vectors.layout`.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from fed.compression.codec import CodecState, Draw
from fed.compression.feedback import Encoder
from fed.errors import InvalidPayload
from fed.storage.serialization import bytes_of
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, torch
from fed.wire.messages import Difference

__all__ = ["Movement", "Reference"]

Movement: TypeAlias = Callable[[Tensor], Tensor]
"""Function from factors to the movement [J] that they stand for, in float64."""

# Enough that no two versions share a name by chance.
_NAME_BYTES = 16


class Reference(NamedTuple):
    """A version of the reference.

    Args:
        name: name of these numbers.
        numbers_KP: parameters of the model, then the broadcast tensors of the same length, in the model's type, [K, P];
            no rows where differences are not encoded.
        moved_J: values that the coordinator alone moves, in the model's type; empty unless movements travel as factors.
    """

    name: str
    numbers_KP: Tensor
    moved_J: Tensor

    @classmethod
    def first(cls, numbers_KP: Tensor, moved_J: Tensor | None = None) -> "Reference":
        """The first version of a run, which is sent as it is; what is moved is empty unless given."""
        moved_J = numbers_KP.new_zeros(0) if moved_J is None else moved_J
        return cls(_digest("", [numbers_KP, moved_J]), numbers_KP, moved_J)

    def towards(
        self,
        model_KP: Tensor,
        number: int,
        encoder: Encoder | None,
        state: CodecState,
        streams: Streams,
        *,
        factors: Tensor | None = None,
        movement: Movement | None = None,
    ) -> tuple["Reference", Difference, CodecState]:
        """The next version, with the difference to it and the state of the codecs after it.

        Args:
            model_KP: model that the reference follows.
            number: version of the model.
            encoder: encoder of differences; None: parameters go whole, beside the difference.
            state: state of the codecs, [K, ·] each.
            streams: random streams of the run.
            factors: factors of the movement of W; None: it does not travel as factors.
            movement: function that finds the movement; None likewise.
        """
        messages: list[Tensor] = []
        kept: dict[str, Tensor] = {}
        numbers_KP = self.numbers_KP
        moved_J = self.moved_J
        if encoder is not None:
            sent = encoder.encode(model_KP, {**state, "sent": numbers_KP}, self._draw(number, streams))
            messages += sent.messages
            kept = dict(sent.counted)
            # Rounded as the clients round it, who must hold the same bits.
            numbers_KP = kept.pop("sent").to(numbers_KP.dtype)
        if factors is not None and movement is not None:
            factors = factors.to(moved_J.dtype)
            messages.append(factors)
            moved_J = self._after(factors, movement)
        after = _digest(self.name, messages)
        difference = Difference(number=number, before=self.name, after=after, messages=tuple(messages))
        return Reference(after, numbers_KP, moved_J), difference, kept

    def moved(
        self, difference: Difference, encoder: Encoder | None, streams: Streams, movement: Movement | None = None
    ) -> "Reference":
        """The version after a difference.

        Args:
            difference: untrusted difference.
            encoder: encoder of differences; None: parameters go whole, beside the difference.
            streams: random streams of the run.
            movement: function that finds the movement of W from factors; None: none travels as factors.

        Raises:
            InvalidPayload: if the difference does not lead to the version that it names, or cannot be decoded.
        """
        # Before it is decoded: a wrong base would give numbers that look right.
        if _digest(self.name, difference.messages) != difference.after:
            raise InvalidPayload("the difference does not lead to the version of the model that was announced")
        numbers_KP = self.numbers_KP
        moved_J = self.moved_J
        coded = difference.messages[: len(numbers_KP)]
        if encoder is not None:
            decoded_KP = encoder.decode(coded, self._draw(difference.number, streams))
            numbers_KP = (numbers_KP + decoded_KP).to(numbers_KP.dtype)
        if movement is not None:
            moved_J = self._after(difference.messages[-1], movement)
        return Reference(difference.after, numbers_KP, moved_J)

    def _after(self, factors: Tensor, movement: Movement) -> Tensor:
        """W after the movement of these factors, in the model's type.

        Raises:
            InvalidPayload: if they are no factors of this model, or do not move it to numbers.
        """
        moved_J: Tensor = (self.moved_J.double() + movement(factors.double())).to(self.moved_J.dtype)
        if not bool(torch.isfinite(moved_J).all()):
            raise InvalidPayload("factors must move the model to finite numbers, got others")
        return moved_J

    def _draw(self, number: int, streams: Streams) -> Draw:
        rows = range(len(self.numbers_KP))
        return Draw(streams, rounds=[number] * len(rows), clients=rows, purpose="downlink codec")


def _digest(name: str, tensors: Sequence[Tensor]) -> str:
    digest = hashlib.blake2b(name.encode(), digest_size=_NAME_BYTES)
    for tensor in tensors:
        # Lengths too: else two lists of tensors could give the same bytes.
        digest.update(len(tensor).to_bytes(8, "little"))
        digest.update(bytes_of(tensor))
    return digest.hexdigest()
