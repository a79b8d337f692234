"""The format of a run's messages: parts, lengths, types, codecs and sizes, made once when the run is prepared.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from fed.compression.chain import CodecChain
from fed.compression.codec import Codec, CodecState, Draw, Values
from fed.compression.contract import check_chain
from fed.compression.feedback import EF21, Encoder, ErrorFeedback, NoFeedback
from fed.compression.lossless import Zstd
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, torch
from fed.wire.payloads import TensorSpec

if TYPE_CHECKING:
    from fed.protocol.protocol_pb2 import Assignment

__all__ = ["MOST_DIFFERENCES", "Format", "Outgoing", "TaskSpec"]

MOST_DIFFERENCES = 64
"""Largest number of differences that a client is sent: one that is further behind gets the whole model."""


class Outgoing(NamedTuple):
    """The encoded messages of K clients.

    Args:
        payloads: tensors of each message, as ``uplink`` describes them, without the integers.
        update_KM: updates as the coordinator finds them, in float64; under secure aggregation none, of width 0.
        sizes: bytes of each client's tensors but the integers, where they depend on the codecs; else empty.
        counted: states that the clients keep for the codecs once their messages count, [K, ·] each.
        lost: states that the clients keep for the codecs if the messages are lost, [K, ·] each.
        overflown: row → reason why its client's message has no lanes, under secure aggregation.
        lanes_KL: lanes of the messages under secure aggregation; else None.
    """

    payloads: list[tuple[Tensor, ...]]
    update_KM: Tensor
    sizes: tuple[int, ...] = ()
    counted: CodecState = MappingProxyType({})
    lost: CodecState = MappingProxyType({})
    overflown: Mapping[int, str] = MappingProxyType({})
    lanes_KL: Tensor | None = None


class TaskSpec(NamedTuple):
    """Tensors of tasks, as agreed; a node holds a server to them.

    Args:
        model: tensors of a task that brings the whole model.
        difference: tensors of each difference, in a task that brings differences.
        beside: tensors that follow the differences.
    """

    model: tuple[TensorSpec, ...] = ()
    difference: tuple[TensorSpec, ...] = ()
    beside: tuple[TensorSpec, ...] = ()

    def of(self, assignment: "Assignment") -> tuple[TensorSpec, ...]:
        """The tensors of a task's payload."""
        if not assignment.since:
            return self.model
        return (*self.difference * min(len(assignment.differences), MOST_DIFFERENCES), *self.beside)


@dataclass(frozen=True)
class Format:
    """Tensors that travel between a coordinator and its clients.

    A client whose whole message is its update sends the trained model: the coordinator finds the update in float64
    without a rounding. All other messages travel in the model's type, float32 for most: that halves their bytes, and
    moves each number by at most 2⁻²⁴ of itself, far less than the noise of a mini-batch.

    Args:
        dtype: type of the model, and of values on the wire.
        parts: number of values in each part of a client's message, the update first.
        buffers: number of values in the float buffers' update, which follows the parts.
        integers: number of values in the integer buffers.
        parameters: number of parameters; codecs encode parts of this length.
        broadcast: number of values in each tensor that goes out beside the model in the first round.
        later_broadcast: number of values in each of these tensors in later rounds.
        sends_models: True if clients send their trained model in place of a message.
        codecs: chain of codecs that encodes values, first to last.
        layers: shapes of the parameters' tensors, one after another, for codecs that look at them.
        error_feedback: error feedback around the codecs.
        weighs_samples: True if a client's weight is its number of samples; known to the coordinator alone.
        weighs_alike: True if all clients have a weight of 1; known to the coordinator alone.
        downlink_codecs: chain of codecs for the differences of models that go out, first to last.
        votes: True if parameters of a message count by their signs alone; known to the coordinator alone.
        fixed: fixed point by which messages become lanes that are masked and added; None where each travels by itself.
        moved: number of values that follow the model's buffers on the way to clients, and never come back.
        is_factored: True if movements of these values may travel as factors, in place of the values.
        hides_numbers: True if clients tell neither losses nor numbers of samples, and weigh 1, under differential
            privacy.
        clip: largest L2 norm of a message that the coordinator accepts; None: no bound.
        has_bits: True if messages are in units of the task's clip, and a number follows each that says whether it was
            clipped.

    Example:
        >>> plain = Format(torch.float32, (10,), buffers=2, integers=1, parameters=10, sends_models=True)
        >>> plain.numbers, plain.uplink_bytes, plain.downlink_bytes
        (12, 56, 56)
    """

    dtype: "torch.dtype"
    parts: tuple[int, ...]
    buffers: int = 0
    integers: int = 0
    parameters: int = 0
    broadcast: tuple[int, ...] = ()
    later_broadcast: tuple[int, ...] = ()
    sends_models: bool = False
    codecs: tuple[Codec | Zstd, ...] = ()
    layers: "tuple[torch.Size, ...]" = ()
    error_feedback: ErrorFeedback = field(default_factory=NoFeedback)
    weighs_samples: bool = True
    weighs_alike: bool = False
    downlink_codecs: tuple[Codec | Zstd, ...] = ()
    votes: bool = False
    fixed: FixedPoint | None = None
    moved: int = 0
    is_factored: bool = False
    hides_numbers: bool = False
    clip: float | None = None
    has_bits: bool = False

    @property
    def most_clients(self) -> int:
        """Clients of a session of secure aggregation; 0 without."""
        return self.fixed.most_clients if self.fixed else 0

    @cached_property
    def encoder(self) -> Encoder | None:
        """The codecs with their error feedback, for a part as long as the parameters; None where none is encoded."""
        if not self.codecs or self.parameters not in self.parts:
            return None
        return Encoder(self.chain(self.codecs), self.error_feedback)

    @cached_property
    def downlink_encoder(self) -> Encoder | None:
        """The codecs of the differences of models that go out; None where models go out whole.

        The error of a difference is part of the next one, so that a chain is scaled as under error feedback.
        """
        return Encoder(self.chain(self.downlink_codecs), EF21()) if self.downlink_codecs else None

    @property
    def sends_differences(self) -> bool:
        """True if clients that have an earlier model may be sent what has changed since."""
        return bool(self.downlink_codecs) or self.is_factored

    @cached_property
    def followed(self) -> int:
        """K, the vectors as long as the parameters whose differences are encoded."""
        return 1 + sum(self._are_broadcast_coded) if self.downlink_codecs else 0

    def chain(self, codecs: tuple[Codec | Zstd, ...]) -> CodecChain:
        """A chain of codecs for vectors as long as the parameters, in float32 unless the model is wider."""
        wide = self.dtype if self.dtype in (torch.float32, torch.float64) else torch.float32
        return CodecChain(codecs, Values(self.parameters, wide, self.layers))

    def check_codecs(self) -> None:
        """Encode and decode a message of zeros, so that a codec that breaks its contract is named before the run.

        Raises:
            InvalidExperiment: if a codec fails, or writes more than it says.
        """
        for key, encoder in (("uplink", self.encoder), ("downlink", self.downlink_encoder)):
            if encoder is not None:
                check_chain(key, encoder.chain)
                encoder.init()

    def codec_state(self) -> CodecState:
        """State that codecs keep of a client before its first task, [·] each: of all coded parts, one after another."""
        kept = self.encoder.init() if self.encoder else {}
        return {name: part.repeat(self.coded) for name, part in kept.items()}

    @property
    def numbers(self) -> int:
        """M, the numbers of a client's message with its float buffers."""
        return sum(self.sizes)

    @property
    def part_sizes(self) -> list[int]:
        """The numbers of each part and of the float buffers."""
        return [*self.parts, self.buffers]

    @property
    def sizes(self) -> list[int]:
        """The numbers of each part, and those that follow: float buffers, and what says whether it was clipped."""
        return [*self.parts, self.buffers + self.has_bits]

    @cached_property
    def uplink(self) -> tuple[TensorSpec, ...]:
        """The tensors of one client's message on the wire, integers last."""
        if self.fixed is not None:
            return TensorSpec(self.fixed.dtype, self.fixed.lanes), TensorSpec(torch.int64, 0)
        coded = [TensorSpec(torch.uint8, self.encoder.most_bytes, True)] * self.coded if self.encoder else []
        raw = sum(self.sizes) - self.coded * self.parameters
        values = [TensorSpec(self.dtype, raw)] if raw or not coded else []
        return (*coded, *values, TensorSpec(torch.int64, self.integers))

    @cached_property
    def uplink_bytes(self) -> int:
        """Bytes of one client's message; where they depend on its numbers, the most before lossless compression."""
        coded = self.coded * self.encoder.size_bytes if self.encoder and self.fixed is None else 0
        return coded + sum(spec.size_bytes for spec in self.uplink if spec.dtype != torch.uint8)

    @property
    def downlink(self) -> tuple[TensorSpec, ...]:
        """The tensors of a task of the first round: the model, its integers, and what is broadcast."""
        numbers = self.parameters + self.buffers + self.moved
        model = TensorSpec(self.dtype, numbers), TensorSpec(torch.int64, self.integers)
        return (*model, *(TensorSpec(self.dtype, numbers) for numbers in self.broadcast))

    @cached_property
    def downlink_bytes(self) -> int:
        """Bytes of a task of the first round."""
        return sum(spec.size_bytes for spec in self.downlink)

    @cached_property
    def later_downlink_bytes(self) -> int:
        """Bytes of a task of a later round, in which more may be broadcast."""
        return self.downlink_bytes + (sum(self.later_broadcast) - sum(self.broadcast)) * self.dtype.itemsize

    @cached_property
    def difference(self) -> tuple[TensorSpec, ...]:
        """The tensors of one difference of models that go out; none where models go out whole."""
        encoder = self.downlink_encoder
        coded = [TensorSpec(torch.uint8, encoder.most_bytes, True)] * self.followed if encoder else []
        # More factors than values are never sent.
        factors = [TensorSpec(self.dtype, self.moved, True)] if self.is_factored else []
        return (*coded, *factors)

    def difference_bytes(self, factors: int = 0) -> int:
        """Bytes of a difference with so many factors, or the most of them before lossless compression."""
        coded_bytes = self.downlink_encoder.size_bytes * self.followed if self.downlink_encoder else 0
        return coded_bytes + factors * self.dtype.itemsize

    def later_task_bytes(self, behind: int, factors: int = 0) -> int:
        """Bytes of a task of a later round.

        Args:
            behind: number of differences that the client lacks.
            factors: number of factors in each of them.
        """
        numbers = self.parameters * self.followed + (self.moved if self.is_factored else 0)
        whole_bytes = numbers * self.dtype.itemsize
        saved_bytes = whole_bytes - behind * self.difference_bytes(factors) if behind <= MOST_DIFFERENCES else 0
        return self.later_downlink_bytes - max(saved_bytes, 0)

    @property
    def beside(self) -> tuple[TensorSpec, ...]:
        """The tensors of a task that go with differences: float buffers, integers, and what is broadcast but coded."""
        model, integers, *broadcast = self.downlink
        coded = zip(broadcast, self._are_broadcast_coded, strict=True)
        rest = [part for part, is_coded in coded if not is_coded]
        return (model._replace(numbers=self._end_of_whole - self._begin_of_whole), integers, *rest)

    def split_model(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The numbers [K, P] and [J] of a model that differences are of, and the tensors that go beside differences.

        Args:
            tensors: tensors of the model, as ``downlink`` describes them.
        """
        model_V, integers_I, *broadcast = tensors
        places = [*zip(broadcast, self._are_broadcast_coded, strict=True)]
        coded = [part for part, is_coded in places if is_coded]
        rest = [part for part, is_coded in places if not is_coded]
        if self.downlink_codecs:
            numbers_KP = torch.stack([model_V[: self.parameters], *coded])
        else:
            numbers_KP = model_V.new_zeros(0, self.parameters)
        whole = model_V[self._begin_of_whole : self._end_of_whole]
        return numbers_KP, model_V[self._end_of_whole :], (whole, integers_I, *rest)

    def join_model(self, numbers_KP: Tensor, moved_J: Tensor, beside: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The model's tensors, as ``downlink`` says, from what :meth:`split_model` gave.

        Args:
            numbers_KP: rows that differences are of.
            moved_J: values that the coordinator alone moves, where its movements travel as factors; else empty.
            beside: tensors that go beside differences.
        """
        coded = [*numbers_KP.unbind()]
        model_P = coded[:1]
        del coded[:1]
        whole, integers_I, *rest = beside
        broadcast = [(coded if is_coded else rest).pop(0) for is_coded in self._are_broadcast_coded]
        return (torch.cat([*model_P, whole, moved_J]), integers_I, *broadcast)

    @property
    def _begin_of_whole(self) -> int:
        """Place in a model of the first value that goes beside differences as it is."""
        return self.parameters if self.downlink_codecs else 0

    @property
    def _end_of_whole(self) -> int:
        """Place in a model behind the last value that goes beside differences as it is."""
        return self.parameters + self.buffers + (0 if self.is_factored else self.moved)

    @cached_property
    def _are_broadcast_coded(self) -> list[bool]:
        return [bool(self.downlink_codecs) and numbers == self.parameters for numbers in self.broadcast]

    def encode(self, update_KM: Tensor, state: CodecState, draw: Draw) -> Outgoing:
        """Encode messages that are no trained models.

        Args:
            update_KM: finite messages, [K, M].
            state: states that the clients keep for the codecs, [K, ·] each.
            draw: the random streams.
        """
        if self.encoder is None:
            # Rounded to the type on the wire like a real node's message: simulated and deployed runs end with the same
            # bits.
            values_KM = update_KM.to(self.dtype)
            return Outgoing([(row_M,) for row_M in values_KM], self.counted(values_KM).double())
        encoder = self.encoder
        parts = update_KM.split_with_sizes(self.sizes, 1)
        coded = [part for part, is_coded in zip(parts, self.are_coded, strict=True) if is_coded]
        kept = {name: part.chunk(len(coded), 1) for name, part in state.items()}
        sent = [
            encoder.encode(part, {name: of_parts[place] for name, of_parts in kept.items()}, draw)
            for place, part in enumerate(coded)
        ]
        raw_KR = torch.cat([part for part, is_coded in zip(parts, self.are_coded, strict=True) if not is_coded], 1)
        values = [raw_KR.to(self.dtype)] if raw_KR.shape[1] else []
        payloads = [*zip(*(one.messages for one in sent), *values, strict=True)]
        decoded_KM = self._joined([one.decoded_KM for one in sent], values)
        counted, lost = (
            {name: torch.cat([of[name] for of in states], 1) for name in states[0]}
            for states in ([one.counted for one in sent], [one.lost for one in sent])
        )
        sizes = tuple(sum(tensor.nbytes for tensor in payload) for payload in payloads)
        return Outgoing(payloads, decoded_KM, sizes=sizes, counted=counted, lost=lost)

    @cached_property
    def summed_sizes(self) -> list[int]:
        """The numbers of each part and of the float buffers as the coordinator adds them."""
        coded = self.encoder.chain.summed.numbers if self.encoder else 0
        sizes = zip(self.sizes, self.are_coded, strict=True)
        return [coded if is_coded else numbers for numbers, is_coded in sizes]

    @property
    def sum_bytes(self) -> int:
        """Bytes of a sum of clients' messages, which nothing encodes."""
        return sum(self.summed_sizes) * self.dtype.itemsize + self.integers * torch.int64.itemsize

    def read(self, mean_M: Tensor, streams: Streams, number: int) -> Tensor:
        """Read the mean of decoded messages, [M], where codecs leave that to the end.

        Args:
            mean_M: the mean of the messages as the coordinator adds them.
            streams: random streams of the run.
            number: number of the round, from 1.
        """
        if self.encoder is None:
            return mean_M
        draw = Draw(streams, [number], [0])
        chain = self.encoder.chain
        if self.fixed is not None:
            parts = zip(mean_M.split_with_sizes(self.linear_sizes), self.are_coded, strict=True)
            dtype = chain.values.dtype
            read = [
                chain.from_linear(part[None].to(dtype), draw)[0].double() if is_coded else part
                for part, is_coded in parts
            ]
            return torch.cat(read)
        if not chain.reads_sums:
            return mean_M
        parts = zip(mean_M.split_with_sizes(self.summed_sizes), self.are_coded, strict=True)
        read = [chain.read(part[None], draw)[0].double() if is_coded else part for part, is_coded in parts]
        return torch.cat(read)

    @cached_property
    def linear_sizes(self) -> list[int]:
        """The numbers of each part and of the float buffers as a common chain leaves them."""
        coded = self.encoder.chain.stages[-1].numbers if self.encoder else 0
        return [coded if is_coded else size for size, is_coded in zip(self.sizes, self.are_coded, strict=True)]

    def decode(self, payload: Sequence[Tensor], draw: Draw) -> Tensor:
        """Decode one client's message [M]; in the type on the wire where nothing is encoded.

        Args:
            payload: tensors of the message without the integers, untrusted but of the types and lengths of ``uplink``.
            draw: the random streams with which it was encoded.

        Raises:
            InvalidPayload: if it cannot be decoded.
        """
        if self.encoder is None:
            return self.counted(payload[0][None])[0]
        coded = [self.encoder.decode([message], draw) for message in payload[: self.coded]]
        return self._joined(coded, [part[None] for part in payload[self.coded :]])[0]

    def _joined(self, coded: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Messages [K, M] in float64 from their coded parts and from the values that go raw."""
        left = [*coded]
        raw = values[0].double() if values else None
        parts = []
        for numbers, is_coded in zip(self.sizes, self.are_coded, strict=True):
            if is_coded:
                parts.append(left.pop(0).double())
            elif raw is not None:
                parts.append(raw[:, :numbers])
                raw = raw[:, numbers:]
        return self.counted(torch.cat(parts, 1))

    def counted(self, update_KM: Tensor) -> Tensor:
        """Updates as they count: of votes the signs."""
        if not self.votes:
            return update_KM
        votes_KP, buffers_KR = update_KM.split_with_sizes([sum(self.sizes[:-1]), self.sizes[-1]], 1)
        return torch.cat([torch.where(votes_KP >= 0, 1, -1).to(update_KM.dtype), buffers_KR], 1)

    @cached_property
    def are_coded(self) -> list[bool]:
        """True for each part that is encoded; the float buffers are not."""
        return [self.encoder is not None and numbers == self.parameters for numbers in self.parts] + [False]

    @cached_property
    def coded(self) -> int:
        """Number of parts that are encoded."""
        return sum(self.are_coded)
