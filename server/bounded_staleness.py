"""Stale synchronous parallel rounds: every client goes on at its own pace, none too far ahead of the slowest.

Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NeurIPS 2013.
"""

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeInt

from fed.errors import RunFailed
from fed.server.coordinator import Coordinator
from fed.server.fleet import Fleet
from fed.server.gathering import Exchange, Gathering, joined
from fed.server.parameter_store import ParameterStore
from fed.server.synchronous import NOBODY_STAYS, Rounds, lose_patience

__all__ = ["BoundedStaleness", "Held"]


class Held:
    """How many samples all members hold, counted anew only where they are others."""

    def __init__(self) -> None:
        self._members: list[int | str] = []
        self._samples = 0

    def by_all(self, fleet: Fleet) -> int:
        """All of a fleet's."""
        if self._members != (members := list(fleet.members())):
            self._members, self._samples = members, sum(fleet.size_of(client) for client in members)
        return self._samples


@dataclass(frozen=True, kw_only=True)
class BoundedStaleness(Rounds):
    r"""Every client trains all the time, and waits where it would run ahead of the slowest by more than a bound.

    .. math::
        x ← x + η_g \frac{\sum_{i ∈ A} n_i Δ_i}{\sum_{j} n_j}, \qquad
        c_i ≤ \min_j c_j + s \text{ for those that are asked}

    A are the clients that answer in an instant, j all clients, c_i how many tasks client i has finished; an algorithm
    that counts clients alike has 1 in place of n. A round has passed when the slowest client has finished one more
    task. With s = 0 nobody begins a round before all have ended the last one: with equal devices these are synchronous
    rounds of everybody, to the bit. A server optimiser takes a step in each instant. There is no cohort to be drawn.

    Args:
        bound: s; ``none``: nobody ever waits.
    """

    bound: NonNegativeInt | Literal["none"] = 3

    def check(self, population: int) -> None:
        """Any number of clients will do."""

    @property
    def keeps_late(self) -> bool:
        """Whether answers count, however late they come."""
        return True

    def cohort_of(self, population: int) -> int:
        """All."""
        return population

    def asked_of(self, population: int) -> int:
        """All."""
        return population

    def round(self, coordinator: Coordinator, number: int) -> Exchange:
        """Until the slowest client has finished so many tasks."""
        store = coordinator.clocks(math.inf if self.bound == "none" else self.bound)
        exchanges, begins_s, held = [], coordinator.fleet.clock, Held()
        while store.slowest < number:
            lose_patience(coordinator, number, begins_s)
            gathering = coordinator.begin()
            for clock, clients in sorted(self._ready(coordinator, store).items()):
                coordinator.ask(gathering, clock + 1, clients, cohort=len(coordinator.fleet.members()))
            if not coordinator.open:
                if not coordinator.fleet.wait():
                    problem = "waits for the slowest client, which will never be there again"
                    raise RunFailed(f"round {number} {problem}: {NOBODY_STAYS}")
                continue
            coordinator.gather(gathering, enough=1)
            share = self._share(coordinator, gathering, held)
            exchanges.append(coordinator.move(gathering, number, share=share))
            for client in gathering.loss_of:
                if client in store.workers:
                    store.tick(client)
        return joined(exchanges)

    def _share(self, coordinator: Coordinator, gathering: Gathering, held: Held) -> float:
        """What those that have answered are of all: by samples, where the algorithm weighs by them."""
        if not gathering.replied:  # perhaps because the last member has left
            return 0.0
        samples = sum(count for _, count in gathering.losses)
        if gathering.weight != samples:
            return gathering.replied / len(coordinator.fleet.members())
        return samples / held.by_all(coordinator.fleet)

    def _ready(self, coordinator: Coordinator, store: ParameterStore) -> dict[int, list[int | str]]:
        """Who has no task and need not wait, by clock."""
        members = coordinator.fleet.members()
        if store.workers != set(members):
            for client in store.workers - set(members):
                store.leave(client)
            for client in set(members) - store.workers:
                store.register(client)
        return store.ready(coordinator.fleet.nodes())
