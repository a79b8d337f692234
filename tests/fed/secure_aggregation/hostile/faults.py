"""Faults, each of which makes the product as it must not be, so that it is seen to be found."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from fed.protocol.protocol_pb2 import Assignment, Consents, KeyList, Plan, ToSession
from fed.secure_aggregation import agreement, participant
from fed.secure_aggregation.agreement import TaskDigests
from fed.secure_aggregation.client import ClientPhase, SessionClient
from fed.secure_aggregation.commands import Command, Remember
from fed.secure_aggregation.key_agreement import digest
from fed.secure_aggregation.revealed_rounds import RevealedRounds
from fed.secure_aggregation.settings import SecureAggregation
from fed.secure_aggregation.terms import Identities, Session
from tests.fed.secure_aggregation.hostile import honest

PutBack = Callable[[pytest.MonkeyPatch], None]


class Fault(NamedTuple):
    """A fault.

    Args:
        put_back: puts it into the product, as long as a test lasts.
        shows: words of the finding that shows it.
        strategies: those that find it.
        settings: the settings with which they find it soon.
    """

    put_back: PutBack
    shows: str
    strategies: Sequence[str]
    settings: Mapping[str, Any] = {}


_DIGESTS_OF = agreement.digests_of
_PLAN_DIGEST = agreement.plan_digest


def _with_digests(patch: pytest.MonkeyPatch, digests_of: Callable[[Plan, Assignment], TaskDigests]) -> None:
    for module in (participant, honest):
        patch.setattr(module, "digests_of", digests_of)


def _without(assignment: Assignment, *fields: str) -> Assignment:
    rest = Assignment()
    rest.CopyFrom(assignment)
    for name in fields:
        rest.ClearField(name)
    return rest


def message_kept_under_the_id_of_its_task(patch: pytest.MonkeyPatch) -> None:
    def digests_of(plan: Plan, assignment: Assignment) -> TaskDigests:
        name = digest("task's id", assignment.task.SerializeToString())
        return _DIGESTS_OF(plan, assignment)._replace(own=name)

    _with_digests(patch, digests_of)


def message_of_another_plan(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(participant, "_names", lambda plan: None)  # at a new plan nothing is forgotten

    def digests_of(plan: Plan, assignment: Assignment) -> TaskDigests:
        of_any_plan = _DIGESTS_OF(Plan(), assignment).own
        return _DIGESTS_OF(plan, assignment)._replace(own=of_any_plan)

    _with_digests(patch, digests_of)


def message_of_another_round(patch: pytest.MonkeyPatch) -> None:
    def digests_of(plan: Plan, assignment: Assignment) -> TaskDigests:
        of_any_round = _DIGESTS_OF(plan, _without(assignment, "round")).own
        return _DIGESTS_OF(plan, assignment)._replace(own=of_any_round)

    _with_digests(patch, digests_of)


def _rounds_not_known(*by: str) -> PutBack:
    def fault(patch: pytest.MonkeyPatch) -> None:
        count = itertools.count()
        for name in by:
            patch.setattr(RevealedRounds, name, lambda *_: b"never again %d" % next(count))

    return fault


def rounds_known_with_their_ledger_alone(patch: pytest.MonkeyPatch) -> None:
    apart = {name: why for name, why in agreement.TASK_APART.items() if name != "ledger"}
    patch.setattr(agreement, "TASK_APART", apart)


def revealed_rounds_forgotten_at_a_restart(patch: pytest.MonkeyPatch) -> None:
    begin = RevealedRounds.__init__
    patch.setattr(RevealedRounds, "__init__", lambda self, salt, entries=(): begin(self, salt))


def shares_leave_before_their_record(patch: pytest.MonkeyPatch) -> None:
    told = participant.Participant.told

    def told_and_revealed(self: participant.Participant, message: ToSession) -> list[Command]:
        commands = told(self, message)
        asked = [command.entries for command in commands if isinstance(command, Remember)]
        return [*commands, *self.recorded(asked[0])] if asked else commands

    patch.setattr(participant.Participant, "told", told_and_revealed)


def consents_not_checked(patch: pytest.MonkeyPatch) -> None:
    def take_consents(self: SessionClient, consents: Consents) -> None:
        with self._phase(ClientPhase.CONSENTS, ClientPhase.RECORDING):
            return

    patch.setattr(SessionClient, "take_consents", take_consents)


def floor_of_survivors_not_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "least_survivors", 0)


def colluders_rounded_down(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SecureAggregation, "colluders", lambda self, clients: math.floor(self.corrupt * clients))


def another_attempt_after_a_reveal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RevealedRounds, "holds", lambda self, entry: False)


def keys_of_anybody(patch: pytest.MonkeyPatch) -> None:
    agreed = SessionClient._agreed

    def agreed_with_anybody(self: SessionClient, listed: KeyList) -> Session:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Identities, "is_signed", lambda *_: True)
            return agreed(self, listed)

    patch.setattr(SessionClient, "_agreed", agreed_with_anybody)


def _left_out_of_the_terms(field: str) -> PutBack:
    def fault(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(agreement, "TASK_OWN", {**agreement.TASK_OWN, field: "a fault"})

    return fault


def parts_taken(patch: pytest.MonkeyPatch) -> None:
    assigned = participant.Participant.assigned
    strip = "takes_parts"
    patch.setattr(
        participant.Participant, "assigned", lambda self, assignment: assigned(self, _without(assignment, strip))
    )
    _with_digests(patch, lambda plan, assignment: _DIGESTS_OF(plan, _without(assignment, strip)))


def plan_left_out_of_the_terms(patch: pytest.MonkeyPatch) -> None:
    for module in (participant, honest):
        patch.setattr(module, "plan_digest", lambda plan: bytes(32))


_DETERMINED = "is determined"
_BOTH = "both secrets"
_STRAY = "for the task of"
_FEW = "alone, of fewer than"
_REUSE = ("message_of_another_task",)
_TERMS = ("two_tasks_in_one_session",)

_FIVE = {"clients": 5, "colluders": 0, "listed": 5, "graph": "complete", "corrupt": 0.0, "minimum_cohort": 3}


def _of_rounds(put_back: PutBack) -> Fault:
    return Fault(put_back, _DETERMINED, ("two_sums_of_one_round",), {**_FIVE, "threshold": 3})


FAULTS: Mapping[str, Fault] = {
    "message kept under its task's id": Fault(message_kept_under_the_id_of_its_task, _DETERMINED, _REUSE, _FIVE),
    "message of another plan": Fault(message_of_another_plan, _DETERMINED, _REUSE, _FIVE),
    "message of another round": Fault(message_of_another_round, _STRAY, _REUSE, _FIVE),
    "rounds known by their run's name alone": _of_rounds(_rounds_not_known("of_task", "of_message")),
    "rounds not known by their run's name": _of_rounds(_rounds_not_known("of_round")),
    "rounds not known by plan and task": _of_rounds(_rounds_not_known("of_task")),
    "rounds known with their ledger alone": _of_rounds(rounds_known_with_their_ledger_alone),
    "rounds not known by the message": _of_rounds(_rounds_not_known("of_message")),
    "revealed rounds forgotten at a restart": _of_rounds(revealed_rounds_forgotten_at_a_restart),
    "shares leave before their record": _of_rounds(shares_leave_before_their_record),
    "another attempt after a reveal": _of_rounds(another_attempt_after_a_reveal),
    "consents not checked": Fault(consents_not_checked, _FEW, ("others_lost_to_each",), {**_FIVE, "threshold": 3}),
    "floor of survivors not checked": Fault(floor_of_survivors_not_checked, _FEW, ("late_message",)),
    "colluders rounded down": Fault(colluders_rounded_down, _BOTH, ("two_lists_of_survivors", "others_lost_to_each")),
    "keys of anybody": Fault(keys_of_anybody, _BOTH, ("false_keys",)),
    "parts taken": Fault(parts_taken, _DETERMINED, _TERMS),
    "plan left out of the terms": Fault(plan_left_out_of_the_terms, _DETERMINED, _TERMS),
    "lr left out of the terms": Fault(_left_out_of_the_terms("lr"), _DETERMINED, _TERMS),
    "steps left out of the terms": Fault(_left_out_of_the_terms("steps"), _DETERMINED, _TERMS),
}
"""All faults, by their names."""
