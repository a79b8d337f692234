"""Executors of pure work: items are done here or elsewhere, with the same bits.

An item is a small picklable content with tensors. Kinds of executors are a family of the registry: that of this module
does items in this process, that of :mod:`fed.simulations.executors.pool` in others of this machine.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

from fed.vectors.tensors import Tensor, torch

__all__ = ["Demand", "Executor", "InProcess", "Item", "Make", "Result", "Work"]

Work: TypeAlias = Callable[[Any, Sequence[Tensor]], tuple[Any, Sequence[Tensor]]]
"""(content, tensors) → (content, tensors): a pure function, which changes neither its arguments nor earlier results.

The tensors that it gets are its own for as long as it runs."""

Make: TypeAlias = Callable[["torch.device"], Work]
"""Factory of the work: called once by each worker, with the device that its work is to compute on."""


@dataclass(frozen=True)
class Item:
    """Unit of work.

    Args:
        content: small and picklable; a copy of it reaches another process.
        tensors: tensors that the caller leaves unchanged until the result is there.
        label: name for people, such as "clients 3, 7 and 9 in round 5".
        cost: duration relative to other items, in any unit.
        priority: rank in the queue: the lowest number comes first, then the largest cost, then the first that was
            submitted.
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


@dataclass(frozen=True)
class Demand:
    """Workers that a simulation has use for, told to executors that place their workers themselves.

    Args:
        workers: number of workers that the experiment asks for; None: as many as there is room for, at most
            ``groups``.
        groups: number of groups of a round, each one item.
        device: type of the device that each worker computes on, such as cpu or cuda.
        processes: number of processes of each worker, which need a core or a GPU each.
    """

    workers: int | None
    groups: int
    device: str
    processes: int = 1


class Executor(ABC):
    """Does items. One thread may use it, as a context whose end closes it.

    A kind of executor is a class of this base. A simulation calls it with those of these arguments that its constructor
    names:

    - ``make``, a :data:`Make`;
    - ``devices``, the device of each worker, so that their number is the number of workers;
    - ``capacity_bytes``, the largest size of an item's tensors, and of those of its result, in bytes;
    - ``small_bytes``, the size below which an item takes less time than its way to another process, in bytes;
    - ``awaits``, True if the constructor is to wait until a worker has begun, so that failing to start fails there;
    - ``demand``, a :class:`Demand`, for executors that place their workers themselves, on other machines too.

    Attributes:
        is_parallel: True if items are at work while the caller does something else.
        pickles_work: True if ``make`` goes to other processes, and must be picklable for it.
        shares_memory: True if these processes are spawned by this one, and may map its memory: training data then lie
            in it once for all, as :class:`fed.vectors.shared_memory.SharedTensor`.
        copies_arrays: True if arrays of NumPy in ``make`` reach each machine once: training data are then in such
            arrays, as :class:`fed.vectors.arrays.ArrayTensor`.
    """

    is_parallel: ClassVar[bool] = False
    pickles_work: ClassVar[bool] = False
    shares_memory: ClassVar[bool] = False
    copies_arrays: ClassVar[bool] = False

    @abstractmethod
    def submit(self, item: Item) -> int:
        """Ask for an item to be done.

        Returns:
            The item's ticket.

        Raises:
            InvalidInput: if the item is too large, or cannot go to another process.
        """

    def submit_all(self, items: Sequence[Item]) -> list[int]:
        """Ask for several items to be done, the costliest first: an idle worker begins an item as soon as it comes.

        Workers that take item after item, each the costliest that is left, end at about the same time, also where one
        is slower than another.

        Args:
            items: items in any order.

        Returns:
            The items' tickets, in the order of ``items``.

        Raises:
            InvalidInput: if an item is too large, or cannot go to another process.

        Reference:
            Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969, theorem 2: on w equal
            workers at most 4/3 - 1/(3w) times the shortest time.
        """
        tickets = [0] * len(items)
        for place in sorted(range(len(items)), key=lambda place: items[place].rank(place)):
            tickets[place] = self.submit(items[place])
        return tickets

    @abstractmethod
    def results(self, tickets: Iterable[int]) -> Iterator[Result]:
        """The results of these tickets as they finish, each once; those of other tickets are kept for later calls.

        Raises:
            FedError: the error of this kind that the work raised, as soon as it did.
            RunFailed: if an item ended several workers, or workers cannot be started.
            KeyError: if there is no result to come for a ticket.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop all items that are not done. Afterwards no process is left."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class InProcess(Executor):
    """Executor in this process: does items when their results are asked for, and raises what the work raises as it is.

    Args:
        make: factory of the work, called at once.
        devices: the device of the one worker.

    Example:
        >>> import torch
        >>> def make(device):
        ...     return lambda content, tensors: (content.upper(), [tensors[0] + 1])
        >>> executor = InProcess(make, [torch.device("cpu")])
        >>> small = executor.submit(Item("a", [torch.zeros(1)], "small", cost=1))
        >>> large = executor.submit(Item("b", [torch.ones(1)], "large", cost=9))
        >>> for ticket, content, tensors in executor.results([small, large]):
        ...     print(content, tensors[0].item())
        B 2.0
        A 1.0
    """

    def __init__(self, make: Make, devices: "Sequence[torch.device]") -> None:
        (device,) = devices
        self._work = make(device)
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
