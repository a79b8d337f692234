"""A node's sessions of secure aggregation: it holds the server to its own rules, and masks what leaves it."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fed.config.experiment import Experiment
from fed.errors import FedError, InvalidCredentials, RunFailed, SessionFailed, os_errors_as
from fed.identity.certificates import private_key_of
from fed.identity.credentials import NodeCredentials
from fed.identity.identities import IDENTITIES_FILE, SignedIdentities
from fed.secure_aggregation.client import RevealedRounds, SessionClient
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.secure_aggregation.key_agreement import digest
from fed.secure_aggregation.terms import Terms
from fed.storage.atomic_files import write_atomically
from fed.wire import protocol_pb2 as pb
from fed.wire.protocol import name_of

if TYPE_CHECKING:
    from fed.secure_aggregation.settings import SecureAggregation

__all__ = ["SecureNode", "model_digest", "plan_digest", "task_digest"]

_LOOKS_EVERY_S = 0.2


@dataclass
class _Conversation:
    """One session of one task."""

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
    """A node that takes part under secure aggregation alone.

    Args:
        credentials: the node's, with the identities of all clients.
        folder: for what it must not forget.
        minimum_cohort: least clients of a sum that the node takes part in.
        corrupt: the least share of colluding clients that the threshold and the graph must be made for.
    """

    credentials: NodeCredentials
    folder: Path
    minimum_cohort: int
    corrupt: float = 0.1
    _conversation: _Conversation | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        """Take the newest identities that were ever seen."""
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
        """Hold a plan to the node's own rules.

        Args:
            experiment: of the plan.
            plan: of the server.
            fixed: how the node's messages become lanes.

        Raises:
            RunFailed: if the plan is not what this node takes part in.
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
        said = SignedIdentities.read(plan.identities, self.credentials.authority_pem)
        if said.version < self._identities.version:
            raise RunFailed(
                f"the server's identities are of version {said.version}, and this node knows version "
                f"{self._identities.version}: copy the authority's newest to the server"
            )
        if said.content != self._identities.content:
            with os_errors_as(RunFailed, f"{self.folder} cannot be written to", "make room there"):
                write_atomically(self.folder / IDENTITIES_FILE, said.content, mode=0o600)
            self._identities = said
        self._known = said.known()
        self._settings, self._fixed, self._run = settings, fixed, plan.run
        self._plan_sha256 = plan_digest(plan)
        self._revealed = RevealedRounds(self.folder / "revealed", plan.run)

    def begin(self, assignment: pb.Assignment) -> pb.FromSession:
        """Join the session of a task; a session of an earlier one is over.

        Raises:
            SessionFailed: if the node has revealed shares in this round.
        """
        if self._settings is None:
            raise SessionFailed("the server asks before it has told its plan")
        name, known = name_of(assignment.task), self._conversation
        if known is not None and (known.name, known.attempt) == (name, assignment.attempt):
            if known.task_sha256 == task_digest(assignment):
                return known.keys  # told again after a connection was lost
            known.client.abort()
            known.problem = "the server has told one task with two models"
            raise SessionFailed(known.problem)
        terms = Terms(
            self._settings,
            self._fixed,
            self._run,
            assignment.round,
            assignment.attempt,
            self._plan_sha256,
            task_digest(assignment),
            self._known.sha256,
        )
        self._revealed.check(assignment.round)
        client = SessionClient(self.credentials.name, self._key, self._known, terms, os.urandom)
        keys = pb.FromSession(task=assignment.task, attempt=assignment.attempt, keys=client.open())
        with self._changed:
            if self._conversation is not None:
                self._conversation.client.abort()
            self._conversation = _Conversation(
                name, assignment.round, assignment.attempt, task_digest(assignment), client, keys
            )
            self._changed.notify_all()
        return keys

    def hear(self, said: pb.ToSession) -> pb.FromSession | None:
        """Answer a message of the server; None where there is nothing to say now."""
        conversation = self._conversation
        of = {"task": said.task, "attempt": said.attempt}
        if conversation is None or (conversation.name, conversation.attempt) != (name_of(said.task), said.attempt):
            return None  # of a session that is over
        for earlier, answer in conversation.answered:
            if earlier == said:  # told again after a connection was lost
                return answer
        answer = self._answer(conversation, said, **of)
        conversation.answered.append((said, answer))
        return answer

    def _answer(self, conversation: _Conversation, said: pb.ToSession, **of: Any) -> pb.FromSession | None:
        client = conversation.client
        try:
            if said.HasField("key_list"):
                return pb.FromSession(**of, shares=client.share(said.key_list))
            if said.HasField("delivery"):
                with self._changed:
                    conversation.delivery = said.delivery
                    self._changed.notify_all()
                return None
            if said.HasField("survivors"):
                return pb.FromSession(**of, consent=client.consent(said.survivors))
            if said.HasField("consents"):
                unmasking = client.unmask(said.consents)
                self._revealed.reveal(conversation.round)  # on the disk before the shares leave
                return pb.FromSession(**of, unmasking=unmasking)
            raise SessionFailed("the server says nothing that is known here")
        except (FedError, OSError) as error:
            client.abort()
            with self._changed:
                conversation.problem = str(error)
                self._changed.notify_all()
            return pb.FromSession(**of, aborted=str(error))

    def masked(self, task: str, lanes: Tensor, is_wanted: Callable[[], bool]) -> Tensor | None:
        """The masked message, once the neighbours have shared their secrets; None if the task is withdrawn before.

        Args:
            task: the task's name.
            lanes: the message, which stays as it is.
            is_wanted: the task is still waited for.

        Raises:
            SessionFailed: if the session has ended.
        """
        while is_wanted():
            with self._changed:
                conversation = self._conversation
                if conversation is not None and conversation.name == task:
                    if conversation.problem:
                        raise SessionFailed(conversation.problem)
                    if conversation.delivery is not None:
                        delivery, conversation.delivery = conversation.delivery, None
                        return conversation.client.mask(delivery, lanes.clone())
                self._changed.wait(_LOOKS_EVERY_S)
        return None


def plan_digest(plan: pb.Plan) -> bytes:
    """Digest of what all clients of a run are told: the experiment, and the format of messages."""
    return digest("plan", plan.experiment.encode(), plan.format.SerializeToString(deterministic=True))


def task_digest(assignment: pb.Assignment) -> bytes:
    """Digest of all that the tasks of one round have in common: the model, and what is to be done with it."""
    common = pb.Assignment(round=assignment.round, repeats=assignment.repeats, population=assignment.population)
    common.broadcast_count, common.model_sha256 = assignment.broadcast_count, assignment.model_sha256
    for name in ("lr", "steps"):
        if assignment.HasField(name):
            setattr(common, name, getattr(assignment, name))
    return digest("task", common.SerializeToString(deterministic=True))


def model_digest(tensors: Sequence[Tensor]) -> bytes:
    """Digest of a model's tensors and of what is broadcast beside it."""
    return digest("model", *(tensor.contiguous().numpy().tobytes() for tensor in tensors))
