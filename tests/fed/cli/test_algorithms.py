"""``fed algorithms NAME``: all about one algorithm, from its docstring and its code."""

import dataclasses
import re
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

import fed
from fed.cli.main import main
from fed.config import yaml
from fed.config.components import Component, Family
from fed.config.registry import (
    ALGORITHMS,
    AVAILABILITIES,
    DEVICES,
    EVALUATIONS,
    ROUNDS,
    SAMPLINGS,
    SCHEDULES,
    STALENESSES,
)
from fed.simulations.devices import Device

KEYS = Path(__file__).resolve().parents[3] / "docs" / "experiments.md"
ROBUST = {"weights", "bucketing", "nearest_neighbour_mixing"}


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
    assert not re.search(r"\\[a-z]+|:math:|``", text), "markup of a docstring"
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
        ("dpsgd", ["peers keep a model each"]),
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


def test_a_rule_that_chooses_among_clients_says_that_it_refuses_samples(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("krum", "multi_krum", "bulyan"):
        assert "refuses samples" in told(kind, capsys)
    assert "refuses samples" not in told("median", capsys)


def test_an_unknown_algorithm_is_one_sentence_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "scafold"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: scafold: no such algorithm; did you mean scaffold? known: fedavg, ")
    assert error.count("\n") == 1
    assert main(["algorithms", "SCAFFOLD"]) == 2
    assert "did you mean scaffold?" in capsys.readouterr().err


def part_of_the_page(heading: str) -> str:
    """From a heading, which begins so, to the next one of the same depth."""
    text = KEYS.read_text(encoding="utf-8")
    found = re.search(rf"^### `{heading}`.*?(?=^##)", text, re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[0]


@pytest.mark.parametrize(
    ("family", "heading", "of_all"),
    [
        (ALGORITHMS, "algorithm", ROBUST),
        (EVALUATIONS, "evaluation", set()),
        (SCHEDULES, "local", {"warm_up"}),
        (SAMPLINGS, "rounds", set()),
        (ROUNDS, "rounds", {"count", "sampling", "evaluate_every"}),
        (STALENESSES, "rounds", set()),
        (DEVICES, "devices", {"availability", "failure", "interruption", "joining_s", "staying_s"}),
        (AVAILABILITIES, "devices", set()),
    ],
    ids=lambda value: str(getattr(value, "name", "")),
)
def test_the_table_of_kinds_has_each_with_its_keys(family: Family[Component], heading: str, of_all: set[str]) -> None:
    text = part_of_the_page(heading)
    assert all(f"`{key}`" in text for key in of_all)
    for kind in family.builtin:
        rows = re.findall(rf"^\| `{kind}` \| (.*)$", text, re.MULTILINE)
        keys = family.section(kind).model_fields.keys() - of_all - {"kind"}
        if inherited := re.search(r"those of `(\w+)`", rows[0] if rows else ""):
            keys -= family.section(inherited[1]).model_fields.keys()
        assert any(all(f"`{key}`" in row for key in keys) for row in rows), (kind, keys)


@pytest.mark.parametrize(
    ("family", "heading"),
    [(ROUNDS, "rounds"), (STALENESSES, "rounds"), (DEVICES, "devices"), (AVAILABILITIES, "devices")],
    ids=lambda value: str(getattr(value, "name", "")),
)
def test_the_tables_of_time_have_the_defaults_in_force(family: Family[Component], heading: str) -> None:
    text = part_of_the_page(heading)
    for kind in family.builtin:
        fields = family.section(kind).model_fields
        rows = re.findall(rf"^\| `{kind}` \| ([^|]*) \|", text, re.MULTILINE)
        said = [dict(re.findall(r"`(\w+)`: (?:`([^`]*)`|no default)", row)) for row in rows]
        told = [one for one in said if one.keys() <= fields.keys()]
        assert told, kind
        for key, value in max(told, key=len).items():
            assert value == default_of(fields[key]), (kind, key)


def default_of(field: FieldInfo) -> str:
    """As a document says it; nothing where there is none."""
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True, validated_data={})
    return value.kind if isinstance(value, Component) else yaml.dump(value).removesuffix("...\n").strip()


def test_checkpoints_are_told_with_their_defaults() -> None:
    text = part_of_the_page("checkpoints")
    for key, value in fed.Experiment().dump()["checkpoints"].items():
        assert f"| `{key}` | `{value}` |" in text


def test_the_metrics_of_time_are_told_and_so_are_the_columns_of_traces() -> None:
    text = part_of_the_page("rounds")
    for key in ("selected", "replied", "late", "failed", "staleness_mean", "virtual_s"):
        assert f"| `{key}` |" in text
    columns = ", ".join(f"`{field.name}`" for field in dataclasses.fields(Device))
    assert f"`client`, {columns}" in part_of_the_page("devices")
