"""A coordinator that tells the clients of one round different things, so that the sum shows what one has learnt."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from fed.protocol import protocol_pb2 as pb
from fed.secure_aggregation.agreement import (
    PLAN_APART,
    TASK_APART,
    TASK_OWN,
    digests_of,
    plan_digest,
    task_digest,
)
from fed.secure_aggregation.coordinator import SessionCoordinator
from fed.secure_aggregation.reasons import Reason
from tests.server.hostile.coordinator import NodeRefuses
from tests.server.hostile.nodes import COHORT, Field
from tests.server.hostile.plans import Run

TARGET, *OTHERS = COHORT
LATER_FIELD = b"\xf8\x3e\x01"  # number 1007, of a version that nobody knows yet


def set_to(message: Message, field: Any, number: int) -> None:
    """Give a field a value, another one for another number."""
    if field.is_repeated:
        one = getattr(message, field.name)
        if field.message_type is None:
            one.append(_value(field, number))
        else:
            _fill(one.add(), number)
    elif field.message_type is None:
        setattr(message, field.name, _value(field, number))
    else:
        _fill(getattr(message, field.name), number)


def _fill(message: Message, number: int) -> None:
    for field in message.DESCRIPTOR.fields:
        set_to(message, field, number)


def _value(field: Any, number: int) -> Any:
    of_type = {
        FieldDescriptor.CPPTYPE_STRING: str(number).encode()
        if field.type == FieldDescriptor.TYPE_BYTES
        else str(number),
        FieldDescriptor.CPPTYPE_BOOL: bool(number % 2),
        FieldDescriptor.CPPTYPE_DOUBLE: float(number),
    }
    return of_type.get(field.cpp_type, number)


def changes_of(message: Message) -> Iterator[tuple[Any, Any]]:
    """Each field, with the message in which it alone has changed."""
    for field in message.DESCRIPTOR.fields:
        changed = type(message)()
        changed.CopyFrom(message)
        changed.ClearField(field.name)
        set_to(changed, field, 8)
        yield field, changed


def whole(kind: type[Message]) -> Any:
    """A message with all its fields."""
    message = kind()
    _fill(message, 7)
    return message


def test_each_field_of_a_task_is_agreed_on_or_named() -> None:
    plan, task = whole(pb.Plan), whole(pb.Assignment)
    assert {*TASK_OWN, *TASK_APART} <= {*pb.Assignment.DESCRIPTOR.fields_by_name}
    assert not TASK_OWN.keys() & TASK_APART.keys()
    before = digests_of(plan, task)
    assert before.agreed == task_digest(task)
    for field, changed in changes_of(task):
        after = digests_of(plan, changed)
        assert (after.agreed == before.agreed) == (field.name in {*TASK_OWN, *TASK_APART}), field.name
        assert (after.own == before.own) == (field.name in TASK_APART), field.name


def test_each_field_of_a_plan_is_agreed_on_or_named() -> None:
    plan, task = whole(pb.Plan), whole(pb.Assignment)
    assert PLAN_APART.keys() <= {*pb.Plan.DESCRIPTOR.fields_by_name}
    for field, changed in changes_of(plan):
        assert (plan_digest(changed) == plan_digest(plan)) == (field.name in PLAN_APART), field.name
    for name in ("format", "signature"):
        for field, changed_part in changes_of(getattr(plan, name)):
            changed = whole(pb.Plan)
            getattr(changed, name).CopyFrom(changed_part)
            assert plan_digest(changed) != plan_digest(plan), field.name
    renamed = whole(pb.Plan)
    renamed.run = "another"  # a term by itself
    assert digests_of(renamed, task).own != digests_of(plan, task).own


def test_field_of_a_later_version_is_agreed_on() -> None:
    plan, task = whole(pb.Plan), whole(pb.Assignment)
    later = pb.Assignment.FromString(task.SerializeToString() + LATER_FIELD)
    assert task_digest(later) != task_digest(task)
    assert plan_digest(pb.Plan.FromString(plan.SerializeToString() + LATER_FIELD)) != plan_digest(plan)


@pytest.mark.parametrize(
    ("of_target", "of_others"),
    [
        ({"takes_parts": True}, {"takes_parts": True, "deadline_s": 0.001}),
        ({}, {"takes_parts": True, "deadline_s": 0.001}),
        ({}, {"steps": 1}),
        ({}, {"lr": 0.0}),
        ({}, {"round": 2}),
        ({}, {"repeats": 1}),
        ({}, {"population": 4}),
        ({}, {"clip": 0.5}),
    ],
    ids=["parts of all", "parts", "steps", "lr", "round", "repeats", "population", "clip"],
)
def test_sum_of_clients_that_train_otherwise_is_refused(
    of_target: dict[str, Any], of_others: dict[str, Any], field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SessionCoordinator, "take_keys", take_any_keys)
    run = Run(field.coordinator, f"otherwise {of_target} {of_others}")
    run.tell()
    model_V = run.model(30)
    tasks = {name: told(run.task(model_V), of_target if name == TARGET else of_others) for name in COHORT}
    with pytest.raises(NodeRefuses) as refused:
        run.sum_of(tasks)
    assert str(refused.value) in (Reason.TAKES_PARTS, Reason.BROKEN_RULE)


def test_deadline_alone_ends_no_training(field: Field) -> None:
    run = Run(field.coordinator, "deadline")
    run.tell()
    task = run.task(run.model(31))
    hurried = told(task, {"deadline_s": 0.001})
    mean_M = run.mean(run.sum_of({TARGET: task, **dict.fromkeys(OTHERS, hurried)}))
    torch.testing.assert_close(mean_M, run.honest_mean(run.model(31)).double(), atol=1e-6, rtol=0)


def told(task: pb.Assignment, changed: dict[str, Any]) -> pb.Assignment:
    """A task in which some fields are others."""
    copied = pb.Assignment()
    copied.CopyFrom(task)
    for name, value in changed.items():
        setattr(copied, name, value)
    return copied


def take_any_keys(moves: SessionCoordinator, name: str, keys: pb.SessionKeys) -> None:
    """Take keys whatever terms they are signed for, as a coordinator does that attacks."""
    moves._keys[name] = keys
    moves.replied.add(name)
