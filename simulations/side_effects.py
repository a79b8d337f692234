"""Side effects of a model's forward pass, which batched clients would share."""

import contextlib
import copy
import pickle
import random
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from fed.clients.training.reading import called
from fed.vectors import trees
from fed.vectors.fixed_part import in_training
from fed.vectors.tensors import Tensor, nn, torch
from fed.vectors.trees import Tree

__all__ = ["changed_by_forward"]


def changed_by_forward(module: "nn.Module", inputs: Tree) -> str | None:
    """Name of what a forward pass in training changes; None where it changes nothing.

    It may be a parameter, a buffer, another attribute, or a random generator of Python's or NumPy's.

    Args:
        module: model, which is only read.
        inputs: samples [n, ...], or a tree of them; a copy of the model computes the outputs of the first two.

    Example:
        >>> changed_by_forward(nn.BatchNorm1d(3), torch.zeros(2, 3))
        'running_var'
    """
    # In training mode, where BatchNorm and the like change their buffers.
    tried = in_training(copy.deepcopy(module).cpu())
    before = {name: part.clone() for name, part in _tensors(tried)}
    attributes = {name: _attributes(part) for name, part in tried.named_modules()}
    drawn = _drawn()
    with torch.no_grad(), contextlib.suppress(Exception):  # the first step of the loop will raise it again
        # Two, for BatchNorm refuses one.
        called(tried, trees.mapped(lambda leaf: leaf[:2].clone(), inputs))
    if drawn != _drawn():
        return "the state of Python's or NumPy's random generator"
    for name, part in _tensors(tried):
        if name not in before or not torch.equal(part, before[name]):
            return name
    for name, part in tried.named_modules():
        known = attributes.get(name, {})
        changed = [key for key, value in _attributes(part).items() if known.get(key) != value]
        if changed:
            return ".".join(filter(None, (name, changed[0])))
    return None


def _drawn() -> tuple[object, bytes]:
    """States of the random generators of Python and NumPy."""
    # As bytes: == of NumPy's state would compare its array elementwise.
    return random.getstate(), pickle.dumps(np.random.get_state())


def _tensors(module: "nn.Module") -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _attributes(module: "nn.Module") -> dict[str, Any]:
    """Attributes of a module beside parameters, buffers and other modules, in a form that can be compared."""
    others = ("_parameters", "_buffers", "_modules")
    return {key: _form(value) for key, value in vars(module).items() if key not in others}


def _form(value: object, depth: int = 3) -> object:
    """Form of a value that can be compared: a plain value itself, a generator's state, a list of parts, else the id."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, Tensor):
        return id(value), value._version  # the version counts changes in place
    if depth and isinstance(value, Mapping):
        return [(_form(key, depth - 1), _form(part, depth - 1)) for key, part in value.items()]
    if depth and isinstance(value, (list, tuple, deque)):
        return [_form(part, depth - 1) for part in value]
    return id(value)
