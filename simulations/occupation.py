"""What simulated clients have done with their time: who was idle, and who was late."""

from dataclasses import dataclass, field
from typing import Any

from fed.clients.data import ClientId
from fed.storage.checkpoints import Tree

__all__ = ["Occupation"]

_MOST = 10


@dataclass
class Occupation:
    """Counts over the tasks of a run.

    Attributes:
        busy_s: of all clients together, from being asked to answering.
        asked: client → tasks that it was sent.
        late: client → tasks whose answers nobody waited for.

    Example:
        >>> occupation = Occupation()
        >>> occupation.begin("a", 3.0), occupation.begin("b", 5.0), occupation.miss("b")
        (None, None, None)
        >>> occupation.summary(clients=2, clock=4.0, to_come_s=1.0)
        {'idle_share': 0.125, 'most_late': [{'client': 'b', 'late': 1, 'tasks': 1}]}
    """

    busy_s: float = 0.0
    asked: dict[ClientId, int] = field(default_factory=dict)
    late: dict[ClientId, int] = field(default_factory=dict)

    def begin(self, client: ClientId, takes_s: float) -> None:
        """A client gets a task."""
        self.busy_s += takes_s
        self.asked[client] = self.asked.get(client, 0) + 1

    def miss(self, client: ClientId) -> None:
        """Nobody waits for a client's answer any more."""
        self.late[client] = self.late.get(client, 0) + 1

    def state(self) -> Tree:
        """All of it, for a checkpoint."""
        return {"busy_s": self.busy_s, "asked": self.asked, "late": self.late}

    def summary(self, *, clients: int, clock: float, to_come_s: float) -> dict[str, Any]:
        """What a run's summary says of it.

        Args:
            clients: how many there are.
            clock: simulated seconds since the run began.
            to_come_s: of the busy time, what comes after that.
        """
        if not clock:
            return {}
        most = sorted(self.late, key=lambda client: (-self.late[client], str(client)))[:_MOST]
        told = [{"client": client, "late": self.late[client], "tasks": self.asked[client]} for client in most]
        idle = 1 - (self.busy_s - to_come_s) / (clients * clock)
        return {"idle_share": idle, **({"most_late": told} if told else {})}
