"""A file and ``--set`` say together what is run, and whatever is wrong with them is said in a line."""

from pathlib import Path
from typing import Any

import pytest
import typer

from fed.cli.documents import changes, read, read_comparison, read_experiment
from fed.config import yaml
from fed.errors import InvalidInput

COMPARISON = """
name: three
base: {rounds: {count: 3}}
compare:
  - {name: FedAvg}
  - {name: FedProx, algorithm: {kind: fedprox, mu: 0.5}}
  - {name: ring, algorithm: {kind: dpsgd}}
seeds: [1, 2]
target: 0.9
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "file.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("local.lr=1e-3", "local.lr", 0.001),
        ("name=off", "name", "off"),
        ("name=a=b", "name", "a=b"),
        ("data=null", "data", None),
        ("data=", "data", None),
        ("seeds=[1, 2]", "seeds", [1, 2]),
        ("topology={kind: ring}", "topology", {"kind": "ring"}),
    ],
)
def test_value_is_yaml(setting: str, path: str, value: object) -> None:
    assert changes([setting]) == {path: value}


def test_last_value_counts_where_it_stands() -> None:
    settings = ["rounds.count=1", "rounds={kind: synchronous, cohort: 3}", "rounds.count=2"]
    assert list(changes(settings).items()) == [
        ("rounds", {"kind": "synchronous", "cohort": 3}),
        ("rounds.count", 2),
    ]


@pytest.mark.parametrize("setting", ["rounds.count", "", "=3", "rounds.=3", ".count=3", "a..b=3"])
def test_setting_without_key_and_value_is_a_usage_error(setting: str) -> None:
    with pytest.raises(typer.BadParameter, match="key=value"):
        changes([setting])


def test_setting_that_is_no_yaml_names_itself() -> None:
    with pytest.raises(InvalidInput, match=r"^--set local\.lr=\[: not valid YAML"):
        changes(["local.lr=["])


def test_setting_may_give_what_the_file_lacks(write: Any) -> None:
    assert (
        read_experiment(write("data: {kind: csv}"), ["data.path=x.csv", "data.label=y"]).dump()["data"]["path"]
        == "x.csv"
    )


@pytest.mark.parametrize(
    ("text", "settings", "line"),
    [
        ("rounds: {cuont: 3}", [], "file.yaml: rounds.cuont: unknown key; did you mean count?"),
        ("name: x", ["rounds.cuont=3"], "file.yaml with --set: rounds.cuont: unknown key; did you mean count?"),
        ("- a\n- b", [], "file.yaml: must hold a mapping of keys to values, got list"),
        ("", [], "file.yaml: must hold a mapping of keys to values, got nothing"),
        ("name: [", [], "file.yaml: not valid YAML"),
    ],
)
def test_error_begins_with_the_file(write: Any, text: str, settings: list[str], line: str) -> None:
    path = write(text)
    with pytest.raises(InvalidInput) as caught:
        read(path, settings)
    assert str(caught.value).startswith(str(path.with_name(line)))


def test_comparison_and_experiment_are_told_apart(write: Any) -> None:
    with pytest.raises(InvalidInput, match="fed compare"):
        read_experiment(write(COMPARISON), [])
    with pytest.raises(InvalidInput, match="fed simulate"):
        read_comparison(write("name: x"), [])
    assert read_comparison(write("compare: [{name: FedAvg}]"), []).seeds == [0]


def test_experiment_in_force_reads_back_as_itself(write: Any) -> None:
    experiment = read_experiment(write("algorithm: {kind: dpsgd}"), ["local.steps=3"])
    assert read_experiment(write(yaml.dump(experiment.dump())), []) == experiment


def test_comparison_in_force_has_the_same_variants(write: Any) -> None:
    comparison = read_comparison(write(COMPARISON), ["base.local.lr=0.25"])
    shown = comparison.in_force()
    again = read_comparison(write(yaml.dump(shown)), [])
    assert again.variants() == comparison.variants()
    assert (again.seeds, again.target, again.name) == ([1, 2], 0.9, "three")
    # Each variant has what differs from the base.
    assert [{*variant} for variant in shown["compare"]] == [
        {"name"},
        {"name", "algorithm"},
        {"name", "algorithm", "topology"},
    ]
    assert again.in_force() == shown
    assert shown["base"]["local"]["lr"] == 0.25
