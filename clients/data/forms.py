"""Forms of samples as a text, by which nodes and server compare trees before any sample is seen.

Shapes: see :mod:`fed.vectors.layout`.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from fed.clients.data.held import Pair
from fed.clients.data.samples import pattern_of
from fed.errors import InvalidData
from fed.vectors import trees
from fed.vectors.tensors import Tensor, torch
from fed.vectors.trees import Ragged, Tree

__all__ = ["DTYPES", "check_form", "form_of", "is_plain", "zeros_of"]

DTYPES = ("float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64")
"""Types of which samples may be where nodes and server compare them."""

_MOST_NUMBERS = 1 << 28  # of all leaves of a sample
_MOST_DEPTH = 16
_STAND_IN_LENGTH = 2  # of a sample that may have any length
_LEAF = re.compile(r"(\w{1,20})\[((?:\d{1,12}|\*)(?:,\d{1,12}){0,15})?\]")


def is_plain(pair: Pair) -> bool:
    """True for a pair of two tensors, which needs no form."""
    return all(isinstance(part, Tensor) for part in pair)


def form_of(held: Any) -> str:
    """Form of samples: JSON with ``dtype[shape]`` of a sample in the place of each tensor, * for any length.

    Args:
        held: pair in memory, or samples on demand.

    Returns:
        The form; empty for a pair of two tensors.

    Example:
        >>> pair = {"ids": Ragged.of([torch.tensor([1, 2])]), "age": torch.zeros(1)}, None
        >>> form_of(pair)
        '[{"age":"float32[]","ids":"int64[*]"},null]'
    """
    pair = pattern_of(held)
    if is_plain(pair):
        return ""
    return json.dumps(trees.mapped(_leaf, pair), sort_keys=True, separators=(",", ":"))


def _leaf(leaf: Any) -> str:
    shape = ["*", *leaf.values_T.shape[1:]] if isinstance(leaf, Ragged) else leaf.shape[1:]
    return f"{str(leaf.dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"


@dataclass(frozen=True)
class _Leaf:
    """Type and shape of one tensor of a sample, in whose shape a length that may be any is 2."""

    dtype: str
    shape: tuple[int, ...]
    has_lengths: bool


def check_form(form: str) -> None:
    """Check a form that another machine has said; no memory is claimed for it.

    Raises:
        InvalidData: if the form is none, or a sample of it is too large.
    """
    _read(form)


def zeros_of(form: str, samples: int) -> Pair:
    """Zeros in the place of samples of a form, by which a server without data makes the model.

    Args:
        form: form that a node has said.
        samples: number of samples.

    Raises:
        InvalidData: if the form is none, or a sample of it is too large.
    """
    inputs, targets = _read(form)

    def zeros(leaf: _Leaf) -> trees.Leaf:
        made = torch.zeros(samples, *leaf.shape, dtype=getattr(torch, leaf.dtype))
        return Ragged.of([*made]) if leaf.has_lengths else made

    return trees.mapped(zeros, inputs), trees.mapped(zeros, targets)


def _read(form: str) -> tuple[Tree, Tree]:
    """Trees of :class:`_Leaf` of the inputs and the targets."""
    try:
        inputs, targets = json.loads(form)
    except (ValueError, TypeError, RecursionError):
        raise InvalidData("the form of samples must be JSON of inputs and targets") from None
    read = _parsed(inputs), _parsed(targets)
    numbers = sum(math.prod(leaf.shape) for part in read for leaf in trees.leaves(part))
    if not 0 < numbers <= _MOST_NUMBERS:
        raise InvalidData(f"a sample must have 1 to {_MOST_NUMBERS} numbers, got none or more")
    return read


def _parsed(form: Any, depth: int = 0) -> Tree:
    if depth > _MOST_DEPTH:
        raise InvalidData(f"the form of samples must be nested {_MOST_DEPTH} deep at most, got more")
    if form is None:
        return None
    if isinstance(form, dict):
        return {key: _parsed(part, depth + 1) for key, part in form.items()}
    if isinstance(form, list):
        return tuple(_parsed(part, depth + 1) for part in form)
    found = _LEAF.fullmatch(form) if isinstance(form, str) else None
    if found is None or found[1] not in DTYPES:
        raise InvalidData(f"tensors of samples must be of one of {', '.join(DTYPES)}, got {str(form)[:40]!r}")
    sizes = found[2] or ""
    shape = tuple(int(size) for size in sizes.replace("*", str(_STAND_IN_LENGTH)).split(",") if size)
    return _Leaf(found[1], shape, has_lengths=sizes.startswith("*"))
