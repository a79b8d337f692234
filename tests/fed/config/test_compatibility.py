"""Sections that have no meaning together are refused when the experiment is read, and all others are not."""

from dataclasses import dataclass
from typing import Any

import pytest

from fed.aggregators.centralized import Centralized
from fed.aggregators.fedavg import FedAvg
from fed.cli.main import main
from fed.config.comparison import Comparison
from fed.config.experiment import Experiment, Local
from fed.config.registry import ALGORITHMS
from fed.errors import InvalidExperiment

LOCAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "schedule": {"schedule": "cosine", "scaling": "linear"},
    "decay": {"weight_decay": 0.01},
    "half": {"precision": "bfloat16"},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.01},
}
REFUSED = {
    "scaffold": {"adam", "adamw"},
    "mimelite": {"adam", "adamw", "momentum", "nesterov"},
    "qfedavg": {"adam", "adamw"},
}


def problem(**keys: Any) -> str:
    """The one sentence that these keys are answered with."""
    with pytest.raises(InvalidExperiment) as caught:
        Experiment(**keys)
    (line,) = str(caught.value).splitlines()
    return line


# Local training.


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("kind", ALGORITHMS.builtin)
def test_an_algorithm_refuses_the_local_steps_for_which_its_equation_is_wrong(kind: str, local: str) -> None:
    keys: dict[str, Any] = {"algorithm": {"kind": kind}, "local": LOCAL[local]}
    if local not in REFUSED.get(kind, set()):
        assert Experiment(**keys).algorithm.kind == kind
        return
    line = problem(**keys)
    assert line.startswith(f"{kind} ")
    for part in ("needs local.optimizer sgd", ", for ", f", got {LOCAL[local].get('optimizer', 'sgd')}", "choose "):
        assert part in line


def test_qfedavg_that_is_not_fair_takes_any_local_steps() -> None:
    assert Experiment(algorithm={"kind": "qfedavg", "q": 0.0}, local={"optimizer": "adam"}).local.optimizer == "adam"


def test_local_steps_are_refused_in_the_variant_that_they_are_wrong_for() -> None:
    keys: dict[str, Any] = {
        "base": {"local": {"optimizer": "adam"}},
        "compare": [{"name": "ours"}, {"name": "theirs", "algorithm": {"kind": "scaffold"}}],
    }
    with pytest.raises(InvalidExperiment) as caught:
        Comparison(**keys)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("compare[1] theirs: scaffold needs local.optimizer sgd")


@dataclass(frozen=True, kw_only=True)
class Picky(FedAvg):
    def check_local(self, local: Local) -> None:
        """Steps of 0.1 or less."""
        if local.lr > 0.1:
            raise InvalidExperiment(f"picky needs local.lr of at most 0.1, got {local.lr}: lower it")


def picky() -> Picky:
    return Picky()


@pytest.mark.parametrize("kind", ["Picky", "picky"])
def test_a_users_algorithm_may_refuse_local_steps_too(kind: str) -> None:
    algorithm = {"kind": f"python:{__name__}:{kind}"}
    assert Experiment(algorithm=algorithm).local.lr == 0.1
    assert problem(algorithm=algorithm, local={"lr": 0.2}) == "picky needs local.lr of at most 0.1, got 0.2: lower it"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (f"python:{__name__}:Picky", "steps of 0.1 or less"),
        ("fedavg", "any local training"),
        ("dpsgd", "any local training"),
        ("scaffold", "steps of sgd, with momentum or without"),
        ("mimelite", "steps of sgd without momentum"),
    ],
)
def test_what_an_algorithm_combines_with_is_told(
    kind: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["algorithms", kind]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("combines with")]
    assert line.removeprefix("combines with").strip().startswith(f"{said};")


@pytest.mark.parametrize(("key", "value"), [("joining_s", 20.0), ("staying_s", 60.0)])
@pytest.mark.parametrize("rounds", ["synchronous", "buffered", "bounded_staleness"])
def test_an_algorithm_that_numbers_its_clients_refuses_those_that_come_or_leave_for_good(
    rounds: str, key: str, value: float
) -> None:
    line = problem(algorithm="afl", rounds=rounds, devices={"kind": "lognormal", key: value})
    assert f"devices.{key} has no meaning for afl, which numbers all clients from the beginning to the end" in line
    assert Experiment(algorithm="scaffold", rounds=rounds, devices={key: value}).algorithm.kind == "scaffold"
    assert Experiment(algorithm="afl", rounds=rounds, devices={"availability": "on_off"}).algorithm.kind == "afl"


# Adversaries.


@dataclass(frozen=True, kw_only=True)
class AllInOnePlace(Centralized):
    """A ceiling of a user's own."""


def in_one_place() -> Centralized:
    return Centralized()


@pytest.mark.parametrize("kind", ["dpsgd", "local", "centralized", "AllInOnePlace", "in_one_place"])
def test_who_reports_to_no_coordinator_cannot_be_attacked(kind: str) -> None:
    named = kind if kind in ALGORITHMS.builtin else f"python:{__name__}:{kind}"
    line = problem(algorithm={"kind": named}, adversaries={"kind": "ipm"})
    assert line.startswith(
        f"adversaries have no meaning for {named}, whose clients report to no coordinator, got ipm: "
    )


@pytest.mark.parametrize(("fraction", "clients", "count"), [(0.02, 20, 0), (0.99, 10, 10), (0.5, 1, 0)])
def test_attackers_that_are_nobody_or_everybody_are_refused(fraction: float, clients: int, count: int) -> None:
    line = problem(data={"clients": clients}, adversaries={"kind": "ipm", "fraction": fraction})
    assert f"got {fraction} of {clients} clients, which is {count}: change it" in line


def test_how_many_attack_is_left_open_where_nobody_says_how_many_clients_there_are() -> None:
    adversaries = {"kind": "ipm", "fraction": 0.001}
    of_the_source = {"kind": "text", "path": "plays", "clients": None}
    for data in (None, of_the_source):
        assert Experiment(data=data, adversaries=adversaries).adversaries is not None
    assert "of 100 clients" in problem(adversaries=adversaries)
