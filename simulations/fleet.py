"""A fleet of simulated clients on a virtual clock. Shapes: see :mod:`fed.messages`."""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from torch import Tensor

from fed.clients.data import ClientId
from fed.messages import Failure, GroupReply, Task
from fed.simulations.client_states import ClientStates
from fed.simulations.executor import Item
from fed.simulations.simulated_clients import SimulatedClients
from fed.simulations.tasks import Train, Trained, label_of

__all__ = ["SimulatedFleet"]


class SimulatedFleet:
    """A :class:`fed.server.fleet.Fleet` whose clients are trained, in groups, when their answers are collected.

    The clock moves to the last arrival of those that are collected together.

    Args:
        clients: who trains on what.
        states: what the clients keep.
        answer_bytes: of a client's message with its integers.
        reduces: whether the mean of a group's messages is all that is wanted; else each client's comes by itself.
        places: whether clients are told their numbers.
    """

    def __init__(
        self,
        clients: SimulatedClients,
        *,
        states: ClientStates,
        answer_bytes: int,
        reduces: bool,
        places: bool = False,
    ) -> None:
        self.clock = 0.0
        self._data = clients.data
        self._groups = clients.groups
        self._executor = clients.executor
        self._device = clients.device
        self._states = states
        self._answer_bytes = answer_bytes
        self._reduces = reduces
        self._places = {client: place for place, client in enumerate(clients.data.clients)} if places else {}
        self._due: list[tuple[float, int, Task, int]] = []

    def nodes(self) -> Sequence[ClientId]:
        """Every client of the data."""
        return self._data.clients

    def size_of(self, client: ClientId) -> int:
        """How many samples a client holds."""
        return self._data.size_of(client)

    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Start tasks at the present clock."""
        bytes_of: dict[int, int] = {}  # of tasks that share their tensors, as those of a round do
        for task in tasks:
            samples = self._data.size_of(task.client)
            if (size_bytes := bytes_of.get(id(task.vector_V))) is None:
                size_bytes = bytes_of[id(task.vector_V)] = task.size_bytes()
            heapq.heappush(self._due, (self.clock + self._takes_s(task, size_bytes, samples), task.id, task, samples))

    def collect(self, until: float = math.inf) -> Iterator[GroupReply | Failure]:
        """Train all clients whose answers are due, those together that started from one model.

        What clients keep changes at the end, for all of them, and for nobody if one has diverged or an error is raised.
        """
        versions: dict[tuple[int, int], list[tuple[Task, int]]] = {}
        while self._due and self._due[0][0] <= until:
            self.clock, _, task, samples = heapq.heappop(self._due)
            versions.setdefault((id(task.vector_V), task.round), []).append((task, samples))
        items = {}
        for due in versions.values():
            tasks, sizes = zip(*due, strict=True)
            for group in self._groups.of(sizes):
                seen = sum(self._groups.seen(sizes[place], tasks[place].steps) for place in group)
                members = [tasks[place] for place in group]
                items[self._executor.submit(self._item(members, seen))] = members
        kept: list[tuple[list[ClientId], Sequence[Tensor]]] = []
        has_diverged = False
        for ticket, members in items.items():  # in turn, so that of several errors the same one is raised everywhere
            for _, trained, tensors in self._executor.results([ticket]):
                has_diverged |= trained.diverged is not None
                kept.append(([task.client for task in members], tensors[2:]))
                yield from self._answers(members, trained, tensors)
        for clients, states in () if has_diverged else kept:
            self._states.keep(clients, states)

    def _takes_s(self, task: Task, size_bytes: int, samples: int) -> float:
        seen = self._groups.seen(samples, task.steps)
        return self._device.exchange_s(bytes_down=size_bytes, samples=seen, bytes_up=self._answer_bytes)

    def _item(self, tasks: list[Task], seen: int) -> Item:
        first = tasks[0]
        clients = tuple(task.client for task in tasks)
        places = tuple(self._places[client] for client in clients) if self._places else ()
        wants: Literal["mean", "messages"] = "mean" if self._reduces else "messages"
        train = Train(
            clients, first.round, wants, first.lr, first.steps, len(first.broadcast), len(self._data.clients), places
        )
        model = first.vector_V, first.integers_I
        tensors = (*model, *first.broadcast, *self._states.stacked(clients, model))
        return Item(train, tensors, label_of(train), cost=seen)

    def _answers(
        self, tasks: list[Task], trained: Trained, tensors: Sequence[Tensor]
    ) -> Iterator[GroupReply | Failure]:
        number = tasks[0].round
        if trained.diverged is not None:
            client, reason = trained.diverged
            (id_,) = (task.id for task in tasks if task.client == client)
            yield Failure(id_, number, client, reason, diverged=True)
            return
        messages, integers, *_ = tensors
        parts = [slice(None)] if self._reduces else [slice(row, row + 1) for row in range(len(tasks))]
        for part in parts:
            yield GroupReply(
                tuple(task.id for task in tasks[part]),
                number,
                tuple(task.client for task in tasks[part]),
                messages if self._reduces else messages[part][0],
                sum(trained.weights[part]),
                integers if self._reduces else integers[part][0],
                trained.samples[part],
                trained.train_losses[part],
            )
