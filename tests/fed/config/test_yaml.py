"""YAML 1.2's core schema, and the way out and back."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fed.config import yaml
from fed.errors import InvalidExperiment, InvalidInput

# All but the line breaks that no keyboard has, which PyYAML itself loses between quotes.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x85\u2028\u2029"), max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts | st.integers(), inner, max_size=4),
    max_leaves=12,
)


def same(one: object, other: object) -> bool:
    """Equal, and of the same types, so that neither 1 nor True is 1.0; keys in the same order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return len(one) == len(other) and all(map(same, [*one, *one.values()], [*other, *other.values()]))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other and math.copysign(1, one) == math.copysign(1, other) if isinstance(one, float) else one == other


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),  # a text in YAML 1.1
        ("-.5", -0.5),
        ("1.", 1.0),
        ("0.0", 0.0),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("12", 12),
        ("+7", 7),
        ("0o17", 15),
        ("0x1F", 31),
        ("017", 17),  # octal in YAML 1.1
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        # words, all of them, which YAML 1.1 takes for booleans, dates, numbers to the base of 60 and more
        ("off", "off"),
        ("yes", "yes"),
        ("y", "y"),
        ("tRUE", "tRUE"),
        ("2020-01-01", "2020-01-01"),
        ("12:30:45", "12:30:45"),
        ("1_000", "1_000"),
        ("0b101", "0b101"),
        ("-0x1F", "-0x1F"),
        ("1e", "1e"),
        (".", "."),
        ("'1e-3'", "1e-3"),
        ('"true"', "true"),
        ("=", "="),
        ("python:module:Name", "python:module:Name"),
    ],
)
def test_a_scalar_is_what_the_core_schema_says(text: str, value: object) -> None:
    assert same(yaml.parse(text), value)
    assert same(yaml.parse(f"- {{key: {text}}}"), [{"key": value}])
    assert same(yaml.parse(yaml.dump(value)), value)
    assert same(yaml.parse(yaml.dump({text: text})), {text: text})  # dumped as the text that it is


@pytest.mark.parametrize("text", [".nan", ".NaN", ".NAN"])
def test_nan_is_a_number(text: str) -> None:
    assert math.isnan(yaml.parse(text))


def test_a_file_of_the_users_is_read_as_it_looks() -> None:
    text = """
    # a comment
    local: {lr: 1e-3, hidden: [128, 64], nesterov: off}
    data:
      kind: csv
      path: "a: b.csv"
      text: |
        two
        lines
    """
    assert yaml.parse(text) == {
        "local": {"lr": 0.001, "hidden": [128, 64], "nesterov": "off"},
        "data": {"kind": "csv", "path": "a: b.csv", "text": "two\nlines\n"},
    }


def test_a_mapping_may_be_merged_into_another_that_overrides_it() -> None:
    text = "base: &base {lr: 0.1, batch: 16}\nfast: {<<: *base, lr: 1.0}\nslow: {lr: 0.01, <<: *base}"
    parsed = yaml.parse(text)
    assert parsed["fast"] == {"lr": 1.0, "batch": 16}
    assert parsed["slow"] == {"lr": 0.01, "batch": 16}


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("a: 1\nb: 2\na: 3", "a", 3),
        ("local:\n  lr: 1\n  lr: 2", "lr", 3),
        ("- 1\n- {x: 1, y: 2, x: 1}", "x", 2),
        ("a: 1\n'a': 2", "a", 2),
        ("base: &base {lr: 1}\nmore:\n  <<: *base\n  lr: 2\n  lr: 3", "lr", 5),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_its_line(text: str, key: str, line: int) -> None:
    with pytest.raises(InvalidExperiment, match=f"key '{key}' is given twice.* line {line}, column"):
        yaml.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "a: [1, 2",
        "a: b: c",
        "\tkey: 1",
        "{[1, 2]: 3}",
        "a: *nowhere",
        "!!python/object/apply:os.system ['true']",
        "!unknown 3",
        "!!int three",
        "!!float three",
        "a: \x07",
        "a: 1\n---\nb: 2",
        "9" * 5000,
        "a: !!timestamp abc",
        "a: !!bool maybe",
        "[" * 5000 + "]" * 5000,
    ],
)
def test_what_is_no_yaml_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InvalidExperiment, match=r"^not valid YAML: [^\n]+$"):
        yaml.parse(text)


@given(values)
def test_what_is_dumped_is_parsed_again(value: Any) -> None:
    assert same(yaml.parse(yaml.dump(value)), value)


@given(st.text(alphabet=".+-0123456789eEoxabfnN~ytrulsINF:_'\"#&*!|>%@`{}[],? \n", max_size=8))
def test_a_text_that_looks_like_something_else_stays_a_text(text: str) -> None:
    assert same(yaml.parse(yaml.dump({"key": text, text: "value"})), {"key": text} | {text: "value"})


def test_a_dump_reads_well() -> None:
    assert yaml.dump({"name": "Überblick", "model": {"kind": "mlp", "hidden": [128, 64]}, "lr": 1e-05}) == (
        "name: Überblick\nmodel:\n  kind: mlp\n  hidden: [128, 64]\nlr: 1.0e-05\n"
    )


def test_a_file_is_utf8_and_its_name_begins_every_error(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_bytes("name: Überblick".encode())
    assert yaml.load(path) == {"name": "Überblick"}
    path.write_bytes("name: Überblick".encode("latin-1"))
    with pytest.raises(InvalidInput, match=r"experiment.yaml: must be text in UTF-8, which byte 6 is not: con"):
        yaml.load(path)
    path.write_text("a: 1\na: 2")
    with pytest.raises(InvalidExperiment, match=r"experiment.yaml: not valid YAML: key 'a' is given twice at line 2,"):
        yaml.load(path)
    with pytest.raises(InvalidInput, match=r"cannot be read \(Is a directory\): give a file"):
        yaml.load(tmp_path)


def test_missing_file_error_names_the_searched_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput) as caught:
        yaml.load(Path("nowhere.yaml"))
    assert str(caught.value) == f"nowhere.yaml: no such file (looked in {Path.cwd()})"
