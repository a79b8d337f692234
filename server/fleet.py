"""The contract of fleets: what a coordinator sees of the clients, wherever they are."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from fed.protocol.protocol_pb2 import ToSession
from fed.storage.checkpoints import Tree
from fed.wire.messages import Answer, Task

__all__ = ["ConversingFleet", "Fleet"]


class Fleet(Protocol):
    """Clients that take tasks and answer them, in their own time.

    Every task that is dispatched is answered exactly once, by an update or a failure, unless it is cancelled first. The
    order in which answers come must not matter to the coordinator.
    """

    @property
    def clock(self) -> float:
        """Seconds since the run began: simulated ones, or real ones. It never runs backwards."""

    def registered(self) -> Sequence[int | str]:
        """The clients that take part, available or not, in a fixed order."""

    def population(self) -> int:
        """The number of clients that have ever registered."""

    def available(self) -> Sequence[int | str]:
        """The registered clients that can take a task now, in their order.

        A client with an open task is not available. Nor is one that keeps a state, until the verdict on its last task;
        nor, for a while, one whose task was cancelled. The sequence may change as clients come and go.
        """

    def size_of(self, client: int | str) -> int:
        """The number of samples that a client trains on."""

    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Send tasks to available clients, one each; returns at once.

        The task of a client that goes away for longer than the fleet waits fails; it may also fail at its
        ``deadline_s``.
        """

    def collect(self, until: float = math.inf, enough: int | None = None) -> Iterator[Answer]:
        """Answers as they arrive, to be taken to the last; each counts for its own tasks.

        Answers that have arrived are given whatever the clock says. Where tasks are left and ``enough`` is not reached,
        the clock is at ``until`` in the end; where no task is left, time does not pass. An answer that must not count,
        such as one of another shape, is a failure.

        Args:
            until: time at which to stop, in seconds of :attr:`clock`.
            enough: number of updates after which to stop; all of one instant are given. None: no limit.
        """

    def cancel(self, tasks: Iterable[int]) -> None:
        """Give no answers to these tasks any more, but those that have arrived.

        Those are given by ``collect(until=clock)``. Tasks that are unknown or answered make no difference.
        """

    def settle(self, counted: Mapping[int, float]) -> None:
        """Take the coordinator's verdict on the tasks collected since the last one.

        The state of a client whose update counted is committed, at a discount s only s of the way from the old state to
        the new. All other tasks are lost: their clients go on from what they had.

        Args:
            counted: task → the factor in (0, 1] with which its update moved the model.
        """

    def state(self) -> Tree:
        """All that a resumed run needs, for a checkpoint; every collected task has been settled."""

    def restore(self, state: Tree) -> None:
        """Resume, in a fleet that has done nothing yet, from what :meth:`state` wrote down.

        Simulated tasks that were in flight go on. Real ones are not in the state: the coordinator dispatches them
        again, and their clients begin them from what they kept before.
        """

    def wait(self, until: float = math.inf) -> bool:
        """Let time pass until :meth:`available`, which was read before, may have changed, or until a clock.

        Returns:
            True where a client has come, gone or become free; False where an answer arrived first, which is to be
            collected, or where no client will ever come.
        """


class ConversingFleet(Fleet, Protocol):
    """A fleet whose clients can hold a conversation with the coordinator during a task.

    Clients' messages arrive while time passes: in ``collect``, ``wait`` and :meth:`pass_time`.
    """

    def tell(self, client: int | str, message: ToSession) -> None:
        """Send a client a message of its session; one that is not connected does not get it."""

    def renew(self, identities: bytes) -> None:
        """Send all clients these signed identities, unless they have got them."""

    def give_up(self, task: int, reason: str) -> None:
        """Fail an open task.

        Args:
            task: id of the task.
            reason: reason of the failure, as a sentence for the user.
        """

    def pass_time(self, until: float) -> None:
        """Take what has arrived, or wait for it for a moment, no longer than until a clock."""
