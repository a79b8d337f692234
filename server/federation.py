"""What a run sees of its clients, with a coordinator or without one.

Shapes: V, a model's floating-point state; I, its integers.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from fed.server.accumulator import RoundStats
from fed.server.coordinator import Coordinator
from fed.server.rounds.synchronous import Rounds
from fed.storage.checkpoints import Tree

__all__ = ["Coordinated", "Federation", "Kept", "State"]

State: TypeAlias = tuple[Tensor, Tensor]
"""A model as (vector [V], integers [I])."""


class Federation(Protocol):
    """Clients that learn together, round by round."""

    @property
    def clock(self) -> float:
        """Seconds since the run began."""
        ...

    def round(self, number: int) -> RoundStats:
        """Train and exchange."""
        ...

    def model(self) -> State:
        """The model that users evaluate."""
        ...

    def state(self) -> Tree:
        """All that it will go on with, for a checkpoint."""
        ...

    def restore(self, state: Tree) -> None:
        """Go on, before the first round, with what :meth:`state` said."""
        ...

    def models(self) -> Mapping[int | str, State]:
        """The clients' own models, where they keep some."""
        ...

    def occupation(self) -> dict[str, Any]:
        """What clients have done with their time, for a summary; nothing where they are in step."""
        ...


class Kept(Protocol):
    """What clients keep of their own, where they train models that are not the coordinator's alone."""

    def whole(self, model: State) -> State:
        """The coordinator's model, with private parts where there are any."""
        ...

    def models(self, model: State) -> Mapping[int | str, State]:
        """Each client's own."""
        ...


class Coordinated:
    """A federation with a coordinator.

    Args:
        policy: who trains when.
        coordinator: over any fleet.
        states: what the clients keep.
        sends: whether models travel.
        occupation: what clients have done with their time.
    """

    def __init__(
        self,
        policy: Rounds,
        coordinator: Coordinator,
        states: Kept,
        sends: bool,
        occupation: Callable[[], dict[str, Any]],
    ) -> None:
        self.occupation = occupation
        self._policy = policy
        self._policy_state = policy.init()
        self._coordinator = coordinator
        self._states = states
        self._sends = sends

    @property
    def clock(self) -> float:
        """Seconds since the run began."""
        return self._coordinator.fleet.clock

    def round(self, number: int) -> RoundStats:
        """One round of the policy."""
        exchange = self._policy.round(self._coordinator, number, self._policy_state)
        return exchange if self._sends else exchange._replace(bytes_up=0, bytes_down=0)

    def state(self) -> Tree:
        """The coordinator's, the fleet's and the policy's."""
        policy = self._policy.saved(self._policy_state)
        return {"coordinator": self._coordinator.state(), "fleet": self._coordinator.fleet.state(), "policy": policy}

    def restore(self, state: Tree) -> None:
        """Go on with what :meth:`state` said."""
        self._coordinator.restore(state["coordinator"])
        self._coordinator.fleet.restore(state["fleet"])
        if state["policy"] is not None:
            self._policy_state = self._policy.restored(state["policy"])

    def model(self) -> State:
        """The coordinator's model, with the first model's private parts where there are any."""
        return self._states.whole(self._coordinator.model())

    def models(self) -> Mapping[int | str, State]:
        """Each client's own, where it has private parts of a model, or a whole one."""
        return self._states.models(self._coordinator.model())
