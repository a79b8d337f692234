"""A trial executor, as one for other machines would be: one class, whose family has one more line."""

import pickle
from collections.abc import Iterable, Iterator, Sequence

import torch

from fed.clients.training.executor import Executor, InProcess, Item, Make, Result


class Noted(InProcess):
    """Does the work here, and notes the costs of clients' items as they are submitted, round by round.

    Attributes:
        costs: costs of the items of each round.
    """

    costs: list[list[float]]

    def __init__(self, make: Make, devices: Sequence[torch.device]) -> None:
        super().__init__(make, devices)
        self._is_new = True

    def submit(self, item: Item) -> int:
        if item.priority == 0:
            if self._is_new:
                self.costs.append([])
            self._is_new = False
            self.costs[-1].append(item.cost)
        return super().submit(item)

    def results(self, tickets: Iterable[int]) -> Iterator[Result]:
        self._is_new = True
        return super().results(tickets)


class Pickled(Executor):
    """Sends work, items and results through pickle, shares no memory, and gives the last item's result first."""

    is_parallel = True
    pickles_work = True

    def __init__(self, make: Make, devices: Sequence[torch.device]) -> None:
        pickled = pickle.dumps(make)
        self.works = [pickle.loads(pickled)(device) for device in devices]
        self._items: dict[int, bytes] = {}
        self._submitted = 0

    def submit(self, item: Item) -> int:
        self._submitted += 1
        self._items[self._submitted] = pickle.dumps((item.content, list(item.tensors)))
        return self._submitted

    def results(self, tickets: Iterable[int]) -> Iterator[Result]:
        for ticket in sorted(tickets, reverse=True):
            work = self.works[ticket % len(self.works)]
            answer = work(*pickle.loads(self._items.pop(ticket)))
            content, tensors = pickle.loads(pickle.dumps(answer))
            yield Result(ticket, content, tensors)

    def close(self) -> None:
        self._items.clear()
