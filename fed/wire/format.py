"""The format of a run's messages: parts, lengths, types, codecs and sizes, made once when the run is prepared.

Shapes: see :mod:`fed.layout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fed.compression.codec import Codec, Draw, TensorSpec
from fed.errors import InvalidExperiment, InvalidPayload
from fed.randomness import Streams

if TYPE_CHECKING:
    from fed.wire.protocol_pb2 import Format as FormatHeader

__all__ = ["Format"]

_MOST_CLIENTS = 1 << 20


@dataclass(frozen=True)
class Format:
    """Tensors that travel between a coordinator and its clients.

    A client whose whole message is its update sends the trained model: the coordinator finds the update in float64
    without a rounding. All other messages travel in the model's type, float32 for most: that halves their bytes, and
    moves each number by at most 2⁻²⁴ of itself, far less than the noise of a mini-batch.

    Args:
        dtype: the model's type, which values have on the wire.
        parts: numbers of each part of a client's message, the update first.
        buffers: numbers of the float buffers' update, which follows the parts.
        integers: numbers of the integer buffers.
        parameters: numbers of the parameters; codecs encode parts of this length.
        broadcast: numbers of each tensor that goes out beside the model in the first round.
        later_broadcast: the same in later rounds.
        sends_models: clients send their trained model in place of a message.
        codecs: the chain that encodes values, first to last.
        weighs_samples: a client's weight is its number of samples; known to the coordinator alone.

    Example:
        >>> plain = Format(torch.float32, (10,), buffers=2, integers=1, parameters=10, sends_models=True)
        >>> plain.numbers, plain.uplink_bytes, plain.downlink_bytes
        (12, 56, 56)
    """

    dtype: torch.dtype
    parts: tuple[int, ...]
    buffers: int = 0
    integers: int = 0
    parameters: int = 0
    broadcast: tuple[int, ...] = ()
    later_broadcast: tuple[int, ...] = ()
    sends_models: bool = False
    codecs: tuple[Codec, ...] = ()
    weighs_samples: bool = True

    def header(self) -> "FormatHeader":
        """The format as a plan says it; nodes know the codecs from the experiment."""
        from fed.wire.protocol_pb2 import Format as FormatHeader

        others = {name: getattr(self, name) for name in FormatHeader.DESCRIPTOR.fields_by_name if name != "dtype"}
        return FormatHeader(dtype=str(self.dtype).removeprefix("torch."), **others)

    @classmethod
    def of(cls, header: "FormatHeader", own: "Format") -> "Format":
        """The format that a plan says, held to the node's own model and algorithm.

        Args:
            header: from a server.
            own: the format that the node's own experiment has with one client.

        Raises:
            InvalidPayload: if the server's model or algorithm is another.
        """
        ours = str(own.dtype), own.parameters, own.buffers, own.integers
        theirs = f"torch.{header.dtype[:20]}", header.parameters, header.buffers, header.integers
        if ours != theirs:
            raise InvalidPayload(
                f"the server's model must have the type, parameters, buffers and integers {ours}, got {theirs}: do "
                "both run the same version of fed, and of the model's code?"
            )
        kept = own.sends_models, len(own.parts), len(own.broadcast)
        said = header.sends_models, len(header.parts), len(header.broadcast)
        lengths = zip([*header.parts, *header.broadcast], [*own.parts, *own.broadcast], strict=False)
        if kept != said or any(numbers != expected and numbers > _MOST_CLIENTS for numbers, expected in lengths):
            lists = [*header.parts[:4]], [*header.broadcast[:4]]
            raise InvalidPayload(
                f"the server's messages must have parts of {own.parts} numbers beside {own.broadcast} broadcast, or as "
                f"many as there are clients, got {lists}: do both run the same version of fed?"
            )
        return replace(own, parts=tuple(header.parts), broadcast=tuple(header.broadcast))

    def check_codecs(self) -> None:
        """Encode and decode a message of zeros, so that a codec that breaks its contract is named before the run.

        Raises:
            InvalidExperiment: if a codec fails, or gives tensors of other types or lengths than it says.
        """
        if not self.codecs or self.parameters not in self.parts:
            return
        draw = Draw(Streams(0), [1], [0])
        specs = [TensorSpec(self.dtype, self.parameters)]
        rows_1M = torch.zeros(1, self.parameters, dtype=self.dtype)
        for codec in self.codecs:
            values, name = specs[0], type(codec).__name__
            try:
                specs = [*codec.payload(values)]
                said = [[1, spec.numbers] for spec in specs]
                payload = codec.encode(rows_1M, draw)
                made = [[*tensor.shape] for tensor in payload]
                decoded = [*codec.decode(payload, values.numbers, draw).shape] if made == said else None
            except Exception as error:
                raise InvalidExperiment(
                    f"uplink's {name} must encode and decode {values.numbers} zeros, got {type(error).__name__}: "
                    f"{error}: correct {name}"
                ) from error
            if not said or decoded != [1, values.numbers]:
                raise InvalidExperiment(
                    f"uplink's {name} must encode {values.numbers} values to shapes {said}, as its payload says, and "
                    f"decode them to [1, {values.numbers}], got {made} and {decoded}: correct {name}"
                )
            rows_1M = payload[0].to(specs[0].dtype)

    @property
    def numbers(self) -> int:
        """M, the numbers of a client's message with its float buffers."""
        return sum(self.parts) + self.buffers

    @property
    def sizes(self) -> list[int]:
        """The numbers of each part and of the float buffers."""
        return [*self.parts, self.buffers]

    @cached_property
    def uplink(self) -> tuple[TensorSpec, ...]:
        """The tensors of one client's message on the wire, integers last."""
        coded = [spec for numbers in self.parts if self._is_coded(numbers) for spec in self._payload(numbers)]
        raw = sum(numbers for numbers in self.sizes[:-1] if not self._is_coded(numbers)) + self.buffers
        values = [TensorSpec(self.dtype, raw)] if raw or not coded else []
        return (*coded, *values, TensorSpec(torch.int64, self.integers))

    @cached_property
    def uplink_bytes(self) -> int:
        """Bytes of one client's message."""
        return sum(spec.size_bytes for spec in self.uplink)

    @property
    def downlink(self) -> tuple[TensorSpec, ...]:
        """The tensors of a task of the first round: the model, its integers, and what is broadcast."""
        model = TensorSpec(self.dtype, self.parameters + self.buffers), TensorSpec(torch.int64, self.integers)
        return (*model, *(TensorSpec(self.dtype, numbers) for numbers in self.broadcast))

    @cached_property
    def downlink_bytes(self) -> int:
        """Bytes of a task of the first round."""
        return sum(spec.size_bytes for spec in self.downlink)

    @cached_property
    def later_downlink_bytes(self) -> int:
        """Bytes of a task of a later round, in which more may be broadcast."""
        return self.downlink_bytes + (sum(self.later_broadcast) - sum(self.broadcast)) * self.dtype.itemsize

    def encode(self, update_KM: Tensor, draw: Draw) -> tuple[Tensor, ...]:
        """Encode messages that are no trained models: tensors [K, ·] as ``uplink`` says, without the integers."""
        parts = update_KM.split_with_sizes(self.sizes, 1)
        coded = [self._encoded(part, draw) for part in parts[:-1] if self._is_coded(part.shape[1])]
        raw = [part for part in parts[:-1] if not self._is_coded(part.shape[1])] + [parts[-1]]
        values = [torch.cat(raw, 1).to(self.dtype)] if any(part.shape[1] for part in raw) or not coded else []
        return (*(tensor for payload in coded for tensor in payload), *values)

    def decode(self, payload: Sequence[Tensor], draw: Draw) -> Tensor:
        """Decode what :meth:`encode` made: messages [K, M]; in the type on the wire where nothing is encoded."""
        if not self.codecs:
            return payload[0]
        left = list(payload)
        coded = [self._decoded(left, numbers, draw) for numbers in self.parts if self._is_coded(numbers)]
        raw_KR = left.pop(0).double() if left else coded[0].new_zeros(len(coded[0]), 0)
        parts = []
        for numbers in self.sizes[:-1]:
            parts.append(coded.pop(0) if self._is_coded(numbers) else raw_KR[:, :numbers])
            raw_KR = raw_KR if self._is_coded(numbers) else raw_KR[:, numbers:]
        return torch.cat([*parts, raw_KR], 1)

    def received(self, update_KM: Tensor, draw: Draw) -> Tensor:
        """The messages [K, M] as the coordinator decodes them, in float64."""
        if self.sends_models or (self.dtype == torch.float64 and not self.codecs):
            return update_KM
        # Rounded to the type on the wire like a real node's message: simulated and deployed runs end with the same
        # bits.
        return self.decode(self.encode(update_KM, draw), draw).double()

    def _is_coded(self, numbers: int) -> bool:
        return bool(self.codecs) and numbers == self.parameters

    def _payload(self, numbers: int) -> list[TensorSpec]:
        """The tensors of an encoded part: each codec encodes the first tensor of the one before."""
        specs = [TensorSpec(self.dtype, numbers)]
        for codec in self.codecs:
            specs = [*codec.payload(specs[0]), *specs[1:]]
        return specs

    def _encoded(self, part_KP: Tensor, draw: Draw) -> list[Tensor]:
        tensors = [part_KP]
        for codec in self.codecs:
            tensors = [*codec.encode(tensors[0], draw), *tensors[1:]]
        specs = self._payload(part_KP.shape[1])
        return [tensor.to(spec.dtype) for tensor, spec in zip(tensors, specs, strict=True)]

    def _decoded(self, left: list[Tensor], numbers: int, draw: Draw) -> Tensor:
        """Decode a part from the first of these tensors, which leave the list."""
        steps = [TensorSpec(self.dtype, numbers)]
        for codec in self.codecs[:-1]:
            steps.append(codec.payload(steps[-1])[0])
        count = len(self._payload(numbers))
        tensors, left[:] = left[:count], left[count:]
        for codec, values in zip(reversed(self.codecs), reversed(steps), strict=True):
            own = len(codec.payload(values))
            tensors = [codec.decode(tensors[:own], values.numbers, draw), *tensors[own:]]
        return tensors[0].double()
