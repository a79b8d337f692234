"""The JSON schema accepts what the framework accepts, refuses what it refuses, and describes every key."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

import fed
from fed.config import registry, yaml
from fed.config.components import Family
from fed.config.document import Document
from fed.config.schema import schema_of, schema_text
from fed.errors import InvalidExperiment

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
DOCUMENTS: dict[str, type[Document]] = {"experiment": fed.Experiment, "comparison": fed.Comparison}


@cache  # made when it is first asked for: every worker imports this module
def experiment_schema() -> Draft202012Validator:
    return Draft202012Validator(schema_of(fed.Experiment))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_committed_schema_is_the_one_in_force(name: str) -> None:
    committed = (EXAMPLES / f"{name}.schema.json").read_text(encoding="utf-8")
    remedy = f"run: fed schema {name} > examples/{name}.schema.json"
    assert committed == schema_text(DOCUMENTS[name]), remedy


@pytest.mark.parametrize("name", DOCUMENTS)
def test_schema_is_itself_valid(name: str) -> None:
    schema = schema_of(DOCUMENTS[name])
    metaschema = Draft202012Validator(Draft202012Validator.META_SCHEMA)
    assert best_match(metaschema.iter_errors(schema)) is None


@pytest.mark.parametrize("document", DOCUMENTS.values())
def test_every_reference_leads_somewhere(document: type[Document]) -> None:
    schema = schema_of(document)
    references = {part["$ref"] for part in parts(schema) if "$ref" in part}
    assert references == {f"#/$defs/{name}" for name in schema["$defs"]}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_example_points_to_the_schema_that_accepts_it(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    schema = json.loads((path.parent / first.partition("=")[2]).read_text(encoding="utf-8"))
    assert best_match(Draft202012Validator(schema).iter_errors(yaml.load(path))) is None


def test_no_two_examples_share_a_name() -> None:
    names = [yaml.load(path).get("name") for path in sorted(EXAMPLES.rglob("*.yaml"))]
    assert len({*names}) == len(names)


ACCEPTED: dict[str, dict[str, Any]] = {
    "nothing given": {},
    "kind left to its default": {"rounds": {"count": 3}},
    "a whole number for a number": {"local": {"lr": 1}},
    "data given in Python": {"data": None, "model": None},
    "a kind in a kind": {"data": {"kind": "digits", "partition": {"kind": "dirichlet", "alpha": 0.1}}},
    "null for a kind that is none": {"error_feedback": None},
    "peers": {"algorithm": {"kind": "dpsgd"}, "topology": {"kind": "exponential"}},
}
REFUSED: dict[str, dict[str, Any]] = {
    "misspelt section": {"rouns": {"count": 3}},
    "misspelt key": {"rounds": {"kind": "synchronous", "cuont": 3}},
    "misspelt key of the default kind": {"rounds": {"cuont": 3}},
    "misspelt key of a kind in a kind": {"data": {"kind": "digits", "partition": {"kind": "dirichlet", "alhpa": 1}}},
    "misspelt kind": {"algorithm": {"kind": "fedavgg"}},
    "key of another kind": {"algorithm": {"kind": "fedavg", "mu": 0.1}},
    "wrong type": {"rounds": {"count": True}},
    "out of range": {"algorithm": {"kind": "bmuf", "block_momentum": 1.0}},
    "missing key": {"data": {"kind": "npz"}},
}


@pytest.mark.parametrize("keys", ACCEPTED.values(), ids=ACCEPTED)
def test_schema_accepts_what_the_framework_accepts(keys: dict[str, Any]) -> None:
    fed.Experiment(**keys)
    assert experiment_schema().is_valid(keys)


@pytest.mark.parametrize("keys", REFUSED.values(), ids=REFUSED)
def test_schema_refuses_what_the_framework_refuses(keys: dict[str, Any]) -> None:
    with pytest.raises(InvalidExperiment):
        fed.Experiment(**keys)
    assert not experiment_schema().is_valid(keys)


def test_null_is_the_kind_none() -> None:
    assert fed.Experiment(error_feedback=None) == fed.Experiment(error_feedback="none") == fed.Experiment()


def test_schema_accepts_every_value_in_force() -> None:
    assert best_match(experiment_schema().iter_errors(fed.Experiment().dump())) is None


def test_kinds_of_the_users_own_take_any_key() -> None:
    assert experiment_schema().is_valid({"model": {"kind": "python:package.module:Name", "width": 3}})
    assert not experiment_schema().is_valid({"model": {"kind": "python:nothing", "width": 3}})


def test_comparisons_are_checked_down_to_the_variants() -> None:
    comparison = Draft202012Validator(schema_of(fed.Comparison))
    keys: dict[str, Any] = {"base": {"rounds": {"count": 3}}, "compare": [{"name": "FedAvg"}]}
    assert comparison.is_valid(keys)
    assert not comparison.is_valid(keys | {"base": {"rounds": {"cuont": 3}}})
    assert not comparison.is_valid(keys | {"compare": [{"name": "FedAvg", "algoritm": {"kind": "fedavg"}}]})


def test_every_key_of_every_kind_is_described() -> None:
    silent = [
        f"{family.name} {kind}: {key}"
        for family in vars(registry).values()
        if isinstance(family, Family)
        for kind in family.builtin
        for key, shown in family.section(kind).model_json_schema()["properties"].items()
        if not shown.get("description")
    ]
    assert silent == []


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for inner in schema.values():
            yield from parts(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from parts(inner)
