"""Public reference of a run: the model as coordinator and clients hold it, moved on both sides by the same bytes.

.. math:: x̂ ← x̂ + C(x - x̂)

It has a name that follows from its first numbers and from all differences since, so that equal names mean equal
numbers, whichever server or node they come from. Shapes: see :mod:`fed.vectors.layout`.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from fed.compression.codec import CodecState, Draw
from fed.compression.feedback import Encoder
from fed.errors import InvalidPayload
from fed.storage.serialization import bytes_of
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor
from fed.wire.messages import Difference

__all__ = ["Reference"]

# Enough that no two versions share a name by chance.
_NAME_BYTES = 16


class Reference(NamedTuple):
    """A version of the reference.

    Args:
        name: name of these numbers.
        numbers_KP: parameters of the model, then the broadcast tensors of the same length, in the model's type, [K, P].
    """

    name: str
    numbers_KP: Tensor

    @classmethod
    def first(cls, numbers_KP: Tensor) -> "Reference":
        """The first version of a run, which is sent as it is."""
        return cls(_digest("", [numbers_KP]), numbers_KP)

    def towards(
        self, model_KP: Tensor, number: int, encoder: Encoder, state: CodecState, streams: Streams
    ) -> tuple["Reference", Difference, CodecState]:
        """The next version, with the difference to it and the state of the codecs after it.

        Args:
            model_KP: model that the reference follows.
            number: version of the model.
            encoder: encoder of differences.
            state: state of the codecs, [K, ·] each.
            streams: random streams of the run.
        """
        sent = encoder.encode(model_KP, {**state, "sent": self.numbers_KP}, self._draw(number, streams))
        difference = Difference(
            number=number,
            before=self.name,
            after=_digest(self.name, sent.messages),
            messages=tuple(sent.messages),
        )
        kept = dict(sent.counted)
        # Rounded as the clients round it, who must hold the same bits.
        return Reference(difference.after, kept.pop("sent").to(self.numbers_KP.dtype)), difference, kept

    def moved(self, difference: Difference, encoder: Encoder, streams: Streams) -> "Reference":
        """The version after a difference.

        Args:
            difference: untrusted difference.
            encoder: encoder of differences.
            streams: random streams of the run.

        Raises:
            InvalidPayload: if the difference does not lead to the version that it names, or cannot be decoded.
        """
        # Before it is decoded: a wrong base would give numbers that look right.
        if _digest(self.name, difference.messages) != difference.after:
            raise InvalidPayload("the difference does not lead to the version of the model that was announced")
        decoded_KP = encoder.decode(difference.messages, self._draw(difference.number, streams))
        return Reference(difference.after, (self.numbers_KP + decoded_KP).to(self.numbers_KP.dtype))

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
