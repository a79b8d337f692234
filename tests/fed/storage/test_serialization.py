"""A tree as bytes: nothing is lost, nothing is made up."""

import math
import struct
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from fed.errors import InvalidCheckpoint
from fed.storage.serialization import MOST_LEVELS, Tree, bytes_of, join_tree, split_tree
from tests.fed.storage.random_trees import same, trees


def again(tree: Tree) -> Tree:
    structure, tensors = split_tree(tree)
    content = b"".join(bytes_of(tensor) for tensor in tensors)
    return join_tree(structure, torch.tensor(list(content), dtype=torch.uint8))


@given(trees)
def test_what_is_join_tree_is_what_was_split_tree(tree: Tree) -> None:
    assert same(again(tree), tree)


NAN_WITH_A_LOAD = struct.unpack("<d", bytes.fromhex("efbeadde0000f8ff"))[0]


@pytest.mark.parametrize(
    "value",
    [
        *(math.inf, -math.inf, math.nan, NAN_WITH_A_LOAD, -0.0, 0.0, 5e-324, 1.7976931348623157e308, 0.1),
        *(2**63, 2**63 - 1, -(2**63), -(2**63) - 1, 2**128 + 1, 10**5000, -(10**5000), 0),
        *(True, False, None, "", "ü", "\0", "\ud800\udc00", "\ud800", '"}', "null"),
        *({}, [], (), ((),), [[]], {"": {}}, {1: "a", "1": "b"}, {2**70: 0}, {"tuple": [1]}, {"tensor": 0}),
        *((True, 1, 1.0), {0: False, "0": 0}, {"b": 1, "a": 2}),
    ],
    ids=lambda value: f"{type(value).__name__} {str(value)[:12]!a}" if not isinstance(value, int) else "int",
)
def test_every_value_comes_back_to_the_bit(value: Any) -> None:
    assert same(again({"in": [value, (value,)]}), {"in": [value, (value,)]})


def test_lazily_conjugated_and_negated_tensors_round_trip() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    for one in (tensor.conj(), tensor.conj().imag, torch.nn.Parameter(tensor).conj()):
        assert torch.equal(again(one), one)


def test_tensors_come_back_with_memory_of_their_own_without_gradients() -> None:
    whole = torch.zeros(4, requires_grad=True)
    first, second = again([whole[:3], whole[1:]])
    first += 1
    assert (first.tolist(), second.tolist(), first.requires_grad) == ([1, 1, 1], [0, 0, 0], False)


def test_a_shared_tensor_is_stored_once_and_stays_shared() -> None:
    model = torch.zeros(1000)
    tree = {"tasks": [(number, model) for number in range(50)], "other": model.clone()}
    assert sum(tensor.numel() for tensor in split_tree(tree)[1]) == 2000
    back = again(tree)
    assert all(started is back["tasks"][0][1] for _, started in back["tasks"])
    assert back["other"] is not back["tasks"][0][1]


def nested(levels: int) -> Tree:
    tree: Tree = 1
    for level in range(levels):
        tree = {0: tree} if level % 2 else (tree,)
    return tree


def test_trees_are_as_deep_as_they_say_and_no_deeper() -> None:
    assert same(again(nested(MOST_LEVELS)), nested(MOST_LEVELS))
    loop: list[Any] = []
    loop.append(loop)
    for tree in (nested(MOST_LEVELS + 1), loop):
        with pytest.raises(InvalidCheckpoint, match=f"got more than {MOST_LEVELS} levels at state"):
            split_tree(tree)


Pair = namedtuple("Pair", ["a"])


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.float64(1), "a numpy.float64"),
        (np.arange(3), "a numpy.ndarray"),
        (b"", "a builtins.bytes"),
        (Pair(1), "a .*Pair"),
        ({True: 1}, "the key True"),
        ({None: 1}, "the key None"),
        ({1.0: 1}, "the key 1.0"),
        ({(1,): 1}, r"the key \(1,\)"),
        (torch.eye(2).to_sparse(), "a torch.Tensor"),
        (torch.ones(2, device="meta"), "a torch.Tensor"),
    ],
    ids=str,
)
def test_what_is_no_tree_is_refused_with_its_place(value: Any, found: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=rf"got {found} at state\['clients'\]\[3\]: keep its parts"):
        split_tree({"clients": {3: value}})


@pytest.mark.parametrize("size", [7, 9])
def test_tensors_of_another_size_are_refused(size: int) -> None:
    structure, _ = split_tree([torch.zeros(2)])
    with pytest.raises((ValueError, RuntimeError)):
        join_tree(structure, torch.zeros(size, dtype=torch.uint8))


def test_an_unknown_kind_of_part_is_refused() -> None:
    with pytest.raises(ValueError, match="no tree holds 'python/object'"):
        join_tree(b'{"tree":{"python/object":"os.system"},"tensors":[]}', torch.empty(0, dtype=torch.uint8))
