"""A tree as bytes: its structure in JSON, the numbers of its tensors one after another.

In the structure an object with one key stands for what JSON lacks: ``{"tuple": […]}``, ``{"dict": [[key, value], …]}``,
so that 1 and "1" are two keys; ``{"int": "0x…"}`` beyond 63 bits, ``{"float": "…"}`` of the eight bytes of what is not
finite, ``{"tensor": n}`` the n-th of the tensors. Those stand once each, however often the tree holds them.
"""

import json
import math
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fed.storage.state_trees import Tree, refused

__all__ = ["MOST_LEVELS", "bytes_of", "put_together", "taken_apart"]

MOST_LEVELS = 100
"""How deep a tree may be: JSON is read by recursion, which Python bounds."""

_Path: TypeAlias = tuple[int | str, ...]


def taken_apart(tree: Tree) -> tuple[bytes, list[Tensor]]:
    """The structure of a tree, and the tensors in it.

    Raises:
        InvalidCheckpoint: if it holds something that a tree cannot, or is deeper than ``MOST_LEVELS``.

    Example:
        >>> structure, tensors = taken_apart({"step": 3, 7: (torch.zeros(2, dtype=torch.int8), None)})
        >>> structure.decode()
        '{"tree":{"dict":[["step",3],[7,{"tuple":[{"tensor":0},null]}]]},"tensors":[["int8",[2]]]}'
        >>> put_together(structure, torch.tensor([5, 6], dtype=torch.uint8))
        {'step': 3, 7: (tensor([5, 6], dtype=torch.int8), None)}
    """
    tensors: dict[int, tuple[int, Tensor]] = {}
    described = _described(tree, tensors, ())
    kept = [tensor for _, tensor in tensors.values()]
    shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in kept]
    content = {"tree": described, "tensors": shapes}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass"), kept  # any str, also one that is no text


def _described(tree: Tree, tensors: dict[int, tuple[int, Tensor]], path: _Path) -> Any:
    if len(path) > MOST_LEVELS:
        raise refused(f"more than {MOST_LEVELS} levels", path[:3])
    kind = type(tree)
    if tree is None or kind is bool or kind is str:
        return tree
    if kind is int:
        return tree if -(2**63) <= tree < 2**63 else {"int": hex(tree)}
    if kind is float:
        return tree if math.isfinite(tree) else {"float": struct.pack("<d", tree).hex()}
    if kind is list or kind is tuple:
        parts = [_described(part, tensors, (*path, index)) for index, part in enumerate(tree)]
        return parts if kind is list else {"tuple": parts}
    if kind is dict:
        for key in tree:
            if type(key) is not int and type(key) is not str:
                raise refused(f"the key {key!r}", path)
        pairs = tree.items()
        return {
            "dict": [[_described(key, tensors, path), _described(part, tensors, (*path, key))] for key, part in pairs]
        }
    if isinstance(tree, Tensor) and not (tree.layout != torch.strided or tree.is_quantized or tree.is_meta):
        return {"tensor": tensors.setdefault(id(tree), (len(tensors), tree))[0]}
    raise refused(f"a {kind.__module__}.{kind.__qualname__}", path)


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's numbers in the order of its indices, as they are in memory; copied only if that differs or is a GPU's.

    Example:
        >>> list(bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T))
        [1, 3, 2, 4]
    """
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    row = dense.as_strided((dense.numel(),), (1,))  # a lone number may have any stride, which a view refuses
    data: memoryview = row.view(torch.uint8).numpy().data
    return data


def put_together(structure: bytes, content: Tensor) -> Tree:
    """The tree that was taken apart; its tensors are on the CPU, each with memory of its own.

    Args:
        structure: as :func:`taken_apart` gave it.
        content: uint8 [size], the :func:`bytes_of` all its tensors.

    Raises:
        ValueError: if the two are not of one tree.
    """
    described = json.loads(structure.decode("utf-8", "surrogatepass"))
    tensors, offset = [], 0
    for name, shape in described["tensors"]:
        dtype = getattr(torch, name)
        size = math.prod(shape) * dtype.itemsize
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
