"""What is public says so: every module lists it in ``__all__``, and everything else starts with an underscore."""

import ast
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import fed
from tests.trees import tree_of

pytestmark = pytest.mark.xdist_group("syntax trees")  # so that files are parsed once


def test_a_module_lists_exactly_what_is_public(module_name: str) -> None:
    module = importlib.import_module(module_name)
    body = tree_of(Path(inspect.getfile(module)).resolve()).body
    if module_name.endswith((".__main__", "_pb2", "_pb2_grpc")) or _says_nothing(body):
        return
    assert "__all__" in vars(module), f"{module_name} needs an __all__"
    listed = module.__all__
    assert sorted(set(listed)) == sorted(listed), "named twice"
    assert [name for name in listed if not hasattr(module, name)] == [], "listed, but not there"
    assert sorted(_public_names(body) - set(listed)) == [], "public: list it, or start it with an underscore"
    assert [name for name in listed if not _has_docstring(module, name, body)] == [], "listed, but without docstring"


def _says_nothing(body: list[ast.stmt]) -> bool:
    """Whether a package is a docstring alone."""
    return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body)


def _public_names(body: list[ast.stmt]) -> set[str]:
    names = {name for node in body for name in _defined(node)}
    return {name for name in names if not name.startswith("_")}


def _defined(node: ast.stmt) -> list[str]:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _has_docstring(module: ModuleType, name: str, body: list[ast.stmt]) -> bool:
    """From the source: a dataclass and a named tuple make one up where there is none. Constants need none."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return ast.get_docstring(node) is not None
    value = getattr(module, name)
    is_ours = (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("fed")
    return not is_ours or bool(value.__doc__)


def test_the_package_offers_what_it_lists() -> None:
    for name in fed.__all__:
        assert getattr(fed, name) is not None
    assert set(fed.__all__) <= set(dir(fed))
