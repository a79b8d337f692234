"""Tasks under way: who holds each, until when it is waited for, and what has come of its answer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fed.processes.clock import Clock
from fed.protocol import protocol_pb2 as pb
from fed.server.registry import TaskOutcome
from fed.wire.payloads import Incoming, TensorSpec

__all__ = ["Lease", "Leases"]

_MOST_DELIVERED = 10_000  # number of answers that are remembered, so that one sent twice is known


@dataclass
class Lease:
    """A task under way.

    Args:
        assignment: assignment of the task, as it was given.
        client: client that it was given to.
        given_s: time at which it was given, in seconds of the server's clock.
        lease_until_s: time at which the task has failed, in seconds of the server's clock; a heartbeat of its holder
            puts it off.
        is_accepted: True if a node has said that it holds the task.
        incoming: file of the answer, as far as it has come; None: nothing has come.
        deliveries: number of deliveries begun; only the last counts, since earlier ones had connections that were cut.
        times_damaged: number of times that the answer came damaged.
    """

    assignment: pb.Assignment
    client: int | str
    given_s: float
    lease_until_s: float
    is_accepted: bool = False
    incoming: Incoming | None = None
    deliveries: int = 0
    times_damaged: int = 0

    @property
    def number(self) -> int:
        """Number of the task."""
        return self.assignment.task.number

    def told(self, now_s: float) -> pb.ToNode:
        """The assignment with the seconds that are left until its deadline.

        Args:
            now_s: present time, in seconds of the server's clock.
        """
        message = pb.ToNode(assignment=self.assignment)  # a copy: the lease keeps the deadline as it was given
        if self.assignment.HasField("deadline_s"):
            left_s = self.given_s + self.assignment.deadline_s - now_s
            message.assignment.deadline_s = max(left_s, 0.0)
        return message

    def drop(self) -> None:
        """Forget what has come of its answer."""
        if self.incoming is not None:
            self.incoming.path.unlink(missing_ok=True)
            self.incoming = None


class Leases:
    """All tasks of one start of a server that are under way, and the last ones that were answered.

    Args:
        start: number that names this start of the server.
        spool: folder of files on their way.
        arrived: function that takes the outcome of a task.
        lease_s: seconds without a heartbeat after which a task has failed.
        clock: time, by which leases end.
    """

    def __init__(
        self, start: int, spool: Path, arrived: Callable[[TaskOutcome], object], lease_s: float, clock: Clock
    ) -> None:
        self._clock = clock
        self._start = start
        self._spool = spool
        self._arrived = arrived
        self._lease_s = lease_s
        self._open: dict[int, Lease] = {}
        self._delivered: dict[int, tuple[int | str, str]] = {}

    def __iter__(self) -> Iterator[Lease]:
        """Iterate over the open leases of this moment."""
        return iter([*self._open.values()])  # a copy, for leases end during the iteration

    def __contains__(self, lease: Lease) -> bool:
        """True while the lease is open."""
        return self._open.get(lease.number) is lease

    def give(self, client: int | str, assignment: pb.Assignment) -> Lease:
        """Begin a lease for a task."""
        now_s = self._clock.monotonic_s()
        lease = Lease(assignment, client, given_s=now_s, lease_until_s=now_s + self._lease_s)
        self._open[assignment.task.number] = lease
        return lease

    def find(self, task: pb.TaskId) -> Lease | None:
        """Find a task's lease, of any client."""
        # An earlier start of the server gave the same numbers to other tasks.
        return self._open.get(task.number) if task.start == self._start else None

    def own(self, client: int | str, task: pb.TaskId) -> Lease | None:
        """A client's open lease of a task; None: it has none."""
        lease = self.find(task)
        return lease if lease is not None and lease.client == client else None

    def of(self, client: int | str) -> list[Lease]:
        """A client's open leases."""
        return [lease for lease in self if lease.client == client]

    def renew(self, lease: Lease) -> None:
        """Extend a lease after a heartbeat of its holder."""
        lease.lease_until_s = self._clock.monotonic_s() + self._lease_s

    def incoming(self, lease: Lease, answer: pb.Answer, spec: Sequence[TensorSpec]) -> Incoming:
        """File of this answer as far as it has come: empty, where it is another answer than before.

        Args:
            lease: lease of the task that is answered.
            answer: header of the answer.
            spec: types and lengths that its tensors must have.

        Raises:
            InvalidPayload: if its tensors are not what is asked for.
            OSError: if its file cannot be written.
        """
        if lease.incoming is None or lease.incoming.payload != answer.payload:
            # No text of a node becomes part of a path.
            lease.incoming = Incoming(self._spool / f"{lease.number}.in", answer.payload, spec)
        return lease.incoming

    def complete(self, lease: Lease, answer: pb.Answer, incoming: Incoming) -> None:
        """End a lease with its answer.

        Args:
            lease: lease of the task.
            answer: header of the answer.
            incoming: file of the answer, whole.
        """
        del self._open[lease.number]
        # Kept with its hash: another answer to this task is not the one that counted.
        self._delivered[lease.number] = lease.client, answer.payload.sha256
        if len(self._delivered) > _MOST_DELIVERED:
            del self._delivered[next(iter(self._delivered))]  # dicts keep their order: the oldest
        self._arrived(TaskOutcome(lease.number, answer, incoming.take))

    def was_completed(self, client: int | str | None, answer: pb.Answer) -> bool:
        """True if this answer has been accepted before.

        Args:
            client: client that sent it; None: any client.
            answer: header of the answer.
        """
        delivered = self._delivered.get(answer.task.number) if answer.task.start == self._start else None
        if delivered is None:
            return False
        whose, sha256 = delivered
        return client in (None, whose) and answer.payload.sha256 == sha256

    def withdraw(self, number: int) -> Lease | None:
        """Wait for a task no longer; None if it is not under way."""
        lease = self._open.pop(number, None)
        if lease is not None:
            lease.drop()
        return lease

    def fail(self, lease: Lease, reason: str, *, lacks_model: bool = False) -> None:
        """End a lease without an answer; one that is over stays so.

        Args:
            lease: lease that ends.
            reason: reason of the failure, one sentence for the user.
            lacks_model: True if the node does not have the model that the task's differences are added to.
        """
        # An outcome is told once: the lease may have ended meanwhile.
        if self.withdraw(lease.number) is not None:
            self._arrived(TaskOutcome(lease.number, problem=reason, lacks_model=lacks_model))
