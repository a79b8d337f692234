"""Serialization of states: named tuples as trees of plain containers, and a tree as JSON and its tensors' numbers.

In the JSON an object with one key stands for what JSON lacks: ``{"tuple": […]}``; ``{"dict": [[key, value], …]}``,
which keeps 1 and "1" apart; ``{"int": "0x…"}`` beyond 63 bits; ``{"float": "…"}`` with the eight bytes of a number that
is not finite; ``{"tensor": n}`` for the n-th tensor. A tensor that occurs several times is stored once.
"""

import json
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from fed.errors import InvalidCheckpoint
from fed.vectors.tensors import Tensor, torch

__all__ = ["MOST_LEVELS", "Tree", "bytes_of", "join_tree", "plain", "refilled", "split_tree"]

Tree: TypeAlias = Any
"""Dicts with keys of int or str, lists and tuples of trees; their leaves are tensors, int, float, bool, str and None.

The type is Any because type checkers do not take a dict of something narrower for a dict of trees.
"""

_Path: TypeAlias = tuple[int | str, ...]
MOST_LEVELS = 100
"""Greatest depth of a tree: JSON is read by recursion, which Python bounds."""

_MOST_SHOWN = 8  # names of fields in an error
_SCALARS = (bool, int, float, str, type(None))


def plain(state: Any, path: _Path = ()) -> Tree:
    """The tree of a state: a named tuple becomes a dict of its fields.

    Args:
        state: state of named tuples, tuples, lists and dicts, nested at will, with tensors, numbers, str and None in
            them.
        path: place of the state in a larger one, for the error.

    Raises:
        InvalidCheckpoint: if it holds something else.

    Example:
        >>> from collections import namedtuple
        >>> State = namedtuple("State", ["model_P", "kept"])
        >>> plain(State(1.5, (None, State(2, ()))))
        {'model_P': 1.5, 'kept': (None, {'model_P': 2, 'kept': ()})}
    """
    # Exact types: NumPy's float64 is a float, and no plain one.
    if isinstance(state, Tensor) or type(state) in _SCALARS:
        return state
    if _is_named(state):
        return {name: plain(part, (*path, name)) for name, part in zip(state._fields, state, strict=True)}
    if type(state) is dict:
        return {key: plain(part, (*path, key)) for key, part in state.items()}
    if type(state) in (tuple, list):
        return type(state)([plain(part, (*path, index)) for index, part in enumerate(state)])
    raise _refused(f"a {type(state).__module__}.{type(state).__qualname__}", path)


def refilled(template: Any, tree: Tree, path: _Path = ()) -> Any:
    """The state that :func:`plain` made a tree of, with the named tuples of another state of the same algorithm.

    Args:
        template: state with the same named tuples, fields, lengths and keys, and tensors of the same shapes and types.
            None matches any tensor or number, and is matched by it. An empty tensor matches any shape.
        tree: content of the state. Its tensors move to the devices of the template's tensors.
        path: place of both in a larger state, for the error.

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
            f"{_place(path)} must have the shape of {_worded(template)}, got {_worded(tree)}: resume with the "
            "experiment and the code that wrote it"
        )


def _worded(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor {list(value.shape)}"
    if _is_named(value):
        return f"a {type(value).__name__} of {_listed(value._fields)}"
    if type(value) is dict:
        return f"a dict of {_listed(map(repr, value))}"
    return f"a {type(value).__name__} of {len(value)}" if type(value) in (tuple, list) else type(value).__name__


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    if not shown:
        return "nothing"
    return ", ".join(shown[:_MOST_SHOWN]) + (", …" if len(shown) > _MOST_SHOWN else "")


def _refused(found: str, path: _Path) -> InvalidCheckpoint:
    """The error for a value that no checkpoint can hold; it names its place in the state."""
    return InvalidCheckpoint(
        "a state to keep must be of dense tensors, int, float, bool, str and None, in tuples, lists and dicts with "
        f"keys of int or str, got {found} at {_place(path)}: keep its parts as these"
    )


def _place(path: _Path) -> str:
    return "state" + "".join(f"[{key!r}]" for key in path)


def split_tree(tree: Tree) -> tuple[bytes, list[Tensor]]:
    """Split a tree into its structure and its tensors.

    Raises:
        InvalidCheckpoint: if it holds something that a tree cannot, or is deeper than ``MOST_LEVELS``.

    Example:
        >>> structure, tensors = split_tree({"step": 3, 7: (torch.zeros(2, dtype=torch.int8), None)})
        >>> structure.decode()
        '{"tree":{"dict":[["step",3],[7,{"tuple":[{"tensor":0},null]}]]},"tensors":[["int8",[2]]]}'
        >>> join_tree(structure, torch.tensor([5, 6], dtype=torch.uint8))
        {'step': 3, 7: (tensor([5, 6], dtype=torch.int8), None)}
    """
    tensors: dict[int, tuple[int, Tensor]] = {}
    described = _described(tree, tensors, ())
    kept = [tensor for _, tensor in tensors.values()]
    shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in kept]
    content = {"tree": described, "tensors": shapes}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass"), kept  # any str, even one that is no valid text


def _described(tree: Tree, tensors: dict[int, tuple[int, Tensor]], path: _Path) -> Any:
    if len(path) > MOST_LEVELS:
        raise _refused(f"more than {MOST_LEVELS} levels", path[:3])
    kind = type(tree)  # exact types: a subclass would come back as its base
    if tree is None or kind is bool or kind is str:
        return tree
    if kind is int:
        # Readers of JSON in other languages have 64 bits for an integer.
        return tree if -(2**63) <= tree < 2**63 else {"int": hex(tree)}
    if kind is float:
        # With all eight bytes, since a NaN carries a payload that the bits of a run include.
        return tree if math.isfinite(tree) else {"float": struct.pack("<d", tree).hex()}
    if kind is list or kind is tuple:
        parts = [_described(part, tensors, (*path, index)) for index, part in enumerate(tree)]
        return parts if kind is list else {"tuple": parts}
    if kind is dict:
        for key in tree:
            if type(key) is not int and type(key) is not str:
                raise _refused(f"the key {key!r}", path)
        pairs = tree.items()
        return {
            "dict": [[_described(key, tensors, path), _described(part, tensors, (*path, key))] for key, part in pairs]
        }
    if isinstance(tree, Tensor) and not (tree.layout != torch.strided or tree.is_quantized or tree.is_meta):
        # The dict keeps the tensor alive, and with it its id.
        return {"tensor": tensors.setdefault(id(tree), (len(tensors), tree))[0]}
    raise _refused(f"a {kind.__module__}.{kind.__qualname__}", path)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's numbers, in the order of its indices.

    They are copied only if the memory has another order, or is a GPU's.

    Example:
        >>> list(bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T))
        [1, 3, 2, 4]
    """
    # lazy conjugation and negation are flags that the bytes do not have
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    row = tensor.as_strided((tensor.numel(),), (1,))  # a single number may have any stride, which view refuses
    data: memoryview = row.view(torch.uint8).numpy().data
    return data


def join_tree(structure: bytes, content: Tensor) -> Tree:
    """Join a tree from its structure and its tensors' bytes. Each tensor is on the CPU, with memory of its own.

    Args:
        structure: structure from :func:`split_tree`.
        content: :func:`bytes_of` all tensors one after the other, uint8 [size].

    Raises:
        ValueError: if structure and bytes are not of the same tree.
    """
    described = json.loads(structure.decode("utf-8", "surrogatepass"))
    tensors = []
    offset = 0
    for name, shape in described["tensors"]:
        dtype = getattr(torch, name)
        size = math.prod(shape) * dtype.itemsize
        # A view would keep the whole content in memory, and its offset may not suit the type.
        tensors.append(content[offset : offset + size].clone().view(dtype).view(shape))
        offset += size
    if offset != len(content):
        raise ValueError(f"tensors must take {offset} bytes, got {len(content)}")
    return _restored(described["tree"], tensors)


def _restored(described: Any, tensors: Sequence[Tensor]) -> Tree:
    if isinstance(described, list):
        return [_restored(part, tensors) for part in described]
    if not isinstance(described, dict):
        return described
    ((kind, content),) = described.items()
    if kind == "tuple":
        return tuple(_restored(part, tensors) for part in content)
    if kind == "dict":
        return {_restored(key, tensors): _restored(part, tensors) for key, part in content}
    if kind == "tensor":
        return tensors[content]
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return struct.unpack("<d", bytes.fromhex(content))[0]
    raise ValueError(f"no tree holds {kind!r}")
