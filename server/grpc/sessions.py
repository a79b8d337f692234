"""Sessions of secure aggregation with real nodes: the coordinator's side, driven by what arrives and by the clock.

Shapes: see :mod:`fed.vectors.layout`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fed.errors import InvalidExperiment, InvalidPayload, SessionFailed
from fed.identity.identities import SignedIdentities
from fed.protocol import protocol_pb2 as pb
from fed.secure_aggregation.agreement import ledger_term, model_digest, task_digest
from fed.secure_aggregation.coordinator import SessionCoordinator, SessionPhase
from fed.secure_aggregation.fixed_point import FixedPoint, SecureSum
from fed.secure_aggregation.settings import SecureAggregation
from fed.secure_aggregation.terms import Terms
from fed.server.fleet import ConversingFleet
from fed.server.secure_fleet import SessionResult
from fed.wire.messages import Answer, GlobalModel, Task, one_line

__all__ = ["NodeSessions"]

_log = logging.getLogger(__name__)
_ATTEMPTS = 2  # of a round: the second has fresh keys, and the clients that have revealed no shares
_WHILE_TRAINING = {SessionPhase.KEYS: "keys", SessionPhase.SHARES: "shares"}


@dataclass(eq=False)
class NodeSessions:
    """Sessions of a round with nodes, as :class:`fed.server.secure_fleet.Sessions`.

    A phase of keys, shares, consents or unmasking ends once all clients that were asked have answered, or after
    ``patience_s``: clients without an answer have dropped out. A node that reconnects is sent again what it has not
    answered. Where too few clients are left for a sum, those that have revealed no shares try once more, with fresh
    keys.

    Args:
        fleet: fleet of the nodes.
        settings: section of the experiment.
        fixed: fixed point by which messages become lanes.
        run: name of the run.
        identities: function that returns the clients' newest identities.
        patience_s: seconds to wait for the messages of a phase.
        plan_sha256: digest of the run's plan, set before the first round.
        attempt: number of the attempt in its round, from 0.
    """

    fleet: ConversingFleet
    settings: SecureAggregation
    fixed: FixedPoint
    run: str
    identities: Callable[[], SignedIdentities]
    patience_s: float
    plan_sha256: bytes = b""
    attempt: int = 0
    _tasks: dict[str, Task] = field(default_factory=dict)  # by client, of this attempt, not failed
    _task_ids: dict[str, pb.TaskId] = field(default_factory=dict)
    _coordinator: SessionCoordinator | None = None
    _unanswered: dict[str, pb.ToSession] = field(default_factory=dict)  # the message that each client has to answer
    _due_s: float = 0.0  # of the phase, by the fleet's clock
    _result: SessionResult = field(default_factory=SessionResult)
    _sent: set[str] = field(default_factory=set)  # clients whose masked messages are in the sum, and that still answer
    _taken: set[tuple[str, str]] = field(default_factory=set)  # client and kind of message, of this attempt
    _revealed: set[str] = field(default_factory=set)
    _digested: tuple[int, bytes] = (-1, b"")  # version of a model, and its digest
    _deadline_s: float | None = None  # of the round, by the fleet's clock

    def open(self, tasks: Sequence[Task]) -> None:
        """Begin a round; the fleet's dispatch of these tasks begins the session."""
        self.attempt = 0
        self._result = SessionResult()
        self._revealed = set()
        left_s = tasks[0].deadline_s
        self._deadline_s = None if left_s is None else self.fleet.clock + left_s
        self._expect(tasks)

    def begin(self, assignments: Mapping[int | str, pb.Assignment], model: GlobalModel) -> None:
        """Begin the session of tasks that are being sent, and write attempt and model digest into their assignments.

        Args:
            assignments: assignment of each client.
            model: global model that the assignments bring.
        """
        # Once for each version: a hash over a large model takes long.
        if self._digested[0] != model.version:
            self._digested = model.version, model_digest(model.tensors)
        for assignment in assignments.values():
            assignment.attempt = self.attempt
            assignment.model_sha256 = self._digested[1]
        if not assignments.keys() & {task.client for task in self._tasks.values()} or self._coordinator is not None:
            return  # a task that is sent again, with the whole model
        # Read anew for each session: a node that was revoked meanwhile takes part in none.
        signed = self.identities()
        self.fleet.renew(signed.content)
        identities = signed.known()
        number = next(iter(self._tasks.values())).round
        first = next(iter(assignments.values()))
        task_sha256 = task_digest(first)
        terms = Terms(
            settings=self.settings,
            fixed=self.fixed,
            run=self.run,
            round=number,
            attempt=self.attempt,
            plan_sha256=self.plan_sha256,
            task_sha256=task_sha256,
            identities_sha256=identities.sha256,
            ledger=ledger_term(first),
        )
        self._coordinator = SessionCoordinator(terms, identities)
        self._task_ids = {str(client): assignment.task for client, assignment in assignments.items()}
        self._due_s = self.fleet.clock + self.patience_s

    def take(self, answer: Answer) -> None:
        """Add a masked message to the sum."""
        name = str(answer.clients[0])
        if self._coordinator is None or name not in self._tasks:
            return  # the client has dropped out meanwhile
        try:
            self._coordinator.take_masked(name, answer.lanes)
            self._sent.add(name)
        except InvalidPayload as error:
            _log.warning("round %d: the masked message of client %r is not in the sum: %s", answer.round, name, error)

    def take_message(self, client: int | str, message: pb.FromSession) -> None:
        """Take a client's message; one of another session, or that was taken before, makes no difference."""
        name = str(client)
        coordinator = self._coordinator
        # Bytes of messages that do not count are counted, too: they have travelled.
        self._result.bytes_up += _size_bytes(message)
        if coordinator is None or name not in self._tasks or message.attempt != self.attempt:
            return
        kind = message.WhichOneof("what") or ""
        if message.task != self._task_ids.get(name) or (name, kind) in self._taken:
            return
        try:
            if message.HasField("keys"):
                coordinator.take_keys(name, message.keys)
            elif message.HasField("shares"):
                coordinator.take_shares(name, message.shares)
            elif message.HasField("consent"):
                coordinator.take_consent(name, message.consent)
            elif message.HasField("unmasking"):
                self._revealed.add(name)  # even if they are refused
                coordinator.take_unmasking(name, message.unmasking)
            else:
                self._drop(name, f"it has ended the session: {one_line(message.aborted)}")
        except InvalidPayload as error:
            self._drop(name, str(error))
        # A refused message counts as taken: a client has one try with each kind of message.
        self._taken.add((name, kind))
        self._unanswered.pop(name, None)
        self._advance()

    def take_failure(self, client: int | str) -> None:
        """Take the failure of a client's task: it has dropped out, unless its masked message is in the sum."""
        if str(client) not in self._sent and self._tasks.pop(str(client), None) is not None:
            self._unanswered.pop(str(client), None)
            self._advance()

    def resend(self) -> None:
        """Send again what has not been answered: it may have been lost with a connection."""
        for name, message in [*self._unanswered.items()]:
            self._tell(name, message)

    def tick(self) -> None:
        """Drop the clients whose keys or shares are overdue."""
        coordinator = self._coordinator
        if coordinator is None or coordinator.phase not in _WHILE_TRAINING or self.fleet.clock < self._due_s:
            return
        for name in self._missing():
            self._drop(name, f"it has not sent its {_WHILE_TRAINING[coordinator.phase]} within {self.patience_s:g} s")
        self._advance()

    def close(self) -> SessionResult:
        """Unmask the sum, or try again."""
        result = self._result
        while True:
            try:
                if self._coordinator is None:
                    raise SessionFailed("its clients have ended the session")
                result.total = self._unmasked(self._coordinator)
                result.problem = ""
                break
            except SessionFailed as error:
                result.problem = str(error)
                result.survivors = ()
            # Shares that were revealed for one sum must never be revealed for another.
            if not self._begin_again(sorted(self._sent - self._revealed)):
                break
            self._collect_again()
        self._coordinator = None
        return result

    def _unmasked(self, coordinator: SessionCoordinator) -> SecureSum:
        survivors, names = coordinator.close_masked()
        self._result.survivors = [self._tasks[name].id for name in names]
        self._await({name: pb.ToSession(survivors=survivors) for name in names})
        relayed = coordinator.close_consents()
        self._await({name: pb.ToSession(consents=consents) for name, consents in relayed.items()})
        total = coordinator.finish()
        for name in sorted(coordinator.cheaters):
            _log.warning("client %r has revealed false shares: the sum was found without them", name)
        return total

    def _await(self, messages: Mapping[str, pb.ToSession]) -> None:
        """Send messages, and wait until all are answered, for ``patience_s`` at most."""
        self._unanswered = {}
        for name, message in messages.items():
            self._tell(name, message)
        until = self.fleet.clock + self.patience_s
        while self._unanswered and self.fleet.clock < until:
            self.fleet.pass_time(until)
        for name in self._unanswered:
            _log.info("client %r has not answered within %g s, and drops out of the session", name, self.patience_s)
        self._sent -= self._unanswered.keys()
        self._unanswered = {}

    def _begin_again(self, names: Sequence[str]) -> bool:
        """Begin another attempt, with fresh keys, if these clients are enough for one."""
        try:
            self.settings.degree(len(names))
        except InvalidExperiment:
            return False
        if self.attempt + 1 >= _ATTEMPTS:
            return False
        left_s = None if self._deadline_s is None else max(self._deadline_s - self.fleet.clock, 0.0)
        tasks = [self._tasks[name]._replace(deadline_s=left_s) for name in names]
        _log.info("round %d tries again with fresh keys, among %d clients", tasks[0].round, len(tasks))
        self.attempt += 1
        self._expect(tasks)
        self.fleet.dispatch(tasks)
        return True

    def _collect_again(self) -> None:
        """Take the masked messages of another attempt, for which no client trains again."""
        tasks = [task.id for task in self._tasks.values()]
        # Keys, shares and masked messages each have their time.
        for answer in self.fleet.collect(self.fleet.clock + 3 * self.patience_s):
            if not answer.problem:
                self._result.bytes_up += answer.size_bytes
                self.take(answer)
        # A client that has not answered the second attempt must not be waited for in the next round.
        self.fleet.cancel(tasks)

    def _expect(self, tasks: Sequence[Task]) -> None:
        self._tasks = {str(task.client): task for task in tasks}
        self._coordinator = None
        self._unanswered = {}
        self._sent = set()
        self._taken = set()

    def _advance(self) -> None:
        """Close the phase of keys or of shares once no message of it is missing."""
        coordinator = self._coordinator
        if coordinator is None or coordinator.phase not in _WHILE_TRAINING or self._missing():
            return
        messages: dict[str, pb.ToSession]
        try:
            if coordinator.phase is SessionPhase.KEYS:
                messages = {name: pb.ToSession(key_list=one) for name, one in coordinator.close_keys()}
                self._due_s = self.fleet.clock + self.patience_s
            else:
                messages = {name: pb.ToSession(delivery=one) for name, one in coordinator.close_shares().items()}
        except SessionFailed as error:
            self._coordinator = None
            if not self._begin_again(sorted(self._tasks)):
                for name in [*self._tasks]:
                    self._drop(name, f"the session of its round has ended without a sum: {error}")
            return
        for name in messages.keys() & self._tasks.keys():  # a task may have failed after its message
            self._tell(name, messages[name])

    def _missing(self) -> list[str]:
        """Clients that have not sent their message of this phase."""
        assert self._coordinator is not None
        return [name for name in self._tasks if name not in self._coordinator.replied]

    def _drop(self, name: str, reason: str) -> None:
        """Take a client out of the session; its task fails unless its masked message is in the sum."""
        self._unanswered.pop(name, None)
        if name not in self._sent:
            if (task := self._tasks.pop(name, None)) is not None:
                self.fleet.give_up(task.id, reason)
        else:
            # Its message is in the sum already, which the others' shares unmask.
            _log.info("client %r: %s", name, reason)

    def _tell(self, name: str, message: pb.ToSession) -> None:
        """Send a client a message, which :meth:`resend` repeats until it is answered."""
        self._result.bytes_down += _size_bytes(message)
        message.task.CopyFrom(self._task_ids[name])
        message.attempt = self.attempt
        self._unanswered[name] = message
        self.fleet.tell(self._tasks[name].client, message)


def _size_bytes(message: pb.ToSession | pb.FromSession) -> int:
    """Bytes of a message's content, without its task and attempt."""
    kind = message.WhichOneof("what")
    content = getattr(message, kind) if kind else b""
    return len(content) if isinstance(content, str | bytes) else int(content.ByteSize())
