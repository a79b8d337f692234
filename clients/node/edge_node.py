"""An edge node: dials the coordinator, keeps a stream open, trains when it is asked, and comes back after failures."""

import logging
import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import grpc

from fed.clients.data import ClientId
from fed.clients.node.fixed_part import FixedPartMissing
from fed.clients.node.plans import as_experiment, check_code, check_schema, names_sha256
from fed.clients.node.privacy import PrivateNode
from fed.clients.node.said import disclosed
from fed.clients.node.sessions import SecureNode
from fed.clients.node.training import STATE_LOST, Hidden
from fed.clients.node.training_process import TrainingProcess, TrainingProcessDied
from fed.errors import FedError, InvalidCell, InvalidInput, RunFailed, os_errors_as
from fed.protocol import protocol_pb2 as pb
from fed.protocol.limits import MOST_CLASSES, name_of
from fed.protocol.protocol_pb2_grpc import CoordinationStub
from fed.protocol.signatures import types_fit
from fed.secure_aggregation.agreement import digests_of, plan_digest
from fed.secure_aggregation.reasons import ClientRefusal, Reason, reason_of
from fed.vectors.tensors import torch
from fed.wire.dialling import Dialler, Outbox
from fed.wire.messages import one_line
from fed.wire.payloads import spec_of, written
from fed.wire.transfers import Transfers

__all__ = ["EdgeNode"]

_log = logging.getLogger(__name__)
_FAREWELL_S = 2.0
# Requests wait in memory, and an honest server has few open at a node.
_MOST_WAITING = 100  # requests of a server that are not done yet
_SHORTEST_S = 0.01  # between heartbeats
_LONGEST_S = 3600.0
_OF_LEDGERS = frozenset({Reason.OTHER_LEDGER, Reason.BUDGET_SPENT, Reason.NO_PRIVACY})


@dataclass(frozen=True)
class _Held:
    """A task, until its answer is delivered or withdrawn.

    Args:
        assignment: the task, as the server told it.
        own_sha256: digest of the run, the plan and all that the task carries, under which its message is kept.
        path: the file of its tensors.
        due_s: time by which the answer must be there, by the node's clock.
    """

    assignment: pb.Assignment
    own_sha256: bytes
    path: Path
    due_s: float

    @property
    def name(self) -> str:
        return name_of(self.assignment.task)


_Leaving = TypeVar("_Leaving", pb.FromNode, pb.Answer)

_SaidInSession: TypeAlias = pb.Plan | pb.Assignment | pb.ToSession | pb.Withdrawal

_Work: TypeAlias = tuple[Callable[[], None], Callable[[Exception], None]]
"""Work that the server has asked for, and the handler of its error."""


@dataclass
class EdgeNode(Dialler):
    """One node of a deployment.

    Args:
        name: name in the node's certificate; without a certificate, the name under which it joins.
        client: id of the client that the node stands for.
        training: training process of the node.
        folder: folder of files in transfer.
        allowed: ``python:`` names that the node accepts.
        tasks_done: number of tasks of rounds whose answers the server has accepted.
        app: name of the node's own app; None: it trains on data, as fed does.
        secure: sessions of a node that takes part under secure aggregation alone; None for any other.
        private: account of the node's own privacy; None: it keeps none.
    """

    name: str
    client: ClientId
    training: TrainingProcess
    folder: Path
    allowed: Sequence[str] = ()
    tasks_done: int = 0
    app: str | None = None
    secure: SecureNode | None = None
    private: PrivateNode | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._held: dict[str, _Held] = {}
        self._work: queue.Queue[_Work] = queue.Queue()
        self._for_sessions: queue.Queue[_SaidInSession] = queue.Queue()
        self._is_prepared = threading.Event()
        self._plans_to_prepare = 0
        self._mark = secrets.token_hex(4)  # nothing that an earlier start left open can be in the way
        self._transfers = Transfers(self.patience, self.connected, self.clock)
        self._outbox: Outbox = queue.Queue()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._delivery_s: float | None = None  # duration of the last delivery
        self._says_it_waits = True
        self._ended_with = ""  # the server's last reason to end a connection
        self._described = pb.Joining()  # until run() has asked
        self._plan: pb.Plan | None = None
        self._schema: str | None = None  # by which the node has read its table
        self._code_sha256 = b""  # of the names of code that the node has accepted
        self._question = ""  # numbers that the plan asks for before the first round, in words; empty in rounds
        self._hides_reasons = self.secure is not None  # True if what went wrong is said in a closed list of sentences

    def run(self, *, stopped: threading.Event | None = None) -> str:
        """Work until the server says farewell for good; returns the server's reason.

        Args:
            stopped: event by which another thread ends the run.

        Raises:
            InvalidInput: if the node's data cannot be used, or it goes without credentials to another machine.
            RunFailed: if the server refuses it for good, or its data do not fit what the server asks for, or it does
                not accept that.
        """
        if stopped is not None:
            self._stopped = stopped
        try:
            self._described = self.training.describe()
        except TrainingProcessDied:
            if self._stopped.is_set():  # the signal went to the training process too
                return ""
            raise
        self._described.hides_numbers = self.secure is not None
        self.clear_folder()
        threading.Thread(target=self._work_on, name="work", daemon=True).start()
        if self.secure is not None:
            threading.Thread(target=self._converse, args=(self.secure,), name="sessions", daemon=True).start()
        try:
            farewell = self.dial(self._stopped)
        finally:
            self._transfers.over.set()
            with suppress(OSError):  # the next start removes what cannot be removed now
                self._remove_files()
        if farewell and self.secure is not None:
            self.training.forget()  # the run is over
        return farewell

    def clear_folder(self) -> None:
        """Remove files whose transfer was cut off at the end of this process, or of an earlier one that was killed."""
        with os_errors_as(InvalidInput, f"{self.folder} cannot be written to", "give another --state"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_files()

    def _remove_files(self) -> None:
        for left in self.folder.iterdir():
            left.unlink(missing_ok=True)  # a delivery that has just ended removes its own

    def open(self, channel: grpc.Channel, said: Iterator[pb.FromNode]) -> Any:
        """Open the stream ``Attend`` on a connection."""
        self._transfers.stub = stub = CoordinationStub(channel)  # type: ignore[no-untyped-call]
        return stub.Attend(said)

    def greet(self, outbox: Outbox) -> None:
        """Join the run, and name the tasks that are held."""
        self._says_it_waits = True
        with self._lock:
            held = [item.assignment.task for item in self._held.values()]
            greeting = pb.FromNode(joining=pb.Joining(name=self.name, held=held))
            greeting.joining.MergeFrom(self._described)
            greeting.joining.code_sha256 = self._code_sha256
            if self.private is not None and (seen := self.private.seen) is not None:
                greeting.joining.ledger.count = seen.count
                greeting.joining.ledger.sha256 = bytes.fromhex(seen.sha256)
            outbox.put(self._disclosed(greeting))
            # Under one lock with the list: a task that ended in between would be told on the old connection.
            self._outbox = outbox

    def heartbeat(self) -> pb.FromNode:
        """A heartbeat with the tasks that are held."""
        with self._lock:
            return pb.FromNode(heartbeat=pb.Heartbeat(held=[item.assignment.task for item in self._held.values()]))

    def take(self, message: pb.ToNode) -> None:
        """Do the work that a message of the server asks for."""
        if self._work.qsize() >= _MOST_WAITING:
            self._end_flood()
        elif message.HasField("heartbeat"):
            if self._says_it_waits and not self.connected.is_set():
                self._says_it_waits = False
                _log.info("%s is there, and the run has yet to begin", self.server)
        elif message.HasField("table"):
            self._work.put((partial(self._join_by, message.table.schema, self._outbox), self._end_with))
        elif message.HasField("code"):
            self._work.put((partial(self._join_with, message.code, self._outbox), self._end_with))
        elif message.HasField("plan"):
            self._take_plan(message.plan)
        elif message.HasField("assignment"):
            self._accept(message.assignment)
        elif message.HasField("withdrawal"):
            with self._lock:
                self._held.pop(name_of(message.withdrawal.task), None)
            self._hear_in_session(message.withdrawal)
        elif message.HasField("session"):
            if self._for_sessions.qsize() < _MOST_WAITING:  # a server repeats messages that are not answered
                self._hear_in_session(message.session)
        elif message.HasField("examination"):
            outbox = self._outbox
            score = partial(self._score, message.examination, outbox)
            say_unscored = partial(self._say_unscored, message.examination, outbox)
            self._work.put((score, say_unscored))
        elif message.HasField("farewell"):
            reason = one_line(message.farewell.reason)
            if message.farewell.is_refusal:
                if self._schema is None and self.training.needs_schema:
                    _log.info("without a schema this node's table cannot be read: %s", self.training.needs_schema)
                self.problem = RunFailed(f"{self.server} refuses this node: {reason}")
            elif message.farewell.is_final:
                self.farewell = reason or "the server needs no more"
            elif reason != self._ended_with:  # two nodes of one name end each other's connections again and again
                self._ended_with = reason
                _log.info("%s ends the connection: %s", self.server, reason)

    def _join_with(self, code: pb.Code, outbox: Outbox) -> None:
        """Join a run whose experiment names code, if the node accepts that code and has it.

        Raises:
            InvalidExperiment: if it does not.
        """
        check_code(code.names, self.allowed if self.app is None else [*self.allowed, self.app])
        with self._lock:
            self._code_sha256 = names_sha256(code.names)
        if self._outbox is outbox:
            self.greet(outbox)

    def _join_by(self, schema: str, outbox: Outbox) -> None:
        """Read the table by the server's schema, and join with what it is then.

        Raises:
            ClientRefusal: if the node has read it by another schema already. Each schema is a question on the cells,
                which the node answers by joining or not.
        """
        if self._schema not in (None, schema):
            raise ClientRefusal(
                f"{self.server} has a second schema of tables, and a node reads its table by one alone: start it again "
                "if you trust the server",
                Reason.CANNOT_FOLLOW,
            )
        self._schema = schema
        described = self.training.describe_by(schema)
        described.hides_numbers = self.secure is not None
        with self._lock:
            self._described = described
        if self._outbox is outbox:
            self.greet(outbox)

    def _take_plan(self, plan: pb.Plan) -> None:
        if not _SHORTEST_S <= plan.heartbeat_s <= _LONGEST_S:  # so written, NaN is refused
            self.problem = RunFailed(
                f"{self.server} asks for a heartbeat every {plan.heartbeat_s} s, which must be {_SHORTEST_S} to "
                f"{_LONGEST_S} s"
            )
            return
        before = self._plan
        is_told_again = not self.connected.is_set() and plan == before  # each connection begins with one
        is_other = before is None or (before.run, plan_digest(before)) != (plan.run, plan_digest(plan))
        if is_other:
            with self._lock:
                self._held.clear()  # tasks of another plan
        self.heartbeat_s = plan.heartbeat_s
        self._plan = plan
        if not self.connected.is_set():  # a run may tell several plans on one connection
            _log.info("connected to %s, as %r", self.server, self.client)
        self.connected.set()
        if is_told_again:
            self._join_again()
            return
        if self.secure is not None and not is_other:
            # The thread that trains may wait for a message of the very sessions that would wait for it.
            self._hear_in_session(plan)
            self._join_again()
            return
        # The thread that trains prepares: take() must not take long.
        with self._lock:
            self._plans_to_prepare += 1
            self._is_prepared.clear()
        self._work.put((partial(self._prepare, plan), self._end_with))

    def _join_again(self) -> None:
        """Say the keys of held tasks again: no server asks for them once it has heard that a task is held."""
        with self._lock:
            assignments = [held.assignment for held in self._held.values()]
        for assignment in assignments:
            self._hear_in_session(assignment)

    def _prepare(self, plan: pb.Plan) -> None:
        said = plan.signature
        own = self._described.signature
        # Before a training process is asked: a model for other samples would fail there with a long traceback.
        is_for_these = said.input_shape == own.input_shape and types_fit(own, said) and said.form == own.form
        if not is_for_these or not own.classes <= said.classes <= MOST_CLASSES:
            raise ClientRefusal(
                "the server's plan is for other samples than this node's: is it the right server?", Reason.CANNOT_FOLLOW
            )
        experiment = as_experiment(plan.experiment, self.allowed, self.app)
        if self._described.HasField("table_sha256"):
            check_schema(experiment, self._schema)
        self._question = "" if experiment.table is None else experiment.table.sought_in_words
        # Before samples are held to the plan: what does not fit may be a number of the data.
        self._hides_reasons = self.secure is not None or experiment.privacy is not None
        try:
            self.training.prepare(experiment, plan)
        except FixedPartMissing:
            path = self._fixed_part(plan)
            if path is None:
                with self._lock:
                    self._plans_to_prepare -= 1  # another plan has come, and is prepared next
                return
            self.training.prepare(experiment, plan, path)
        if self.private is not None:
            self.private.prepare(experiment, plan, self.training.fixed, samples=self._described.samples)
        if self.secure is not None:
            self.secure.prepare(experiment, plan, self.training.fixed, keeps_states=self.training.keeps_states)
        elif experiment.secure_aggregation is not None:
            raise RunFailed("the server's plan is of secure aggregation: start fed client with --secure")
        with self._lock:
            self._plans_to_prepare -= 1
            if not self._plans_to_prepare:  # else sessions of the next plan would be joined under the terms of this one
                self._is_prepared.set()

    def _fixed_part(self, plan: pb.Plan) -> Path | None:
        """File of the model's fixed part, downloaded; None if a plan with another one has come meanwhile."""
        _log.info(
            "the model's fixed part is another than the server's, of which %d bytes are downloaded",
            plan.fixed_part.size_bytes,
        )
        path = self.folder / f"{self._mark}-fixed-part"
        # The training process has compared them with those of its own model.
        spec = [spec_of(part) for part in plan.fixed_part.tensors]

        def is_wanted() -> bool:
            # A connection that was cut begins again with the same plan.
            return self._plan is not None and self._plan.fixed_part == plan.fixed_part

        return path if self._transfers.download(plan.fixed_part, path, spec, is_wanted) else None

    def _accept(self, assignment: pb.Assignment) -> None:
        """Hold a task. One that is told again is kept if its content and its attempt are the same, else replaced."""
        name = name_of(assignment.task)
        own_sha256 = digests_of(self._plan or pb.Plan(), assignment).own
        # Counted from now, since the clocks of two machines differ.
        due_s = self.clock.monotonic_s() + assignment.deadline_s
        with self._lock:
            before = self._held.get(name)
            # A delivery of the last attempt ends: its masked message must not count in this one.
            if before is None or (before.own_sha256, before.assignment.attempt) != (own_sha256, assignment.attempt):
                path = self.folder / f"{self._mark}-{own_sha256.hex()[:32]}"
                held = _Held(assignment, own_sha256, path=path, due_s=due_s)
                self._held[name] = held
                self._work.put((partial(self._do, held), partial(self._give_up_with, held)))
        # Outside the lock, and told again each time: the last acceptance may have been lost with its connection.
        self._say(pb.FromNode(accepted=assignment.task))
        self._hear_in_session(assignment)

    def _hear_in_session(self, said: _SaidInSession) -> None:
        """Hand a message of the server to the thread of sessions, if there is one."""
        if self.secure is None:
            return
        if self._for_sessions.qsize() >= 2 * _MOST_WAITING:
            self._end_flood()
            return
        self._for_sessions.put(said)

    def _end_flood(self) -> None:
        self.problem = RunFailed(
            f"{self.server} asks for more than {_MOST_WAITING} things at once, which no server should: is it one that "
            "you trust?"
        )

    def _converse(self, secure: SecureNode) -> None:
        """Answer the server's messages in sessions, one after another, while the node trains."""
        while not self._transfers.over.is_set():
            message = self._for_sessions.get()
            self._is_prepared.wait()
            try:
                if isinstance(message, pb.Plan):
                    self._renew(message, secure)
                else:
                    self._say_in_session(secure.take(message))
            except Exception:  # whatever it is, the next session may go well
                _log.exception("a session failed")
                self._say_in_session(secure.failed("the node has an error of its own"))

    def _renew(self, plan: pb.Plan, secure: SecureNode) -> None:
        """Take newer identities, or end the node; the training process is already prepared for the rest of the plan."""
        try:
            secure.renew(plan)
        except FedError as error:
            self._end_with(error)

    def _say_in_session(self, messages: Iterable[pb.FromSession]) -> None:
        for message in messages:
            self._say(pb.FromNode(session=message))

    def _say(self, message: pb.FromNode, outbox: Outbox | None = None) -> None:
        """Send the server a message, on the open connection, or on the connection of an outbox."""
        (outbox or self._outbox).put(self._disclosed(message))

    def _disclosed(self, message: _Leaving) -> _Leaving:
        """The message as it may leave the node."""
        return message if self.secure is None else disclosed(message)

    def _work_on(self) -> None:
        """Do the server's requests, one after another."""
        while not self._transfers.over.is_set():
            work, take_error = self._work.get()
            try:
                work()
            except Exception as error:  # whatever it is, the next task may go well
                if not isinstance(error, FedError | OSError):
                    _log.exception("a task failed")
                take_error(error)

    def _end_with(self, error: Exception) -> None:
        """End the node with an error, since it cannot follow this plan, and tell the server."""
        self.parting = RunFailed(self._in_one_line(error))
        if self._hides_reasons:
            reason: str = reason_of(error, Reason.CANNOT_FOLLOW)
        elif isinstance(error, InvalidCell):
            reason = one_line(error.told)  # a cell stays here
        else:
            reason = self._in_one_line(error)
        self._say(pb.FromNode(farewell=pb.Farewell(reason=reason, is_final=True)))
        until_s = self.clock.monotonic_s() + _FAREWELL_S  # time for the server to end the stream
        was_connected = self.connected.is_set()
        while self.connected.is_set() == was_connected and self.clock.monotonic_s() < until_s:
            self.clock.wait(0.02)
        self.problem = self.parting

    def _do(self, held: _Held) -> None:
        """Train and send the answer; train once more if the training process dies, and give up if it dies again."""
        if self.private is not None:
            self.private.check(held.assignment)
        # Another attempt sends the message of the first one again, which is no other release if the noise is the same.
        is_recorded = self.secure is not None and self.secure.holds(held.own_sha256, held.assignment)
        try:
            done = self._train(held)
        except TrainingProcessDied as error:
            if self._transfers.over.is_set() or self._stopped.is_set():
                return
            _log.warning("%s; task %d begins anew", error, held.assignment.task.number)
            done = self._train(held)  # into a new file: half an answer may be in the old one
        leaves = isinstance(done, pb.Answer | Hidden)
        if self.private is not None and leaves and (not is_recorded or self.private.counts_attempts):
            self.private.record(held.assignment)
        if isinstance(done, Hidden):
            assert self.secure is not None
            if done.problem:
                number = held.assignment.task.number
                _log.warning("task %d adds nothing to its round's sum: %s", number, done.problem)
            self._say_in_session(self.secure.trained(held.own_sha256, done.lanes))
            done = self._masked(held, done.answer, self.secure)
        if isinstance(done, pb.Failed):
            self._give_up(held, done)
        elif done is not None:
            if done.began_anew:
                _log.warning("task %d: %s", held.assignment.task.number, STATE_LOST)
            self._deliver(held, done)

    def _masked(self, held: _Held, answer: pb.Answer, secure: SecureNode) -> pb.Answer | None:
        """Answer with the masked message; None if the task is withdrawn."""
        masked = secure.masked(held.own_sha256, lambda: self._is_wanted(held))
        if masked is None:
            held.path.unlink(missing_ok=True)
            return None
        payload = written(held.path, [masked, torch.zeros(0, dtype=torch.int64)])
        return pb.Answer(task=answer.task, payload=payload, began_anew=answer.began_anew)

    def _train(self, held: _Held) -> pb.Answer | pb.Failed | Hidden | None:
        """Train; None if the task has been withdrawn. A message that is asked for again is not trained again."""
        assignment = held.assignment
        if self.secure is not None and self.secure.holds(held.own_sha256, assignment):
            return self._masked(held, pb.Answer(task=assignment.task), self.secure)
        began_s = self.clock.monotonic_s()
        spec = self.training.spec.of(assignment)
        if not self._transfers.download(assignment.payload, held.path, spec, lambda: self._is_wanted(held)):
            held.path.unlink(missing_ok=True)
            return None
        until_s = None
        takes_parts = assignment.takes_parts and self.secure is None  # a secure node takes all steps
        if assignment.HasField("deadline_s") and takes_parts:  # the way back may be as long as the way here
            until_s = held.due_s - (self._delivery_s or self.clock.monotonic_s() - began_s)
        return self.training.train(assignment, held.path, until_s)

    def _score(self, examination: pb.Examination, outbox: Outbox) -> None:
        """Send scores on the connection on which they were asked for, as long as it lasts."""
        if self.secure is not None:
            raise ClientRefusal("a node under secure aggregation scores no model", Reason.SCORES_NOTHING)
        path = self.folder / f"{self._mark}-scores-{examination.id}"
        spec = self.training.spec.model[:2]  # a broadcast is not needed to score
        try:
            if self._transfers.download(examination.payload, path, spec, lambda: self._outbox is outbox):
                self._say(pb.FromNode(scores=self.training.score(examination, path)), outbox)
        finally:
            path.unlink(missing_ok=True)

    def _say_unscored(self, examination: pb.Examination, outbox: Outbox, error: Exception) -> None:
        self._say(pb.FromNode(scores=pb.Scores(id=examination.id, problem=self._reason(error))), outbox)

    def _deliver(self, held: _Held, answer: pb.Answer) -> None:
        """Send an answer, and hear whether the server accepts it."""
        began_s = self.clock.monotonic_s()
        receipt = self._transfers.deliver(self._disclosed(answer), held.path, lambda: self._is_wanted(held))
        if receipt is None:
            held.path.unlink(missing_ok=True)
            return
        if receipt.accepted:
            self._say_answered(held, answer)
            self._delivery_s = self.clock.monotonic_s() - began_s
        else:
            reason = one_line(receipt.reason)
            _log.warning("the answer to task %d was refused: %s", held.assignment.task.number, reason)
        with self._lock:
            if self._held.get(held.name) is held:  # else the server has told it anew meanwhile
                del self._held[held.name]
        held.path.unlink(missing_ok=True)
        self.tasks_done += receipt.accepted and not self._question

    def _say_answered(self, held: _Held, answer: pb.Answer) -> None:
        if self._question:
            _log.info("answered the question for %s", self._question)
            return
        told = {one.name: one.value for one in answer.metrics}
        train_loss = answer.train_loss if self.app is None else told.get("train_loss")
        is_silent = self.secure is not None or train_loss is None
        loss = "" if is_silent else f", with a training loss of {train_loss:.4g}"
        _log.info("round %d: answered%s", held.assignment.round, loss)

    def _give_up_with(self, held: _Held, error: Exception) -> None:
        is_of_ledgers = isinstance(error, ClientRefusal) and error.reason in _OF_LEDGERS
        if self._hides_reasons or is_of_ledgers:
            _log.warning("task %d of round %d: %s", held.assignment.task.number, held.assignment.round, error)
        self._give_up(held, pb.Failed(reason=self._reason(error)))

    def _give_up(self, held: _Held, failed: pb.Failed) -> None:
        if self._transfers.over.is_set():  # the task may be done after another start
            return
        _log.warning("task %d of round %d: %s", held.assignment.task.number, held.assignment.round, failed.reason)
        # A training process's own words could hold a number of the data.
        if self._hides_reasons and failed.reason not in set(Reason):
            failed.reason = Reason.LACKS_MODEL if failed.lacks_model else Reason.NO_MESSAGE
            failed.diverged = False
        held.path.unlink(missing_ok=True)
        with self._lock:  # at once, so that a connection that begins meanwhile names the task or hears of it
            if self._held.get(held.name) is held:
                del self._held[held.name]
                failed.task.CopyFrom(held.assignment.task)
                self._say(pb.FromNode(failed=failed))

    def _is_wanted(self, held: _Held) -> bool:
        with self._lock:
            return self._held.get(held.name) is held

    def _reason(self, error: Exception) -> str:
        """The sentence in which the server is told of an error."""
        if isinstance(error, ClientRefusal) and error.reason in _OF_LEDGERS:
            return error.reason  # its own words have what the owner allows, and what was spent elsewhere
        return reason_of(error, Reason.NO_MESSAGE) if self._hides_reasons else self._sentence(error)

    def _in_one_line(self, error: Exception) -> str:
        return one_line(self._sentence(error).replace("\n", "; "))

    def _sentence(self, error: Exception) -> str:
        if isinstance(error, FileNotFoundError):
            return f"a file of the node's is gone from {self.folder}: leave what is there to the node"
        if isinstance(error, OSError):
            return f"the node cannot write to {self.folder} ({error.strerror or error}): make room there"
        return str(error) if isinstance(error, FedError) else f"{type(error).__name__}: {error}"
