"""The contract of codecs, and the random streams that they draw from.

Shapes: see :mod:`fed.vectors.layout`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np

from fed.config.compatibility import Feature, Term
from fed.config.hyperparameters import Hyperparameters
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor, torch

__all__ = ["NOT_COMMON", "SUMS_ALONE", "Codec", "CodecState", "Draw", "Encoded", "Rows", "Values", "later_errors"]

Rows: TypeAlias = Tensor | Sequence[Tensor]
"""K vectors: one tensor [K, ·], or K of any lengths."""

CodecState: TypeAlias = Mapping[str, Tensor]
"""Tensors that a client keeps for a codec from task to task, by name, [K, ·] each."""


NOT_COMMON = Term(
    Feature.COMMON_ENCODING,
    "choose randomk, rotation or sketch for {section}",
    "whose scale, positions or bytes are each client's own",
)
"""Term that a codec lacks if its messages cannot be added before they are decoded."""

SUMS_ALONE = tuple(
    Term(feature, "choose another codec", "whose sum alone is read")
    for feature in (Feature.SINGLE_ANSWERS, Feature.LEGIBLE_MESSAGES, Feature.DECODED_MESSAGES)
)
"""Terms that a codec lacks if its messages are decoded only after they have been added."""

_LARGE = 64  # numbers of a layer that is coded alone


class Values(NamedTuple):
    """The vectors that a codec encodes.

    Args:
        numbers: M, the length of each vector.
        dtype: type of the numbers.
        layers: shapes of the tensors that follow one another in a vector; empty where it has no such parts.
    """

    numbers: int
    dtype: "torch.dtype"
    layers: "tuple[torch.Size, ...]" = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of a vector that is not encoded."""
        return self.numbers * self.dtype.itemsize

    def groups(self) -> list[list[slice]]:
        """Places of the layers, each alone but for those of fewer than 64 numbers, which are together."""
        groups: list[list[slice]] = []
        small: list[slice] = []
        end = 0
        for shape in self.layers or (torch.Size([self.numbers]),):
            place = slice(end, end + shape.numel())
            end = place.stop
            if shape.numel() >= _LARGE:
                groups.append([place])
            elif shape.numel():
                small.append(place)
        # Small layers share the last scale: one of its own would cost a bias of few numbers too much.
        return [*groups, small] if small else groups


class Draw(NamedTuple):
    """The random streams of an encoding.

    Args:
        streams: random streams of the run.
        rounds: round of each row, from 1.
        clients: client of each row.
        purpose: first part of the streams' names.
        own_streams: streams of the clients' own draws; None: those of the run.
        repeats: number of earlier tasks of each row's client in the row's round, for draws that differ from task to
            task; empty: none had one.
    """

    streams: Streams
    rounds: Sequence[int]
    clients: Sequence[int | str]
    purpose: str = "codec"
    own_streams: Streams | None = None
    repeats: Sequence[int] = ()

    def common(self, row: int) -> np.random.Generator:
        """The stream that the coordinator and all clients of the row's round share."""
        return self.streams.generator(self.purpose, self.rounds[row])

    def own(self, row: int) -> np.random.Generator:
        """The stream of the row's client."""
        # Where clients keep secrets, the run's seed would tell the coordinator each client's draws.
        streams = self.own_streams or self.streams
        repeats = self.repeats[row] if self.repeats else 0
        if repeats:
            return streams.generator(self.purpose, self.clients[row], self.rounds[row], repeats)
        return streams.generator(self.purpose, self.clients[row], self.rounds[row])

    def of(self, row: int) -> "Draw":
        """The streams of one row alone."""
        return self._replace(
            rounds=[self.rounds[row]],
            clients=[self.clients[row]],
            repeats=[self.repeats[row]] if self.repeats else (),
        )


class Encoded(NamedTuple):
    """Encoded vectors.

    Args:
        content: bytes of each vector, uint8, on the CPU.
        values: numbers that the next codec of a chain encodes; None where nothing is left.
        counted: states of the clients once their messages count, under the names of :meth:`Codec.init`.
        lost: states of the clients if the messages are lost, under the same names.
    """

    content: Rows
    values: Rows | None = None
    counted: CodecState = MappingProxyType({})
    lost: CodecState = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Codec(Hyperparameters, ABC):
    """An encoding of vectors that keeps each row for itself: a row's bytes do not depend on the other rows.

    The coordinator counts what :meth:`decode` returns. In simulation the messages are encoded and decoded as well, so
    that a simulated update has the bits of a deployed one.

    Attributes:
        gives: "values" where the next codec of a chain finds numbers to encode, "bytes" where it finds none.
        is_linear: True if decoding a weighted sum of encoded values gives the weighted sum of the decoded vectors.
        is_unbiased: True if the mean of the decoded vector over all draws is the vector.
        is_contraction: True if the squared error is at most 1 − δ of the squared norm, with δ > 0, in the mean over all
            draws.
        keeps_contractions: True if a chain of this codec and a contraction is a contraction.
        bound: bound on the error, where values are in the normal range of their type; for an unbiased codec on ω, the
            mean squared error as a share of the squared norm, for a contraction on δ. Empty where none is known.
        keeps_residual: True if the codec itself sends later the values that it leaves out.
        has_fixed_size: True if the contents of all vectors of one length have the same number of bytes.
        selects: True if the codec chooses the values of largest magnitude.
        comes_first: reason why no codec may come before this one, as a clause; empty where one may.
        reads_sums: True if the coordinator adds the encoded values of all clients, and decodes the sum once.
        is_common: True if the codec writes values only, by a linear map that all clients of a round share.
    """

    gives: ClassVar[Literal["values", "bytes"]] = "bytes"
    is_linear: ClassVar[bool] = False
    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = False
    keeps_contractions: ClassVar[bool] = False
    bound: ClassVar[str] = ""
    keeps_residual: ClassVar[bool] = False
    has_fixed_size: ClassVar[bool] = True
    selects: ClassVar[bool] = False
    comes_first: ClassVar[str] = ""
    reads_sums: ClassVar[bool] = False
    is_common: ClassVar[bool] = False

    def needs(self) -> Sequence[Term]:
        """Vectors that travel encoded, and under a residual parameters to which it can be added."""
        encoded = Term(Feature.ENCODED, "set {section} to []")
        return (encoded, later_errors("choose another codec")) if self.keeps_residual else (encoded,)

    def lacks(self) -> Sequence[Term]:
        """A common encoding, unless it is one, and each client's own message, where sums alone are read."""
        terms = () if self.is_common else (NOT_COMMON,)
        return (*terms, *SUMS_ALONE) if self.reads_sums else terms

    def shrinkage(self, values: Values) -> float:
        """Scale that makes a common encoding a contraction, the same for all clients: 1/(1 + ω)."""
        return 1.0

    def init(self, values: Values) -> CodecState:
        """A client's state before its first task, [·] each; none unless a codec overrides this.

        A codec with a state is the first of its chain, and its names are its own: it sees and writes no others.
        """
        return {}

    @abstractmethod
    def size_bytes(self, values: Values) -> int:
        """Bytes of the content of one vector, or the most of them where they depend on it."""

    def inner(self, values: Values, content: Tensor | None = None) -> Values:
        """The vector that the next codec of a chain encodes.

        Args:
            values: the vector that this codec encodes.
            content: untrusted content of the vector; None for the longest that there can be.

        Raises:
            InvalidPayload: if the content does not tell the vector's length.
        """
        return values._replace(numbers=0, layers=())

    @abstractmethod
    def encode(self, rows_KM: Tensor, values: Values, state: CodecState, draw: Draw) -> Encoded:
        """Encode vectors.

        Args:
            rows_KM: finite values, [K, M].
            values: description of the vectors.
            state: states of the clients, under the names of :meth:`init`, [K, ·] each.
            draw: the random streams; row k belongs to ``draw.clients[k]``.
        """

    @abstractmethod
    def decode(self, content: Rows, inner: Rows, values: Values, draw: Draw) -> Tensor:
        """Decode untrusted bytes.

        Args:
            content: bytes of each vector, at most ``size_bytes``; one tensor [K, ·] where all have as many.
            inner: decoded values of the next codec, [K, ·]; without numbers where this codec gives bytes.
            values: description of the vectors to be found.
            draw: the random streams with which they were encoded.

        Returns:
            The vectors, [K, M].

        Raises:
            InvalidPayload: if the bytes are no such content.
        """


def later_errors(way_out: str) -> Term:
    """Term that a part needs if it sends the error of a message with a later one.

    Args:
        way_out: imperative clause on how the user can change this part.
    """
    why = "to which the error of an earlier message is added"
    return Term(Feature.SAME_PARAMETERS, way_out, why)
