"""A fleet of simulated clients on a virtual clock. Shapes: see :mod:`fed.messages`."""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence

from fed.clients.data import ClientId
from fed.errors import Diverged
from fed.messages import Failure, Reply, Task
from fed.simulations.devices import Device
from fed.simulations.in_process import InProcessClients

__all__ = ["SimulatedFleet"]


class SimulatedFleet:
    """A :class:`fed.server.fleet.Fleet` whose clients are trained when their answers are collected, one at a time.

    Answers arrive in the order in which simulated devices finish; the clock moves to each arrival.

    Args:
        clients: who trains.
        device: every client's.
    """

    def __init__(self, clients: InProcessClients, device: Device) -> None:
        self.clock = 0.0
        self._clients = clients
        self._nodes = list(clients.data.train)
        self._device = device
        self._due: list[tuple[float, int, Task]] = []

    def nodes(self) -> Sequence[ClientId]:
        """Every client of the data."""
        return self._nodes

    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Start tasks at the present clock."""
        for task in tasks:
            heapq.heappush(self._due, (self.clock + self._takes_s(task), task.id, task))

    def collect(self, until: float = math.inf) -> Iterator[Reply | Failure]:
        """Train client after client, in the order in which their answers arrive."""
        while self._due and self._due[0][0] <= until:
            self.clock, _, task = heapq.heappop(self._due)
            yield self._answer(task)

    def _takes_s(self, task: Task) -> float:
        samples = self._clients.trainer.samples_of(self._clients.data.sizes[task.client])
        answer_bytes = task.vector_V.nbytes + task.integers_I.nbytes
        return self._device.exchange_s(bytes_down=task.size_bytes(), samples=samples, bytes_up=answer_bytes)

    def _answer(self, task: Task) -> Reply | Failure:
        try:
            trained = self._clients.train(task.client, task.round, task.vector_V, task.integers_I, task.broadcast)
        except Diverged as error:
            return Failure(task.id, task.round, task.client, str(error), diverged=True)
        samples = self._clients.data.sizes[task.client]
        return Reply(
            task.id, task.round, task.client, trained.vector_V, trained.integers_I, samples, trained.train_loss
        )
