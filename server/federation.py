"""Federation of a run's clients, with a coordinator or without one."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from fed.server.round_stats import RoundStats
from fed.storage.checkpoints import Tree
from fed.vectors.tensors import Tensor

__all__ = ["Federation", "State"]

State: TypeAlias = tuple[Tensor, Tensor]
"""Model as (vector [V], integers [I])."""


class Federation(Protocol):
    """Clients that learn together, round by round."""

    @property
    def clock(self) -> float:
        """Seconds since the run began."""

    def round(self, number: int) -> RoundStats:
        """Run one round, numbered from 1: train, and exchange updates or models."""

    def clients(self) -> Sequence[int | str]:
        """Clients that have registered by now; at a real peer its own."""

    def model(self) -> State:
        """The model that users evaluate."""

    def state(self) -> Tree:
        """The whole state, for a checkpoint."""

    def restore(self, state: Tree) -> None:
        """Resume, before the first round, from a state that :meth:`state` gave."""

    def models(self) -> Mapping[int | str, State]:
        """The clients' own models, where they keep some."""

    def measures(self) -> dict[str, float]:
        """Measures of the models beside scores, for each round's metrics."""

    def occupation(self) -> dict[str, Any]:
        """The clients' use of their time, for a summary; nothing where they are in step."""
