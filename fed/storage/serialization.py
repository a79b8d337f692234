"""Serialization of trees: the structure in JSON, then the numbers of all tensors.

In the structure an object with one key stands for what JSON lacks: ``{"tuple": […]}``; ``{"dict": [[key, value], …]}``,
which keeps 1 and "1" apart; ``{"int": "0x…"}`` beyond 63 bits; ``{"float": "…"}`` with the eight bytes of a number that
is not finite; ``{"tensor": n}`` for the n-th tensor. A tensor that occurs several times is stored once.
"""

import json
import math
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fed.storage.state_trees import Tree, refused

__all__ = ["MOST_LEVELS", "bytes_of", "join_tree", "split_tree"]

MOST_LEVELS = 100
"""The greatest depth of a tree: JSON is read by recursion, which Python bounds."""

_Path: TypeAlias = tuple[int | str, ...]


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
        raise refused(f"more than {MOST_LEVELS} levels", path[:3])
    kind = type(tree)  # exact types: a subclass would come back as its base
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
        # the dict keeps the tensor alive, and with it its id
        return {"tensor": tensors.setdefault(id(tree), (len(tensors), tree))[0]}
    raise refused(f"a {kind.__module__}.{kind.__qualname__}", path)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's numbers, in the order of its indices.

    They are copied only if the memory has another order, or is a GPU's.

    Example:
        >>> list(bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T))
        [1, 3, 2, 4]
    """
    # lazy conjugation and negation are flags that the bytes do not have
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    row = dense.as_strided((dense.numel(),), (1,))  # a single number may have any stride, which view refuses
    data: memoryview = row.view(torch.uint8).numpy().data
    return data


def join_tree(structure: bytes, content: Tensor) -> Tree:
    """Join a tree from its structure and its tensors' bytes. Each tensor is on the CPU, with memory of its own.

    Args:
        structure: as :func:`split_tree` gave it.
        content: uint8 [size], :func:`bytes_of` all its tensors.

    Raises:
        ValueError: if structure and bytes are not of the same tree.
    """
    described = json.loads(structure.decode("utf-8", "surrogatepass"))
    tensors, offset = [], 0
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
