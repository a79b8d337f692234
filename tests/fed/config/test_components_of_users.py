"""A user's own class or function takes its keys like a built-in kind, and its own failures stay its own."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import Field, ValidationError

import fed
from fed.config.hyperparameters import Hyperparameters
from fed.config.registry import MODELS
from fed.errors import InvalidExperiment, ValueRange

Own = Callable[[str], str]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Own:
    """Writes a module of the user's, whose name no other test has, and returns it."""
    name = f"own_{abs(hash(request.node.nodeid))}"
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    def write(source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        return name

    return write


NET = '''
from typing import TYPE_CHECKING
from torch import nn
if TYPE_CHECKING:
    from nowhere import Shape, Module

class Net(nn.Linear):
    def __init__(self, input_shape, classes, bias: bool = True):
        super().__init__(input_shape[0], classes, bias)

def net(input_shape: "Shape", classes: int, bias: bool = True) -> "Module":
    """A line.

    Args:
        bias: added at the end.
    """
    return nn.Linear(input_shape[0], classes, bias)
'''


@pytest.mark.parametrize("name", ["Net", "net"])
def test_context_arguments_are_no_keys_and_may_have_unresolved_annotations(own: Own, name: str) -> None:
    kind = f"python:{own(NET)}:{name}"
    model = MODELS.make(kind, bias=False)
    assert model.model_dump() == {"kind": kind, "bias": False, "train": None}
    assert model.make(input_shape=(3,), classes=2).bias is None
    with pytest.raises(ValidationError, match="unknown key; known: kind, train, bias"):
        MODELS.make(kind, classes=2)


def test_a_key_is_described_by_its_docstring(own: Own) -> None:
    assert MODELS.section(f"python:{own(NET)}:net").model_fields["bias"].description == "added at the end."


def test_a_dataclass_may_make_its_defaults(own: Own) -> None:
    source = """
from dataclasses import dataclass, field

@dataclass
class Net:
    sizes: list[int] = field(default_factory=list)
"""
    assert MODELS.make(f"python:{own(source)}:Net").model_dump()["sizes"] == []


FIELDS = """
from dataclasses import dataclass
from pydantic import Field
from fed.config.hyperparameters import Hyperparameters

@dataclass(frozen=True, kw_only=True)
class Checked(Hyperparameters):
    beta: float = Field(0.9, ge=0, lt=1)
    sizes: "list[int]" = Field(default_factory=list)
    rate: float = Field(gt=0)

@dataclass
class Plain:
    beta: float = Field(0.9, ge=0, lt=1)
    sizes: list[int] = Field(default_factory=list)
    rate: float = Field(gt=0)

def function(
    beta: float = Field(0.9, ge=0, lt=1), sizes: list[int] = Field(default_factory=list), rate: float = Field(gt=0)
):
    return Plain(beta, sizes, rate)
"""


@pytest.mark.parametrize("name", ["Checked", "Plain", "function"])
def test_a_field_of_pydantic_is_default_and_bounds(own: Own, name: str) -> None:
    kind = f"python:{own(FIELDS)}:{name}"
    made = MODELS.make(kind, rate=0.5).make()
    assert (made.beta, made.sizes, made.rate) == (0.9, [], 0.5)
    for keys, problem in (({"rate": 0.5, "beta": 1.0}, "beta must be less than 1"), ({}, "rate: missing key")):
        with pytest.raises(InvalidExperiment, match=problem):
            fed.Experiment(model={"kind": kind, **keys})


def test_fields_of_pydantic_hold_objects_of_a_program() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(Hyperparameters):
        beta: float = Field(0.9, ge=0, lt=1)

    assert Own().beta == 0.9
    with pytest.raises(ValueRange, match=r"beta must be less than 1, got 1\.5"):
        Own(beta=1.5)


@pytest.mark.parametrize(
    ("source", "place", "problem"),
    [
        ("int('ten')", 1, "ValueError: invalid literal for int() with base 10: 'ten'"),
        ("import os\nos.nothing", 2, "AttributeError: module 'os' has no attribute 'nothing'"),
        ("import nowhere", 1, "ModuleNotFoundError: No module named 'nowhere': install what brings nowhere"),
        ("\nNet = (", 2, "SyntaxError: '(' was never closed"),
    ],
)
def test_a_module_that_fails_is_named_with_the_line(own: Own, source: str, place: int, problem: str) -> None:
    module = own(source)
    with pytest.raises(InvalidExperiment) as caught:
        fed.Experiment(model=f"python:{module}:Net")
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"model.kind: module {module} fails while it is imported, at ")
    assert f"{module}.py:{place}: {problem}" in line
