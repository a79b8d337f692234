"""Chain of codecs: each encodes the values that the one before it left, and one message holds the contents of all.

A message is a byte with the version, for each codec but the last the length of its content (uint32, little-endian), and
the contents. Values that no codec encodes are the last content. With :class:`fed.compression.lossless.Zstd` all bytes
behind the version are one frame. Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fed.compression.blocks import as_bytes, from_bytes
from fed.compression.codec import Codec, CodecState, Draw, Encoded, Rows, Values
from fed.compression.lossless import Zstd
from fed.compression.pieces import stacked
from fed.errors import InvalidExperiment, InvalidInput, InvalidPayload
from fed.vectors.tensors import Tensor, torch

__all__ = ["CodecChain", "check_order"]

_VERSION = 1  # the first byte of a message, by which a later format could be told apart
_LENGTH = np.dtype("<u4")


@dataclass(frozen=True)
class CodecChain:
    """Codecs, first to last, for vectors of one kind.

    Args:
        codecs: the codecs, first to last; a lossless one is the last.
        values: description of the vectors that the first codec encodes.
    """

    codecs: tuple[Codec | Zstd, ...]
    values: Values

    @cached_property
    def lossy(self) -> tuple[Codec, ...]:
        """The codecs but for a lossless one at the end."""
        return tuple(codec for codec in self.codecs if isinstance(codec, Codec))

    @cached_property
    def lossless(self) -> Zstd | None:
        """The lossless codec at the end, if there is one."""
        return next((codec for codec in self.codecs if isinstance(codec, Zstd)), None)

    @cached_property
    def stages(self) -> tuple[Values, ...]:
        """The vectors that each codec encodes, and those that are left, as long as they can be."""
        stages = [self.values]
        for codec in self.lossy:
            stages.append(codec.inner(stages[-1]))
        return tuple(stages)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of a message, or the most of them where they depend on it."""
        contents = [codec.size_bytes(values) for codec, values in zip(self.lossy, self.stages, strict=False)]
        contents += [self.stages[-1].size_bytes] if self._leaves_values else []
        return 1 + _LENGTH.itemsize * (len(contents) - 1) + sum(contents)

    @property
    def most_bytes(self) -> int:
        """Bytes of a message that nobody exceeds: a lossless codec makes some a little longer."""
        # Zstandard's own bound is size/256 and some bytes of frame: this is above it for all sizes.
        return self.size_bytes + (self.size_bytes // 128 + 512 if self.lossless else 0)

    @property
    def is_contraction(self) -> bool:
        """True if feedback can add a message's error to the next one without a scale."""
        are_contractions = all(codec.is_contraction for codec in self.lossy)
        return are_contractions and all(codec.keeps_contractions for codec in self.lossy[:-1])

    @property
    def is_common(self) -> bool:
        """True if all clients of a round encode by one linear map, so that sums of encoded values are decoded."""
        return self.lossless is None and all(codec.is_common for codec in self.lossy)

    @property
    def reads_sums(self) -> bool:
        """True if the coordinator adds the decoded values of all clients, and reads the vectors from the sum."""
        return any(codec.reads_sums for codec in self.lossy[:1])

    @property
    def summed(self) -> Values:
        """The vectors that the coordinator adds: the encoded ones, unless sums are read."""
        return self.stages[1] if self.reads_sums else self.values

    def read(self, sums_KM: Tensor, draw: Draw) -> Tensor:
        """Read sums, or means, of decoded values.

        Args:
            sums_KM: sums of vectors as ``summed`` describes them, [K, ·].
            draw: the random streams, of which only those of the whole run are used.

        Returns:
            The vectors, [K, M].
        """
        if not self.reads_sums:
            return sums_KM
        nothing = torch.empty(len(sums_KM), 0, dtype=torch.uint8)
        return self.lossy[0].decode(nothing, sums_KM, self.values, draw)

    @cached_property
    def shrinkage(self) -> float:
        """Scale that makes a common chain a contraction."""
        return math.prod(codec.shrinkage(values) for codec, values in zip(self.lossy, self.stages, strict=False))

    def linear(self, rows_KM: Tensor, draw: Draw) -> Tensor:
        """Values that a common chain makes of vectors, [K, ·], as long as its last stage.

        Args:
            rows_KM: finite values, [K, M].
            draw: the random streams.
        """
        values_KJ = rows_KM
        for codec, values in zip(self.lossy, self.stages, strict=False):
            found = codec.encode(values_KJ, values, {}, draw).values
            assert isinstance(found, Tensor)
            values_KJ = found
        return values_KJ

    def from_linear(self, values_KJ: Tensor, draw: Draw) -> Tensor:
        """The vectors [K, M] of such values, or of their sums.

        Args:
            values_KJ: the values of :meth:`linear`, or weighted sums of them.
            draw: the random streams with which they were made.
        """
        nothing = torch.empty(len(values_KJ), 0, dtype=torch.uint8)
        for codec, values in reversed([*zip(self.lossy, self.stages, strict=False)]):
            values_KJ = codec.decode(nothing, values_KJ, values, draw)
        return values_KJ

    def init(self) -> CodecState:
        """A client's state before its first task, [·] each: that of the first codec, for others keep none."""
        return self.lossy[0].init(self.values) if self.lossy else {}

    @cached_property
    def state_names(self) -> frozenset[str]:
        """Names of the tensors that a client keeps for the codecs."""
        return frozenset(self.init())

    def encode(self, rows_KM: Tensor, state: CodecState, draw: Draw) -> Encoded:
        """Encode vectors.

        Args:
            rows_KM: finite values, [K, M].
            state: states of the clients, [K, ·] each; names that no codec keeps are ignored.
            draw: the random streams.

        Returns:
            A message for each client, K tensors of uint8.

        Raises:
            InvalidInput: if a value is not finite.
            InvalidExperiment: if a codec gives a state that is not its own, or not all of it.
        """
        if rows_KM.numel() and not all(map(math.isfinite, map(float, torch.aminmax(rows_KM)))):
            raise InvalidInput("codecs encode finite values, got NaN or infinity: lower local.lr")
        rows_KM = rows_KM.cpu()  # codecs compute with NumPy
        made = self._first_encoded(rows_KM, state, draw) if self.lossy else Encoded([], rows_KM)
        contents = [made.content] if self.lossy else []
        contents += self._encode(len(contents), made.values, self.stages[len(contents)], draw)
        messages = [self._message([*parts]) for parts in zip(*contents, strict=True)]
        return Encoded(messages, values=None, counted=made.counted, lost=made.lost)

    def decode(self, messages: Rows, draw: Draw) -> Tensor:
        """Decode untrusted messages.

        Args:
            messages: K tensors of uint8, of at most ``most_bytes``.
            draw: the random streams with which they were encoded.

        Returns:
            The vectors, [K, M], or values that are added before they are read.

        Raises:
            InvalidPayload: if one is no such message.
        """
        contents = [*zip(*(self._contents(message) for message in messages), strict=True)]
        return self._decode(int(self.reads_sums), contents, self.summed, draw)

    def _first_encoded(self, rows_KM: Tensor, state: CodecState, draw: Draw) -> Encoded:
        """Encode by the first codec, which sees its own state alone, and gives no other."""
        # A client's state also holds the feedback's tensors, which a codec must not read.
        own = {name: state[name] for name in self.state_names}
        made = self.lossy[0].encode(rows_KM, self.values, own, draw)
        _check_names(self.lossy[0], made, self.state_names)
        return made

    @property
    def _leaves_values(self) -> bool:
        return not self.lossy or self.lossy[-1].gives == "values"

    @property
    def _contents_count(self) -> int:
        return len(self.lossy) + self._leaves_values

    def _encode(self, index: int, rows: Rows | None, values: Values, draw: Draw) -> list[Rows]:
        """The contents of a codec and of those behind it, each of K."""
        if rows is None:
            return []
        if not isinstance(rows, Tensor):  # of unlike lengths
            alone = [
                self._encode(index, row[None], values._replace(numbers=len(row)), draw.of(number))
                for number, row in enumerate(rows)
            ]
            return [[content[0] for content in of_codec] for of_codec in zip(*alone, strict=True)]
        if index == len(self.lossy):
            return [as_bytes(rows.to(values.dtype))]
        if not values.numbers:
            # So that no codec need know how to encode nothing.
            return [torch.empty(len(rows), 0, dtype=torch.uint8)] * (self._contents_count - index)
        made = self.lossy[index].encode(rows, values, {}, draw)
        _check_names(self.lossy[index], made, frozenset())
        return [made.content, *self._encode(index + 1, made.values, self.lossy[index].inner(values), draw)]

    def _message(self, contents: list[Tensor]) -> Tensor:
        lengths = np.array([len(content) for content in contents[:-1]], _LENGTH)
        parts = [torch.from_numpy(lengths.view(np.uint8)), *contents]
        if self.lossless:
            frame = self.lossless.compress(torch.cat(parts).numpy().data)
            # As a bytearray: PyTorch warns of memory that cannot be written to.
            parts = [torch.frombuffer(bytearray(frame), dtype=torch.uint8)]
        return torch.cat([torch.tensor([_VERSION], dtype=torch.uint8), *parts])

    def _contents(self, message: Tensor) -> list[Tensor]:
        """The contents of an untrusted message, one for each codec."""
        if not 1 <= len(message) <= self.most_bytes or message[0] != _VERSION:
            raise InvalidPayload(
                f"an encoded vector must begin with version {_VERSION} and take at most {self.most_bytes} bytes, got "
                f"{message[:1].tolist()} and {len(message)}"
            )
        body = message[1:]
        if self.lossless:
            content = self.lossless.decompress(body.numpy().data, self.size_bytes - 1)
            body = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else body[:0]
        # The last content needs no length: it takes the rest.
        begin = (self._contents_count - 1) * _LENGTH.itemsize
        if len(body) < begin:
            raise InvalidPayload(f"the lengths of an encoded vector take {begin} bytes, got {len(body)}")
        lengths = body[:begin].numpy().view(_LENGTH).tolist() if begin else []
        if (left := len(body) - begin - sum(lengths)) < 0:
            raise InvalidPayload(f"an encoded vector of {len(body)} bytes cannot hold {sum(lengths)}")
        return [*body[begin:].split_with_sizes([*lengths, left])]

    def _decode(self, index: int, contents: Sequence[Rows], values: Values, draw: Draw) -> Tensor:
        """Decode the contents of a codec and of those behind it."""
        content = contents[index]
        if index == len(self.lossy):
            _check_length(content, values.size_bytes)
            return from_bytes(stacked(content), values.dtype)
        if not values.numbers:
            return torch.empty(len(content), 0, dtype=values.dtype)
        codec = self.lossy[index]
        inner: Rows = torch.empty(len(content), 0)
        if index + 1 < len(contents):
            lengths = [codec.inner(values, one) for one in content]
            # Of small models a call costs more than its numbers: rows of one length are decoded together.
            if len(set(lengths)) == 1:
                inner = self._decode(index + 1, contents, lengths[0], draw)
            else:
                inner = [
                    self._decode(index + 1, [of[row : row + 1] for of in contents], length, draw.of(row))[0]
                    for row, length in enumerate(lengths)
                ]
        if codec.has_fixed_size:
            _check_length(content, codec.size_bytes(values))
        return codec.decode(content, inner, values, draw)


def check_order(key: str, codecs: Sequence[object]) -> None:
    """Refuse chains that make no sense.

    Args:
        key: key of the experiment that holds the chain, for the error.
        codecs: the chain, first to last.

    Raises:
        InvalidExperiment: if the chain makes no sense, with the reason.
    """
    for place, codec in enumerate(codecs):
        before = [*codecs[:place]]
        name = type(codec).__name__
        if isinstance(codec, Zstd) and place < len(codecs) - 1:
            reason = f"{name} leaves nothing to encode: put it last"
        elif not isinstance(codec, Codec) or not before:
            continue
        elif any(isinstance(earlier, Codec) and earlier.gives == "bytes" for earlier in before):
            reason = f"{name} finds no values behind {type(before[-1]).__name__}, which writes bytes: put it first"
        elif codec.comes_first:
            reason = f"{name} {codec.comes_first}: put it first"
        elif codec.selects and any(isinstance(earlier, Codec) and earlier.selects for earlier in before):
            reason = f"{name} selects the largest of values that were selected for that already: lower one fraction"
        else:
            continue
        raise InvalidExperiment(f"{key} must be a chain in which each codec finds values to encode; {reason}")


def _check_names(codec: Codec, made: Encoded, own: frozenset[str]) -> None:
    """Refuse states under names that are not a codec's own, or without some that are."""
    name = type(codec).__name__
    for field, state in (("counted", made.counted), ("lost", made.lost)):
        if state.keys() != own:
            raise InvalidExperiment(
                f"{name}'s {field} must have the names of its init, [{', '.join(sorted(own))}], got "
                f"[{', '.join(sorted(state))}]: correct {name}.encode"
            )


def _check_length(content: Rows, size_bytes: int) -> None:
    if wrong := [len(one) for one in content if len(one) != size_bytes]:
        raise InvalidPayload(f"the values must take {size_bytes} bytes, got {wrong[0]}")
