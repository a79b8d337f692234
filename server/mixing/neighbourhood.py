"""Neighbourhood: what a peer sees of the others, and the messages of one exchange with them.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from fed.storage.checkpoints import Tree
from fed.vectors.mixing import Weights
from fed.vectors.tensors import Tensor

__all__ = ["Attendance", "EncodedRows", "Exchange", "Neighbourhood"]


class Attendance(NamedTuple):
    """Peers that take part in a round, of those whose rows are here.

    Args:
        rows_S: places of those that take part, ascending.
        steps_S: number of optimizer steps after which each is cut off; None: it takes them all.
        failed: other peers, which broke down or went away too soon.
        anew_S: places in ``rows_S`` of the peers that begin anew, since members have come or gone for good.
    """

    rows_S: Tensor
    steps_S: list[int | None]
    failed: Sequence[int | str] = ()
    anew_S: Sequence[int] = ()


class EncodedRows(NamedTuple):
    """Vectors that travel encoded, one for each row that is here.

    Args:
        messages: message of each row, uint8, of unequal lengths.
        vectors_NM: vectors that receivers then have, in float64: the decoded messages, added to ``before_NM`` if there
            is one.
        before_NM: vectors that the messages are added to, of which every receiver keeps a copy: the ``vectors_NM`` of
            the row's last message, and before the first the same at all peers. A receiver that missed messages gets
            them with the next one, or ``before_NM`` itself where that is shorter. None: a message is the whole vector.
        decode: function from messages of one round, their senders and the round's number to vectors; for receivers that
            are not here.
        size_bytes: bytes of a message; with lossless compression the largest number before it.
        most_bytes: largest number of bytes that a message may have.
    """

    messages: Sequence[Tensor]
    vectors_NM: Tensor
    before_NM: Tensor | None
    decode: Callable[[Sequence[Tensor], Sequence[int | str], int], Tensor]
    size_bytes: int
    most_bytes: int


class Exchange(Protocol):
    """One exchange of messages with a round's neighbours."""

    def exchange(
        self, *tensors_NM: Tensor, encoded: EncodedRows | None = None
    ) -> tuple[Weights | None, tuple[Tensor, ...]]:
        """Send each row's message to its peer's neighbours, and wait for theirs.

        Args:
            tensors_NM: tensors of the messages that travel as they are, each in its own type.
            encoded: tensor that travels encoded; None: there is none.

        Returns:
            W of those that took part, None where peers never meet; of each tensor what was sent to the rows that
            are here, [S, M], the vectors of ``encoded`` last: ``senders_X`` are places in it.
        """


class Neighbourhood(Exchange, Protocol):
    """Peers that exchange vectors with their neighbours, in their own time.

    Attributes:
        bytes_sent: bytes sent in this round by the peers that are here.
        bytes_received: bytes received in this round by the peers that are here.
    """

    bytes_sent: int
    bytes_received: int

    @property
    def left_out(self) -> Collection[int | str]:
        """Peers whose messages came too late for one of this round's exchanges, and did not count."""

    @property
    def members(self) -> Sequence[int | str]:
        """Peers whose rows are here, in the order of a topology's nodes."""

    @property
    def gone(self) -> Collection[int]:
        """Places in ``members`` of those that have gone for good: their models count no more in the mean."""

    @property
    def clock(self) -> float:
        """Seconds since the run began: simulated ones, or real ones. It is never turned back."""

    def begin(self, number: int) -> Attendance:
        """Find out who takes part in a round, numbered from 1."""

    def train(self, samples_seen_S: Sequence[int]) -> None:
        """Take note that those that take part have trained on this many samples."""

    def end(self) -> None:
        """End the round."""

    def measures(self) -> dict[str, float]:
        """Counts of the round: ``alone``, the peers that mixed with nobody, and of a single peer the others it saw."""

    def state(self) -> Tree:
        """State for a checkpoint."""

    def restore(self, state: Tree) -> None:
        """Resume from what :meth:`state` wrote down."""
