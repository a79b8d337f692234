"""Buffered asynchronous rounds: whoever answers is replaced at once, and the model moves when enough have answered.

Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022, arXiv 2106.06639.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from pydantic import NonNegativeInt, PositiveInt

from fed.errors import InvalidExperiment
from fed.families import STALENESSES
from fed.kinds import Component
from fed.server.coordinator import Coordinator
from fed.server.gathering import Exchange
from fed.server.staleness import Staleness
from fed.server.synchronous import Rounds, await_clients

__all__ = ["Buffered"]


@dataclass(frozen=True, kw_only=True)
class Buffered(Rounds):
    r"""The model moves by the mean of so many updates, however old the models that they start from (2106.06639).

    .. math:: x ← x + η_g \sum_i n_i \, s(τ_i) Δ_i / \sum_i n_i

    τ_i is how often the model has moved since client i was asked, s the weight of such an update, η_g and what else is
    done with the mean the algorithm's. So many clients have tasks at any time. All that happens in one instant is
    handled before anybody is asked: with equal devices, and as many clients at a time as the buffer holds, these are
    synchronous rounds, to the bit. Answers that arrive together count together, where the buffer is full of them.

    Args:
        buffer: K, how many updates move the model.
        concurrency: how many clients have tasks at any time.
        staleness: s, the weight by age: polynomial, constant or hinge.
        most_stale: the age beyond which an update is dropped; never unless given.
    """

    buffer: PositiveInt = 10
    concurrency: PositiveInt = 100
    staleness: Annotated[Component, STALENESSES] = field(default_factory=lambda: STALENESSES.validate("polynomial"))
    most_stale: NonNegativeInt | None = None

    def check(self, population: int) -> None:
        """Hold the policy to the number of clients.

        Raises:
            InvalidExperiment: if more should have tasks than there are, or the buffer never fills.
        """
        if not self.buffer <= self.concurrency <= population:
            raise InvalidExperiment(
                f"rounds.buffer must be at most rounds.concurrency, and that at most {population}, the number of "
                f"clients, got {self.buffer} and {self.concurrency}: lower them"
            )

    @property
    def keeps_late(self) -> bool:
        """Whether answers count, however late they come."""
        return True

    def cohort_of(self, population: int) -> int:
        """How many of so many clients move the model in a round."""
        return min(self.buffer, population)

    def asked_of(self, population: int) -> int:
        """How many of so many clients have tasks at a time."""
        return min(self.concurrency, population)

    def round(self, coordinator: Coordinator, number: int) -> Exchange:
        """Until the model moves for that time, counted from 1."""
        gathering = coordinator.begin()
        while gathering.replied < self.buffer:
            free = self.concurrency - len(coordinator.open)
            if free and (clients := self.draw(coordinator, number, free, gathering.selected)):
                coordinator.ask(gathering, number, clients, cohort=self.buffer)
            elif not coordinator.open:
                await_clients(coordinator, number, 1)
                continue
            coordinator.gather(gathering, enough=1, weigh=self._weigh)
        return coordinator.move(gathering, number)

    def _weigh(self, staleness: int) -> float | None:
        if self.most_stale is not None and staleness > self.most_stale:
            return None
        return self._weights.weight(staleness)

    @cached_property
    def _weights(self) -> Staleness:
        weights: Staleness = STALENESSES.validate(self.staleness).make()
        return weights
