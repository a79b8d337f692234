"""Every example in a docstring runs."""

import doctest
import importlib
from pathlib import Path

import pytest


def test_examples_in_docstrings_hold(module_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(module_name)
    monkeypatch.chdir(tmp_path)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0
