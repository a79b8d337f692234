"""Node's sessions of secure aggregation: it checks plans against its owner's limits, and masks its messages."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fed.clients.node.record import RevealedRecord
from fed.config.experiment import Experiment
from fed.errors import InvalidCredentials, RunFailed, SessionFailed, os_errors_as
from fed.identity.certificates import private_key_of
from fed.identity.credentials import NodeCredentials
from fed.identity.identities import IDENTITIES_FILE, SignedIdentities
from fed.processes.clock import SYSTEM_CLOCK, Clock
from fed.protocol import protocol_pb2 as pb
from fed.secure_aggregation.agreement import digests_of
from fed.secure_aggregation.commands import Command, Deliver, Ended, Remember, Say
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.secure_aggregation.participant import AgreedPlan, Participant
from fed.secure_aggregation.reasons import ClientRefusal, Reason
from fed.secure_aggregation.settings import settings_of
from fed.storage.atomic_files import write_atomically
from fed.vectors.tensors import Tensor

if TYPE_CHECKING:
    from fed.secure_aggregation.settings import SecureAggregation

__all__ = ["Limits", "SecureNode"]

_log = logging.getLogger(__name__)
_LOOKS_EVERY_S = 0.2  # at the task, whether it is still wanted


@dataclass(frozen=True)
class Limits:
    """Limits of a node's owner, to which every plan is held.

    Args:
        minimum_cohort: the smallest number of clients in a sum, at least 2.
        corrupt: γ in [0, 1), the share of clients that may collude, rounded up to whole clients.
        threshold: the smallest number of shares that recover a secret, at least 1.
        allows_state: True if the node may keep something from task to task. The server says after which task a client
            goes on, so that in a round in which nobody learns it could have the sum show what one client has kept.
    """

    minimum_cohort: int = 5
    corrupt: float = 0.1
    threshold: int = 1
    allows_state: bool = False

    def check(self, settings: "SecureAggregation", *, keeps_states: bool) -> None:
        """Check a plan.

        Args:
            settings: the section ``secure_aggregation`` of the plan's experiment.
            keeps_states: True if the plan has clients keep something from task to task.

        Raises:
            ClientRefusal: if it hides less than this node's owner allows.
        """
        if settings.minimum_cohort < self.minimum_cohort:
            raise ClientRefusal(
                f"this node takes part only in sums of at least {self.minimum_cohort} clients (--minimum-cohort), and "
                f"the plan's secure_aggregation.minimum_cohort is {settings.minimum_cohort}",
                Reason.HIDES_TOO_LITTLE,
            )
        if settings.corrupt < self.corrupt:
            raise ClientRefusal(
                f"this node takes part only where a share of {self.corrupt:g} of the clients may collude (--corrupt), "
                f"and the plan's secure_aggregation.corrupt is {settings.corrupt:g}",
                Reason.HIDES_TOO_LITTLE,
            )
        if keeps_states and not self.allows_state:
            raise ClientRefusal(
                "clients must keep nothing between tasks under secure aggregation, or a server that lies could learn "
                "what this one has kept, and the plan's algorithm or error_feedback keeps something: choose fedavg or "
                "the like with error_feedback none, or start this node with --allow-state",
                Reason.KEEPS_STATE,
            )


@dataclass
class SecureNode:
    """Sessions of a node that takes part under secure aggregation alone: it carries out a participant's commands.

    Args:
        credentials: the node's certificate and key, with the identities of all clients.
        folder: the folder of the newest identities and of the record of revealed rounds.
        limits: the floors of the node's owner.
        begins_record: True if the owner begins a record of revealed rounds where there is none.
        clock: time, by which it waits.
    """

    credentials: NodeCredentials
    folder: Path
    limits: Limits = field(default_factory=Limits)
    _: KW_ONLY
    begins_record: bool = False
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        """Load the newest identities that the node has seen, and the record of revealed rounds."""
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
        self._record = RevealedRecord(self.folder, begins_anew=self.begins_record)
        self._participant = Participant(
            self.credentials.name,
            private_key_of(self.credentials.key_pem),
            os.urandom,
            self._record.rounds,
            least_threshold=self.limits.threshold,
        )
        self._agreed: AgreedPlan | None = None
        self._changed = threading.Condition()
        self._masked: tuple[bytes, Tensor] | None = None  # the last masked message, under the digest of its task
        self._handed_out = b""  # the digest of the last task whose masked message was taken
        self._ended: Ended | None = None  # the last session that has failed while somebody waited for its message

    def prepare(
        self, experiment: Experiment, plan: pb.Plan, fixed: FixedPoint | None, *, keeps_states: bool = False
    ) -> None:
        """Check a plan against the node's limits, and get ready for its sessions.

        Args:
            experiment: the experiment in the plan.
            plan: the server's plan.
            fixed: the fixed point by which the node's messages become lanes.
            keeps_states: True if the node keeps something from task to task.

        Raises:
            ClientRefusal: if the plan breaks a limit, or its identities are older than the node's, or not signed by the
                authority.
        """
        settings = settings_of(experiment)
        if settings is None or fixed is None:
            raise ClientRefusal(
                "this node takes part under secure aggregation alone (--secure), and the plan has none",
                Reason.HIDES_TOO_LITTLE,
            )
        self.limits.check(settings, keeps_states=keeps_states)
        with self._changed:
            self._take_identities(plan.identities)
            self._agreed = AgreedPlan(plan=plan, settings=settings, fixed=fixed, identities=self._identities.known())
            self._participant.begin(self._agreed)

    def renew(self, plan: pb.Plan) -> None:
        """Take the identities of a plan that is otherwise the one that the node is prepared for.

        Another plan changes nothing: it waited for its turn until the node was prepared for the plan told after it.

        Args:
            plan: plan of the server.

        Raises:
            ClientRefusal: if its identities are older than the node's, or not signed by the authority.
        """
        with self._changed:  # another thread may prepare the node for the next plan meanwhile
            if self._agreed is None or not self._agreed.is_told_by(plan):
                return
            self._take_identities(plan.identities)
            self._agreed = replace(self._agreed, plan=plan, identities=self._identities.known())
            self._participant.begin(self._agreed)

    def _take_identities(self, content: bytes) -> None:
        """Take the identities of a plan, and keep them where they are newer."""
        try:
            identities = SignedIdentities.read(content, self.credentials.authority_pem)
        except InvalidCredentials as error:
            raise ClientRefusal(str(error), Reason.OLD_IDENTITIES) from None
        # An older list may still have a client whose key has been stolen.
        if identities.version < self._identities.version:
            raise ClientRefusal(
                f"the server's identities are of version {identities.version}, and this node knows version "
                f"{self._identities.version}: copy the authority's newest to the server",
                Reason.OLD_IDENTITIES,
            )
        if identities.content != self._identities.content:
            # Kept before it counts: a node that is started again must not accept an older list.
            with os_errors_as(RunFailed, f"{self.folder} cannot be written to", "make room there"):
                write_atomically(self.folder / IDENTITIES_FILE, identities.content, mode=0o600)
            self._identities = identities

    def take(self, said: pb.Assignment | pb.ToSession | pb.Withdrawal) -> Sequence[pb.FromSession]:
        """Take a message of the server that concerns sessions; returns the messages to the server."""
        match said:
            case pb.Assignment():
                return self.join(said)
            case pb.ToSession():
                return self.answer(said)
            case pb.Withdrawal():
                return self.withdrawn(said.task)

    def join(self, assignment: pb.Assignment) -> Sequence[pb.FromSession]:
        """Join the session of a task; returns the messages to the server."""

        def joined() -> list[Command]:
            plan = pb.Plan() if self._agreed is None else self._agreed.plan
            if self._ended is not None and self._ended.own_sha256 == digests_of(plan, assignment).own:
                self._ended = None  # it was of an earlier attempt, unless it is told again
            return self._participant.assigned(assignment)

        return self._carry_out(joined)

    def answer(self, message: pb.ToSession) -> Sequence[pb.FromSession]:
        """Take a message of the server; returns the messages to the server."""
        return self._carry_out(lambda: self._participant.told(message))

    def withdrawn(self, task: pb.TaskId) -> Sequence[pb.FromSession]:
        """End the session of a task that the server needs no more."""
        return self._carry_out(lambda: self._participant.withdrawn(task))

    def failed(self, problem: str) -> Sequence[pb.FromSession]:
        """End the session for a reason of the node's own; returns the messages to the server.

        Args:
            problem: the reason, for the node's log.
        """
        return self._carry_out(lambda: self._participant.failed(Reason.NODE_FAILED, problem))

    def holds(self, own_sha256: bytes, assignment: pb.Assignment) -> bool:
        """True if the message of this task is there and may be masked, so that it need not be trained again.

        Args:
            own_sha256: the own digest of the task.
            assignment: the task, as the server told it for this attempt.
        """
        with self._changed:
            return self._participant.holds(own_sha256, assignment)

    def trained(self, own_sha256: bytes, lanes: Tensor) -> Sequence[pb.FromSession]:
        """Take the node's message of a task; returns the messages to the server.

        Args:
            own_sha256: the own digest of the message's task.
            lanes: signed integers of R bits.
        """
        return self._carry_out(lambda: self._participant.trained(own_sha256, lanes))

    def masked(self, own_sha256: bytes, is_wanted: Callable[[], bool]) -> Tensor | None:
        """The masked message, once the mask partners' boxes have come; None if the task is withdrawn before.

        Args:
            own_sha256: the own digest of the message's task.
            is_wanted: () → True if the server still waits for it.

        Raises:
            SessionFailed: if the session has failed.
        """
        self._handed_out = b""
        while is_wanted():
            with self._changed:
                if self._masked is not None and self._masked[0] == own_sha256:
                    lanes = self._masked[1]
                    self._masked = None
                    self._handed_out = own_sha256
                    return lanes
                if self._ended is not None and self._ended.own_sha256 == own_sha256:
                    problem = self._ended.problem
                    self._ended = None  # another attempt may mask the message
                    raise SessionFailed(problem)
                self.clock.wait_on(self._changed, _LOOKS_EVERY_S)
        return None

    def _carry_out(self, act: Callable[[], list[Command]]) -> list[pb.FromSession]:
        """Carry out the commands of an event, in their order."""
        said = []
        with self._changed:
            left = act()
            while left:
                command, *left = left
                match command:
                    case Say(message):
                        said.append(message)
                    case Deliver(own_sha256, lanes):
                        self._masked = own_sha256, lanes
                    case Remember(entries):
                        left += self._recorded(entries)
                    case Ended():
                        _log.warning("the session has ended: %s", command.problem)
                        # Once the masked message is taken nobody waits: the notice would end a later attempt.
                        if command.own_sha256 != self._handed_out:
                            self._ended = command
            self._changed.notify_all()
        return said

    def _recorded(self, entries: tuple[bytes, ...]) -> list[Command]:
        """Write entries down before the shares leave."""
        try:
            self._record.append(entries)
        except OSError as error:
            problem = f"{self.folder} cannot be written to ({error.strerror or error}): make room there"
            return self._participant.failed(Reason.NODE_FAILED, problem)
        return self._participant.recorded(entries)
