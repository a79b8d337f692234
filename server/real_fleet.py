"""Base of the fleets of real nodes, whatever engine carries their messages."""

import logging
import math
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fed.clients.data.holdings import in_order
from fed.errors import InvalidPayload
from fed.processes.clock import Clock
from fed.protocol import protocol_pb2 as pb
from fed.quantities import counted
from fed.server.observer import Event, MessageRefused, NodeCame, NodeWent
from fed.server.registry import ClientStateVersions, CountedTask, Members, NodeCounts, TaskOutcome
from fed.server.telling import Observers
from fed.server.way_in import received
from fed.storage.checkpoints import Tree
from fed.vectors.randomness import Streams
from fed.vectors.tensors import Tensor
from fed.wire.agreed_format import header_of
from fed.wire.format import Format
from fed.wire.messages import Answer, Failure, Task, one_line
from fed.wire.payloads import described
from fed.wire.rate_limits import Allowance, Refusals

if TYPE_CHECKING:
    from fed.privacy.ledger import Ledger

__all__ = ["RealFleet"]

_log = logging.getLogger(__name__)
_SAYS_EVERY_S = 30.0  # seconds between two lines of the log on what is waited for
_MOST_NOTED = 1_000  # nodes that come and go, and refusals, that observers have not been told of


class RealFleet(ABC):
    """Fleet of nodes that say themselves who they are and what they hold, as :class:`fed.server.fleet.Fleet`.

    A client's state is committed by the coordinator's verdict: a node is told with each task which of its earlier ones
    counted last, and at what discount, so that a server that resumes from a checkpoint finds its clients' states.

    Attributes:
        counts: counts of what became of each client's tasks in this run.
        run: name of the run, the same after a resume.
        time: clock by which it waits; :attr:`clock` counts from the run's beginning.
        observers: observers that are told of nodes that come and go, and of refused messages.
        ledger: ledger of what the federation has released, whose head tasks tell; None: the run promises no privacy.

    Args:
        clock: time, by which it waits.
    """

    def __init__(self, clock: Clock) -> None:
        self.time = clock
        self.observers = Observers()
        self.ledger: Ledger | None = None
        self._noted: deque[Event] = deque(maxlen=_MOST_NOTED)
        self.run = secrets.token_hex(16)
        self._start = secrets.randbits(63)  # a resumed server numbers tasks anew: nodes tell them apart by this
        self._began_s = self.time.monotonic_s()
        self._changes = self._seen = 0
        self._members = Members()
        self.counts = NodeCounts()
        self._refusals = Refusals(clock, self._note_refusal)
        self._open: dict[int, Task] = {}  # until their answers are collected
        self._outcomes: deque[TaskOutcome] = deque()  # of open tasks, first to arrive first
        self._kept = ClientStateVersions()
        self._unsettled: dict[int, int | str] = {}  # collected tasks, until the verdict on them
        self._examination = 0
        self._unscored: set[int | str | None] = set()  # clients whose scores are waited for
        self._scores: dict[int | str, pb.Scores] = {}
        self._keeps_states = self._adds_up = False
        self._sent_again_bytes = 0  # of whole models, which no answer has told of yet

    @property
    def clock(self) -> float:
        """Seconds since the run began, without those in which there was no server."""
        return self.time.monotonic_s() - self._began_s

    def begin(
        self,
        plan: pb.Plan,
        message: Format,
        streams: Streams,
        *,
        fixed_part: Sequence[Tensor] = (),
        keeps_states: bool = False,
        keeps_checkpoints: bool = True,
    ) -> None:
        """Tell nodes the plan of the run, before the first task.

        Args:
            plan: plan of the run for nodes; the format is added to it.
            message: the format of clients' messages.
            streams: random streams of the run, for codecs.
            fixed_part: fixed part of the model, for nodes that have another.
            keeps_states: True if clients keep a state from task to task.
            keeps_checkpoints: True if the run has checkpoints, so that it may go on from an earlier state.
        """
        self._message = message
        self._streams = streams
        self._kept.goes_back = keeps_checkpoints
        self._keeps_states = keeps_states
        self._adds_up = message.error_feedback.adds_up
        plan.format.CopyFrom(header_of(message))
        if fixed_part:
            plan.fixed_part.CopyFrom(described(fixed_part))
        self._make_known(plan, message, fixed_part)

    def await_nodes(self, count: int, wanted: int | None = None) -> None:
        """Wait until this many nodes are connected.

        Args:
            count: number of nodes to wait for.
            wanted: number of nodes that the run begins with, for the log; None: as many as it waits for.
        """
        said = -1
        may_say = _once_in_a_while(self.time)
        while (there := len(self._attending())) < count:
            if may_say.spend() or there != said:
                said = there
                _log.info("%d of %d nodes are there", there, wanted or count)
            self.pass_time(math.inf)
            self._seen = self._changes

    def registered(self) -> Sequence[int | str]:
        """All clients that have joined, but for those that came after the members were fixed; numbers, then names."""
        return in_order(self._members)

    def population(self) -> int:
        """The number of clients that have ever registered."""
        return len(self.registered())

    def fix_registered(self) -> None:
        """Fix the members, who are told their numbers: a client that joins later is connected, and gets no tasks."""
        self._members.is_closed = True

    def available(self) -> Sequence[int | str]:
        """Connected members without a task."""
        self._poll()  # what has arrived by now must not end the next wait
        self._tell_observers()
        self._seen = self._changes
        there = {*self._free()} - {task.client for task in self._open.values()}
        # their next task has to say whether the last one counted
        there -= {*self._unsettled.values()} if self._keeps_states else set()
        return [client for client in self.registered() if client in there]

    def size_of(self, client: int | str) -> int:
        """Number of samples that a client says it trains on."""
        return self._members[client]

    @abstractmethod
    def dispatch(self, tasks: Iterable[Task]) -> None:
        """Send tasks; clients that are not connected, as after a resume, get theirs when they come."""

    def collect(self, until: float = math.inf, enough: int | None = None) -> Iterator[Answer]:
        """Answers as they arrive."""
        replies = 0
        may_say = _once_in_a_while(self.time)
        while self._open and (enough is None or replies < enough):
            self._tell_observers()
            if not self._has_answer():
                if may_say.spend():
                    waiting = sorted({str(task.client) for task in self._open.values()})
                    _log.info("waiting for answers of %s, %s among them", counted(len(waiting), "client"), waiting[0])
                self.pass_time(until)
            if self._has_answer():
                answer = self._answer(self._outcomes.popleft())
                task = self._open.pop(answer.tasks[0])
                if isinstance(answer.content, Failure):
                    self.counts.add(task.client, "failed", one_line(answer.content.reason))
                    self._lose(task.id, task.client)
                else:
                    replies += 1
                    self.counts.add(task.client, "answered")
                    self._unsettled[task.id] = task.client
                sent_again_bytes = self._sent_again_bytes
                self._sent_again_bytes = 0
                yield answer._replace(more_bytes_down=sent_again_bytes)
                del answer  # it may be large, and the next is on its way
            elif self.clock >= until:
                return

    @abstractmethod
    def cancel(self, tasks: Iterable[int]) -> None:
        """Give no answers to these tasks but those that have arrived."""

    def settle(self, counted: Mapping[int, float]) -> None:
        """Remember the tasks whose updates counted; with the next task a node commits the state that they left."""
        self._tell_observers()
        unsettled = self._unsettled
        self._unsettled = {}
        for task, client in unsettled.items():
            if discount := counted.get(task, 0.0):
                self._kept.count(client, CountedTask(self._start, task, discount))
            else:
                self._lose(task, client)

    def wait(self, until: float = math.inf) -> bool:
        """Wait until a node comes, goes or has done its work."""
        may_say = _once_in_a_while(self.time)
        while not self._has_answer():
            self._tell_observers()
            if self._changes != self._seen:
                self._seen = self._changes
                return True
            if self.clock >= until:
                return False
            if may_say.spend():
                _log.info("waiting for nodes; %d are there", len(self._attending()))
            self.pass_time(until)
        return False

    def scores(self, model: tuple[Tensor, Tensor], limit_s: float, round_number: int = 1) -> dict[int | str, pb.Scores]:
        """Let connected clients score a model, or their own, on samples that they hold out.

        A client that does not answer in time is asked again only once it has answered or come back.

        Args:
            model: (vector [V], integers [I]).
            limit_s: seconds to wait for them.
            round_number: number of the round that the model is of, from 1.

        Returns:
            Scores by client, of those that have answered.
        """
        # a number of its own: scores that come late must not count for the next model
        self._examination += 1
        self._unscored = set()
        self._scores = {}
        until = self.clock + limit_s
        self._examine(model, limit_s, round_number)
        while self._unscored and self.clock < until:
            self.pass_time(until)
        if self._unscored:
            _log.warning(
                "%s not scored the model within %g s, and must do so before the next is sent: %s",
                f"{counted(len(self._unscored), 'client')} {'has' if len(self._unscored) == 1 else 'have'}",
                limit_s,
                ", ".join(sorted(map(repr, self._unscored))[:5]),
            )
        return self._scores

    def state(self) -> Tree:
        """Clock, members, counts, the run's name, and the task after which each client's state was kept."""
        return {
            "clock": self.clock,
            "members": dict(self._members),
            "kept": self._kept.state(),
            "counts": self.counts.state(),
            "run": self.run,
        }

    def restore(self, state: Tree) -> None:
        """Resume from what :meth:`state` wrote down; tasks that were open then are to be sent again."""
        self._began_s = self.time.monotonic_s() - state["clock"]  # the clock goes on from where it stopped
        # nodes may have dialled before the checkpoint was read
        self._members.clear()
        self._members.update(state["members"])
        self._kept.restore(state["kept"])
        self.counts.restore(state["counts"])
        self.run = state["run"]

    def _assignment(self, task: Task, members: Sequence[int | str], payload: pb.Payload) -> pb.Assignment:
        """Assignment of a task, as nodes are told it.

        Args:
            task: task of the assignment.
            members: all clients that take part, in their order.
            payload: description of the file of the task's tensors.
        """
        return pb.Assignment(
            task=pb.TaskId(start=self._start, number=task.id),
            ledger=self._ledger_head(),
            round=task.round,
            repeats=task.repeats,
            lr=task.lr,
            clip=task.clip,
            steps=task.steps,
            broadcast_count=len(task.model.broadcast),
            population=len(members),
            # a place stays the same only where no other client can come before it
            place=members.index(task.client) if self._members.is_closed else None,
            payload=payload,
            **self._kept_state(task.client),
            durable_after=_task_id(self._kept.durable_after.get(task.client)),
            lost_after=[
                pb.TaskId(start=start, number=number) for start, number in self._kept.lost_after.get(task.client, ())
            ],
            deadline_s=task.deadline_s,
            takes_parts=task.takes_parts,
            reference=task.model.reference,
            since=_base_of(task),
            differences=[pb.Difference(number=one.number, after=one.after) for one in task.differences or ()],
        )

    def _ledger_head(self) -> pb.LedgerHead | None:
        """The head of the ledger, by which nodes know an older one."""
        if self.ledger is None:
            return None
        head = self.ledger.head
        return pb.LedgerHead(count=head.count, sha256=bytes.fromhex(head.sha256))

    def _kept_state(self, client: int | str) -> dict[str, Any]:
        """The task whose state a client resumes from, and its discount; none for the first state."""
        kept = self._kept.after.get(client)
        return {} if kept is None else {"kept_after": _task_id(kept), "kept_discount": kept.discount}

    def _with_whole_model(self, number: int) -> Task | None:
        """The open task, with the whole model for a node that lacks the base of its differences.

        None: the task is not open any more, or has brought the whole model already.
        """
        task = self._open.get(number)
        if task is None or task.differences is None:
            return None
        _log.info("client %r has lost the model of its last task, and is sent the whole model", task.client)
        # also in the open task, so that a node that comes back gets the whole model again
        self._open[number] = task = task._replace(differences=None)
        self._sent_again_bytes += task.size_bytes()
        return task

    def _note_refusal(self, sender: int | str, reason: str) -> None:
        """Count a refusal; calls of nodes are refused in a thread of their own."""
        self.counts.add(sender, "refused", reason)
        self._noted.append(MessageRefused(sender, reason))

    def _note_presence(self, event: NodeCame | NodeWent) -> None:
        """Take note that a client has come or gone."""
        self._changes += 1
        self._noted.append(event)

    def _tell_observers(self) -> None:
        """Tell observers what was noted, in the thread that runs the rounds."""
        while self._noted:
            self.observers.tell(self._noted.popleft())

    def _miss(self, task: int) -> None:
        """Wait no longer for an open task."""
        client = self._open.pop(task).client
        self.counts.add(client, "late")
        self._lose(task, client)

    def _lose(self, task: int, client: int | str) -> None:
        """Note that a message is lost, where clients keep something."""
        if self._keeps_states:
            self._kept.lose(client, self._start, task)

    def _answer(self, outcome: TaskOutcome) -> Answer:
        """The answer to an open task; a failure where the node has none, or sent one that must not count."""
        task = self._open[outcome.task]
        if outcome.answer is None or outcome.read is None:
            return Answer.failure(task, outcome.problem)
        try:
            return self._received(task, outcome.answer, outcome.read())
        except InvalidPayload as error:
            self._refuse(task.client, str(error))
            return Answer.failure(task, f"its answer was refused: {error}")

    def _refuse(self, client: int | str, reason: str) -> None:
        """Count and log the refusal of a client's answer."""
        self._refusals.note(client, reason)

    def _received(self, task: Task, header: pb.Answer, tensors: Sequence[Tensor]) -> Answer:
        """An answer as it is counted.

        Args:
            task: task that it answers.
            header: header of the answer, as the node sent it.
            tensors: tensors of the answer, as the node sent them.

        Raises:
            InvalidPayload: if it must not be counted.
        """
        answer = received(task, header, tensors, self._message, self._streams)
        # the sum holds shares by what was said at first: more now would count what it does not hold
        joined = self._members.get(task.client, header.samples)
        if self._adds_up and header.samples > joined:
            raise InvalidPayload(f"client {task.client!r} joined with {joined} samples, got {header.samples}")
        if header.began_anew and self._adds_up:
            raise InvalidPayload(
                f"client {task.client!r} has lost what it had sent (its folder was removed, or is damaged), which the "
                "coordinator's sum still holds: restore its folder, or begin the run anew"
            )
        # without a sum only this client's own state is lost, and the run goes on
        if header.began_anew:
            _log.warning(
                "client %r has lost what it kept between tasks (its folder was removed, or is damaged), and resumes "
                "from its initial client state",
                task.client,
            )
        return answer

    def _has_answer(self) -> bool:
        """True if an answer to an open task has arrived."""
        return bool(self._outcomes)

    def _take_scores(self, client: int | str | None, examination: int, scores: pb.Scores) -> None:
        """Take a client's scores, unless they are of an earlier examination."""
        if examination == self._examination and client is not None:
            self._unscored.discard(client)
            self._scores[client] = scores

    @abstractmethod
    def _examine(self, model: tuple[Tensor, Tensor], limit_s: float, round_number: int) -> None:
        """Ask clients for the scores of this examination, and enter those that are asked as unscored."""

    @abstractmethod
    def _make_known(self, plan: pb.Plan, message: Format, fixed_part: Sequence[Tensor]) -> None:
        """Tell nodes the plan, hold their answers to the format, and have the model's fixed part ready for them."""

    @abstractmethod
    def _attending(self) -> Collection[int | str]:
        """Clients that are connected."""

    @abstractmethod
    def _free(self) -> Collection[int | str]:
        """Connected clients that would begin a task now."""

    @abstractmethod
    def _poll(self) -> None:
        """Take what has arrived."""

    @abstractmethod
    def pass_time(self, until: float) -> None:
        """Take what has arrived, or wait for it until a clock, with breaks in which Ctrl-C is heard."""


def _base_of(task: Task) -> str:
    """The name of the reference that a task's differences are added to; empty where it brings the whole model."""
    if task.differences is None:
        return ""
    return task.differences[0].before if task.differences else task.model.reference


def _task_id(found: CountedTask | None) -> pb.TaskId | None:
    return None if found is None else pb.TaskId(start=found.start, number=found.number)


def _once_in_a_while(clock: Clock) -> Allowance:
    """Limit on how often the log says what is waited for; the first line has to wait as long as any other."""
    allowance = Allowance(1, 1 / _SAYS_EVERY_S, clock)
    allowance.spend()
    return allowance
