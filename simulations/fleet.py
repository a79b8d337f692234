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
    """A :class:`fed.server.fleet.Fleet` whose clients are trained when their answers are collected.

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
        self._queue: list[Task] = []
        self._arrivals: list[tuple[float, int, Reply | Failure]] = []

    def nodes(self) -> Sequence[ClientId]:
        """Every client of the data."""
        return self._nodes

    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Queue tasks, which start at the present clock."""
        self._queue.extend(tasks)

    def collect(self, until: float = math.inf) -> Iterator[Reply | Failure]:
        """Train what is queued and yield the answers in the order of their arrival."""
        for task in self._queue:
            answer, took_s = self._answer(task)
            heapq.heappush(self._arrivals, (self.clock + took_s, task.id, answer))
        self._queue.clear()
        while self._arrivals and self._arrivals[0][0] <= until:
            self.clock, _, answer = heapq.heappop(self._arrivals)
            yield answer

    def _answer(self, task: Task) -> tuple[Reply | Failure, float]:
        bytes_down = task.size_bytes()
        try:
            trained = self._clients.train(task.client, task.round, task.vector_V, task.integers_I, task.broadcast)
        except Diverged as error:
            failure = Failure(task.id, task.round, task.client, str(error), diverged=True)
            return failure, self._device.exchange_s(bytes_down=bytes_down, samples=0, bytes_up=0)
        samples = self._clients.data.sizes[task.client]
        reply = Reply(
            task.id, task.round, task.client, trained.vector_V, trained.integers_I, samples, trained.train_loss
        )
        took_s = self._device.exchange_s(
            bytes_down=bytes_down, samples=trained.samples_seen, bytes_up=reply.size_bytes()
        )
        return reply, took_s
