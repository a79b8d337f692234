"""Trees of plain containers: the form of a state in a checkpoint, made from named tuples and turned back into them."""

from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import Tensor

from fed.errors import InvalidCheckpoint

__all__ = ["Tree", "plain", "refilled", "refused"]

Tree: TypeAlias = Any
"""Dicts with keys of int or str, lists and tuples of trees; their leaves are tensors, int, float, bool, str and None.

The type is Any because type checkers do not take a dict of something narrower for a dict of trees.
"""

_Path: TypeAlias = tuple[int | str, ...]
_SCALARS = (bool, int, float, str, type(None))


def plain(state: Any, path: _Path = ()) -> Tree:
    """The tree of a state: a named tuple becomes a dict of its fields.

    Args:
        state: named tuples, tuples, lists and dicts, nested at will, of tensors, numbers, str and None.
        path: where it stands in a larger state, for messages.

    Raises:
        InvalidCheckpoint: if it holds something else.

    Example:
        >>> from collections import namedtuple
        >>> State = namedtuple("State", ["model_P", "kept"])
        >>> plain(State(1.5, (None, State(2, ()))))
        {'model_P': 1.5, 'kept': (None, {'model_P': 2, 'kept': ()})}
    """
    # exact types: NumPy's float64 is a float, and no plain one
    if isinstance(state, Tensor) or type(state) in _SCALARS:
        return state
    if _is_named(state):
        return {name: plain(part, (*path, name)) for name, part in zip(state._fields, state, strict=True)}
    if type(state) is dict:
        return {key: plain(part, (*path, key)) for key, part in state.items()}
    if type(state) in (tuple, list):
        return type(state)([plain(part, (*path, index)) for index, part in enumerate(state)])
    raise refused(f"a {type(state).__module__}.{type(state).__qualname__}", path)


def refilled(template: Any, tree: Tree, path: _Path = ()) -> Any:
    """The state that :func:`plain` made a tree of, with the named tuples of another state of the same algorithm.

    Args:
        template: a state with the same named tuples, fields, lengths and keys, and tensors of the same shapes and
            types. None matches any tensor or number, and is matched by it. An empty tensor matches any shape.
        tree: the content. Its tensors move to the devices of the template's.
        path: where both stand in a larger state, for messages.

    Raises:
        InvalidCheckpoint: if the shapes differ.

    Example:
        >>> from collections import namedtuple
        >>> State = namedtuple("State", ["model_P", "kept"])
        >>> refilled(State(0.0, (None,)), {"model_P": 1.5, "kept": (7,)})
        State(model_P=1.5, kept=(7,))
    """
    if _is_named(template):
        _check(type(tree) is dict and tree.keys() == set(template._fields), template, tree, path)
        pairs = zip(template._fields, template, strict=True)
        return type(template)._make([refilled(part, tree[name], (*path, name)) for name, part in pairs])
    if type(template) is dict:
        _check(type(tree) is dict and tree.keys() == template.keys(), template, tree, path)
        return {key: refilled(part, tree[key], (*path, key)) for key, part in template.items()}
    if type(template) in (tuple, list):
        _check(type(tree) is type(template) and len(tree) == len(template), template, tree, path)
        pairs_of = enumerate(zip(template, tree, strict=True))
        return type(template)([refilled(*pair, (*path, index)) for index, pair in pairs_of])
    _check(_is_end(tree) and (template is None or tree is None or _alike(template, tree)), template, tree, path)
    return tree.to(template.device) if isinstance(template, Tensor) and isinstance(tree, Tensor) else tree


def _is_named(state: Any) -> bool:
    return isinstance(state, tuple) and hasattr(state, "_fields")


def _is_end(tree: Tree) -> bool:
    return isinstance(tree, Tensor) or type(tree) in _SCALARS


def _alike(template: Any, tree: Tree) -> bool:
    if isinstance(template, Tensor) and isinstance(tree, Tensor):
        return (template.shape == tree.shape or not template.numel()) and template.dtype == tree.dtype
    return type(template) is type(tree)


def _check(holds: bool, template: Any, tree: Tree, path: _Path) -> None:
    if not holds:
        raise InvalidCheckpoint(
            f"{_place(path)} must have the shape of {_described(template)}, got {_described(tree)}: resume with the "
            "experiment and the code that wrote it"
        )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor {list(value.shape)}"
    if _is_named(value):
        return f"a {type(value).__name__} of {_listed(value._fields)}"
    if type(value) is dict:
        return f"a dict of {_listed(map(repr, value))}"
    return f"a {type(value).__name__} of {len(value)}" if type(value) in (tuple, list) else type(value).__name__


def _listed(names: Iterable[str], most: int = 8) -> str:
    shown = list(names)
    return ", ".join(shown[:most]) + (", …" if len(shown) > most else "") if shown else "nothing"


def refused(found: str, path: _Path) -> InvalidCheckpoint:
    """The error for a value that no checkpoint can hold; it names its place in the state."""
    return InvalidCheckpoint(
        "a state to keep must be of dense tensors, int, float, bool, str and None, in tuples, lists and dicts with "
        f"keys of int or str, got {found} at {_place(path)}: keep its parts as these"
    )


def _place(path: _Path) -> str:
    return "state" + "".join(f"[{key!r}]" for key in path)
