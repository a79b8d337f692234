"""Syntax trees of the project's files, each parsed once for all tests that look at it."""

import ast
from functools import cache
from pathlib import Path

__all__ = ["tree_of"]


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file that does not change any more; nobody may change the tree."""
    return ast.parse(path.read_text())
