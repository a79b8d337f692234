"""Node's sessions of secure aggregation: it checks plans against its owner's limits, and masks what leaves it."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fed.config.experiment import Experiment
from fed.errors import FedError, InvalidCredentials, RunFailed, SessionFailed, os_errors_as
from fed.identity.certificates import private_key_of
from fed.identity.credentials import NodeCredentials
from fed.identity.identities import IDENTITIES_FILE, SignedIdentities
from fed.secure_aggregation.client import SessionClient
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.secure_aggregation.key_agreement import digest
from fed.secure_aggregation.revealed_rounds import RevealedRounds
from fed.secure_aggregation.terms import Terms
from fed.storage.atomic_files import write_atomically
from fed.tensors import Tensor
from fed.wire import protocol_pb2 as pb
from fed.wire.protocol import name_of

if TYPE_CHECKING:
    from fed.secure_aggregation.settings import SecureAggregation

__all__ = ["SecureNode", "model_digest", "plan_digest", "task_digest"]

_LOOKS_EVERY_S = 0.2


@dataclass
class _JoinedSession:
    """Session of one attempt of one task."""

    name: str
    round: int
    attempt: int
    task_sha256: bytes
    client: SessionClient
    keys: pb.FromSession
    delivery: pb.Delivery | None = None
    problem: str = ""
    answered: list[tuple[pb.ToSession, pb.FromSession | None]] = field(default_factory=list)


@dataclass
class SecureNode:
    """Sessions of a node that takes part under secure aggregation alone.

    Args:
        credentials: the node's, with the identities of all clients.
        folder: keeps the newest identities, and the last round whose shares were revealed.
        minimum_cohort: the smallest number of clients in a sum; plans with a smaller one are refused.
        corrupt: γ in [0, 1), the share of clients that may collude; plans with a smaller one are refused.
    """

    credentials: NodeCredentials
    folder: Path
    minimum_cohort: int
    corrupt: float = 0.1
    _session: _JoinedSession | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        """Load the newest identities that the node has seen."""
        self._key = private_key_of(self.credentials.key_pem)
        kept = self.folder / IDENTITIES_FILE
        content = kept.read_bytes() if kept.exists() else None
        seen = SignedIdentities.read(content, self.credentials.authority_pem) if content else None
        identities = SignedIdentities.newest(self.credentials.identities, seen)
        if identities is None:
            raise InvalidCredentials(
                f"{IDENTITIES_FILE} is missing among the node's credentials, which --secure needs: copy the node's "
                "folder anew from the authority"
            )
        self._identities = identities
        self._settings: SecureAggregation | None = None

    def prepare(self, experiment: Experiment, plan: pb.Plan, fixed: FixedPoint | None) -> None:
        """Check a plan against the node's limits, and get ready for its sessions.

        Args:
            experiment: of the plan.
            plan: of the server.
            fixed: how the node's messages become lanes.

        Raises:
            RunFailed: if the plan breaks a limit, or its identities are older than the node's.
            InvalidCredentials: if its identities are not signed by the authority.
        """
        settings = experiment.secure_aggregation
        if settings is None or fixed is None:
            raise RunFailed("this node takes part under secure aggregation alone (--secure), and the plan has none")
        if settings.minimum_cohort < self.minimum_cohort:
            raise RunFailed(
                f"this node takes part in sums of at least {self.minimum_cohort} clients (--minimum-cohort), and the "
                f"plan's secure_aggregation.minimum_cohort is {settings.minimum_cohort}"
            )
        if settings.corrupt < self.corrupt:
            raise RunFailed(
                f"this node takes part where {self.corrupt:g} of the clients may collude (--corrupt), and the plan's "
                f"secure_aggregation.corrupt is {settings.corrupt:g}"
            )
        identities = SignedIdentities.read(plan.identities, self.credentials.authority_pem)
        if identities.version < self._identities.version:
            raise RunFailed(
                f"the server's identities are of version {identities.version}, and this node knows version "
                f"{self._identities.version}: copy the authority's newest to the server"
            )
        if identities.content != self._identities.content:
            with os_errors_as(RunFailed, f"{self.folder} cannot be written to", "make room there"):
                write_atomically(self.folder / IDENTITIES_FILE, identities.content, mode=0o600)
            self._identities = identities
        self._known = identities.known()
        self._settings, self._fixed, self._run = settings, fixed, plan.run
        self._plan_sha256 = plan_digest(plan)
        self._revealed = RevealedRounds(self.folder / "revealed", plan.run)

    def join(self, assignment: pb.Assignment) -> pb.FromSession:
        """Join the session of a task, with fresh keys; a session of an earlier one is over.

        Raises:
            SessionFailed: if the node has revealed shares in this round, or has been sent this task with another model.
        """
        if self._settings is None:
            raise SessionFailed("the server asks before it has told its plan")
        name, session, task_sha256 = name_of(assignment.task), self._session, task_digest(assignment)
        if session is not None and (session.name, session.attempt) == (name, assignment.attempt):
            if session.task_sha256 == task_sha256:
                return session.keys  # sent again after a connection was lost
            session.client.abort()
            session.problem = "the server has told one task with two models"
            raise SessionFailed(session.problem)
        terms = Terms(
            self._settings,
            self._fixed,
            self._run,
            assignment.round,
            assignment.attempt,
            self._plan_sha256,
            task_sha256,
            self._known.sha256,
        )
        self._revealed.check(assignment.round)
        client = SessionClient(self.credentials.name, self._key, self._known, terms, os.urandom)
        keys = pb.FromSession(task=assignment.task, attempt=assignment.attempt, keys=client.open())
        with self._changed:
            if self._session is not None:
                self._session.client.abort()
            self._session = _JoinedSession(name, assignment.round, assignment.attempt, task_sha256, client, keys)
            self._changed.notify_all()
        return keys

    def answer(self, message: pb.ToSession) -> pb.FromSession | None:
        """Answer to a message of the server; None if it needs none, or if its session is over."""
        session = self._session
        if session is None or (session.name, session.attempt) != (name_of(message.task), message.attempt):
            return None
        for earlier, answer in session.answered:
            if earlier == message:  # sent again after a connection was lost
                return answer
        answer = self._answer(session, message)
        session.answered.append((message, answer))
        return answer

    def _answer(self, session: _JoinedSession, message: pb.ToSession) -> pb.FromSession | None:
        client, answer = session.client, partial(pb.FromSession, task=message.task, attempt=message.attempt)
        try:
            if message.HasField("key_list"):
                return answer(shares=client.share(message.key_list))
            if message.HasField("delivery"):
                with self._changed:
                    session.delivery = message.delivery
                    self._changed.notify_all()
                return None
            if message.HasField("survivors"):
                return answer(consent=client.consent(message.survivors))
            if message.HasField("consents"):
                unmasking = client.unmask(message.consents)
                self._revealed.note(session.round)  # on the disk before the shares leave
                return answer(unmasking=unmasking)
            raise SessionFailed("the server says nothing that is known here")
        except (FedError, OSError) as error:
            client.abort()
            with self._changed:
                session.problem = str(error)
                self._changed.notify_all()
            return answer(aborted=str(error))

    def masked(self, task: str, lanes: Tensor, is_wanted: Callable[[], bool]) -> Tensor | None:
        """The masked message, once the neighbours' boxes have come; None if the task is withdrawn before.

        Args:
            task: the task's name.
            lanes: the message, signed integers of R bits, which stays as it is.
            is_wanted: tells whether the server still waits for the task.

        Raises:
            SessionFailed: if the session has failed.
        """
        while is_wanted():
            with self._changed:
                session = self._session
                if session is not None and session.name == task:
                    if session.problem:
                        raise SessionFailed(session.problem)
                    if session.delivery is not None:
                        delivery, session.delivery = session.delivery, None
                        return session.client.mask(delivery, lanes.clone())
                self._changed.wait(_LOOKS_EVERY_S)
        return None


def plan_digest(plan: pb.Plan) -> bytes:
    """Digest of a run's plan: the experiment and the format of messages."""
    return digest("plan", plan.experiment.encode(), plan.format.SerializeToString(deterministic=True))


def task_digest(assignment: pb.Assignment) -> bytes:
    """Digest of all that the tasks of one round have in common: the model, the step size and the number of steps."""
    common = pb.Assignment(round=assignment.round, repeats=assignment.repeats, population=assignment.population)
    common.broadcast_count, common.model_sha256 = assignment.broadcast_count, assignment.model_sha256
    for name in ("lr", "steps"):
        if assignment.HasField(name):
            setattr(common, name, getattr(assignment, name))
    return digest("task", common.SerializeToString(deterministic=True))


def model_digest(tensors: Sequence[Tensor]) -> bytes:
    """Digest of a model's tensors and of what is broadcast beside it."""
    return digest("model", *(tensor.contiguous().numpy().tobytes() for tensor in tensors))
