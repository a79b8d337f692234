"""Errors of users' algorithms: one sentence with the class, the method, the line and the error; signs of ours pass."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import fed
from fed.aggregators.base import ClientWork, Reduced, Report
from fed.aggregators.composed import Transform
from fed.aggregators.dpsgd import DPSGD
from fed.aggregators.fedavg import FedAvg
from fed.aggregators.transforms import chain
from fed.clients.training.draws import UnlikeDraws
from fed.errors import InvalidExperiment, RunFailed

pytestmark = pytest.mark.usefixtures("device")


@dataclass(frozen=True, kw_only=True)
class Lost(FedAvg):
    def apply(self, state: Any, reduced: Reduced) -> Any:
        return state.momentum_P if reduced.clients > 1 else super().apply(state, reduced)


@dataclass(frozen=True, kw_only=True)
class Mute(FedAvg):
    def report(self, work: ClientWork) -> Report:
        return Report((work.update_KP @ torch.zeros(3, dtype=torch.float64),), work.samples_K1)


@dataclass(frozen=True, kw_only=True)
class Stuck(DPSGD):
    def step(self, state: Any, descend: Any, mix: Any) -> Any:
        return state._asdict()["models"]


@dataclass(frozen=True, kw_only=True)
class Halved(Transform):
    def update(self, mean_update_P: Tensor, state: Any, params_P: Tensor) -> tuple[Tensor, Any]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (Lost(), r"Lost\.apply raised AttributeError: 'State' object has no attribute 'momentum_P'"),
        (Mute(), r"Mute\.report raised RuntimeError: size mismatch.*"),
        (Stuck(), r"Stuck\.step raised KeyError: 'models'"),
        (chain(Halved()), r"Halved\.update raised NotImplementedError"),
    ],
    ids=["apply", "report", "step", "transform"],
)
def test_a_users_error_ends_a_run_with_one_sentence(algorithm: Any, said: str) -> None:
    experiment = fed.Experiment(
        data={"kind": "digits", "clients": 2},
        model="logistic",
        algorithm=algorithm,
        rounds={"count": 1, "cohort": "all"},
    )
    with pytest.raises(RunFailed, match=rf"^\S*{said}, at \S*test_users_methods\.py:\d+: correct it$") as caught:
        fed.simulate(experiment)
    assert caught.value.__cause__ is not None


def test_what_is_ours_or_meant_is_raised_as_it_is() -> None:
    class Draws(FedAvg):
        def init(self, params_P: Tensor) -> Any:
            raise UnlikeDraws("a sign for a caller of ours")

        def check(self, replies: int) -> None:
            raise ZeroDivisionError

        def check_local(self, local: Any) -> None:
            raise InvalidExperiment("it refuses this")

        def own(self) -> None:
            raise ZeroDivisionError

    rule = Draws()
    with pytest.raises(UnlikeDraws):
        rule.init(torch.zeros(1))
    with pytest.raises(InvalidExperiment, match=r"^it refuses this$"):
        rule.check_local(None)
    for method in (rule.own, lambda: rule.check(1)):
        with pytest.raises(ZeroDivisionError):
            method()
    assert FedAvg.apply.__qualname__ == "FedAvg.apply"
    assert not hasattr(FedAvg.apply, "__wrapped__")
