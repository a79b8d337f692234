"""What a simulated run sees of its clients, with a coordinator or without one.

Shapes: V, a model's floating-point state; I, its integers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, TypeAlias

from torch import Tensor

from fed.clients.data import ClientId
from fed.server.coordinator import Coordinator, Exchange
from fed.server.synchronous import Synchronous

__all__ = ["Coordinated", "Federation", "State"]

State: TypeAlias = tuple[Tensor, Tensor]
"""A model as (vector [V], integers [I])."""


class Federation(Protocol):
    """Clients that learn together, round by round."""

    @property
    def clock(self) -> float:
        """Simulated seconds since the run began."""
        ...

    @property
    def trainees(self) -> int:
        """How many clients train in a round."""
        ...

    @property
    def bytes_each_way(self) -> int:
        """What a round sends, up as well as down, where every client answers and a rule over mix mixes once."""
        ...

    def round(self, number: int) -> Exchange:
        """Train and exchange."""
        ...

    def model(self) -> State:
        """The model that users evaluate."""
        ...

    def models(self) -> Mapping[ClientId, State]:
        """The clients' own models, where they keep some."""
        ...


class Coordinated:
    """A federation with a coordinator.

    Args:
        policy: who trains when.
        coordinator: over the simulated fleet.
        message_bytes: of a model as it travels; 0 where nothing does.
    """

    def __init__(self, policy: Synchronous, coordinator: Coordinator, message_bytes: int) -> None:
        self._policy = policy
        self._coordinator = coordinator
        self._message_bytes = message_bytes

    @property
    def clock(self) -> float:
        """Simulated seconds since the run began."""
        return self._coordinator.fleet.clock

    @property
    def trainees(self) -> int:
        """The cohort's size."""
        return self._policy.cohort_of(len(self._coordinator.fleet.nodes()))

    @property
    def bytes_each_way(self) -> int:
        """A model to, and one from, each client of a cohort."""
        return self.trainees * self._message_bytes

    def round(self, number: int) -> Exchange:
        """One round of the policy."""
        exchange = self._policy.round(self._coordinator, number)
        return exchange if self._message_bytes else replace(exchange, bytes_up=0, bytes_down=0)

    def model(self) -> State:
        """The coordinator's model."""
        return self._coordinator.model()

    def models(self) -> Mapping[ClientId, State]:
        """None: clients keep no models of their own."""
        return {}
