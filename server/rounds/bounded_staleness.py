"""Bounded staleness: every client trains at its own pace, none too far ahead of the slowest.

Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NeurIPS 2013.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeInt

from fed.config.compatibility import Feature, Term
from fed.errors import RunFailed
from fed.server.rounds.synchronous import STAY_LONGER, WithoutCohorts, fail_if_stalled

if TYPE_CHECKING:
    from fed.server.coordinator import Coordinator
    from fed.server.parameter_store import ParameterStore
    from fed.server.round_stats import RoundStats
    from fed.server.way_in import UpdateAccumulator

__all__ = ["BoundedStaleness"]


@dataclass(frozen=True, kw_only=True)
class BoundedStaleness(WithoutCohorts):
    r"""Every client trains all the time, and waits where it would run ahead of the slowest by more than a bound.

    .. math::
        x ← x + η_g \frac{\sum_{i ∈ A} n_i Δ_i}{\sum_{j} n_j}, \qquad
        c_i ≤ \min_j c_j + s \text{ for clients that get a task}

    A are the clients that answer in an instant, j all clients, c_i the number of tasks that client i has finished; an
    algorithm that counts clients alike has 1 in place of n. A round has passed when the slowest client has finished one
    more task. With s = 0 no client begins a round before all have ended the last one: with equal devices these are
    synchronous rounds of all clients, to the bit. A server optimiser takes a step in each instant. There is no cohort
    to be drawn.

    Args:
        bound: s ≥ 0, number of tasks by which a client may be ahead of the slowest; ``none``: no client ever waits.
    """

    bound: NonNegativeInt | Literal["none"] = 3

    def lacks(self) -> Sequence[Term]:
        """Cohorts, and means over the clients that have answered."""
        why = "which count clients that have not answered as zeros"
        return [*super().lacks(), Term(Feature.MEAN_OF_ANSWERS, "choose synchronous rounds", why)]

    def check(self, population: int) -> None:
        """Accept any number of clients."""

    def cohort_of(self, population: int) -> int:
        """All clients."""
        return population

    def asked_of(self, population: int) -> int:
        """All clients."""
        return population

    def init(self) -> "ParameterStore":
        """The clients' clocks, of which none runs further ahead than the bound."""
        from fed.server.parameter_store import ParameterStore

        return ParameterStore(bound=math.inf if self.bound == "none" else self.bound)

    def round(self, coordinator: "Coordinator", number: int, state: "ParameterStore") -> "RoundStats":
        """Run until the slowest client has finished as many tasks as the round's number."""
        rounds_stats: list[RoundStats] = []
        begins_s = coordinator.fleet.clock
        share_of = _shares(coordinator)
        while state.slowest < number:
            fail_if_stalled(coordinator, number, begins_s)
            accumulator = coordinator.new_accumulator()
            # Earliest clocks first, in whatever order clients came.
            for clock, clients in sorted(self._ready(coordinator, state).items()):
                coordinator.dispatch(accumulator, clock + 1, clients, cohort=len(coordinator.fleet.registered()))
            if not coordinator.open:
                if not coordinator.fleet.wait():
                    problem = "waits for the slowest client, which will never be there again"
                    raise RunFailed(f"round {number} {problem}: {STAY_LONGER}")
                continue
            # One instant at a time, so that no client runs ahead unseen.
            coordinator.collect(accumulator, enough=1)
            rounds_stats.append(coordinator.step(accumulator, number, share=share_of(accumulator)))
            for client in accumulator.loss_of:
                if client in state.workers:  # it may have left while its answer travelled
                    state.tick(client)
        from fed.server.round_stats import joined

        return joined(rounds_stats)

    def _ready(self, coordinator: "Coordinator", store: "ParameterStore") -> dict[int, list[int | str]]:
        """Clients without a task that need not wait, by clock."""
        members = coordinator.fleet.registered()
        if store.workers != set(members):
            # A slow client that has left would hold the others back.
            for client in store.workers - set(members):
                store.leave(client)
            for client in set(members) - store.workers:
                store.register(client)
        return store.ready(coordinator.fleet.available())


def _shares(coordinator: "Coordinator") -> "Callable[[UpdateAccumulator], float]":
    """The share of all clients that have answered: of their samples, where the algorithm weighs by these."""
    # Counted again only where the members change: there are as many steps as clients.
    held_by = lru_cache(1)(lambda members: sum(map(coordinator.fleet.size_of, members)))

    def share_of(accumulator: "UpdateAccumulator") -> float:
        if not accumulator.replied:  # perhaps because the last client has left
            return 0.0
        members = coordinator.fleet.registered()
        if not coordinator.message.weighs_samples:
            return len(accumulator.replied) / len(members)
        return sum(samples for _, samples in accumulator.losses) / held_by(tuple(members))

    return share_of
