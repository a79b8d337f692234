"""What a coordinator sees of the clients, wherever they are."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from fed.checkpoints import Tree
from fed.messages import EdgeReply, Failure, GroupReply, Reply, Task

__all__ = ["Fleet"]


class Fleet(Protocol):
    """Clients that take tasks and answer them, in their own time."""

    @property
    def clock(self) -> float:
        """Seconds since the run began: simulated ones, or real ones."""
        ...

    def members(self) -> Sequence[int | str]:
        """The clients that take part, whether they are there now or not, in a fixed order."""
        ...

    def nodes(self) -> Sequence[int | str]:
        """The clients that can take a task now, in a fixed order."""
        ...

    def size_of(self, client: int | str) -> int:
        """How many samples a client holds."""
        ...

    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Send tasks out; returns at once."""
        ...

    def collect(
        self, until: float = math.inf, enough: int | None = None
    ) -> Iterator[Reply | GroupReply | EdgeReply | Failure]:
        """Answers as they arrive; each counts for its own tasks.

        Args:
            until: the clock at which to stop.
            enough: the number of replies after which to stop; all of one instant are given. None: when no task is left.
        """
        ...

    def cancel(self, tasks: Iterable[int]) -> None:
        """Give no answers to these tasks, for which nobody waits any more, but those that are there already."""
        ...

    def state(self) -> Tree:
        """All that it will go on with after an interruption, for a checkpoint."""
        ...

    def restore(self, state: Tree) -> None:
        """Go on with what :meth:`state` said."""
        ...

    def wait(self, until: float = math.inf) -> bool:
        """Let time pass until a client comes or goes, or the clock is at ``until``.

        Returns:
            Whether one did; not where an answer is there before, which is to be collected, or where none ever will.
        """
        ...
