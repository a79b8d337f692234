"""Fleets whose answers a test writes down."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fed.server.coordinator import Coordinator
from fed.server.round_stats import RoundStats
from fed.wire.messages import Answer, Task

__all__ = ["ScriptedFleet", "one_round"]


class ScriptedFleet:
    """Clients who are always there, on a clock that stands still, and answer nothing later; tests say what they answer.

    Attributes:
        verdicts: what the coordinator has said of the tasks that counted, each time.

    Args:
        clients: all of them.
    """

    clock = 0.0

    def __init__(self, clients: Sequence[int | str]) -> None:
        self.verdicts: list[dict[int, float]] = []
        self._clients = clients
        self._tasks: list[Task] = []

    def registered(self) -> Sequence[int | str]:
        return self._clients

    def population(self) -> int:
        return len(self.registered())

    def available(self) -> Sequence[int | str]:
        return self._clients

    def size_of(self, client: int | str) -> int:
        return 1

    def dispatch(self, tasks: Iterable[Task]) -> None:
        self._tasks += tasks

    def collect(self, until: float = math.inf, enough: int | None = None) -> Iterator[Answer]:
        """Nothing, unless a test says more."""
        yield from ()

    def cancel(self, tasks: Iterable[int]) -> None:
        """Nobody answers later anyhow."""

    def settle(self, counted: Mapping[int, float]) -> None:
        self.verdicts.append({**counted})

    def wait(self, until: float = math.inf) -> bool:
        return False

    def state(self) -> Any:
        return {}

    def restore(self, state: Any) -> None:
        """Nothing."""

    def _taken(self) -> list[Task]:
        """The tasks that were sent out since the last time."""
        tasks, self._tasks = self._tasks, []
        return tasks


def one_round(coordinator: Coordinator, number: int, clients: Sequence[int | str]) -> RoundStats:
    """Send the model to clients, collect their updates, and move the model by the mean."""
    accumulator = coordinator.new_accumulator()
    coordinator.dispatch(accumulator, number, clients)
    coordinator.collect(accumulator)
    coordinator.cancel(accumulator, are_late=False)
    return coordinator.step(accumulator, number)
