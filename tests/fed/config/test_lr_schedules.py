"""Step sizes over rounds, against their formulas, and as clients take them."""

import math

import pytest
import torch
from torch import nn

import fed
from fed.config.lr_schedules import ConstantSchedule, Cosine, Schedule, Step
from tests.thinned import thinned

COUNT = 20


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (ConstantSchedule(), lambda t: 1.0),
        (Cosine(end=0.1), lambda t: 0.1 + 0.9 * (1 + math.cos(math.pi * (t - 1) / COUNT)) / 2),
        (Step(every=6, gamma=0.5), lambda t: 0.5 ** ((t - 1) // 6)),
    ],
)
def test_a_schedule_is_its_formula(schedule: Schedule, expected: object) -> None:
    got = [schedule.factor(number, COUNT) for number in range(1, COUNT + 1)]
    assert got == pytest.approx([expected(number) for number in range(1, COUNT + 1)])  # type: ignore[operator]


def test_warm_up_rises_linearly_and_then_the_schedule_begins() -> None:
    warm = Cosine(warm_up=4)
    assert [warm.factor(number, COUNT) for number in range(1, 5)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    rest = [warm.factor(number, COUNT) for number in range(5, COUNT + 1)]
    assert rest == [Cosine().factor(number, COUNT - 4) for number in range(1, COUNT - 3)]


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 2.0), ("square_root", math.sqrt(2))])
def test_the_step_size_grows_with_the_cohort(scaling: str, factor: float) -> None:
    local = fed.Experiment(local={"lr": 0.3, "scaling": scaling, "base_cohort": 5}).local
    assert local.lr_in(1, 10, cohort=10) == pytest.approx(0.3 * factor)


@pytest.mark.parametrize("batching", ["on", "off"])
@pytest.mark.parametrize("optimizer", thinned(["sgd", "adam"], quick=1))
@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "dpsgd"])
def test_clients_take_steps_of_the_rounds_size(batching: str, optimizer: str, algorithm: str) -> None:
    """Rounds with a schedule are rounds of runs whose constant step size is the schedule's."""
    torch.manual_seed(0)
    data = fed.FederatedData({name: (torch.randn(6, 3), torch.randint(2, (6,))) for name in "abc"})
    given = {
        "rounds": {"count": 2},
        "algorithm": {"kind": algorithm},
        "simulation": {"batching": batching, "workers": 0},
    }
    local = {"optimizer": optimizer, "batch_size": 6, "lr": 0.5}
    model = nn.Linear(3, 2)
    scheduled = {**local, "schedule": {"kind": "step", "every": 1, "gamma": 0.25}}
    both = fed.simulate(fed.Experiment(local=scheduled, **given), data=data, model=model)
    first = fed.simulate(fed.Experiment(local=local, **given).override({"rounds.count": 1}), data=data, model=model)
    assert first.metrics[0]["train_loss"] == both.metrics[0]["train_loss"]
    if algorithm == "dpsgd":  # whose peers do not begin a second round from one model
        return
    second = fed.Experiment(local={**local, "lr": 0.125}, **given).override({"rounds.count": 1})
    after = fed.simulate(second, data=data, model=first.model)
    for ours, theirs in zip(both.model.parameters(), after.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
