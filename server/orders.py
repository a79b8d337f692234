"""Tasks under way: who holds each, until when it is waited for, and what has come of its answer."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fed.payloads import Incoming
from fed.protocol_pb2 import Answer, Assignment, TaskId, ToNode
from fed.protocol_pb2 import Tensor as TensorMessage

__all__ = ["Arrival", "Order", "Orders"]

_MOST_DELIVERED = 10_000  # that are remembered, so that one sent twice is known


@dataclass(frozen=True)
class Arrival:
    """What became of a task, as a node says.

    Args:
        task: its number.
        client: who had it.
        answer: the header of what it sent, with its file; or
        path: where that is.
        problem: why there is none.
        diverged: whether its numbers are no longer finite.
    """

    task: int
    client: int | str
    answer: Answer | None = None
    path: Path | None = None
    problem: str = ""
    diverged: bool = False


@dataclass
class Order:
    """A task under way.

    Args:
        assignment: as it was given.
        client: whom to.
        given_s: when, by :func:`time.monotonic`.
        lease_until_s: when it has failed unless its holder gives a sign of life.
        is_accepted: whether a node has said that it holds it.
        incoming: what has come of its answer.
        deliveries: that were begun; one that was before the last, of a connection that was cut, has no say.
        times_damaged: how often its answer came damaged.
    """

    assignment: Assignment
    client: int | str
    given_s: float
    lease_until_s: float
    is_accepted: bool = False
    incoming: Incoming | None = None
    deliveries: int = 0
    times_damaged: int = 0

    @property
    def number(self) -> int:
        """Of its task."""
        return self.assignment.task.number

    def told(self) -> ToNode:
        """The assignment as it is told now: with as many seconds as are left."""
        message = ToNode(assignment=self.assignment)
        if self.assignment.HasField("deadline_s"):
            left_s = self.given_s + self.assignment.deadline_s - time.monotonic()
            message.assignment.deadline_s = max(left_s, 0.0)
        return message

    def drop(self) -> None:
        """Forget what has come of its answer."""
        if self.incoming is not None:
            self.incoming.path.unlink(missing_ok=True)
            self.incoming = None


class Orders:
    """All tasks of one start of a server that are under way, and which were answered last.

    Args:
        start: of the server.
        spool: the folder of files on their way.
        arrived: takes what becomes of a task.
        lease_s: without a sign of life from who holds a task, after which the task has failed.
    """

    def __init__(self, start: int, spool: Path, arrived: Callable[[Arrival], object], lease_s: float) -> None:
        self._start = start
        self._spool = spool
        self._arrived = arrived
        self._lease_s = lease_s
        self._open: dict[int, Order] = {}
        self._delivered: dict[int, tuple[int | str, str]] = {}

    def __iter__(self) -> Iterator[Order]:
        """As they are now, whatever becomes of them meanwhile."""
        return iter([*self._open.values()])

    def __contains__(self, order: Order) -> bool:
        """Whether it is still under way."""
        return self._open.get(order.number) is order

    def give(self, client: int | str, assignment: Assignment) -> Order:
        """A task begins."""
        now_s = time.monotonic()
        order = self._open[assignment.task.number] = Order(assignment, client, now_s, now_s + self._lease_s)
        return order

    def find(self, task: TaskId) -> Order | None:
        """Whoever has it."""
        return self._open.get(task.number) if task.start == self._start else None

    def own(self, client: int | str, task: TaskId) -> Order | None:
        """A client's task, if that is under way."""
        order = self.find(task)
        return order if order is not None and order.client == client else None

    def of(self, client: int | str) -> list[Order]:
        """All that a client has."""
        return [order for order in self if order.client == client]

    def renew(self, order: Order) -> None:
        """Its holder gave a sign of life."""
        order.lease_until_s = time.monotonic() + self._lease_s

    def incoming(self, order: Order, answer: Answer, spec: Sequence[TensorMessage]) -> Incoming:
        """What has come of this answer: nothing, where it is another than before.

        Raises:
            InvalidPayload: if its tensors are not what is asked for.
            OSError: if its file cannot be written.
        """
        if order.incoming is None or order.incoming.payload != answer.payload:
            order.incoming = Incoming(self._spool / f"{order.number}.in", answer.payload, spec)
        return order.incoming

    def complete(self, order: Order, answer: Answer, path: Path) -> None:
        """Its answer is there."""
        del self._open[order.number]
        self._delivered[order.number] = order.client, answer.payload.sha256
        if len(self._delivered) > _MOST_DELIVERED:
            del self._delivered[next(iter(self._delivered))]
        self._arrived(Arrival(order.number, order.client, answer, path))

    def was_completed(self, client: int | str | None, answer: Answer) -> bool:
        """Whether this answer is there already.

        Args:
            client: whose it is; None: anybody's.
            answer: its header.
        """
        delivered = self._delivered.get(answer.task.number) if answer.task.start == self._start else None
        if delivered is None:
            return False
        whose, sha256 = delivered
        return client in (None, whose) and answer.payload.sha256 == sha256

    def withdraw(self, number: int) -> Order | None:
        """Wait for a task no longer; None if it is not under way."""
        order = self._open.pop(number, None)
        if order is not None:
            order.drop()
        return order

    def fail(self, order: Order, reason: str, *, diverged: bool = False) -> None:
        """No answer is waited for any more."""
        self._open.pop(order.number, None)
        order.drop()
        self._arrived(Arrival(order.number, order.client, problem=reason, diverged=diverged))
