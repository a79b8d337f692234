"""A kind's section: its keys are the callable's parameters, and making it calls the callable with them."""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any, ClassVar

import pytest
from pydantic import Field, PositiveInt, ValidationError

from fed.config.components import Component, Family, keys_of
from fed.config.document import Document
from fed.config.registry import ALGORITHMS, DATA, MODELS, PARTITIONS, ROUNDS, TOPOLOGIES
from fed.errors import InvalidExperiment

_NUMBERS = itertools.count()  # a kind is remembered by its name
Named = Callable[[object], str]


def scaled(size: int, factor: float = 2.0) -> tuple[int, float]:
    """Sizes by a factor.

    Args:
        size: given.
        factor: by which.
    """
    return size, factor


def spread(size: int, *, spread: Annotated[float, Field(gt=0)], names: list[str] | None = None) -> dict[str, Any]:
    return {"size": size, "spread": spread, "names": names}


@dataclass(frozen=True)
class Between:
    low: int = 0
    high: int = 9

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low must be at most high, got {self.low} and {self.high}: swap them")


class Whatever:
    def __init__(self, size: int, **options: Any) -> None:
        self.size, self.options = size, options


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Named:
    """The kind ``python:module:Name`` of anything, in a module that nobody else has."""

    def name(thing: object) -> str:
        module = ModuleType(f"module_of_a_kind_{next(_NUMBERS)}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(module)["thing"] = thing
        return f"python:{module.__name__}:thing"

    return name


class Sized(Component):
    """What every size has."""

    unit: str = "m"


@pytest.fixture
def family() -> Family[Any]:
    """Sizes, one of which is given."""
    builtin = {name: f"{__name__}:{name}" for name in ("scaled", "spread", "Between", "Whatever")}
    return Family("size", Sized, builtin, given=("size", "stream"), default="scaled")


def lines(family: Family[Any], value: Any) -> list[str]:
    """What is wrong with a section of this family."""

    class Holder(Document):
        size: Annotated[Component, family]

    with pytest.raises(InvalidExperiment) as caught:
        Holder(size=value)
    return str(caught.value).splitlines()


def test_keys_are_the_parameters_that_are_not_given(family: Family[Any]) -> None:
    assert family.make("scaled").model_dump() == {"kind": "scaled", "unit": "m", "factor": 2.0}
    assert list(family.section("spread").model_fields) == ["kind", "unit", "spread", "names"]
    assert lines(family, {"kind": "scaled", "size": 3}) == [
        "size.size: unknown key; known: kind, unit, factor (value: 3)"
    ]


def test_make_passes_the_keys_and_the_requested_arguments(family: Family[Any]) -> None:
    assert family.make("scaled", factor=0.5).make(size=4, stream="never asked for") == (4, 0.5)
    assert family.make("spread", spread=1.0, names=["a"]).make(size=2) == {"size": 2, "spread": 1.0, "names": ["a"]}
    assert family.make("Between", low=3).make() == Between(3, 9)


def test_what_every_kind_of_a_family_has_is_no_argument(family: Family[Any]) -> None:
    section = family.make("scaled", unit="ft")
    assert section.unit == "ft"
    assert section.make(size=1) == (1, 2.0)


def test_a_callable_of_any_key_takes_any_key(family: Family[Any]) -> None:
    section = family.make("Whatever", depth=3, colours=["red"])
    assert section.model_dump() == {"kind": "Whatever", "unit": "m", "depth": 3, "colours": ["red"]}
    made = section.make(size=7, stream=None)
    assert (made.size, made.options) == (7, {"depth": 3, "colours": ["red"]})


def test_a_section_without_kind_is_of_the_default_one(family: Family[Any]) -> None:
    assert family.validate({"factor": 3.0}).model_dump() == {"kind": "scaled", "unit": "m", "factor": 3.0}
    without = Family("size", Sized, family.builtin)
    assert lines(without, {}) == ["size.kind: missing key; known: scaled, spread, Between, Whatever (value: None)"]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (3, "size: must be a name, a mapping with the key kind, or an object of a kind, got 3"),
        (None, "size: must be a name, a mapping with the key kind, or an object of a kind, got None"),
        ({"kind": 3}, "size.kind: must be a text; known: scaled, spread, Between, Whatever (value: 3)"),
        ({"kind": True}, "size.kind: must be a text; known: scaled, spread, Between, Whatever (value: True)"),
        ({"kind": None}, "size.kind: missing key; known: scaled, spread, Between, Whatever (value: None)"),
        (
            {"kind": "scald"},
            "size.kind: no such size; did you mean scaled? known: scaled, spread, Between, Whatever (value: 'scald')",
        ),
        ({"kind": "{}"}, "size.kind: no such size; known: scaled, spread, Between, Whatever (value: '{}')"),
        ({"kind": "spread"}, "size.spread: missing key"),
        ({"kind": "spread", "spread": 0}, "size.spread must be greater than 0, got 0"),
        ({"kind": "spread", "spread": 1, "names": [1]}, "size.names[0] must be a string, got 1"),
        ({"kind": "scaled", "factor": True}, "size.factor must be a number, got True"),
        (
            {"kind": "scaled", "factr": 1},
            "size.factr: unknown key; did you mean factor? known: kind, unit, factor (value: 1)",
        ),
        ({"kind": "Between", "low": 10}, "size: low must be at most high, got 10 and 9: swap them"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_section_is_one_line(family: Family[Any], value: object, problem: str) -> None:
    assert lines(family, value) == [problem]


def test_every_wrong_key_has_its_line(family: Family[Any]) -> None:
    assert lines(family, {"kind": "spread", "spread": -1, "names": 3, "unit": 4}) == [
        "size.unit must be a string, got 4",
        "size.spread must be greater than 0, got -1",
        "size.names must be a list, got 3",
    ]
    (line,) = lines(family, {"kind": "spread", "spread": 1, "names": "one"})
    assert line == "size.names must be a list, got 'one': write [one]"


@pytest.mark.parametrize("name", ["make", "target", "copy", "model_fields", "_hidden"])
def test_parameter_named_like_a_key_of_the_section_is_refused(family: Family[Any], named: Named, name: str) -> None:
    """It would be taken for the section's attribute, or the other way round."""
    namespace: dict[str, Any] = {}
    exec(f"def source({name}=1): return {name}", namespace)
    (line,) = lines(family, {"kind": named(namespace["source"])})
    assert f"has a parameter {name}, which cannot be a key: give it another name" in line


def test_a_kind_may_be_a_class_function_or_callable(family: Family[Any], named: Named) -> None:
    class Caller:
        def __call__(self, size: int, by: PositiveInt = 3) -> int:
            return size * by

    for thing, keys, made in ((scaled, {}, (4, 2.0)), (Between, {"low": 1}, Between(1)), (Caller(), {"by": 5}, 20)):
        kind = named(thing)
        assert family.make(kind, **keys).make(size=4) == made
        assert family.make(kind, **keys).model_dump() == {"kind": kind, "unit": "m", **_defaults(thing), **keys}


def _defaults(thing: object) -> dict[str, Any]:
    return {"factor": 2.0} if thing is scaled else {"low": 0, "high": 9} if thing is Between else {"by": 3}


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (
            "python:nowhere_at_all:Name",
            "cannot import nowhere_at_all (No module named 'nowhere_at_all'); is its folder",
        ),
        ("python:fed.nowhere:Name", "cannot import fed.nowhere (No module named 'fed.nowhere')"),
        ("python:fed.errors:Nothing", "module fed.errors has no Nothing"),
        ("python:os:{path}", "module os has no {path}"),
        ("python:math:pi", "pi of math must be a class or a function, not a float"),
        ("python:os:path", "path of os must be a class or a function, not a module"),
        ("python:os", "must have the form python:package.module:Name"),
        ("python::Name", "must have the form python:package.module:Name"),
        ("python:os:", "must have the form python:package.module:Name"),
        ("python:", "must have the form python:package.module:Name"),
        ("Python:os:path", "no such size"),
    ],
)
def test_a_kind_that_names_nothing_callable_is_refused(family: Family[Any], kind: str, problem: str) -> None:
    (line,) = lines(family, {"kind": kind})
    assert line.startswith(f"size.kind: {problem}")
    assert line.endswith(f"(value: {kind!r})")


def test_fields_of_a_class_without_its_decorator_are_refused(family: Family[Any], named: Named) -> None:
    class Wider(Between):
        width: int = 3

    class Other(Between):
        about: ClassVar[str] = "no field"

    (line,) = lines(family, {"kind": named(Wider)})
    assert (
        "Wider lacks its decorator, without which nobody can set width: write @dataclass(frozen=True, kw_only=True)"
        in line
    )
    assert family.make(named(Other), low=1).make() == Other(1)


def test_a_kind_that_tells_no_parameters_is_refused(family: Family[Any]) -> None:
    (line,) = lines(family, {"kind": "python:builtins:int"})
    assert line.startswith("size: builtins.int does not tell its parameters, which are the keys: name a class")


def test_a_section_is_frozen_and_passes_as_it_is(family: Family[Any]) -> None:
    section = family.make("scaled")
    with pytest.raises(ValidationError, match="frozen"):
        section.factor = 3.0
    assert family.validate(section) is section
    assert family.make("scaled") == section != family.make("scaled", factor=3.0)


def test_a_kind_is_looked_up_once(family: Family[Any]) -> None:
    assert family.section("scaled") is family.section("scaled")


def test_keys_of_a_callable_are_its_parameters() -> None:
    section = keys_of(spread)
    assert list(section.model_fields) == ["size", "spread", "names"]
    with pytest.raises(ValidationError, match="size"):
        section.model_validate({"size": "3", "spread": 1.0})


@pytest.mark.parametrize("family", [DATA, PARTITIONS, MODELS, ALGORITHMS, TOPOLOGIES, ROUNDS], ids=lambda one: one.name)
def test_no_built_in_kind_has_a_context_argument_as_key(family: Family[Any]) -> None:
    for kind in family.builtin:
        own = set(family.section(kind).model_fields) - set(family.base.model_fields)
        assert own.isdisjoint(family.given)


def test_built_in_kinds_are_made_with_what_is_given() -> None:
    model = MODELS.make("mlp", hidden=[5]).make(input_shape=(2, 3), classes=4)
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(5, 6), (5,), (4, 5), (4,)]
    assert MODELS.make("char_gru").make(input_shape=(7,), classes=4).embed.num_embeddings == 4  # asks for classes alone
    assert TOPOLOGIES.make("ring").make(peers=5).number_of_edges() == 5
    assert ALGORITHMS.make("fedprox", mu=0.5).make().mu == 0.5
    assert ROUNDS.make("synchronous", cohort=3).make().cohort == 3
