"""A fleet as a cohort's draw may see it, where a rule says how often a client takes part."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fed.privacy.participation import Participations

if TYPE_CHECKING:
    from fed.server.fleet import Fleet

__all__ = ["EligibleClients"]


@dataclass(eq=False)
class EligibleClients:
    """Fleet of which only those clients are available that may be asked in a round; else it is the same.

    Args:
        fleet: fleet of all clients.
        participations: record of who has been asked.
        number: number of the round, from 1.
    """

    fleet: "Fleet"
    participations: Participations
    number: int

    def available(self) -> Sequence[int | str]:
        """Clients that can take a task now, and may."""
        return self._available

    @cached_property
    def _available(self) -> list[int | str]:
        return [client for client in self.fleet.available() if self.participations.allows(client, self.number)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fleet, name)
