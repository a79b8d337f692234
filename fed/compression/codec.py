"""The contract of codecs, and the random streams that they draw from.

Shapes: see :mod:`fed.layout`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fed.config.compatibility import Feature, Term
from fed.config.hyperparameters import Hyperparameters
from fed.randomness import Streams

__all__ = ["Codec", "Draw", "TensorSpec"]


class TensorSpec(NamedTuple):
    """The type and length of a tensor on the wire."""

    dtype: torch.dtype
    numbers: int

    @property
    def size_bytes(self) -> int:
        """Bytes of such a tensor."""
        return self.numbers * self.dtype.itemsize


class Draw(NamedTuple):
    """The random streams of an encoding.

    Args:
        streams: the run's.
        rounds: the round of each row, from 1.
        clients: the client of each row.
    """

    streams: Streams
    rounds: Sequence[int]
    clients: Sequence[int | str]

    def common(self, row: int) -> np.random.Generator:
        """The stream that the coordinator and all clients of the row's round share."""
        return self.streams.generator("codec", self.rounds[row])

    def own(self, row: int) -> np.random.Generator:
        """The stream of the row's client."""
        return self.streams.generator("codec", self.clients[row], self.rounds[row])


@dataclass(frozen=True, kw_only=True)
class Codec(Hyperparameters, ABC):
    """An encoding of vectors that keeps each row for itself: a row's payload does not depend on the other rows.

    The coordinator counts what :meth:`decode` returns. In simulation the payloads are encoded and decoded as well, so
    that a simulated update has the bits of a deployed one.
    """

    def needs(self) -> Sequence[Term]:
        """Clients that report."""
        return (Term(Feature.REPORTS, "set uplink to []"),)

    @abstractmethod
    def payload(self, values: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensors of one encoded vector; the first is what the next codec of a chain encodes."""

    @abstractmethod
    def encode(self, rows_KM: Tensor, draw: Draw) -> tuple[Tensor, ...]:
        """Encode vectors.

        Args:
            rows_KM: finite values, [K, M].
            draw: the random streams; row k is ``draw.clients[k]``'s.

        Returns:
            Tensors [K, ·] of the types and lengths that :meth:`payload` says.
        """

    @abstractmethod
    def decode(self, payload: Sequence[Tensor], numbers: int, draw: Draw) -> Tensor:
        """Decode untrusted payloads.

        Args:
            payload: tensors [K, ·] as :meth:`payload` says, of any values.
            numbers: M, the length of a decoded vector.
            draw: the random streams with which they were encoded.

        Returns:
            The vectors, [K, M].
        """
