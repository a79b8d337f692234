"""The versions of clients' states at their nodes: the task that each resumes from, now and at the last checkpoints."""

from collections import deque
from typing import NamedTuple

from fed.storage.checkpoints import Tree

__all__ = ["ClientStateVersions", "CountedTask"]

_CHECKPOINTS = 8  # that a run may have to go back over


class CountedTask(NamedTuple):
    """A task whose update counted, among those of all servers that a run has had.

    Args:
        start: the start of its server.
        number: the task's.
        discount: the factor s in (0, 1] with which it counted: the client's state moves s of the way.
    """

    start: int
    number: int
    discount: float = 1.0


class ClientStateVersions:
    """Last counted task of each client; its node keeps older states for a server that goes back.

    Attributes:
        after: client → the task whose state it goes on from; the first state where there is none.
        durable_after: client → the task before which no state is needed any more.
    """

    def __init__(self) -> None:
        self.after: dict[int | str, CountedTask] = {}
        self.durable_after: dict[int | str, CountedTask] = {}
        self._history: deque[dict[int | str, CountedTask]] = deque()

    def count(self, client: int | str, task: CountedTask, *, is_durable: bool = False) -> None:
        """Note that a client's update counted; for good where there are no checkpoints to go back to.

        Args:
            client: whose update.
            task: the task.
            is_durable: true if no checkpoint will be gone back to.
        """
        self.after[client] = task
        if is_durable:
            self.durable_after[client] = task

    def state(self) -> Tree:
        """The versions, for a checkpoint, which is the newest from now on."""
        if len(self._history) > _CHECKPOINTS:
            self.durable_after = self._history.popleft()
        self._history.append(dict(self.after))
        return {client: tuple(task) for client, task in self.after.items()}

    def restore(self, state: Tree) -> None:
        """Resume from what :meth:`state` wrote down."""
        self.after = {client: CountedTask(*task) for client, task in state.items()}
