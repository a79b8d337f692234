"""All sessions of one client, one after another: a state machine without I/O, clock or threads.

It takes events and gives commands. Its driver carries them out in their order, and owns time, disk and transport.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from fed.errors import SessionFailed
from fed.protocol.protocol_pb2 import Assignment, FromSession, Plan, TaskId, ToSession
from fed.secure_aggregation.agreement import TaskDigests, digests_of, ledger_term, plan_digest
from fed.secure_aggregation.client import ClientPhase, SessionClient
from fed.secure_aggregation.commands import Command, Deliver, Ended, Remember, Say
from fed.secure_aggregation.fixed_point import FixedPoint
from fed.secure_aggregation.reasons import Reason
from fed.secure_aggregation.revealed_rounds import RevealedRounds
from fed.secure_aggregation.settings import SecureAggregation
from fed.secure_aggregation.terms import Identities, Terms
from fed.vectors.tensors import Tensor

__all__ = ["AgreedPlan", "Participant"]

_MOST_SUMS = 2  # of one message with noise of its own: an honest server makes two attempts of a round


@dataclass(frozen=True)
class AgreedPlan:
    """A run's plan that a client has checked and accepted.

    Args:
        plan: the server's plan.
        settings: the section of the plan's experiment.
        fixed: the fixed point by which messages become lanes.
        identities: the public keys of all clients.
    """

    plan: Plan
    settings: SecureAggregation
    fixed: FixedPoint
    identities: Identities

    @property
    def has_noise(self) -> bool:
        """True if each message has noise of the client's own, which the sums that it is in would share."""
        noise = self.fixed.noise
        return noise is not None and noise.noise_multiplier > 0

    def is_told_by(self, plan: Plan) -> bool:
        """True if a plan differs from this one in nothing but the fields that are not agreed on.

        Args:
            plan: a plan of the server.
        """
        return _names(self.plan) == _names(plan)


_Session: TypeAlias = tuple[int, int, int]
"""Start of the server, number of the task, and attempt."""


@dataclass
class _Joined:
    """The session of one attempt of a task.

    Args:
        task: the task, by the server's name.
        round: the number of the round, from 1.
        attempt: the number of the attempt in its round, from 0.
        digests: the two digests of the task.
        client: the client's moves in this session.
        round_entries: the entries of the round in the record.
        keys: the client's first answer.
        answered: messages of the coordinator, serialised, with the answers to them.
        message_entry: the entry of the masked message in the record; empty before it is masked.
        last_said: the last message of the coordinator, serialised.
        ended: the notice of its end; None: it goes on.
    """

    task: TaskId
    round: int
    attempt: int
    digests: TaskDigests
    client: SessionClient
    round_entries: tuple[bytes, ...]
    keys: FromSession
    answered: dict[bytes, list[Command]] = field(default_factory=dict)
    message_entry: bytes = b""
    last_said: bytes = b""
    ended: Ended | None = None

    @property
    def entries(self) -> tuple[bytes, ...]:
        """The entries of the round and of the masked message in the record."""
        return (*self.round_entries, self.message_entry)

    def answer(self) -> FromSession:
        """An answer without content."""
        return FromSession(task=self.task, attempt=self.attempt)


class Participant:
    """A client's part in the sessions of its runs.

    A message is masked for the task that it was made for, and for no other: run, plan, round and all that the task
    carries are compared by their digest. A client that has revealed shares joins no other sum of that round. A message
    with noise of the client's own is masked in two sessions at most; for a third, the client makes another one, with
    fresh noise. From sums that overlap the coordinator could else take the noise of some clients away.

    Args:
        name: the client's name.
        identity: long-term private key of the client, which signs.
        entropy: function that returns so many random bytes, from the system's cryptographic source on real nodes.
        revealed: rounds of all runs whose shares the client has revealed.
        least_threshold: smallest threshold of a session that the client accepts, ≥ 1.
    """

    def __init__(
        self,
        name: str,
        identity: EllipticCurvePrivateKey,
        entropy: Callable[[int], bytes],
        revealed: RevealedRounds,
        *,
        least_threshold: int = 1,
    ) -> None:
        self._name = name
        self._identity = identity
        self._entropy = entropy
        self._revealed = revealed
        self._least_threshold = least_threshold
        self._plan: AgreedPlan | None = None
        self._joined: _Joined | None = None
        self._message: tuple[bytes, Tensor] | None = None  # the last one, under the own digest of its task
        self._sums: set[_Session] = set()  # in which it was masked

    def begin(self, plan: AgreedPlan) -> None:
        """Take a run's plan; a session of another plan is over, and its message forgotten."""
        # A plan that is only told again, after a lost connection, must not end the session.
        if self._plan is None or not self._plan.is_told_by(plan.plan):
            self._abort()
            self._message = None
        self._plan = plan

    def holds(self, own_sha256: bytes, assignment: Assignment) -> bool:
        """True if the message of this task is there and may be masked, so that it need not be trained again.

        Args:
            own_sha256: the own digest of the task.
            assignment: the task, as the server told it for this attempt.
        """
        is_there = self._message is not None and self._message[0] == own_sha256
        return is_there and self._may_be_in(_session_of(assignment))

    def assigned(self, assignment: Assignment) -> list[Command]:
        """Join the session of a task, with fresh keys; that of an earlier one is over.

        Args:
            assignment: the task, as the server told it.
        """
        if self._plan is None:
            return _refusal(assignment, b"", Reason.NOT_READY)
        digests = digests_of(self._plan.plan, assignment)
        joined = self._joined
        if joined is not None and (joined.task, joined.attempt) == (assignment.task, assignment.attempt):
            return self._told_again(joined, digests)
        if assignment.takes_parts:
            return _refusal(assignment, digests.own, Reason.TAKES_PARTS)
        entries = self._entries(assignment, digests)
        # A second sum of the same round would differ by those who joined: their difference shows single clients.
        if any(map(self._revealed.holds, entries)):
            return _refusal(assignment, digests.own, Reason.REVEALED)
        self._abort()
        client = SessionClient(
            name=self._name,
            identity=self._identity,
            identities=self._plan.identities,
            terms=self._terms(assignment, digests),
            entropy=self._entropy,
            least_threshold=self._least_threshold,
        )
        keys = FromSession(task=assignment.task, attempt=assignment.attempt, keys=client.open())
        self._joined = _Joined(
            task=assignment.task,
            round=assignment.round,
            attempt=assignment.attempt,
            digests=digests,
            client=client,
            round_entries=entries,
            keys=keys,
        )
        return [Say(keys)]

    def trained(self, own_sha256: bytes, lanes: Tensor) -> list[Command]:
        """Take the client's message of a task, which is masked once the mask partners' boxes are there.

        Args:
            own_sha256: the own digest of the task that the message was made for.
            lanes: the message, signed integers of R bits, which stay as they are.
        """
        self._message = (own_sha256, lanes)
        self._sums.clear()
        return self._masked()

    def told(self, message: ToSession) -> list[Command]:
        """Take a message of the coordinator; one of another session is dropped."""
        joined = self._joined
        if joined is None or (joined.task, joined.attempt) != (message.task, message.attempt):
            return []
        said = message.SerializeToString(deterministic=True)
        if said not in joined.answered and joined.client.phase is ClientPhase.OVER:
            return [Say(self._aborted(joined, Reason.BROKEN_RULE))]  # not kept: a server may say ever more
        if said not in joined.answered:  # else sent again after a connection was lost
            joined.last_said = said
            commands = self._guarded(joined, lambda: self._answer(joined, message))
            joined.answered[said] = [command for command in commands if isinstance(command, Say)]
            return commands
        if joined.ended is not None and not joined.answered[said]:
            return self._ended_again(joined, joined.ended)
        return joined.answered[said]

    def recorded(self, entries: tuple[bytes, ...]) -> list[Command]:
        """Reveal the shares of the session whose round is on the disk now.

        Args:
            entries: the entries of the :class:`.Remember` that was carried out.

        Returns:
            The shares; nothing if these are not the entries that the present session waits for.
        """
        joined = self._joined
        if joined is None or joined.client.phase is not ClientPhase.RECORDING or entries != joined.entries:
            return []

        def reveal() -> list[Command]:
            answer = joined.answer()
            answer.unmasking.CopyFrom(joined.client.unmask())
            self._message = None  # no other attempt will be joined
            return [Say(answer)]

        commands = self._guarded(joined, reveal)
        joined.answered[joined.last_said] = commands  # the consents, should they come again
        return commands

    def withdrawn(self, task: TaskId) -> list[Command]:
        """End the session of a task that the coordinator needs no more, and forget its message."""
        if self._joined is not None and self._joined.task == task:
            self._abort()
            self._message = None
        return []

    def failed(self, reason: Reason, problem: str) -> list[Command]:
        """End the session: the driver could not carry out a command.

        Args:
            reason: the sentence for the coordinator.
            problem: the particulars.
        """
        return [] if self._joined is None else self._ended(self._joined, reason, problem)

    def _told_again(self, joined: _Joined, digests: TaskDigests) -> list[Command]:
        """Answer to a task whose session is joined already."""
        before = joined.digests
        joined.digests = digests
        if joined.ended is not None:
            return self._ended_again(joined, joined.ended)
        if before.agreed != digests.agreed:
            return self._ended(joined, Reason.TOLD_TWICE, "a task was told with two models, or two ways to train")
        if before.own != digests.own and joined.client.phase > ClientPhase.MASKING:
            return self._ended(joined, Reason.TOLD_TWICE, "a task was told anew after its message was masked")
        return [Say(joined.keys)]  # sent again: after a lost connection, or with the whole model

    def _answer(self, joined: _Joined, message: ToSession) -> list[Command]:
        client = joined.client
        answer = joined.answer()
        match message.WhichOneof("what"):
            case "key_list":
                answer.shares.CopyFrom(client.share(message.key_list))
                return [Say(answer)]
            case "delivery":
                client.take_boxes(message.delivery)
                return self._masked()
            case "survivors":
                answer.consent.CopyFrom(client.consent(message.survivors))
                return [Say(answer)]
            case "consents":
                client.take_consents(message.consents)
                # Before the shares leave, and whether they arrive or not: they may have been read on their way.
                self._revealed.add(joined.entries)
                return [Remember(joined.entries)]
        raise SessionFailed("the coordinator's message must be of a kind that this version knows, got another")

    def _masked(self) -> list[Command]:
        """The masked message, if all that it needs is there."""
        joined = self._joined
        message = self._message
        if joined is None or joined.client.phase is not ClientPhase.MASKING or message is None:
            return []
        own_sha256, lanes = message
        session = _session_of(joined)
        if own_sha256 != joined.digests.own or not self._may_be_in(session):
            return []  # made for another task, or in other sums: it is not masked here
        entry = self._revealed.of_message(joined.round, lanes)
        # Clients whose training diverged have the message that adds nothing again, and nobody may learn of that.
        if self._revealed.holds(entry) and not self._agreed_plan().fixed.adds_nothing(lanes):
            return self._ended(joined, Reason.REVEALED, "this very message is in a sum that was revealed")
        joined.message_entry = entry
        self._sums.add(session)
        # A copy, since another attempt masks the same message with other keys.
        return self._guarded(joined, lambda: [Deliver(own_sha256, joined.client.mask(lanes.clone()))])

    def _may_be_in(self, session: _Session) -> bool:
        """True if the message may be masked in a session, whatever other sums it is in."""
        is_bounded = self._plan is not None and self._plan.has_noise
        return not is_bounded or session in self._sums or len(self._sums) < _MOST_SUMS

    def _guarded(self, joined: _Joined, act: Callable[[], list[Command]]) -> list[Command]:
        """Commands of an act, or the end of the session where it breaks a rule."""
        try:
            return act()
        except SessionFailed as error:
            return self._ended(joined, Reason.BROKEN_RULE, str(error))

    def _ended(self, joined: _Joined, reason: Reason, problem: str) -> list[Command]:
        joined.client.abort()
        joined.ended = Ended(joined.digests.own, reason, problem)
        return [joined.ended, Say(self._aborted(joined, reason))]

    def _aborted(self, joined: _Joined, reason: Reason) -> FromSession:
        answer = joined.answer()
        answer.aborted = reason
        return answer

    def _ended_again(self, joined: _Joined, ended: Ended) -> list[Command]:
        """The end of a session once more: the connection over which the coordinator was to hear of it may be lost."""
        return self._ended(joined, ended.reason, ended.problem)

    def _abort(self) -> None:
        if self._joined is not None:
            self._joined.client.abort()
            self._joined = None

    def _entries(self, assignment: Assignment, digests: TaskDigests) -> tuple[bytes, ...]:
        """The names of a round in the record."""
        plan = self._agreed_plan().plan
        return (
            self._revealed.of_round(plan.run, assignment.round),
            self._revealed.of_task(plan_digest(plan), digests.agreed),
        )

    def _terms(self, assignment: Assignment, digests: TaskDigests) -> Terms:
        agreed = self._agreed_plan()
        return Terms(
            settings=agreed.settings,
            fixed=agreed.fixed,
            run=agreed.plan.run,
            round=assignment.round,
            attempt=assignment.attempt,
            plan_sha256=plan_digest(agreed.plan),
            task_sha256=digests.agreed,
            identities_sha256=agreed.identities.sha256,
            ledger=ledger_term(assignment),
        )

    def _agreed_plan(self) -> AgreedPlan:
        assert self._plan is not None
        return self._plan


def _names(plan: Plan) -> tuple[str, bytes]:
    """The run, and all that is agreed on of its plan."""
    return plan.run, plan_digest(plan)


def _refusal(assignment: Assignment, own_sha256: bytes, reason: Reason) -> list[Command]:
    """The end of a session that is not joined."""
    message = FromSession(task=assignment.task, attempt=assignment.attempt, aborted=reason)
    return [Ended(own_sha256, reason, str(reason)), Say(message)]


def _session_of(told: Assignment | _Joined) -> _Session:
    return told.task.start, told.task.number, told.attempt
