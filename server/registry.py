"""Registry of the clients that real nodes stand for: their samples, what became of their tasks, and their states."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fed.clients.data.holdings import in_order
from fed.protocol.protocol_pb2 import Answer as AnswerHeader
from fed.storage.checkpoints import Tree
from fed.vectors.tensors import Tensor
from fed.wire.rate_limits import Unnamed

__all__ = ["ClientStateVersions", "CountedTask", "Members", "NodeCounts", "TaskOutcome"]

_log = logging.getLogger(__name__)
_LOST = 64  # lost tasks that a client is told of, the last ones; a node that did none of them has nothing of them
_CHECKPOINTS = 8  # number of checkpoints that a run may have to go back over
_OUTCOMES = ("answered", "late", "failed", "refused")


class Members(dict[int | str, int]):
    """Client → its number of samples: all that have joined, or, once closed, all that had joined by then.

    Attributes:
        is_closed: True to let no other client in.

    Example:
        >>> members = Members()
        >>> for client in ("ann", 10, 9):
        ...     members.come(client, samples=5)
        >>> members.is_closed = True
        >>> members.come(3, samples=5)
        >>> in_order(members)
        [9, 10, 'ann']
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False
        self._came_late: set[int | str] = set()

    def come(self, client: int | str, samples: int) -> None:
        """Enter a client with its number of samples."""
        if self.take(client):
            self[client] = samples
        # Logged once, since such a node dials again and again.
        elif client not in self._came_late:
            self._came_late.add(client)
            _log.info(
                "client %r is not asked in this run: it came after the first round, and the run's algorithm, or "
                "secure_aggregation, needs all clients from the beginning",
                client,
            )

    def take(self, client: int | str) -> bool:
        """True if a client that joins takes part."""
        return not self.is_closed or client in self


class NodeCounts:
    """Counts by client: answers, late tasks, failed tasks, refusals, and the reason of the last failure or refusal.

    They belong to the run, and go on after a resume. A refused answer counts twice: as a refusal, and as the failure of
    its task. Refusals of senders without a name belong to no client.

    Example:
        >>> counts = NodeCounts()
        >>> counts.add("ann", "answered")
        >>> counts.add("ann", "failed", "it was killed")
        >>> counts.lines()
        {'ann': {'answered': 1, 'late': 0, 'failed': 1, 'refused': 0, 'last_reason': 'it was killed'}}
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # calls of nodes are refused in a thread of their own
        self._before: Counter[tuple[int | str, str]] = Counter()  # a resume
        self._since: Counter[tuple[int | str, str]] = Counter()
        self._last_reasons: dict[int | str, str] = {}

    @property
    def refused(self) -> int:
        """The number of refusals, those of senders without a name among them."""
        return sum(count for (_, outcome), count in self._all().items() if outcome == "refused")

    def add(self, sender: int | str, outcome: str, reason: str = "") -> None:
        """Count what became of a client's task, or the refusal of what a sender said.

        Args:
            sender: id of the client.
            outcome: "answered", "late", "failed" or "refused".
            reason: reason of a failure or a refusal; empty for other outcomes.
        """
        # Callers without a name share one count: a count for each address would grow without end.
        client = "" if isinstance(sender, Unnamed) else sender
        with self._lock:
            # Counted apart from earlier ones, which a resume may read after the first calls have come.
            self._since[client, outcome] += 1
            if reason:
                self._last_reasons[client] = reason

    def lines(self) -> dict[str, dict[str, int | str]]:
        """Counts of each client, for the summary: numbers, then names."""
        counts = self._all()
        reasons = self._last_reasons
        return {
            str(client): {
                **{outcome: counts[client, outcome] for outcome in _OUTCOMES},
                "last_reason": reasons.get(client, ""),
            }
            for client in in_order({client for client, _ in counts} - {""})
        }

    def state(self) -> Tree:
        """State for a checkpoint."""
        counts = [(client, outcome, count) for (client, outcome), count in self._all().items()]
        return {"counts": counts, "last_reasons": dict(self._last_reasons)}

    def restore(self, state: Tree) -> None:
        """Go on from :meth:`state`; what was counted since this server began is added to it."""
        self._before = Counter({(client, outcome): count for client, outcome, count in state["counts"]})
        self._last_reasons = {**state["last_reasons"], **self._last_reasons}

    def _all(self) -> Counter[tuple[int | str, str]]:
        with self._lock:  # an iteration fails when another thread adds a key
            return self._before + self._since


@dataclass(frozen=True)
class TaskOutcome:
    """Outcome of a task, as its node says.

    Args:
        task: number of the task.
        answer: header of the answer; None: there is no answer.
        read: function that reads the tensors of the answer, to be called once; None: there is no answer.
        problem: reason why there is no answer; empty where there is one.
        lacks_model: True if the node does not have the model that the task's differences are added to.
    """

    task: int
    answer: AnswerHeader | None = None
    read: Callable[[], Sequence[Tensor]] | None = None
    problem: str = ""
    lacks_model: bool = False


class CountedTask(NamedTuple):
    """A task whose update counted, among those of all servers that a run has had.

    Args:
        start: number that names the start of its server.
        number: number of the task, given by that server.
        discount: factor s in (0, 1] with which it counted: the client's state moves s of the way.
    """

    start: int
    number: int
    discount: float = 1.0


class ClientStateVersions:
    """Versions of clients' states at their nodes: the last counted task of each, now and at the last checkpoints.

    A node keeps older states for a server that goes back.

    Attributes:
        after: client → the task whose state it goes on from; the first state where there is none.
        lost_after: client → later tasks whose messages were lost, (start, number) each, the last of them.
        durable_after: client → the task before which no state is needed any more.
        goes_back: True if the run has checkpoints, to which it may go back.
    """

    def __init__(self) -> None:
        self.goes_back = True
        self.after: dict[int | str, CountedTask] = {}
        self.durable_after: dict[int | str, CountedTask] = {}
        self.lost_after: dict[int | str, tuple[tuple[int, int], ...]] = {}
        self._history: deque[dict[int | str, CountedTask]] = deque()

    def count(self, client: int | str, task: CountedTask) -> None:
        """Note that a client's update counted; for good where there are no checkpoints to go back to."""
        self.after[client] = task
        # What was lost before a task that counted does not matter any more.
        self.lost_after.pop(client, None)
        # No checkpoint will ever ask for an older state.
        if not self.goes_back:
            self.durable_after[client] = task

    def lose(self, client: int | str, start: int, number: int) -> None:
        """Note that a client's message is lost, if it was ever made.

        Args:
            client: client whose message is lost.
            start: number that names the start of the task's server.
            number: number of the task, given by that server.
        """
        self.lost_after[client] = (*self.lost_after.get(client, ()), (start, number))[-_LOST:]

    def state(self) -> Tree:
        """The versions, for a checkpoint, which is the newest from now on."""
        if len(self._history) > _CHECKPOINTS:  # nobody goes back over so many: nodes may drop older states
            self.durable_after = self._history.popleft()
        self._history.append(dict(self.after))
        return {"after": {client: tuple(task) for client, task in self.after.items()}, "lost_after": self.lost_after}

    def restore(self, state: Tree) -> None:
        """Resume from what :meth:`state` wrote down."""
        self.after = {client: CountedTask(*task) for client, task in state["after"].items()}
        self.lost_after = {client: tuple(map(tuple, tasks)) for client, tasks in state["lost_after"].items()}
