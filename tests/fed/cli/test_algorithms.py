"""``fed algorithms NAME``: all about one algorithm, from its docstring and its code."""

import re
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from torch import Tensor

from fed.aggregators.base import Aggregator, Reduced
from fed.aggregators.fedavg import FedAvg
from fed.cli.main import main
from fed.config.registry import ALGORITHMS


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def told(kind: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["algorithms", kind]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", ALGORITHMS.builtin)
def test_everything_is_told_of_each(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(kind, capsys)
    assert text.startswith(f"{kind}: ")
    assert not re.search(r"\\|:math:|``", text), "markup of a docstring"
    for key in ALGORITHMS.section(kind).model_fields:
        assert key == "kind" or re.search(rf"^ {key} ", text, re.MULTILINE)
    expected = (
        ["peers keep", "moves"] if "peers keep" in text else ["server keeps", "client keeps", "moves down", "moves up"]
    )
    for name in [*expected, "combines with"]:
        assert re.search(rf"^{name} ", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("fedavg", ["server keeps model", "client keeps nothing", "moves up the model from each client"]),
        (
            "scaffold",
            [
                "client keeps control",
                "moves down 2 × the model to each client of a round",
                "moves up 2 × the model from each client",
                "local training corrects each step's gradient",
            ],
        ),
        ("fednova", ["moves up the model and 2 numbers from each client"]),
        ("mimelite", ["asks a client for the full gradient, at the model that it gets, on its own data"]),
        ("fedadam", ["server keeps model, first, second"]),
        ("krum", ["needs each client's message"]),
        (
            "fedrep",
            [
                "client keeps the parameters and buffers of the last layers",
                "moves down the shared part of the model to each client",
                "moves up the shared part of the model from each client",
                "local training the head, then the body",
                "evaluated by the clients",
            ],
        ),
        ("ditto", ["client keeps a model of its own", "moves up the model from each client"]),
        ("dpsgd", ["peers keep model each"]),
        (
            "centralized",
            ["moves down nothing", "moves up nothing", "any local training; any schedule of the step"],
        ),
    ],
)
def test_what_is_kept_and_sent_is_what_the_code_does(
    kind: str, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(told(kind, capsys).split())
    for line in lines:
        assert line in text


def test_ranges_and_defaults_are_those_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"momentum +0\.9 +≥ 0, < 1 +β in \[0, 1\)", told("fedavgm", capsys))
    assert re.search(r"server_lr +1\.0 +> 0 ", told("fedavgm", capsys))
    assert re.search(r"switch +10 +whole ≥ 0 ", told("post_local_sgd", capsys))
    assert re.search(r"elasticity +null +> 0, < 1 or null ", told("easgd", capsys))
    assert re.search(r"nesterov +false +true or false ", told("bmuf", capsys))


def test_selection_rule_page_says_that_it_refuses_sample_weights(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("krum", "multi_krum", "bulyan"):
        assert "refuses samples" in told(kind, capsys)
    assert "refuses samples" not in told("median", capsys)


def test_page_of_cyclic_names_its_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    text = told("cyclic", capsys)
    assert "i = π(t mod N)" in text
    assert "rounds: {kind: synchronous, cohort: 1, sampling: round_robin} unless given" in text
    assert "any cohort" not in text


def test_an_unknown_algorithm_is_one_sentence_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "scafold"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: scafold: no such algorithm; did you mean scaffold? known: fedavg, ")
    assert error.count("\n") == 1
    assert main(["algorithms", "SCAFFOLD"]) == 2
    assert "did you mean scaffold?" in capsys.readouterr().err


class Counted(NamedTuple):
    model_P: Tensor
    rounds: int


@dataclass(frozen=True, kw_only=True)
class Counting(FedAvg):
    """Counts the rounds."""

    def init(self, params_P: Tensor) -> Counted:  # type: ignore[override]  # it keeps more
        return Counted(params_P, 0)

    def apply(self, state: Counted, reduced: Reduced) -> Counted:  # type: ignore[override]  # as above
        return Counted(state.model_P + reduced.update_P, state.rounds + 1)


@dataclass(frozen=True, kw_only=True)
class Nameless(FedAvg):
    """Keeps no named tuple."""

    def init(self, params_P: Tensor) -> tuple[Tensor]:  # type: ignore[override]  # the mistake
        return (params_P,)


def test_a_state_may_hold_what_is_no_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(f"python:{__name__}:Counting", capsys)
    assert re.search(r"server keeps +model, rounds +\n", text)
    assert main(["algorithms", f"python:{__name__}:Nameless"]) == 2
    assert "Nameless.init must return a named tuple whose model_P is the model" in capsys.readouterr().err


class Unfinished(Aggregator):
    """Lacks what every algorithm has."""


@dataclass(frozen=True, kw_only=True)
class Undecided(FedAvg):
    """Has no default."""

    strength: float


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("Unfinished", "cannot be made: Can't instantiate abstract class"), ("Undecided", "strength: missing key")],
)
def test_an_algorithm_that_cannot_be_made_is_one_sentence(
    name: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["algorithms", f"python:{__name__}:{name}"]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
