"""Executors of pure work: items are done here or in other processes, with the same bits.

An item is a small picklable content with tensors. Here this process does it; in :mod:`fed.simulations.executors.pool`
others do.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

from fed.vectors.tensors import Tensor

__all__ = ["Executor", "InProcess", "Item", "Make", "Result", "Work"]

Work: TypeAlias = Callable[[Any, Sequence[Tensor]], tuple[Any, Sequence[Tensor]]]
"""(content, tensors) → (content, tensors): a pure function, which changes neither what it gets nor what it gave before.

The tensors that it gets are its own for as long as it runs."""

Make: TypeAlias = Callable[[int], Work]
"""Called once in each process, with the worker's number from 0."""


@dataclass(frozen=True)
class Item:
    """Unit of work.

    Args:
        content: small and picklable; a copy of it reaches another process.
        tensors: not to be changed until the result is there.
        label: what people call it: "clients 3, 7 and 9 in round 5".
        cost: how long it takes compared with others, in any unit.
        priority: items with a low number come first; then those of the largest cost, then the first come.
    """

    content: Any
    tensors: Sequence[Tensor]
    label: str
    cost: float = 0.0
    priority: int = 0

    def rank(self, ticket: int) -> tuple[int, float, int]:
        """Key by which items are sorted: the lowest comes first, and of equal ones the lowest ticket."""
        return self.priority, -self.cost, ticket


class Result(NamedTuple):
    """Result of the item of a ticket. The tensors are the caller's."""

    ticket: int
    content: Any
    tensors: Sequence[Tensor]


class Executor(ABC):
    """Does items; one thread may use it, as a context that ends what it began.

    Attributes:
        is_parallel: whether items are at work while the caller does something else.
    """

    is_parallel: ClassVar[bool]

    @abstractmethod
    def submit(self, item: Item) -> int:
        """Ask for an item to be done.

        Returns:
            Its ticket.

        Raises:
            InvalidInput: if the item is too large, or cannot go to another process.
        """

    @abstractmethod
    def results(self, tickets: Iterable[int]) -> Iterator[Result]:
        """The results of these tickets as they finish, each once; those of other tickets are kept for later calls.

        Raises:
            FedError: what the work raised of this kind, as soon as it did.
            RunFailed: if an item ended several workers, or workers cannot be started.
            KeyError: if there is no result to come for a ticket.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop whatever is not done. Afterwards no process is left."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class InProcess(Executor):
    """Does items in this process, when their results are asked for; what the work raises is raised as it is.

    Args:
        make: makes what does the work, at once.

    Example:
        >>> import torch
        >>> executor = InProcess(lambda worker: lambda content, tensors: (content.upper(), [tensors[0] + 1]))
        >>> small = executor.submit(Item("a", [torch.zeros(1)], "small", cost=1))
        >>> large = executor.submit(Item("b", [torch.ones(1)], "large", cost=9))
        >>> for ticket, content, tensors in executor.results([small, large]):
        ...     print(content, tensors[0].item())
        B 2.0
        A 1.0
    """

    is_parallel = False

    def __init__(self, make: Make) -> None:
        self._work = make(0)
        self._items: dict[int, Item] = {}
        self._submitted = 0

    def submit(self, item: Item) -> int:  # noqa: D102  # as the base class says
        self._submitted += 1
        self._items[self._submitted] = item
        return self._submitted

    def results(self, tickets: Iterable[int]) -> Iterator[Result]:  # noqa: D102
        for ticket in sorted(set(tickets), key=lambda ticket: self._items[ticket].rank(ticket)):
            item = self._items.pop(ticket)
            content, tensors = self._work(item.content, item.tensors)
            yield Result(ticket, content, [tensor.detach() for tensor in tensors])

    def close(self) -> None:  # noqa: D102
        self._items.clear()
