"""Replica of a coordinator: the clients as each peer's own coordinator sees them, of which one trains here.

The updates of all others come with the round's sum, on which the replicas agree. So every peer moves its model by the
same equations from the same sum, and ends with the bits that a single coordinator would have.

Shapes: see :mod:`fed.vectors.layout`.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fed.clients.training.client_states import ClientState, ClientStates, at_discount
from fed.clients.training.executor import Executor, Item
from fed.clients.training.work_items import Train, Trained, label_of
from fed.errors import RunFailed
from fed.server.observer import NodeCame, NodeWent
from fed.server.peer.members.service_thread import ServiceThread
from fed.server.peer.replica.ballots import Value
from fed.server.peer.replica.replica_files import Snapshot
from fed.server.peer.replica.replica_service import Decision, ReplicaService
from fed.server.peer.replica.ring import RoundSum
from fed.server.round_stats import RoundStats
from fed.server.rounds.coordinated import Coordinated
from fed.server.telling import Observers
from fed.storage.checkpoints import Tree
from fed.wire.messages import Answer, PartialSum, Task, Update, client_id_of, client_order

__all__ = ["Overtaken", "Replicated", "ReplicatedFleet"]

_log = logging.getLogger(__name__)
# The figures of a round in which this replica takes no part.
_NOTHING = RoundStats(selected=0, replied=0, late=0, failed=0, bytes_up=0, bytes_down=0, train_loss=None)


class Overtaken(Exception):
    """Round that the others have decided without this replica; ``snapshot`` is a copy of a later state."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot


@dataclass(eq=False)
class ReplicatedFleet:
    """A :class:`fed.server.fleet.Fleet` of replicas, as one of them sees it.

    Attributes:
        value: value that was agreed on last; None before the first.

    Args:
        thread: event loop of this replica's service.
        size: number of samples of this peer, ≥ 1.
        states: client state of this peer.
        executor: executor that trains this peer's client.
        numbers: M, the number of summed numbers of a message.
        observers: listeners to members that come and go.
    """

    thread: ServiceThread[ReplicaService]
    size: int
    states: ClientStates
    executor: Executor
    numbers: int
    observers: Observers = field(default_factory=Observers)
    value: Value | None = None
    _open: dict[int | str, Task] = field(default_factory=dict)
    _unsettled: tuple[int, ClientState, ClientState] | None = None

    def __post_init__(self) -> None:
        """Begin without members."""
        self._own = self.thread.service.own.client
        self._began_s = self.thread.service.clock.monotonic_s()
        self._members: tuple[int | str, ...] = ()
        self._known: set[int | str] = set()

    @property
    def clock(self) -> float:
        """Seconds since the run began, those between a stop and its resumption left out."""
        return self.thread.service.clock.monotonic_s() - self._began_s

    def set_members(self, members: Sequence[str]) -> None:
        """Take these as the members of the next round."""
        before = self._members
        self._members = tuple(client_id_of(name) for name in sorted(members, key=client_order))
        for client in self._members:
            if client not in before:
                self.observers.tell(NodeCame(client))
        for client in before:
            if client not in self._members:
                self.observers.tell(NodeWent(client))
        # Nobody is forgotten, since the population counts all that were ever members.
        self._known |= {*self._members}

    def await_members(self, number: int) -> None:
        """Wait for a copy of another's state, where this peer joins others.

        Args:
            number: the round that begins, from 1.

        Raises:
            Overtaken: with the copy, if this peer joins.
        """
        if not self._members:
            outcome = self.thread.wait_for(self.thread.service.decision(number))
            assert isinstance(outcome, Snapshot)
            raise Overtaken(outcome)

    def registered(self) -> Sequence[int | str]:
        """Members of the round."""
        return self._members

    def population(self) -> int:
        """The number of clients that have ever been members."""
        return len(self._known)

    def available(self) -> Sequence[int | str]:
        """Members without a task."""
        return [client for client in self._members if client not in self._open]

    def size_of(self, client: int | str) -> int:
        """Number of samples of this peer, which knows its own alone."""
        return self.size

    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Take tasks, of which one is for this peer."""
        self._open |= {task.client: task for task in tasks}

    def collect(self, until: float = math.inf, enough: int | None = None) -> Iterator[Answer]:
        """The sum of the updates that count, as one answer, and a failure for each of the other tasks.

        Both limits are ignored: the agreement has the deadline of the round.
        """
        if not self._open:
            return
        # A round is one sum: all its tasks end here, whether they counted or not.
        tasks = self._open
        self._open = {}
        number = next(iter(tasks.values())).round
        own = tasks.get(self._own)
        # A peer that was away need not train for a round that the others have decided.
        is_over = self.thread.call(self.thread.service.is_decided, number)
        answer = None
        if own is not None and not is_over:
            answer = self._trained(own)
            if answer.has_diverged:  # the others go on without this peer
                yield answer
                return
            if not answer.problem:
                total = RoundSum.of(self.thread.service.own.name, answer, self.numbers)
                self.thread.call(self.thread.service.contribute, number, total)
        decision = self.thread.wait_for(self.thread.service.decision(number))
        if isinstance(decision, Snapshot):
            raise Overtaken(decision)
        counted = [client_id_of(one.name) for one in decision.total.contributions]
        if self._own in counted and answer is None and own is not None and self.states.names:
            # It was sent before this process was killed, which trains again for the client state after that update.
            self._trained(own)
        yield self._merged(decision, tasks)
        if answer is not None and answer.problem:
            yield answer
        for client, task in tasks.items():
            if client not in counted and (client != self._own or answer is None or not answer.problem):
                yield Answer.failure(task, "its update is not in the round's sum")

    def cancel(self, tasks: Iterable[int]) -> None:
        """Do nothing: all tasks of a round have been answered with its sum."""

    def settle(self, counted: Mapping[int, float]) -> None:
        """Commit this peer's state if its update counted, and take the next round's members."""
        if self._unsettled is not None:
            task, before, after = self._unsettled
            if discount := counted.get(task, 0.0):
                self.states.commit(self._own, at_discount(before, after, discount))
            self._unsettled = None
        assert self.value is not None
        self.set_members(self.value.members)

    def wait(self, until: float = math.inf) -> bool:
        """Return False at once: the agreement itself waits for members."""
        return False

    def state(self) -> Tree:
        """State for a checkpoint: this peer's own, and the part that all replicas have in common."""
        return {"clock": self.clock, "clients": self.states.state(), "common": self.common()}

    def restore(self, state: Tree) -> None:
        """Resume from a state that :meth:`state` gave."""
        # The clock goes on from where it stopped.
        self._began_s = self.thread.service.clock.monotonic_s() - state["clock"]
        self.states.restore(state["clients"])
        self.adopt(state["common"])

    def common(self) -> Tree:
        """State that is the same at all replicas."""
        value = None if self.value is None else [self.value.sum_sha256, [*self.value.contributors], self.value.members]
        return {"members": [*self._members], "known": [*self._known], "value": value}

    def adopt(self, common: Tree) -> None:
        """Take over another replica's :meth:`common`."""
        self._members = tuple(common["members"])
        self._known = {*common["known"]}
        value = common["value"]
        self.value = None if value is None else Value(value[0], contributors=tuple(value[1]), members=tuple(value[2]))

    def _merged(self, decision: Decision, tasks: Mapping[int | str, Task]) -> Answer:
        self.value, total = decision
        if total.names != {*self.value.contributors}:
            raise RunFailed(
                "the round's sum must hold the updates of the members agreed on, got others: a member sent a false sum"
            )
        counted = [tasks[client_id_of(one.name)] for one in total.contributions]
        return Answer(
            tasks=tuple(task.id for task in counted),
            round=counted[0].round,
            clients=tuple(task.client for task in counted),
            content=PartialSum(total.mean()),
            integers_I=total.integers_I,
            samples=tuple(one.samples for one in total.contributions),
            train_losses=tuple(one.train_loss for one in total.contributions),
        )

    def _trained(self, task: Task) -> Answer:
        """Answer of this peer's own training."""
        model = (task.model.params_V, task.model.integers_I)
        names = self.states.names
        train = Train.of([task], wants="updates", population=len(self._members), state_names=names)
        given = (*model, *task.model.broadcast, *self.states.stacked([task.client], [model]))
        ticket = self.executor.submit(Item(train, given, label_of(train), cost=self.size))
        ((_, trained, tensors),) = self.executor.results([ticket])
        assert isinstance(trained, Trained)
        if trained.diverged:
            ((_, reason),) = trained.diverged
            return Answer.failure(task, reason, has_diverged=True)
        (update_M, integers_I, *after) = (part[0].clone() for part in tensors)
        if names:
            before = self.states.of(task.client, model)
            self._unsettled = (task.id, before, dict(zip(names, after, strict=True)))
        return Answer(
            tasks=(task.id,),
            round=task.round,
            clients=(task.client,),
            content=Update(update_M, trained.weights[0]),
            integers_I=integers_I,
            samples=trained.samples,
            train_losses=trained.train_losses,
        )


class Replicated(Coordinated):
    """The federation of replicas, as one of them sees it.

    Args:
        parts: arguments of :class:`fed.server.rounds.coordinated.Coordinated` in their order, with a
            :class:`ReplicatedFleet` among them.
        observers: listeners to tasks; None: no listeners.
    """

    def __init__(self, *parts: Any, observers: Observers | None = None) -> None:
        super().__init__(*parts, moved_bytes=self._moved_in_round, observers=observers)
        self._fleet: ReplicatedFleet = self.coordinator.fleet  # type: ignore[assignment]
        self._service = self._fleet.thread.service
        self._moved = (0, 0)
        self._begun = self._applied = 0
        self.snapshot: Snapshot | None = None

    @property
    def is_behind(self) -> bool:
        """True while rounds pass whose outcome is part of a later state that this replica has copied."""
        return self._begun < self._applied

    def begin_with(self, members: Sequence[str]) -> None:
        """Begin with the members of the first round, unless this replica resumes, or joins others."""
        if members and not self._fleet.registered():
            self._fleet.set_members(members)

    def round(self, number: int) -> RoundStats:
        """Run one round. Nothing is done where its outcome is part of a state that was copied."""
        self._begun = number
        if self.is_behind or number == self._applied:
            return _NOTHING
        self._fleet.thread.call(self._service.begin, number, self._applied)
        try:
            self._fleet.await_members(number)
            stats = super().round(number)
        except Overtaken as overtaken:
            self.take_over(overtaken.snapshot)
            return _NOTHING
        self._end(number)
        return stats

    def state(self) -> Tree:
        """State for a checkpoint."""
        return {**super().state(), "round": self._applied}

    def restore(self, state: Tree) -> None:
        """Resume from a state that :meth:`state` gave."""
        super().restore(state)
        self._begun = state["round"]
        self._end(state["round"])

    def take_over_if_later(self, snapshot: Snapshot | None) -> None:
        """Take over a copy, unless this replica's own state is a later one."""
        if snapshot is not None and snapshot.round > self._applied:
            self.take_over(snapshot)

    def take_over(self, snapshot: Snapshot) -> None:
        """Take over the state of another replica, which is on disk.

        Raises:
            InvalidCheckpoint: if it is of another experiment.
        """
        self.coordinator.restore(snapshot.state["coordinator"])
        self._fleet.adopt(snapshot.state["fleet"])
        self._end(snapshot.round)
        assert self._fleet.value is not None
        self._fleet.thread.call(self._service.adopt, snapshot.round, self._fleet.value)
        _log.info("this peer goes on after round %d, with a copy of another's state", snapshot.round)

    def _moved_in_round(self) -> tuple[int, int]:
        before = self._moved
        self._moved = self._service.moved_bytes
        return self._moved[0] - before[0], self._moved[1] - before[1]

    def _end(self, number: int) -> None:
        """Have a round's state ready for others."""
        self._applied = number
        # Made here, in the run's thread: the service's thread gives it to others, and must not read a moving state.
        self.snapshot = Snapshot(number, {"coordinator": self.coordinator.state(), "fleet": self._fleet.common()})
        self._fleet.thread.call(self._service.apply, number)
