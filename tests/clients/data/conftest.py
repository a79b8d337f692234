"""Loading data as an experiment does, from the keys of its section."""

import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any

import pytest

from fed.clients.data import FederatedData, load
from fed.config.document import Document
from fed.config.registry import DATA, DataSection
from fed.vectors.randomness import Streams

_NUMBERS = itertools.count()  # a kind is remembered by its name


class Described(Document):
    data: Annotated[DataSection, DATA]


def load_keys(keys: dict[str, Any], seed: int = 0) -> FederatedData:
    sections: dict[str, Any] = {"data": keys}
    return load(Described(**sections).data, Streams(seed))


@pytest.fixture
def loaded() -> Callable[..., FederatedData]:
    """loaded(kind=..., key=...) is the data of a section with these keys."""
    return lambda seed=0, **keys: load_keys(keys, seed)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], str]:
    """The kind ``python:module:Name`` of a function, in a module that nobody else has."""

    def name(function: Callable[..., Any]) -> str:
        module = ModuleType(f"users_module_{next(_NUMBERS)}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(module)["source"] = function
        return f"python:{module.__name__}:source"

    return name
