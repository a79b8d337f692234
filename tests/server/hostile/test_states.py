"""A coordinator that would have a sum show what one client alone has kept, or ask its samples one bit a task."""

from pathlib import Path
from typing import Any

import pytest

from fed.clients.node.sessions import Limits
from fed.clients.node.training import NodeTraining
from fed.processes.clock import SYSTEM_CLOCK
from fed.secure_aggregation.reasons import ClientRefusal, Reason
from fed.secure_aggregation.settings import settings_of
from tests.server.hostile.coordinator import NodeRefuses
from tests.server.hostile.nodes import COHORT, GUEST, Field, samples_of
from tests.server.hostile.plans import KEYS, Run

WEIGHED = {**KEYS["secure_aggregation"], "max_weight": 100}
KEEPING = ("scaffold", "feddyn", "moon", "easgd")
RESIDUALS = {"uplink": [{"kind": "rotation"}], "error_feedback": {"kind": "ef"}}


def test_residual_of_one_client_is_no_sum(field: Field) -> None:
    # A first round leaves each client its whole message, as if it were lost. In a second one nobody learns anything,
    # and the guest alone is told that its message was lost: the sum is the guest's.
    run = Run(field.coordinator, "residual", RESIDUALS)
    program = field.start(GUEST, state="residual")
    field.coordinator.wait_to_join([GUEST], field.coordinator.views[GUEST].connections + 1)
    run.tell([GUEST])
    with pytest.raises(NodeRefuses, match=Reason.KEEPS_STATE):
        run.settle([GUEST])
    assert program.end() == 1
    assert "--allow-state" in program.said


@pytest.mark.parametrize(
    "changed",
    [
        RESIDUALS,
        {"uplink": [{"kind": "randomk", "fraction": 0.5}], "error_feedback": {"kind": "ef"}},
        *({"algorithm": {"kind": kind}, "secure_aggregation": WEIGHED} for kind in KEEPING),
    ],
    ids=["rotation", "randomk", *KEEPING],
)
def test_node_refuses_plans_that_keep_states(changed: dict[str, Any], field: Field, tmp_path: Path) -> None:
    run = Run(field.coordinator, "kept", changed)
    training = NodeTraining(run.data.only(int(GUEST), int(GUEST)), run.experiment, run.plan, tmp_path, SYSTEM_CLOCK)
    settings = settings_of(run.experiment)
    assert settings is not None
    with pytest.raises(ClientRefusal) as refused:
        Limits(minimum_cohort=2, corrupt=0.0).check(settings, keeps_states=training.keeps_states)
    assert refused.value.reason is Reason.KEEPS_STATE


def test_diverging_client_is_told_apart_by_nobody(field: Field) -> None:
    inputs, labels = samples_of(int(COHORT[0]))
    run = Run(field.coordinator, "diverging")
    names = (*COHORT[:2], GUEST)
    program = field.start(GUEST, (inputs * 1e30, labels), state="diverging")
    field.coordinator.wait_to_join([GUEST], field.coordinator.views[GUEST].connections + 1)
    try:
        run.tell(names)
        found = run.read(run.sum_of(dict.fromkeys(names, run.task(run.model(20)))))
    finally:
        program.kill()
    assert (found.clients, found.weight, found.samples) == (3, 2, 16)
    assert "adds nothing to its round's sum" in program.said
