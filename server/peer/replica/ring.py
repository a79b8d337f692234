"""Ring all-reduce of an exact sum: after 2(N − 1) messages each member has the sum of all.

Members stand in a ring, and the vector is cut into N chunks. In N − 1 steps of reduction each member sends its
successor the chunk that it has just added its own update to; in N − 1 steps more the finished chunks go round
(Patarasuk & Yuan 2009, doi 10.1016/j.jpdc.2008.09.002). Each member sends 2(N − 1)/N of the packed sum, whatever N is.
The sum is exact, so that its bits depend neither on the order of the ring nor on where the chunks begin.

Shapes: see :mod:`fed.vectors.layout`.
"""

import json
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple, Self

from fed.errors import InvalidPayload
from fed.protocol.limits import NODE_NAME
from fed.vectors.reduction import MOST_LANES, WeightedMean
from fed.vectors.tensors import Tensor, torch
from fed.wire.format import Format
from fed.wire.messages import Answer, client_order, refusal_of_numbers
from fed.wire.payloads import TensorSpec

__all__ = ["Contribution", "Ring", "RoundSum", "most_ring_bytes", "sum_specs"]

_MOST_CONTRIBUTION_BYTES = 1000  # a name of 64 bytes, and numbers
_MOST_MEMBERS = 10_000
_TOO_HEAVY = Fraction(10**60)
_WEIGHT = re.compile(r"[0-9]{1,400}(/[1-9][0-9]{0,400})?")


class Contribution(NamedTuple):
    """Numbers of a member beside its update.

    Args:
        name: the member's name.
        samples: number of samples that the member holds, ≥ 1.
        weight: weight of its update in the mean, > 0.
        train_loss: mean loss over the samples that it trained on.
    """

    name: str
    samples: int
    weight: Fraction
    train_loss: float


class RoundSum(NamedTuple):
    """Exact sum of members' updates, or of some consecutive numbers of them.

    Args:
        lanes: packed sum in int32, a row for each lane: see :meth:`fed.vectors.reduction.WeightedMean.packed`.
        integers_I: largest value of each integer buffer.
        contributions: one entry for each member whose update is in the sum, in the order of clients.
    """

    lanes: Tensor
    integers_I: Tensor
    contributions: tuple[Contribution, ...]

    @classmethod
    def of(cls, name: str, answer: Answer, numbers: int) -> Self:
        """Sum of a single update.

        Args:
            name: the member's name.
            answer: result of its training, with one client.
            numbers: M, the number of summed numbers.
        """
        total = WeightedMean(numbers)
        total.add(answer.update.update_M, answer.update.weight)
        own = Contribution(
            name,
            samples=answer.samples[0],
            weight=Fraction(total.weight),
            train_loss=answer.train_losses[0],
        )
        return cls(_rows(total.packed(), numbers), answer.integers_I, (own,))

    @classmethod
    def read(cls, tensors: Sequence[Tensor], numbers: int) -> Self:
        """Read a sum that a member has sent.

        Args:
            tensors: contents of a message, whose types and lengths :func:`sum_specs` allows.
            numbers: number of summed numbers, of the whole vector or of a chunk of it.

        Raises:
            InvalidPayload: if it is no sum of ``numbers`` numbers.
        """
        packed, integers_I, written = tensors
        if not numbers and packed.numel():
            raise InvalidPayload(
                f"the sum of a model without parameters must have no lanes, got {packed.numel()} numbers"
            )
        if numbers and (packed.numel() % numbers or not 0 < packed.numel() <= MOST_LANES * numbers):
            raise InvalidPayload(f"a sum must have up to {MOST_LANES} lanes of {numbers}, got {packed.numel()} numbers")
        try:
            said = json.loads(written.numpy().tobytes())
            contributions = tuple(_contribution(*one) for one in said)
        except (ValueError, TypeError, RecursionError):
            raise InvalidPayload("a sum must list the members whose updates are in it") from None
        if not contributions or len({one.name for one in contributions}) < len(contributions):
            raise InvalidPayload("a sum must have each member's update once")
        return cls(_rows(packed, numbers), integers_I, contributions)

    @property
    def names(self) -> frozenset[str]:
        """Names of the members whose updates are in the sum."""
        return frozenset(one.name for one in self.contributions)

    def mean(self) -> WeightedMean:
        """The sum and its weight, as a coordinator counts them."""
        weight = sum((one.weight for one in self.contributions), Fraction())
        exact = int(weight) if weight.denominator == 1 else weight
        return WeightedMean.unpacked(
            self.lanes.flatten(),
            size=self.lanes.shape[1],
            atoms=len(self.contributions),
            weight=exact,
        )

    def part(self, begin: int, end: int) -> "RoundSum":
        """Numbers from ``begin`` to before ``end``."""
        return self._replace(lanes=self.lanes[:, begin:end])

    def added(self, other: "RoundSum") -> "RoundSum":
        """Sum of both."""
        total = self.mean()
        total.merge(other.mean())
        contributions = sorted((*self.contributions, *other.contributions), key=lambda one: client_order(one.name))
        integers_I = torch.maximum(self.integers_I, other.integers_I)
        return RoundSum(_rows(total.packed(), total.size), integers_I, tuple(contributions))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors as they travel; equal sums give the same bytes."""
        said = [[name, samples, str(weight), loss] for name, samples, weight, loss in self.contributions]
        written = bytearray(json.dumps(said, separators=(",", ":")).encode())
        return self.lanes.flatten(), self.integers_I, torch.frombuffer(written, dtype=torch.uint8)


def sum_specs(message: Format, members: int) -> tuple[TensorSpec, ...]:
    """Tensors of a round's sum, or of chunks of it.

    Args:
        message: format of clients' messages.
        members: largest number of members, ≥ 1.
    """
    numbers = sum(message.summed_sizes)
    integers = message.uplink[-1]
    return (
        TensorSpec(torch.int32, MOST_LANES * numbers, True),
        integers,
        TensorSpec(torch.uint8, _MOST_CONTRIBUTION_BYTES * min(members, _MOST_MEMBERS), True),
    )


def most_ring_bytes(message: Format, members: int) -> int:
    """Bytes that a member sends in a ring at most.

    Args:
        message: format of clients' messages.
        members: largest number of members, ≥ 1.
    """
    lanes, integers, contributions = (spec.numbers * spec.dtype.itemsize for spec in sum_specs(message, members))
    return 2 * lanes + 2 * members * (integers + contributions)


class Ring:
    """One member's part in an all-reduce; it makes no calls.

    Message k goes to the successor before message k of the predecessor is taken, for k from 0 to ``messages`` − 1.

    Attributes:
        messages: the number of messages, 2(N − 1).
        taken: the number of messages that have been taken.

    Args:
        place: place of this member in the ring, from 0.
        members: names of the ring's members, in its order.
        own: sum of this member's update alone.

    Example:
        >>> from fed.wire.messages import Update
        >>> updates = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 4.0, 4.0])]
        >>> def answer(update: Tensor) -> Answer:
        ...     return Answer((0,), 1, ("",), Update(update, 1.0), torch.empty(0), (1,), (0.5,))
        >>> names = "ann", "bob"
        >>> rings = [Ring(k, names, RoundSum.of(names[k], answer(updates[k]), 3)) for k in range(2)]
        >>> for step in range(2):
        ...     sent = [ring.message(step) for ring in rings]
        ...     for ring, tensors in zip(rings, reversed(sent)):
        ...         ring.take(tensors)
        >>> rings[0].result().mean().finish() * 2
        tensor([5., 6., 7.], dtype=torch.float64)
    """

    def __init__(self, place: int, members: Sequence[str], own: RoundSum) -> None:
        self._place = place
        self._members = tuple(members)
        count = len(self._members)
        numbers = own.lanes.shape[1]
        # Chunks of nearly equal length; some are empty where members outnumber the numbers.
        self._bounds = [numbers * chunk // count for chunk in range(count + 1)]
        self._chunks = [own.part(begin, end) for begin, end in pairwise(self._bounds)]
        self.messages = 2 * (count - 1)
        self.taken = 0

    @property
    def successor(self) -> str:
        """Name of the member that this one sends to."""
        return self._members[(self._place + 1) % len(self._members)]

    @property
    def predecessor(self) -> str:
        """Name of the member that sends to this one."""
        return self._members[self._place - 1]

    def message(self, step: int) -> tuple[Tensor, ...]:
        """Message of a step, once the one before it has been taken."""
        return self._chunks[self._sent_in(self._place, step)].tensors()

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Take the predecessor's next message.

        Raises:
            InvalidPayload: if it is not the chunk, or not the sum, that is next in the ring.
        """
        count = len(self._members)
        step = self.taken
        chunk = self._sent_in(self._place - 1, step)
        received = RoundSum.read(tensors, self._bounds[chunk + 1] - self._bounds[chunk])
        reduces = step < count - 1
        behind = range(1, step + 2) if reduces else range(count)
        if received.names != {self._members[(self._place - back) % count] for back in behind}:
            raise InvalidPayload(f"message {step} of a ring must hold the updates of the members before it, got others")
        if received.integers_I.shape != self._chunks[chunk].integers_I.shape:
            raise InvalidPayload("a sum must have the model's integer buffers")
        self._chunks[chunk] = self._chunks[chunk].added(received) if reduces else received
        self.taken += 1

    def result(self) -> RoundSum:
        """Sum of all updates, once all messages have been taken."""
        # Chunks with larger numbers have more lanes; the others get lanes of zeros.
        most = max(len(chunk.lanes) for chunk in self._chunks)
        rows = [torch.nn.functional.pad(chunk.lanes, (0, 0, 0, most - len(chunk.lanes))) for chunk in self._chunks]
        integers_I = torch.stack([chunk.integers_I for chunk in self._chunks]).amax(0)
        return RoundSum(torch.cat(rows, 1), integers_I, self._chunks[0].contributions)

    def _sent_in(self, place: int, step: int) -> int:
        """Chunk that the member at a place sends in a step."""
        return (place - step) % len(self._members)


def _rows(packed: Tensor, numbers: int) -> Tensor:
    # An empty tensor does not tell its number of lanes: four are the fewest of a packed sum.
    return packed.view(-1, numbers) if numbers else packed.view(4, 0)


def _contribution(name: Any, samples: Any, weight: Any, train_loss: Any) -> Contribution:
    # JSON of another member: each value may be of any type.
    if not isinstance(name, str) or not NODE_NAME.fullmatch(name) or not isinstance(weight, str):
        raise InvalidPayload("a sum must name each member, with a weight")
    if not _WEIGHT.fullmatch(weight) or not isinstance(train_loss, float | int):
        raise InvalidPayload("a sum must have weights that are whole numbers or fractions")
    exact = Fraction(weight)
    # A huge fraction overflows float64; cut down to 10^60 it is still refused.
    if reason := refusal_of_numbers(samples, float(min(exact, _TOO_HEAVY)), train_loss):
        raise InvalidPayload(reason)
    return Contribution(name, samples, weight=exact, train_loss=float(train_loss))
