"""A fleet of simulated clients on a virtual clock. Shapes: see :mod:`fed.wire.messages`."""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fed.clients.client_states import ClientStates
from fed.clients.data import ClientId
from fed.clients.training.executor import Item
from fed.clients.training.work_items import Train, Trained, label_of
from fed.randomness import Streams
from fed.simulations.availability import Membership, Spells
from fed.simulations.devices import Devices
from fed.simulations.in_flight import Answer, Departures, Flight
from fed.simulations.occupation import Occupation
from fed.simulations.presence import Presence
from fed.simulations.simulated_clients import SimulatedClients
from fed.storage.checkpoints import Tree
from fed.wire.messages import Failure, GroupReply, Task

__all__ = ["SimulatedFleet"]

_Event: TypeAlias = tuple[float, int, Flight | ClientId]
"""When an answer arrives, with the number of its task, or a client comes or goes, with a number below 0 of its own."""


class SimulatedFleet:
    """A :class:`fed.server.fleet.Fleet` whose clients are trained, in groups, when their answers are collected.

    What happens when is known without training: tasks that will be answered are trained when one of them is needed,
    all that are due together, or where ``looks_ahead`` all that are under way, from as many models as they were sent.

    Args:
        clients: who trains on what.
        states: what the clients keep.
        answer_bytes: of a client's message with its integers.
        reduces: whether the mean of the messages of a group that is due is all that is wanted; else each comes singly.
        looks_ahead: whether every answer will be wanted, however late.
        places: whether clients are told their numbers.
    """

    def __init__(
        self,
        clients: SimulatedClients,
        *,
        states: ClientStates,
        answer_bytes: int,
        reduces: bool,
        looks_ahead: bool = False,
        places: bool = False,
    ) -> None:
        self.clock = 0.0
        self._data = clients.data
        self._groups = clients.groups
        self._executor = clients.executor
        self._departures = Departures(clients.devices, clients.groups, clients.streams, answer_bytes)
        self._states = states
        self._reduces = reduces
        self._looks_ahead = looks_ahead
        self._places = {client: place for place, client in enumerate(clients.data.clients)} if places else {}
        self._members = Presence(clients.data.clients)
        self._present = Presence(clients.data.clients)
        self._occupation = Occupation()
        self._away: set[ClientId] = set()
        self._flights: dict[int, Flight] = {}
        self._busy: set[ClientId] = set()
        self._events: list[_Event] = []
        self._changes = 0
        self._sized: tuple[Tensor | None, int] = None, 0
        self._kept: list[tuple[Sequence[ClientId], Sequence[Tensor]]] = []
        self._spells = _spells(clients.data.clients, clients.devices, clients.streams)
        for client in self._spells:
            self._come_or_go(client)

    def registered(self) -> Sequence[ClientId]:
        """Those that have registered, and not left."""
        return self._members

    def available(self) -> Sequence[ClientId]:
        """Those that are there and have no task."""
        return self._present

    def size_of(self, client: ClientId) -> int:
        """How many samples a client holds."""
        return self._data.size_of(client)

    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Start tasks at the present clock."""
        for task in tasks:
            if task.vector_V is not self._sized[0]:  # of tasks that share their tensors, as those of a round do
                self._sized = task.vector_V, task.size_bytes()
            task_bytes = self._sized[1]
            spells = self._spells.get(task.client)
            until_s = spells.at(self.clock).until_s if spells else math.inf
            samples = self._data.size_of(task.client)
            flight = self._departures.depart(task, self.clock, task_bytes, samples, until_s)
            self._occupation.begin(task.client, flight.arrives_s - self.clock)
            self._set_out(flight)

    def collect(self, until: float = math.inf, enough: int | None = None) -> Iterator[GroupReply | Failure]:
        """Train those whose answers are due, and give their answers.

        What clients keep changes at the end, for all of them, and for nobody if one has diverged or an error is raised.
        """
        due: list[Flight] = []
        replies = 0
        while self._flights and self._events[0][0] <= until and (enough is None or replies < enough):
            arrived = self._pass_instant()
            due += arrived
            replies += sum(flight.counts for flight in arrived)
        if self._flights and math.isfinite(until) and (enough is None or replies < enough):
            self._pass_until(until)
        yield from self._answers(due)

    def cancel(self, tasks: Iterable[int]) -> None:
        """Give no answers to these; clients learn of it when they would have answered."""
        for task in tasks:
            if flight := self._flights.pop(task, None):
                flight.is_cancelled = True
                self._occupation.miss(flight.task.client)

    def wait(self, until: float = math.inf) -> bool:
        """Let the clock run until a client comes or goes, or is free again, if that is before ``until``."""
        event = self._events[0] if self._events else None
        if event is None or event[0] > until:
            self.clock = max(self.clock, until) if math.isfinite(until) else self.clock
            return False
        if self._brings_an_answer():
            return False
        self._pass_instant()
        return True

    def state(self) -> Tree:
        """All that it will go on with, what clients keep among it, for a checkpoint."""
        flights = [what.state() for _, _, what in sorted(self._events) if isinstance(what, Flight)]
        occupation = self._occupation.state()
        return {"clock": self.clock, "flights": flights, "clients": self._states.state(), "occupation": occupation}

    def occupation(self) -> dict[str, Any]:
        """What clients have done with their time, for a summary."""
        to_come_s = math.fsum(time_s - self.clock for time_s, _, what in self._events if isinstance(what, Flight))
        return self._occupation.summary(clients=len(self._data.clients), clock=self.clock, to_come_s=to_come_s)

    def restore(self, state: Tree) -> None:
        """Go on, from a fleet that has done nothing yet, with what :meth:`state` said."""
        self.clock = state["clock"]
        self._states.restore(state["clients"])
        self._occupation = Occupation(**state["occupation"])
        self._events = []
        for client in self._spells:
            self._come_or_go(client)
        for flight in map(Flight.restored, state["flights"]):
            self._set_out(flight)

    def _set_out(self, flight: Flight) -> None:
        if not flight.is_cancelled:
            self._flights[flight.task.id] = flight
        self._busy.add(flight.task.client)
        self._present.leave(flight.task.client)
        heapq.heappush(self._events, (flight.arrives_s, flight.task.id, flight))

    def _come_or_go(self, client: ClientId) -> None:
        spells = self._spells[client]
        spell = spells.at(self.clock)
        if isinstance(spells, Membership):
            (self._members.come if spells.is_member(self.clock) else self._members.leave)(client)
        (self._away.discard if spell.is_there else self._away.add)(client)
        self._let_in(client)
        if math.isfinite(spell.until_s):
            self._changes += 1
            heapq.heappush(self._events, (spell.until_s, -self._changes, client))

    def _let_in(self, client: ClientId) -> None:
        is_free = client not in self._busy and client not in self._away
        (self._present.come if is_free else self._present.leave)(client)

    def _pass_instant(self) -> list[Flight]:
        """Move the clock to what happens next; the flights that arrive then, and are waited for."""
        events, arrived = self._events, []
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

    def _brings_an_answer(self) -> bool:
        """Whether somebody waits for what arrives in the next instant, whatever else happens in it."""
        events, instant = self._events, [heapq.heappop(self._events)]
        while events and events[0][0] == instant[0][0]:
            instant.append(heapq.heappop(events))
        for event in instant:
            heapq.heappush(events, event)
        return any(number in self._flights for _, number, _ in instant)

    def _pass_until(self, time_s: float) -> None:
        while self._events and self._events[0][0] <= time_s:
            self._pass_instant()
        self.clock = max(self.clock, time_s)

    def _answers(self, due: list[Flight]) -> Iterator[GroupReply | Failure]:
        for flight in due:
            if flight.problem is not None:
                task = flight.task
                yield Failure(task.id, task.round, task.client, flight.problem)
        counting = [flight for flight in due if flight.counts]
        wanted = [flight for flight in counting if flight.answer is None]
        given: set[int] = set()
        has_diverged = False
        if wanted:
            ahead = [one for one in self._flights.values() if one.counts and one.answer is None]
            for answer in self._train(wanted, ahead if self._looks_ahead else []):
                if isinstance(answer, Failure):
                    has_diverged = True
                else:
                    given |= set(answer.tasks)
                yield answer
        for flight in counting if not has_diverged else ():
            if flight.task.id not in given:
                yield self._given_singly(flight)
        for clients, states in self._kept if not has_diverged else ():
            self._states.keep(clients, states)
        self._kept = []

    def _train(self, due: list[Flight], ahead: list[Flight]) -> Iterator[GroupReply | Failure]:
        """Train flights; of groups that are due as a whole, from one model, the answers where means will do."""
        versions: dict[object, list[Flight]] = {}
        for flight in sorted([*due, *ahead], key=lambda flight: (flight.arrives_s, flight.task.id)):
            task = flight.task  # what is broadcast is for all of a group, as is the step size
            key = (task.lr, task.steps) if not task.broadcast and ahead else id(task.vector_V)
            versions.setdefault(key, []).append(flight)
        are_due = {id(flight) for flight in due}
        items: dict[int, tuple[list[Flight], bool]] = {}
        for flights in versions.values():
            for places in self._groups.of([one.samples for one in flights], [_steps(one) for one in flights]):
                group = [flights[place] for place in places]
                is_one = len({id(flight.task.vector_V) for flight in group}) == 1
                of_round = is_one and len({flight.task.round for flight in group}) == 1
                reduces = self._reduces and of_round and all(id(flight) in are_due for flight in group)
                items[self._executor.submit(self._item(group, is_one, reduces))] = group, reduces
        for ticket, (group, reduces) in items.items():  # in turn, so that of several errors the same one is raised
            for _, trained, tensors in self._executor.results([ticket]):
                yield from self._landed(group, reduces, trained, tensors)

    def _item(self, flights: list[Flight], is_one: bool, reduces: bool) -> Item:
        tasks = [flight.task for flight in flights]
        first, clients = tasks[0], tuple(task.client for task in tasks)
        train = Train(
            clients,
            first.round,
            "mean" if reduces else "messages",
            first.lr,
            tuple(map(_steps, flights)),
            len(first.broadcast),
            len(self._data.clients),
            tuple(self._places[client] for client in clients) if self._places else (),
            tuple((task.round, *filter(None, [task.repeats])) for task in tasks),
        )
        models = [(task.vector_V, task.integers_I) for task in tasks]
        start = models[0] if is_one else tuple(torch.stack(parts) for parts in zip(*models, strict=True))
        tensors = (*start, *first.broadcast, *self._states.stacked(clients, models))
        return Item(train, tensors, label_of(train), cost=sum(flight.seen for flight in flights))

    def _landed(
        self, flights: list[Flight], reduces: bool, trained: Trained, tensors: Sequence[Tensor]
    ) -> Iterator[GroupReply | Failure]:
        """What a group's training came to: an answer, or more that are kept until they are due."""
        if trained.diverged is not None:
            client, reason = trained.diverged
            (task,) = (flight.task for flight in flights if flight.task.client == client)
            yield Failure(task.id, task.round, client, reason, diverged=True)
            return
        messages, integers, *states = tensors
        clients = tuple(flight.task.client for flight in flights)
        if reduces:
            self._kept.append((clients, states))
            ids = tuple(flight.task.id for flight in flights)
            weight, losses = sum(trained.weights), trained.train_losses
            yield GroupReply(ids, flights[0].task.round, clients, messages, weight, integers, trained.samples, losses)
            return
        messages_of, integers_of, *states_of = (_rows(part) for part in tensors)
        kept_of = zip(*states_of, strict=True) if states else [()] * len(flights)
        told = trained.weights, integers_of, trained.samples, trained.train_losses, kept_of
        for flight, *answer in zip(flights, messages_of, *told, strict=True):
            flight.answer = Answer(*answer)

    def _given_singly(self, flight: Flight) -> GroupReply:
        """One client's answer, as the mean of a group of one."""
        assert flight.answer is not None
        task, answer = flight.task, flight.answer
        self._kept.append(((task.client,), [part.unsqueeze(0) for part in answer.kept]))
        message, alone = (answer.message_M, answer.weight, answer.integers_I), (task.id,)
        return GroupReply(alone, task.round, (task.client,), *message, (answer.samples,), (answer.train_loss,))


def _spells(clients: Sequence[ClientId], devices: Devices, streams: Streams) -> dict[ClientId, Spells]:
    """Of those that are not always there."""
    if devices.are_always_there:
        return {}
    found = ((client, devices.spells(client, streams)) for client in clients)
    return {client: spells for client, spells in found if spells is not None}


def _rows(part_KN: Tensor) -> list[Tensor]:
    """A copy of each row, lest the last of a group to be asked for keeps all of its rows."""
    return [row.clone() for row in part_KN.unbind()] if part_KN.shape[1] else [part_KN[0]] * len(part_KN)


def _steps(flight: Flight) -> int | None:
    return flight.task.steps if flight.steps is None else flight.steps
