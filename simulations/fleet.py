"""Simulated fleet: clients on a virtual clock.

Shapes: see :mod:`fed.vectors.layout`.
"""

import heapq
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, TypeAlias

from fed.clients.data import ClientId
from fed.clients.training.client_states import ClientState, ClientStates, at_discount, client_state, codec_state
from fed.clients.training.executor import Item
from fed.clients.training.work_items import Train, Trained, Wants, label_of
from fed.clients.way_out import Rows, WayOut
from fed.compression.codec import CodecState
from fed.secure_aggregation.fixed_point import ClientNumbers
from fed.server.observer import NodeCame, NodeWent
from fed.server.telling import Observers
from fed.simulations.attacks import Attackers
from fed.simulations.in_flight import Flight, Occupation, depart
from fed.simulations.presence import Presence
from fed.simulations.simulated_clients import SimulatedClients
from fed.storage.checkpoints import Tree
from fed.vectors.tensors import Tensor, torch
from fed.wire.format import Outgoing
from fed.wire.messages import Answer, Failure, Lanes, Task, Update

__all__ = ["SimulatedFleet"]

_log = logging.getLogger(__name__)

_Event: TypeAlias = tuple[float, int, Flight | ClientId]
"""Time of an event, its number, and its subject: a flight that arrives, or a client that comes or goes.

The number of a flight is its task's; numbers of clients' events count down from −1. They order events of one time.
"""


@dataclass(eq=False)
class SimulatedFleet:
    """A :class:`fed.server.fleet.Fleet` whose clients are trained, in groups, when their answers are collected.

    The clock needs no training. A task is trained when its answer is needed, together with all tasks that are due then;
    with ``looks_ahead`` together with all tasks in flight, whatever the versions of their models.

    Args:
        clients: simulated clients, with their data, devices and executor.
        states: store of the clients' states.
        way_out: stages that a client's message passes on its way to the coordinator.
        reduces: True if the mean of a group that is due is enough; False if each client answers by itself.
        looks_ahead: True if every answer will be wanted, however late.
        places: True if clients are told their numbers.
        attackers: clients that send forged updates, with their attack; then every client answers by itself.
        drops_diverged: True if a client that diverges fails alone, and the others of its group train again without it.
        observers: observers that are told of clients that come and go.
    """

    clients: SimulatedClients
    _: KW_ONLY
    states: ClientStates
    way_out: WayOut
    reduces: bool
    looks_ahead: bool = False
    places: bool = False
    attackers: Attackers | None = None
    drops_diverged: bool = False
    observers: Observers = field(default_factory=Observers)

    def __post_init__(self) -> None:
        """Enter the clients that are there at the beginning."""
        clients = self.clients
        self.clock = 0.0
        self.message = self.way_out.message
        self.size_of = clients.data.size_of
        self.reduces = self.reduces and self.attackers is None
        self._places = {client: place for place, client in enumerate(clients.data.clients)} if self.places else {}
        self._members = Presence(clients.data.clients)
        self._unregistered: set[ClientId] = set()
        self._present = Presence(clients.data.clients)
        self._occupation = Occupation()
        self._away: set[ClientId] = set()
        self._has_failed: set[ClientId] = set()
        self._flights: dict[int, Flight] = {}
        self._busy: set[ClientId] = set()
        self._events: list[_Event] = []
        self._changes = 0
        self._task_bytes: dict[tuple[int, int | None], int] = {}  # by content, of the last version
        self._unsettled: dict[int, tuple[ClientId, ClientState, ClientState]] = {}  # states before and after
        self._cancelled: list[Flight] = []  # the codecs' states after them are not known yet
        for client in clients.spells:
            self._place(client)

    def registered(self) -> Sequence[ClientId]:
        """Clients that have registered, and not left."""
        return self._members

    def population(self) -> int:
        """The number of clients that have ever registered."""
        return len(self.clients.data.clients) - len(self._unregistered)

    def available(self) -> Sequence[ClientId]:
        """Available clients without a task."""
        return self._present

    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Start tasks at the present clock."""
        clients = self.clients
        now_s = self.clock
        bytes_up = self.message.uplink_bytes
        for task in tasks:
            if (content := task.content) not in self._task_bytes:
                version = task.model.version
                self._task_bytes = {of: known for of, known in self._task_bytes.items() if of[0] == version}
                self._task_bytes[content] = task.size_bytes()
            bytes_down = self._task_bytes[content]
            spells = clients.spells.get(task.client)
            until_s = spells.at(now_s).until_s if spells else math.inf
            flight = depart(clients, task, now_s=now_s, there_until_s=until_s, bytes_down=bytes_down, bytes_up=bytes_up)
            self._occupation.begin(task.client, flight.arrives_s - now_s)
            self._set_out(flight)

    def collect(self, until: float = math.inf, enough: int | None = None) -> Iterator[Answer]:
        """Train the clients whose answers are due, and give their answers."""
        replies = 0
        while True:
            due: list[Flight] = []
            expected = 0
            while self._flights and self._events[0][0] <= until and (enough is None or replies + expected < enough):
                arrived = self._pass_instant()
                due += arrived
                expected += sum([flight.counts for flight in arrived])
            yield from self._answers(due)
            # Training shows which clients diverge: each one dropped is a reply less, and others are waited for.
            replied = sum([flight.counts for flight in due])
            replies += replied
            if replied == expected:
                break
        if self._flights and math.isfinite(until) and (enough is None or replies < enough):
            self.clock = max(self.clock, until)

    def cancel(self, tasks: Iterable[int]) -> None:
        """Wait for the answers to these tasks no longer; their clients stay busy until they would have answered."""
        for task in tasks:
            if flight := self._flights.pop(task, None):
                flight.is_cancelled = True
                self._occupation.miss(flight.task.client)
                if self.states.codec_names and flight.problem is None:
                    self._cancelled.append(flight)

    def settle(self, counted: Mapping[int, float]) -> None:
        """Commit the states of clients whose updates counted; the others resume from the states they had.

        What codecs keep changes in either case: a lost message goes back.
        """
        unsettled = self._unsettled
        self._unsettled = {}
        for task, (client, before, after) in unsettled.items():
            if discount := counted.get(task, 0.0):
                self.states.commit(client, at_discount(before, after, discount))
            elif self.states.codec_names:
                self.states.commit(client, {name: before[name] for name in self.states.codec_names})
            self._busy.discard(client)
            self._let_in(client)
        if self._cancelled:
            self._put_back()

    def wait(self, until: float = math.inf) -> bool:
        """Let the clock run until a client comes or goes, or is free again, if that is before ``until``."""
        event = self._events[0] if self._events else None
        if event is None or event[0] > until:
            self.clock = max(self.clock, until) if math.isfinite(until) else self.clock
            return False
        if any(flight.arrives_s == event[0] for flight in self._flights.values()):
            return False  # the clock must not pass what collect() has to give
        self._pass_instant()
        return True

    def state(self) -> Tree:
        """Whole state for a checkpoint, client states included."""
        # Sorted, because a heap's own order depends on its history.
        flights = [what.saved() for _, _, what in sorted(self._events) if isinstance(what, Flight)]
        return {
            "clock": self.clock,
            "flights": flights,
            "clients": self.states.state(),
            "occupation": vars(self._occupation),
        }

    def occupation(self) -> dict[str, Any]:
        """Clients' use of their time, for a summary."""
        # Sums by fsum are exact, so that the order of the heap, which a resume changes, does not matter.
        to_come_s = math.fsum(time_s - self.clock for time_s, _, what in self._events if isinstance(what, Flight))
        return self._occupation.summary(clients=len(self.clients.data.clients), clock=self.clock, to_come_s=to_come_s)

    def restore(self, state: Tree) -> None:
        """Resume, in a fleet that has done nothing yet, from what :meth:`state` wrote down."""
        self.clock = state["clock"]
        self.states.restore(state["clients"])
        self._occupation = Occupation(**state["occupation"])
        self._events = []
        for client in self.clients.spells:
            self._place(client)
        for flight in map(Flight.restored, state["flights"]):
            self._set_out(flight)

    def _set_out(self, flight: Flight) -> None:
        if not flight.is_cancelled:
            self._flights[flight.task.id] = flight
        self._busy.add(flight.task.client)
        self._present.set(flight.task.client, False)
        heapq.heappush(self._events, (flight.arrives_s, flight.task.id, flight))

    def _come_or_go(self, client: ClientId) -> None:
        was_away = client in self._away
        self._place(client)
        if was_away != (client in self._away):
            self.observers.tell(NodeCame(client) if was_away else NodeWent(client))

    def _place(self, client: ClientId) -> None:
        """Note the state of a client at the present clock, and the time at which that changes."""
        spell = self.clients.spells[client].at(self.clock)
        self._members.set(client, spell.is_member)
        has_joined = spell.is_member or math.isinf(spell.until_s)  # a client that has left does not come back
        if has_joined:
            self._unregistered.discard(client)
        else:
            self._unregistered.add(client)
        if spell.is_there:
            self._away.discard(client)
        else:
            self._away.add(client)
        self._let_in(client)
        if math.isfinite(spell.until_s):
            self._changes += 1
            heapq.heappush(self._events, (spell.until_s, -self._changes, client))

    def _let_in(self, client: ClientId) -> None:
        self._present.set(client, client not in self._busy and client not in self._away)

    def _pass_instant(self) -> list[Flight]:
        """Move the clock to the next event; returns the flights that arrive then and are waited for."""
        events = self._events
        arrived: list[Flight] = []
        self.clock = events[0][0]
        while events and events[0][0] == self.clock:
            _, number, what = heapq.heappop(events)
            if not isinstance(what, Flight):
                self._come_or_go(what)
                continue
            self._busy.discard(what.task.client)
            self._let_in(what.task.client)
            if self._flights.pop(number, None) is not None:
                arrived.append(what)
        return arrived

    def _answers(self, due: list[Flight]) -> Iterator[Answer]:
        for flight in due:
            if flight.problem is not None:
                yield Answer.failure(flight.task, flight.problem, has_diverged=flight.has_diverged)
        counting = [flight for flight in due if flight.counts]
        wanted = [flight for flight in counting if flight.answer is None]
        given: set[int] = set()
        if wanted:
            # Where late answers count, their flights will be trained in any case: larger groups take less time.
            others = self._flights.values() if self.looks_ahead else ()
            ahead = [one for one in others if one.counts and one.answer is None]
            is_over = False
            for answer in self._train(wanted, ahead, reduces=self.reduces):
                if isinstance(answer.content, Failure):
                    is_over |= answer.content.has_diverged and not self.drops_diverged
                given |= set(answer.tasks)
                yield answer
            # The run ends with this divergence: other answers would only cost time.
            if is_over:
                return
        singly = (self._single(flight) for flight in counting if flight.task.id not in given)
        if self.attackers is not None:
            encode = partial(self._encoded, tasks={flight.task.id: flight.task for flight in counting})
            yield from self.attackers.attacked(singly, self.message, encode)
        else:
            yield from singly

    def _put_back(self) -> None:
        """Commit the state that codecs keep of messages that nobody waits for; their clients train all the same."""
        cancelled = self._cancelled
        self._cancelled = []
        for _ in self._train([flight for flight in cancelled if flight.answer is None], [], reduces=False):
            pass  # one that diverged leaves nothing
        for flight in cancelled:
            if self.attackers is not None and flight.answer is not None:
                # From the state that the task began with.
                outgoing = self._outgoing(flight.answer, flight.lost, flight.task)
                flight.lost = client_state(None, (), _first_row(outgoing.lost))
            self.states.commit(flight.task.client, flight.lost)

    def _train(self, due: list[Flight], ahead: list[Flight], *, reduces: bool) -> Iterator[Answer]:
        """Train flights, and give the answers of reduced groups and of failures; other flights keep their answers.

        A group is reduced to one answer if ``reduces`` is True, all its flights are due, and they have one model and
        one round.
        """
        batches: dict[object, list[Flight]] = {}
        # Groups follow from the order of flights, so that must be one which a resume does not change.
        for flight in sorted([*due, *ahead], key=lambda flight: (flight.arrives_s, flight.task.id)):
            task = flight.task  # a group has one step size, and one broadcast
            key = (task.lr, task.steps) if not task.model.broadcast and ahead else task.model.version
            batches.setdefault(key, []).append(flight)
        due_tasks = {flight.task.id for flight in due}
        items: deque[tuple[int, list[Flight], bool]] = deque()

        def submit(groups: Sequence[list[Flight]]) -> None:
            made = [self._group(group, due_tasks, reduces) for group in groups]
            tickets = self.clients.executor.submit_all([item for item, _ in made])
            for ticket, group, (_, is_reduced) in zip(tickets, groups, made, strict=True):
                items.append((ticket, group, is_reduced))

        submit([group for flights in batches.values() for group in self._grouped(flights)])
        while items:  # in turn, so that of several errors the same one is raised
            ticket, group, is_reduced = items.popleft()
            for _, trained, tensors in self.clients.executor.results([ticket]):
                self.clients.groups.note(trained.most_together, trained.uncaptured)
                if trained.failed:
                    yield from self._failed(group, dict(trained.failed), due_tasks)
                    continue
                if not trained.diverged:
                    yield from self._landed(group, is_reduced, trained, tensors)
                    continue
                yield from self._diverged(group, dict(trained.diverged), due_tasks)
                if self.drops_diverged and (others := [flight for flight in group if not flight.has_diverged]):
                    submit([others])  # as if the one that diverged had never been asked

    def _grouped(self, flights: list[Flight]) -> Iterator[list[Flight]]:
        samples = [one.samples for one in flights]
        for places in self.clients.groups.of(samples, [_steps(one) for one in flights]):
            yield [flights[place] for place in places]

    def _group(self, flights: list[Flight], due: set[int], reduces: bool) -> tuple[Item, bool]:
        """Work item of a group, and True if its answer is one for all its clients."""
        is_one = len({flight.task.model.version for flight in flights}) == 1
        of_round = is_one and len({flight.task.round for flight in flights}) == 1
        is_reduced = reduces and of_round and all(flight.task.id in due for flight in flights)
        return self._item(flights, is_one, is_reduced), is_reduced

    def _diverged(self, group: list[Flight], reasons: Mapping[ClientId, str], due: set[int]) -> Iterator[Answer]:
        """Failures of the flights of a group that have diverged, each when it is due."""
        for flight in group:
            if (reason := reasons.get(flight.task.client)) is None:
                continue
            if self.drops_diverged:
                flight.problem = reason
                flight.has_diverged = True
            if flight.task.id in due or not self.drops_diverged:
                yield Answer.failure(flight.task, reason, has_diverged=True)

    def _failed(self, group: list[Flight], reasons: Mapping[ClientId, str], due: set[int]) -> Iterator[Answer]:
        """Failures of clients whose own code has failed, each when it is due."""
        for flight in group:
            flight.problem = reasons[flight.task.client]
            if flight.task.client not in self._has_failed:
                # Once a client: an app that fails in each round would fill the log.
                _log.warning("round %d: %s; it is said once a client", flight.task.round, flight.problem)
                self._has_failed.add(flight.task.client)
            if flight.task.id in due:
                yield Answer.failure(flight.task, flight.problem)

    def _item(self, flights: list[Flight], is_one: bool, reduces: bool) -> Item:
        tasks = [flight.task for flight in flights]
        clients = [task.client for task in tasks]
        unreduced: Wants = "updates" if self.attackers is None else "reported"
        train = Train.of(
            tasks,
            wants="mean" if reduces else unreduced,
            population=len(self.clients.data.clients),
            places=tuple(self._places[client] for client in clients) if self._places else (),
            state_names=self.states.names,
            cuts={flight.task.id: flight.steps for flight in flights if flight.steps is not None},
        )
        models = [(task.model.params_V, task.model.integers_I) for task in tasks]
        start = models[0] if is_one else tuple(torch.stack(parts) for parts in zip(*models, strict=True))
        tensors = (*start, *tasks[0].model.broadcast, *self.states.stacked(clients, models))
        return Item(train, tensors, label_of(train), cost=sum(flight.seen for flight in flights))

    def _landed(
        self, flights: list[Flight], reduces: bool, trained: Trained, tensors: Sequence[Tensor]
    ) -> Iterator[Answer]:
        """Take the result of a group's training: one answer of the group, or an answer that each flight keeps."""
        updates_KM, integers_KI, *states = tensors  # of a reduced group the mean [M], and the largest [I]
        if states:
            names = self.states.names
            for flight, state in zip(flights, zip(*map(_rows, states), strict=True), strict=True):
                flight.state = dict(zip(names, state[: len(names)], strict=True))
                flight.lost = dict(zip(self.states.codec_names, state[len(names) :], strict=True))
        sizes = self._sizes(trained.sizes, len(flights))
        if reduces:
            for flight in flights:
                self._hold(flight)
            yield Answer(
                tasks=tuple(flight.task.id for flight in flights),
                round=flights[0].task.round,
                clients=tuple(flight.task.client for flight in flights),
                content=self._content(updates_KM, sum(trained.weights)),
                integers_I=integers_KI,
                samples=trained.samples,
                train_losses=trained.train_losses,
                metrics=self._told(trained),
                size_bytes=sum(sizes),
            )
            return
        counts = zip(trained.weights, trained.samples, trained.train_losses, sizes, strict=True)
        metrics = self._told(trained)
        for flight, update_M, integers_I, (weight, samples, loss, size_bytes) in zip(
            flights, _rows(updates_KM), _rows(integers_KI), counts, strict=True
        ):
            flight.answer = Answer(
                tasks=(flight.task.id,),
                round=flight.task.round,
                clients=(flight.task.client,),
                content=self._content(update_M, weight),
                integers_I=integers_I,
                samples=(samples,),
                train_losses=(loss,),
                metrics=metrics,
                size_bytes=size_bytes,
            )

    def _told(self, trained: Trained) -> tuple[Mapping[str, float], ...]:
        """Further numbers of clients; none under secure aggregation, where they tell none."""
        return () if self.message.fixed is not None else trained.metrics

    def _content(self, update_M: Tensor, weight: float) -> Update | Lanes:
        """Update as workers give it: in lanes under secure aggregation, where no attacker reads it."""
        is_hidden = self.message.fixed is not None and self.attackers is None
        return Lanes(update_M) if is_hidden else Update(update_M, weight)

    def _single(self, flight: Flight) -> Answer:
        """The answer of one client."""
        assert flight.answer is not None
        self._hold(flight)
        return flight.answer

    def _hold(self, flight: Flight) -> None:
        """Keep a client's new state until its task is settled; until then the client gets no other task."""
        task = flight.task
        if flight.state:
            before = self.states.of(task.client, (task.model.params_V, task.model.integers_I))
            self._unsettled[task.id] = (task.client, {**before, **flight.lost}, flight.state)
            self._busy.add(task.client)
            self._let_in(task.client)

    def _encoded(self, answer: Answer, tasks: Mapping[int, Task]) -> Answer:
        """An answer as the coordinator receives it, where attackers have seen it first.

        Args:
            answer: report of a client, or of an attacker in its place.
            tasks: id of a task → the task.
        """
        if self.message.sends_models:
            return answer
        task = answer.tasks[0]
        client = answer.clients[0]
        _, before, after = self._unsettled.get(task, (client, {}, {}))
        outgoing = self._outgoing(answer, before, tasks[task])
        if outgoing.counted:
            lost = client_state(None, (), _first_row(outgoing.lost))
            counted = client_state(None, (), _first_row(outgoing.counted))
            self._unsettled[task] = (client, {**before, **lost}, {**after, **counted})
        size_bytes = self._sizes(outgoing.sizes, 1)[0]
        if outgoing.lanes_KL is not None:
            return answer._replace(content=Lanes(outgoing.lanes_KL[0]), size_bytes=size_bytes)
        return answer.with_update(outgoing.update_KM[0])._replace(size_bytes=size_bytes)

    def _outgoing(self, answer: Answer, before: ClientState, task: Task) -> Outgoing:
        """Rest of the way out for the message that a client, or an attacker in its place, reports."""
        kept = {name: part[None] for name, part in codec_state(before).items()}
        update = answer.update
        rows = Rows(update.update_M[None], ClientNumbers([update.weight], answer.samples, answer.train_losses))
        return self.way_out.leave(
            rows, kept, [answer.round], clients=answer.clients, repeats=[task.repeats], clip=task.clip
        )

    def _sizes(self, coded: Sequence[int], count: int) -> Sequence[int]:
        """Bytes of clients' messages; ``coded`` has the bytes of the values where a codec encodes them, or is empty."""
        integers_bytes = self.message.uplink[-1].size_bytes
        return [size_bytes + integers_bytes for size_bytes in coded] or [self.message.uplink_bytes] * count


def _rows(part_KN: Tensor) -> list[Tensor]:
    """Copies of the rows: a view of one would keep all rows of its group in memory."""
    return [row.clone() for row in part_KN.unbind()] if part_KN.shape[1] else [part_KN[0]] * len(part_KN)


def _first_row(state: CodecState) -> CodecState:
    return {name: part[0] for name, part in state.items()}


def _steps(flight: Flight) -> int | None:
    return flight.task.steps if flight.steps is None else flight.steps
