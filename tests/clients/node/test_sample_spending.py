"""Tests of what a node's own steps cost its samples."""

from pathlib import Path

import pytest

from fed.clients.node.sample_spending import SampleSpending
from fed.errors import InvalidCheckpoint
from fed.privacy.accounting import epsilon
from fed.privacy.releases import Release

TASK = {Release(noise_multiplier=1.0, sampling=0.25): 4}
DELTA = 1e-5


def cost(tasks: int) -> float:
    return epsilon({release: tasks * count for release, count in TASK.items()}, DELTA)


def test_a_restart_forgets_no_task(tmp_path: Path) -> None:
    for tasks in (1, 2, 3):
        spending = SampleSpending(tmp_path / "spent", delta=DELTA, budget=None)
        assert spending.spend(TASK)
        assert spending.epsilon == cost(tasks)


def test_what_would_pass_the_budget_is_not_spent(tmp_path: Path) -> None:
    spending = SampleSpending(tmp_path / "spent", delta=DELTA, budget=(cost(2) + cost(3)) / 2)
    assert [spending.spend(TASK) for _ in range(4)] == [True, True, False, False]
    assert SampleSpending(tmp_path / "spent", delta=DELTA, budget=None).epsilon == cost(2)


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spent").write_text("[[")
    with pytest.raises(InvalidCheckpoint, match="put a whole copy back"):
        SampleSpending(tmp_path / "spent", delta=DELTA, budget=None)
