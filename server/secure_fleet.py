"""Fleet under secure aggregation: a coordinator's view of clients that hide their messages from it.

Shapes: see :mod:`fed.vectors.layout`.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fed.errors import InvalidExperiment, InvalidPayload, RunFailed
from fed.secure_aggregation.fixed_point import FixedPoint, SecureSum
from fed.secure_aggregation.settings import SecureAggregation
from fed.server.fleet import Fleet
from fed.wire.messages import Answer, RevealedSum, TakenBySession, Task

__all__ = ["SecureFleet", "SessionResult", "Sessions"]

_log = logging.getLogger(__name__)


@dataclass
class SessionResult:
    """Outcome of a round's sessions.

    Args:
        total: sum of the survivors' messages; None if there is none.
        survivors: ids of the tasks whose messages are in the sum; empty if there is none.
        problem: reason why there is no sum, as a clause.
        bytes_up: bytes from clients, beside their first masked messages.
        bytes_down: bytes to clients, beside their tasks.
    """

    total: SecureSum | None = None
    survivors: Sequence[int] = ()
    problem: str = ""
    bytes_up: int = 0
    bytes_down: int = 0


class Sessions(Protocol):
    """Sessions of a round's clients, by which their masked messages become a sum."""

    def open(self, tasks: Sequence[Task]) -> None:
        """Begin a round with these tasks: keys and shares are exchanged while the clients train."""

    def take(self, answer: Answer) -> None:
        """Take the masked message of an answer, or the sum of a group's messages."""

    def close(self) -> SessionResult:
        """End the round: unmask the sum of the messages that have come, or try again with their clients."""


@dataclass(eq=False)
class SecureFleet:
    """A :class:`fed.server.fleet.Fleet` with one answer a round, the sum of the survivors' messages, and failures.

    The sum is given when the coordinator has cancelled the tasks that are left, which ends the round.

    Args:
        fleet: fleet of the clients, whose answers are masked.
        sessions: sessions in which the answers are added and unmasked.
        settings: section of the experiment.
        fixed: fixed point in which the sum is read.
    """

    fleet: Fleet
    sessions: Sessions
    settings: SecureAggregation
    fixed: FixedPoint
    _tasks: dict[int, Task] = field(default_factory=dict)  # of the round
    _answers: list[Answer] = field(default_factory=list)  # without their messages, which are in the sum
    _is_closing: bool = False
    _refused: list[Answer] = field(default_factory=list)
    _is_short: bool = False

    def __post_init__(self) -> None:
        """Forward what the clients' fleet does unchanged."""
        self.registered = self.fleet.registered
        self.population = self.fleet.population
        self.settle = self.fleet.settle
        self.wait = self.fleet.wait
        # Between rounds no session is open: the clients' fleet has all that a resumed run needs.
        self.state = self.fleet.state
        self.restore = self.fleet.restore
        self._least = self.settings.least_asked(self.fixed.most_clients)
        facts = self.settings.facts(self.fixed)
        _log.info(
            "secure aggregation of %d clients: each has masks with %d others, %d must stay to a round's end, and %d "
            "may collude; numbers have %d levels on either side of 0, and rounding moves a mean by less than %.2g",
            *(facts[key] for key in ("clients", "neighbours", "least_survivors", "corrupt_clients", "levels")),
            facts["largest_rounding"],
        )

    @property
    def clock(self) -> float:
        """Clock of the clients' fleet."""
        return self.fleet.clock

    def size_of(self, client: int | str) -> int:
        """Refuse: a client's number of samples is hidden.

        Raises:
            RunFailed: always.
        """
        raise RunFailed(
            "secure_aggregation hides each client's number of samples: choose a rounds.sampling that does not use it"
        )

    def available(self) -> Sequence[int | str]:
        """Clients without a task, or none of them while they are too few for a session."""
        there = self.fleet.available()
        is_short = 0 < len(there) < self._least
        # Said once, since a round looks again and again.
        if is_short and not self._is_short:
            _log.info("%d clients are there, and a secure round needs %d: it waits", len(there), self._least)
        self._is_short = is_short
        return [] if is_short else there

    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Send a round's tasks; all of them fail if they are too few for a session."""
        tasks = [*tasks]
        # A sampling may draw nobody, and a session of nobody would fail.
        if not tasks:
            return
        try:
            # Before any key is made: a session of too few would fail at its end.
            self.settings.degree(len(tasks), is_begun=True)
        except InvalidExperiment as error:
            _log.warning("round %d is not begun: %s", tasks[0].round, error)
            self._refused = [Answer.failure(task, "too few clients for a secure round") for task in tasks]
            return
        self._tasks = {task.id: task for task in tasks}
        self.sessions.open(tasks)
        self.fleet.dispatch(tasks)

    def collect(self, until: float = math.inf, enough: int | None = None) -> Iterator[Answer]:
        """Failures as they come; and the sum, once the tasks that are left have been cancelled."""
        refused = self._refused
        self._refused = []
        yield from refused
        for answer in self.fleet.collect(until, enough):
            if answer.problem:
                yield answer
                continue
            self.sessions.take(answer)
            # Answers are kept without their lanes: the masked messages of a cohort would fill the memory.
            self._answers.append(
                Answer(
                    tasks=answer.tasks,
                    round=answer.round,
                    clients=answer.clients,
                    content=TakenBySession(),
                    integers_I=answer.integers_I,
                    size_bytes=answer.size_bytes,
                )
            )
        if self._is_closing:
            self._is_closing = False
            if self._answers:
                yield from self._closed()
            self._tasks = {}

    def cancel(self, tasks: Iterable[int]) -> None:
        """End the round: the answers that have come make the sum, all other tasks are cancelled."""
        answered = {task for answer in self._answers for task in answer.tasks}
        self.fleet.cancel([task for task in tasks if task not in answered])
        # The coordinator cancels when the round is over, and then collects once more: that gives the sum.
        self._is_closing = True

    def _closed(self) -> Iterator[Answer]:
        """The sum, as one answer; or a failure of each task."""
        answers = self._answers
        self._answers = []
        answered = [task for answer in answers for task in answer.tasks]
        result = self.sessions.close()
        number = self._tasks[answered[0]].round
        hidden = None
        survivors = result.survivors
        problem = result.problem
        if result.total is not None:
            try:
                hidden = self.fixed.read(result.total)
            except InvalidPayload as error:
                survivors = ()
                problem = str(error)
        problem = problem or "it dropped out of the round's session"
        size_bytes = sum(answer.size_bytes for answer in answers) + result.bytes_up
        failed = [Answer.failure(self._tasks[task], problem) for task in sorted({*answered} - {*survivors})]
        if hidden is None:
            _log.warning("round %d has no sum, and no update was revealed: %s", number, problem)
            # The session's bytes have travelled, and are counted once.
            failed[0] = failed[0]._replace(size_bytes=size_bytes, more_bytes_down=result.bytes_down)
        else:
            counted = [self._tasks[task] for task in sorted(survivors)]
            yield Answer(
                tasks=tuple(task.id for task in counted),
                round=number,
                clients=tuple(task.client for task in counted),
                content=RevealedSum(hidden),
                integers_I=answers[0].integers_I,
                size_bytes=size_bytes,
                more_bytes_down=result.bytes_down,
            )
        yield from failed
