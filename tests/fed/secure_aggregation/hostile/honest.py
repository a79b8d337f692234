"""An honest client in a transcript: the product's participant, and a driver that trains, keeps a disk and may die."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from fed.errors import SessionFailed
from fed.protocol.protocol_pb2 import Assignment, ClientList, FromSession, KeyList, SessionKeys, TaskId, ToSession
from fed.secure_aggregation.agreement import digests_of, ledger_term, plan_digest
from fed.secure_aggregation.commands import Command, Deliver, Remember, Say
from fed.secure_aggregation.participant import AgreedPlan, Participant
from fed.secure_aggregation.revealed_rounds import RevealedRounds
from fed.secure_aggregation.terms import Session, Terms
from tests.fed.secure_aggregation.hostile import record as log
from tests.fed.secure_aggregation.hostile.plans import ToldPlan, Truth


class Beliefs:
    """Terms and sessions as clients make them of what they are told, each made once in a transcript."""

    def __init__(self) -> None:
        self._terms: dict[tuple[int, bytes, bytes, int, int], Terms] = {}
        self._sessions: dict[tuple[bytes, ...], Session] = {}

    def terms(self, agreed: AgreedPlan, assignment: Assignment) -> Terms:
        """The terms of a plan and a task."""
        task_sha256 = digests_of(agreed.plan, assignment).agreed
        ledger = ledger_term(assignment)
        at = id(agreed), task_sha256, ledger, assignment.round, assignment.attempt
        if at not in self._terms:
            self._terms[at] = Terms(
                settings=agreed.settings,
                fixed=agreed.fixed,
                run=agreed.plan.run,
                round=assignment.round,
                attempt=assignment.attempt,
                plan_sha256=plan_digest(agreed.plan),
                task_sha256=task_sha256,
                identities_sha256=agreed.identities.sha256,
                ledger=ledger,
            )
        return self._terms[at]

    def session(self, terms: Terms, names: Sequence[str], keys_sha256: Sequence[bytes]) -> Session:
        """The session of a list.

        Raises:
            SessionFailed: if no client takes such a list.
        """
        at = terms.digest, *map(str.encode, names), *keys_sha256
        if at not in self._sessions:
            self._sessions[at] = Session(terms, names, keys_sha256)
        return self._sessions[at]


class Honest:
    """An honest client, whose coordinator is hostile.

    Attributes:
        name: the client's name.
        terms: the terms of the session that it was last told to join.
        joined: number of its task and attempt; None if it has ended.
        keys: its own in that session.
        dealt: the secrets that it has dealt in the session; None before.
        is_writing: a record is on its way to the disk.
        is_restarted: its process has died at least once.
    """

    def __init__(
        self,
        name: str,
        identity: EllipticCurvePrivateKey,
        truth: Truth,
        beliefs: Beliefs,
        entropy: Callable[[int], bytes],
        record: log.Record,
    ) -> None:
        self.name = name
        self._identity = identity
        self._entropy = entropy
        self._truth = truth
        self._beliefs = beliefs
        self._log = record
        self._salt = entropy(32)
        self._disk: list[bytes] = []
        self.is_restarted = False
        self._start()

    def _start(self) -> None:
        revealed = RevealedRounds(self._salt, self._disk)
        self._participant = Participant(self.name, self._identity, self._draw, revealed)
        self._plan: AgreedPlan | None = None
        self._to_train: deque[tuple[bytes, Assignment, torch.Tensor]] = deque()
        self._to_write: tuple[bytes, ...] = ()
        self.is_writing = False
        self.terms: Terms | None = None
        self.keys: SessionKeys | None = None
        self.joined: tuple[int, int] | None = None
        self.dealt: log.Dealt | None = None
        self._listed: tuple[Session, KeyList] | None = None
        self._senders: Sequence[int] = ()
        self._expected = ""

    @property
    def believed(self) -> Session | None:
        """The session that it was last told the list of."""
        return None if self._listed is None else self._listed[0]

    def restart(self) -> None:
        """Die, and come back with what is on the disk."""
        self.is_restarted = True
        self._start()

    def begin(self, plan: ToldPlan) -> None:
        """Take a run's plan."""
        self._plan = plan.agreed
        self._participant.begin(plan.agreed)

    def assign(self, assignment: Assignment) -> list[FromSession]:
        """Take a task, and put its training in the queue."""
        said = self._carry_out(self._participant.assigned(assignment))
        if self._plan is None or not said or not said[-1].HasField("keys"):
            return said
        if self.keys != said[-1].keys:
            self.keys, self.terms = said[-1].keys, self._beliefs.terms(self._plan, assignment)
            self.joined = assignment.task.number, assignment.attempt
            self.dealt, self._listed, self._senders = None, None, ()
        name, lanes = self._truth.message(self.name, self._plan, assignment)
        self._log.plain[self.name][lanes.tobytes()] = self._expected = name
        own_sha256 = digests_of(self._plan.plan, assignment).own
        self._to_train.append((own_sha256, assignment, torch.from_numpy(lanes.copy())))
        return said

    def train(self) -> list[FromSession]:
        """End the training that has waited longest."""
        if not self._to_train:
            return []
        own_sha256, assignment, lanes = self._to_train.popleft()
        if self._participant.holds(own_sha256, assignment):
            return []
        return self._carry_out(self._participant.trained(own_sha256, lanes))

    def tell(self, message: ToSession) -> list[FromSession]:
        """Take a message of a session."""
        if message.HasField("key_list") and self.dealt is None and self.terms is not None:
            self._listed = self._believed(self.terms, message.key_list)
        if message.HasField("delivery") and not self._senders:
            self._senders = [box.place - 1 for box in message.delivery.boxes]
        return self._carry_out(self._participant.told(message))

    def withdraw(self, task: TaskId) -> list[FromSession]:
        """Hear that a task is needed no more."""
        said = self._carry_out(self._participant.withdrawn(task))
        if self.joined is not None and self.joined[0] == task.number:
            self.joined, self.keys = None, None
        return said

    def write(self) -> list[FromSession]:
        """Have the record on the disk."""
        entries = self._to_write
        self._disk.extend(entries)
        self._to_write, self.is_writing = (), False
        return self._carry_out(self._participant.recorded(entries))

    def write_and_die(self) -> None:
        """Have the record on the disk, and die before anybody hears of it."""
        self._disk.extend(self._to_write)
        self.restart()

    def _draw(self, count: int) -> bytes:
        drawn = self._entropy(count)
        if count == 32:
            self._log.drawn[self.name].append(drawn)
        return drawn

    def _believed(self, terms: Terms, listed: KeyList) -> tuple[Session, KeyList] | None:
        """The session of a list, if it can be one."""
        try:
            clients = ClientList.FromString(listed.clients).clients
            names, digests = [one.name for one in clients], [one.keys_sha256 for one in clients]
            session = self._beliefs.session(terms, names, digests)
        except SessionFailed:  # a list that no client takes
            return None
        return session, listed

    def _carry_out(self, commands: Sequence[Command]) -> list[FromSession]:
        said = []
        for command in commands:
            match command:
                case Say(message):
                    said.append(message)
                    self._note(message)
                case Deliver(_, lanes):
                    assert self.dealt is not None
                    assert self.terms is not None
                    bits = self.terms.fixed.bits
                    self._log.masked.append(log.Masked(self.dealt, self._expected, self._senders, bits, lanes.numpy()))
                case Remember(entries):
                    self._to_write, self.is_writing = entries, True
        return said

    def _note(self, message: FromSession) -> None:
        if message.HasField("aborted") and self.joined == (message.task.number, message.attempt):
            self.joined = None
        if message.HasField("shares") and self.dealt is None:
            assert self._listed is not None
            assert self.keys is not None
            session, listed = self._listed
            place = session.names.index(self.name)
            keys = {placed.place - 1: placed.keys for placed in listed.neighbours} | {place: self.keys}
            holds_own = session.degree.is_complete
            self.dealt = log.Dealt(self.name, session.id, place, session.names, keys, holds_own, message.shares)
            self._log.dealt.append(self.dealt)
        if message.HasField("unmasking"):
            assert self.dealt is not None
            self._log.unmasked.append(log.Unmasked(self.dealt, message.unmasking))
