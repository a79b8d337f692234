"""Queue of an executor whose workers are other processes: tasks that wait, and those that are done."""

import heapq
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fed.clients.training.executor import Executor, Item, Result
from fed.errors import FedError, RunFailed

__all__ = ["QueuedExecutor", "QueuedTask"]


@dataclass(eq=False)
class QueuedTask:
    """Item that has been submitted.

    Args:
        ticket: ticket of the item.
        item: the item.
        deaths: number of workers that have died during it.
    """

    ticket: int
    item: Item
    deaths: int = field(default=0, kw_only=True)


_AnyTask = TypeVar("_AnyTask", bound=QueuedTask)


class QueuedExecutor(Executor, Generic[_AnyTask]):
    """Executor with a queue, in which tasks that a worker's death has set free come first."""

    def __init__(self) -> None:
        self._workers: list[Any] = []
        self._submitted = 0
        self._queue: list[tuple[bool, tuple[int, float, int], _AnyTask]] = []
        self._pending: dict[int, _AnyTask] = {}
        self._finished: dict[int, Result | FedError] = {}

    @abstractmethod
    def _finish(self, task: _AnyTask, result: Result | FedError) -> None:
        """Note the result of a task, and let go of what it held."""

    def _check_open(self) -> None:
        if not self._workers:
            raise RunFailed("these workers are closed")

    def _enqueue(self, task: _AnyTask, *, is_lost: bool = False) -> None:
        # Ranks differ by ticket, so that tasks are never compared.
        heapq.heappush(self._queue, (not is_lost, task.item.rank(task.ticket), task))

    def _first(self) -> _AnyTask:
        """The first task, taken from the queue."""
        return heapq.heappop(self._queue)[2]

    def _done_of(self, wanted: set[int]) -> list[int]:
        """Tickets among the wanted ones whose results are there.

        Raises:
            KeyError: if there are none, and none are to come.
        """
        done = sorted(self._finished.keys() & wanted)  # of several errors the same one is raised
        if not done and self._pending.keys().isdisjoint(wanted):
            raise KeyError(f"no results are to come for tickets {sorted(wanted)}")
        return done

    def _taken(self, ticket: int) -> Result:
        result = self._finished.pop(ticket)
        if isinstance(result, FedError):
            raise result
        return result
