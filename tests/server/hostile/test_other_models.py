"""A coordinator that has a message made for one task, and asks for it in the sum of another."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fed.protocol import protocol_pb2 as pb
from fed.secure_aggregation.fixed_point import SecureSum
from fed.secure_aggregation.reasons import Reason
from fed.vectors.tensors import Tensor
from tests.server.hostile.coordinator import NodeRefuses
from tests.server.hostile.nodes import COHORT, Field
from tests.server.hostile.plans import KEYS, Run

TARGET, *OTHERS = COHORT
ROUNDING = 1e-6  # a mean in fixed point differs by less than 8 / 2**29, and simulated models are rounded to float32


def test_honest_session_gives_the_sum_of_the_messages(field: Field, tmp_path: Path) -> None:
    run = Run(field.coordinator, "honest")
    run.tell()
    task = run.task(run.model(0))
    total = run.sum_of(dict.fromkeys(COHORT, task))
    assert_alike(run.mean(total), run.honest_mean(run.model(0)))
    expected = SecureSum(32, len(total.lanes))
    for name in COHORT:
        expected.add(run.message(name, task, tmp_path / name))
    assert np.array_equal(total.lanes, expected.lanes)


def test_message_of_another_model_is_not_masked(field: Field) -> None:
    run = Run(field.coordinator, "other model")
    run.tell()
    first = run.task(run.model(1))
    run.session({TARGET: first}).assign()  # it trains, and waits for a session
    second = again(first, run.task(run.model(2)), attempt=1)
    mean_M = run.mean(run.sum_of(dict.fromkeys(COHORT, second)))
    assert_alike(mean_M, run.honest_mean(run.model(2)))


def test_message_of_another_plan_is_not_masked(field: Field) -> None:
    run = Run(field.coordinator, "other plan")
    run.tell()
    first = run.task(run.model(3))
    run.mask(dict.fromkeys(COHORT, first))
    fewer_steps = Run(field.coordinator, run.name, {"local": {**KEYS["local"], "epochs": 1}})
    fewer_steps.tell()
    mean_M = fewer_steps.mean(fewer_steps.sum_of(dict.fromkeys(COHORT, again(first, first, attempt=1))))
    assert_alike(mean_M, fewer_steps.honest_mean(run.model(3)))


def test_message_of_another_round_is_not_masked(field: Field) -> None:
    run = Run(field.coordinator, "other round")
    run.tell()
    first = run.task(run.model(4))
    run.mask(dict.fromkeys(COHORT, first))
    attacked_M = run.mean(run.sum_of(dict.fromkeys(COHORT, again(first, first, round=2, attempt=1))))
    # the same round of another run; with another clip, since no message enters two sums
    secure = {**KEYS["secure_aggregation"], "clip": 7.0}
    honest = Run(field.coordinator, "other round, honest", {"secure_aggregation": secure})
    honest.tell()
    task = honest.task(run.model(4), round=2)
    assert_alike(attacked_M, honest.mean(honest.sum_of(dict.fromkeys(COHORT, task))))


def test_next_attempt_after_an_ended_session_gives_the_sum(field: Field) -> None:
    run = Run(field.coordinator, "next attempt")
    run.tell()
    first = run.task(run.model(5))
    session = run.mask(dict.fromkeys(COHORT, first))
    for name in COHORT:
        session.say(name, survivors=pb.Survivors(places=b"\0"))
        with pytest.raises(NodeRefuses, match=Reason.BROKEN_RULE):
            session.answer(name, "consent")
    mean_M = run.mean(run.sum_of(dict.fromkeys(COHORT, again(first, first, attempt=1))))
    assert_alike(mean_M, run.honest_mean(run.model(5)))


def again(first: pb.Assignment, second: pb.Assignment, **changed: Any) -> pb.Assignment:
    """The second task under the name of the first.

    Args:
        first: gives the name.
        second: gives the rest.
        changed: fields in place of the second's.
    """
    told = pb.Assignment()
    told.CopyFrom(second)
    told.task.CopyFrom(first.task)
    told.MergeFrom(pb.Assignment(**changed))
    return told


def assert_alike(found_M: Tensor, expected_M: Tensor) -> None:
    """Hold a mean to another one, up to rounding."""
    torch.testing.assert_close(found_M, expected_M.double(), atol=ROUNDING, rtol=0)
