"""Tasks after which each client's state is to be found, now and at the last checkpoints."""

from collections import deque

from fed.storage.checkpoints import Tree

__all__ = ["KeptStates", "TaskName"]

_CHECKPOINTS = 8  # that a run may have to go back over

TaskName = tuple[int, int]
"""A task among those of all servers that a run has had: (start of its server, number)."""


class KeptStates:
    """Versions of client states: a new one counts with its answer, and until then the one before is kept as well."""

    def __init__(self) -> None:
        self._after: dict[int | str, TaskName] = {}
        self._durable: dict[int | str, TaskName] = {}
        self._history: deque[dict[int | str, TaskName]] = deque()

    def after(self, client: int | str) -> TaskName | None:
        """The task whose state is gone on from; None: the first one."""
        return self._after.get(client)

    def durable_after(self, client: int | str) -> TaskName | None:
        """The task before which no state is needed any more."""
        return self._durable.get(client)

    def count(self, client: int | str, task: TaskName, *, is_durable: bool = False) -> None:
        """A client's answer counts; where there are no checkpoints to go back to, for good."""
        self._after[client] = task
        if is_durable:
            self._durable[client] = task

    def state(self) -> Tree:
        """State for a checkpoint, which is the newest from now on."""
        if len(self._history) > _CHECKPOINTS:
            self._durable = self._history.popleft()
        self._history.append(dict(self._after))
        return dict(self._after)

    def restore(self, state: Tree) -> None:
        """Go on with what :meth:`state` said."""
        self._after = {client: (start, number) for client, (start, number) in state.items()}
