"""Edge coordinators between the clients and the coordinator: each reduces its own clients and reports upward.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from fed.config.compatibility import Feature, Term
from fed.config.hyperparameters import Hyperparameters
from fed.vectors.reduction import WeightedMean
from fed.vectors.tensors import torch

if TYPE_CHECKING:
    from fed.server.fleet import Fleet
    from fed.storage.checkpoints import Tree
    from fed.wire.format import Format
    from fed.wire.messages import Answer, Task

__all__ = ["FleetAbove", "HierarchicalFleet", "Hierarchy", "summed"]


@dataclass(frozen=True, kw_only=True)
class Hierarchy(Hyperparameters):
    r"""Tree of two levels: clients answer to edge coordinators, and these to the coordinator.

    .. math:: \sum_i w_i m_i = \sum_{e} \sum_{i ∈ e} w_i m_i

    An edge sends one exact sum upward when all of its clients that count have answered, so the model is the flat run's,
    to the bit where clients train one by one. Clients belong to edges in the order in which they register.

    Args:
        fan_out: number of clients of an edge.
        latency_s: seconds of latency of one message between an edge and the coordinator.
        bytes_per_s: bandwidth between an edge and the coordinator, in bytes a second each way.
    """

    fan_out: PositiveInt = 32
    latency_s: NonNegativeFloat = 0.01
    bytes_per_s: PositiveFloat = 1.25e8

    def needs(self) -> Sequence[Term]:
        """Clients that report in cohorts, in a simulation."""
        features = (Feature.REPORTS, Feature.COHORTS, Feature.SIMULATION)
        return [Term(feature, "set hierarchy to null") for feature in features]

    def lacks(self) -> Sequence[Term]:
        """Single answers."""
        return (
            Term(Feature.SINGLE_ANSWERS, "set hierarchy to null", "whose edges send sums"),
            Term(Feature.DIRECT_MESSAGES, "set hierarchy to null", "whose clients talk to edges"),
        )

    def transfer_s(self, size_bytes: int) -> float:
        """Seconds that a message takes between an edge and the coordinator."""
        return self.latency_s + size_bytes / self.bytes_per_s


class FleetAbove:
    """Base of fleets above the clients' fleet, whose answers take more time; each is a :class:`fed.server.fleet.Fleet`.

    Args:
        fleet: fleet of clients that answer singly or in groups.
        message: format of clients' messages.
    """

    def __init__(self, fleet: "Fleet", message: "Format") -> None:
        self._fleet = fleet
        self._message = message
        # The clients' fleet does these as they are.
        self.registered = fleet.registered
        self.available = fleet.available
        self.size_of = fleet.size_of
        self.population = fleet.population
        self.cancel = fleet.cancel
        self.settle = fleet.settle
        self._passed_s = 0.0  # above the clients' fleet, whose clock does not know of it

    @property
    def clock(self) -> float:
        """Clock of the clients, plus the time that has passed above them."""
        return self._fleet.clock + self._passed_s

    def wait(self, until: float = math.inf) -> bool:
        """Wait as the clients' fleet does."""
        return self._fleet.wait(until - self._passed_s)

    def state(self) -> "Tree":
        """State of the clients' fleet, and the time that has passed above it."""
        return {"passed_s": self._passed_s, "fleet": self._fleet.state()}

    def restore(self, state: "Tree") -> None:
        """Resume from what :meth:`state` wrote down."""
        self._passed_s = state["passed_s"]
        self._fleet.restore(state["fleet"])


class HierarchicalFleet(FleetAbove):
    """Fleet of clients behind edge coordinators.

    Args:
        fleet: fleet of clients that answer singly or in groups.
        hierarchy: tree of the edges.
        message: format of clients' messages; edges send sums, which no codec encodes.
    """

    def __init__(self, fleet: "Fleet", hierarchy: Hierarchy, message: "Format") -> None:
        super().__init__(fleet, message)
        self._hierarchy = hierarchy
        self._received_bytes: dict[int, int] = {}  # edge → bytes that no answer has counted yet
        self._edges: dict[int | str, int] = {}

    def dispatch(self, tasks: "Iterable[Task]") -> None:
        """Send tasks to edges, which send them on."""
        tasks = [*tasks]
        # By the order of registration, whichever clients a round asks first.
        for client in self._fleet.registered() if len(self._edges) < len(self._fleet.registered()) else ():
            self._edges.setdefault(client, len(self._edges) // self._hierarchy.fan_out)
        for task in tasks:
            self._edges.setdefault(task.client, len(self._edges) // self._hierarchy.fan_out)
        if not tasks:
            return
        received_bytes = self._bytes_to_edges(tasks)
        for edge, size_bytes in received_bytes.items():
            self._received_bytes[edge] = self._received_bytes.get(edge, 0) + size_bytes
        # Edges receive at the same time: the largest message is the last to arrive.
        down_s = self._hierarchy.transfer_s(max(received_bytes.values()))
        self._passed_s += down_s
        # Both ways through the edge, for a client's deadline is that of the whole.
        ways_s = down_s + self._hierarchy.transfer_s(self._message.sum_bytes)
        self._fleet.dispatch(_sooner(task, ways_s) for task in tasks)

    def collect(self, until: float = math.inf, enough: int | None = None) -> "Iterator[Answer]":
        """Each edge's sum of its clients' updates, as one answer; failures pass through."""
        up_s = self._hierarchy.transfer_s(self._message.sum_bytes)
        of_edges: dict[int, list[Answer]] = {}
        # The sum still has to reach the coordinator in time.
        for answer in self._fleet.collect(until - self._passed_s - up_s, enough):
            if answer.problem:
                yield answer
            else:
                of_edges.setdefault(self._edges[answer.clients[0]], []).append(answer)
        self._passed_s += up_s if of_edges else 0.0  # once: edges send at the same time, and as many bytes each
        for edge, answers in of_edges.items():
            # The edge's message and the model that it received travel once more.
            yield summed(
                answers,
                sum(self._message.summed_sizes),
                size_bytes=self._message.sum_bytes,
                more_bytes_down=self._received_bytes.pop(edge, 0),
            )

    def _bytes_to_edges(self, tasks: "Sequence[Task]") -> dict[int, int]:
        """Bytes that each edge receives to send on: the whole model, if a client needs it, and the most differences."""
        received: dict[int, dict[bool, int]] = {}
        for task in {(self._edges[task.client], task.content): task for task in tasks}.values():
            of_edge = received.setdefault(self._edges[task.client], {})
            is_whole = task.differences is None
            # The differences that one client lacks are the last of those that another lacks.
            of_edge[is_whole] = max(of_edge.get(is_whole, 0), task.size_bytes())
        return {edge: sum(of_edge.values()) for edge, of_edge in received.items()}

    def state(self) -> "Tree":
        """State of the clients' fleet and of the edges, and the time that has passed above the clients."""
        return {**super().state(), "edges": self._edges, "received_bytes": self._received_bytes}

    def restore(self, state: "Tree") -> None:
        """Resume from what :meth:`state` wrote down."""
        super().restore(state)
        self._edges = state["edges"]
        self._received_bytes = state["received_bytes"]


def summed(answers: "Sequence[Answer]", numbers: int, *, size_bytes: int, more_bytes_down: int) -> "Answer":
    """One answer with the exact sum of several.

    Args:
        answers: sequence of answers to tasks that started from one model.
        numbers: number M of values in each message.
        size_bytes: bytes that have travelled upward beside the clients' own messages.
        more_bytes_down: bytes that have travelled downward beside their tasks.
    """
    total = WeightedMean(numbers)
    for answer in answers:
        total.add(answer.update.update_M, answer.update.weight)
    integers = [answer.integers_I for answer in answers]
    # Only here, so that reading an experiment loads as little as it can.
    from fed.wire.messages import Answer, PartialSum

    return Answer(
        tasks=tuple(task for answer in answers for task in answer.tasks),
        round=answers[0].round,
        clients=tuple(client for answer in answers for client in answer.clients),
        content=PartialSum(total),
        integers_I=torch.stack(integers).amax(0) if integers[0].numel() else integers[0],
        samples=tuple(count for answer in answers for count in answer.samples),
        train_losses=tuple(loss for answer in answers for loss in answer.train_losses),
        metrics=tuple(numbers for answer in answers for numbers in answer.metrics),
        size_bytes=sum(answer.size_bytes for answer in answers) + size_bytes,
        more_bytes_down=more_bytes_down,
    )


def _sooner(task: "Task", by_s: float) -> "Task":
    """Task with a deadline that leaves time for the way through the edge."""
    return task if task.deadline_s is None else task._replace(deadline_s=max(task.deadline_s - by_s, 0.0))
