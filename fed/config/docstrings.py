"""Docstrings in Google's style, parsed: a callable's first line, and the text of each argument."""

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

__all__ = ["arguments", "attributes", "body", "summary"]

_ENTRY = re.compile(r"(?P<indent> +)\*{0,2}(?P<name>\w+)(?: \([^)]*\))?: +(?P<text>\S.*)")


def summary(target: Callable[..., Any]) -> str:
    """The first line of a callable's docstring; empty where it has none."""
    return (inspect.getdoc(target) or "").partition("\n")[0]


def body(target: Callable[..., Any]) -> list[str]:
    """The paragraphs between a docstring's first line and its first section, each in one piece.

    Example:
        >>> def step(lr):
        ...     '''A step.
        ...
        ...     Down the
        ...     hill.
        ...
        ...     Args:
        ...         lr: step size.
        ...     '''
        >>> body(step)
        ['Down the hill.']
    """
    paragraphs = (inspect.getdoc(target) or "").split("\n\n")[1:]
    sections = [place for place, part in enumerate(paragraphs) if re.match(r"[A-Z]\w+:(\n|$| those of)", part)]
    end = sections[0] if sections else len(paragraphs)
    return [" ".join(part.split()) for part in paragraphs[:end]]


def arguments(target: Callable[..., Any]) -> dict[str, str]:
    """Texts of the arguments, also of those that a class has from its bases, or a function says to share with another.

    Example:
        >>> def step(lr):
        ...     '''A step.
        ...
        ...     Args:
        ...         lr: step size η,
        ...             above 0.
        ...     '''
        >>> arguments(step)
        {'lr': 'step size η, above 0.'}
    """
    if not inspect.isclass(target):
        text = inspect.getdoc(target) or ""
        shared = re.search(r"^Args: those of :func:`(\w+)`", text, re.MULTILINE)
        return arguments(target.__globals__[shared[1]]) if shared else _entries(text)
    described: dict[str, str] = {}
    for base in reversed(inspect.getmro(target)[:-1]):
        for documented in (base, vars(base).get("__init__")):
            described |= _entries(inspect.cleandoc(getattr(documented, "__doc__", None) or ""))
    return described


@cache
def attributes(kind: type) -> dict[str, str]:
    """Texts below the attributes of a class and of its bases, those that its source can be found of.

    Example:
        >>> from fed.config.experiment import Local
        >>> attributes(Local)["batch_size"]
        'Samples in a batch; the last batch of an epoch may be shorter.'
    """
    described: dict[str, str] = {}
    for base in reversed(inspect.getmro(kind)):
        described |= _own_attributes(base)
    return described


def _own_attributes(kind: type) -> dict[str, str]:
    module = inspect.getmodule(kind)
    return {} if module is None else _attributes_in(module).get(kind.__qualname__, {})


@cache  # inspect finds a class by parsing its module anew each time
def _attributes_in(module: ModuleType) -> dict[str, dict[str, str]]:
    """Texts below the attributes of a module's classes, by their qualified names."""
    try:
        # Python keeps no text below an attribute: it is read from the source, where there is one.
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):  # made at run time
        return {}
    return {name: _texts_of(node) for name, node in reversed([*_classes(tree.body)])}  # the first of a name counts


def _classes(body: Iterable[ast.AST], within: str = "") -> Iterator[tuple[str, ast.ClassDef]]:
    """Classes of a block of statements, with their qualified names."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield f"{within}{node.name}", node
            yield from _classes(node.body, f"{within}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _classes(node.body, f"{within}{node.name}.<locals>.")
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _classes(ast.iter_child_nodes(node), within)


def _texts_of(tree: ast.ClassDef) -> dict[str, str]:
    texts: dict[str, str] = {}
    for part, following in pairwise(tree.body):
        match part, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = inspect.cleandoc(text)
    return texts


def _entries(docstring: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    lines = iter(docstring.splitlines())
    if "Args:" not in (line.rstrip() for line in lines):  # leaves the iterator behind that line
        return entries
    name = ""
    depth = 0
    for line in lines:
        if line.strip() and not line.startswith(" "):
            break
        entry = _ENTRY.fullmatch(line)
        if entry and (not name or len(entry["indent"]) <= depth):
            name = entry["name"]
            depth = len(entry["indent"])
            entries[name] = entry["text"]
        elif name and line.strip():
            entries[name] += f" {line.strip()}"
    return entries
