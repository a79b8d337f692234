"""What a coordinator sees of the clients, wherever they are."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from fed.storage.checkpoints import Tree
from fed.wire.messages import EdgeReply, Failure, GroupReply, Reply, Task

__all__ = ["Fleet"]


class Fleet(Protocol):
    """Clients that take tasks and answer them, in their own time.

    Every task that is dispatched is answered exactly once, by replies or a failure, unless it is called off first. In
    which order answers come must not matter to who counts them.
    """

    @property
    def clock(self) -> float:
        """Seconds since the run began: simulated ones, or real ones. It is never turned back."""
        ...

    def registered(self) -> Sequence[int | str]:
        """The clients that take part, whether they are there now or not, in a fixed order."""
        ...

    def available(self) -> Sequence[int | str]:
        """The members that can take a task now, in their order.

        Of who has one, none, until its answer is collected. A client whose task was called off may go on with it for a
        while, in which it is none of them either. The sequence may change as clients come and go.
        """
        ...

    def size_of(self, client: int | str) -> int:
        """How many samples a member trains on."""
        ...

    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Send tasks out, one each to clients that can take one; returns at once.

        Where a client goes away, for longer than it is waited for, its task fails; it may also fail at its
        ``deadline_s``.
        """
        ...

    def collect(
        self, until: float = math.inf, enough: int | None = None
    ) -> Iterator[Reply | GroupReply | EdgeReply | Failure]:
        """Answers as they arrive, to be taken to the last; each counts for its own tasks.

        Answers that are there are given whatever the clock says. Where tasks are left and ``enough`` is not reached,
        the clock is at ``until`` in the end; where no task is left, time does not pass. An answer that must not count,
        such as one of another shape, is a failure. What a client keeps is changed by replies that were collected, and
        by nothing else.

        Args:
            until: the clock at which to stop.
            enough: the number of replies after which to stop; all of one instant are given. Failures are none, but a
                simulated client's that has diverged. None: when no task is left.
        """
        ...

    def cancel(self, tasks: Iterable[int]) -> None:
        """Give no answers to these tasks, for which nobody waits any more, but those that are there already.

        Those are given by ``collect(until=clock)``. Tasks that are unknown or answered make no difference.
        """
        ...

    def state(self) -> Tree:
        """All that it will go on with after an interruption, for a checkpoint."""
        ...

    def restore(self, state: Tree) -> None:
        """Go on, from a fleet that has done nothing yet, with what :meth:`state` said.

        Simulated tasks that were under way go on. Real ones are not in the state: whoever knows them dispatches them
        again, and their clients begin them from what they kept before.
        """
        ...

    def wait(self, until: float = math.inf) -> bool:
        """Let time pass until :meth:`available`, which was asked before, may say something else, or the clock is there.

        Returns:
            Whether a client has come, gone or become free; not where an answer is there before, which is to be
            collected, or where nobody will ever come.
        """
        ...
