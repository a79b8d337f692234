"""Trees of a run's state: the way from named tuples and back, and what is refused with its place."""

from collections import namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fed.errors import InvalidCheckpoint
from fed.storage.serialization import plain, refilled
from tests.fed.storage.random_trees import same, scalars, tensors


class Inner(NamedTuple):
    first: Any
    second: Any


class State(NamedTuple):
    model_P: Any
    kept: tuple[Any, ...]


ends = scalars | tensors()
states = st.recursive(
    ends,
    lambda inner: (
        st.builds(Inner, inner, inner)
        | st.builds(State, inner, st.lists(inner, max_size=2).map(tuple))
        | st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=2)
    ),
    max_leaves=8,
)


@given(states)
def test_what_was_made_plain_is_refilled_to_the_bit(state: Any) -> None:
    tree = plain(state)
    assert "Inner" not in repr(type(tree))
    assert same(refilled(state, tree), state)


def test_named_tuples_become_dicts_of_their_fields_at_any_depth() -> None:
    state = State(torch.ones(2), (None, [Inner(1, {"a": Inner(2, 3)})]))
    tree = plain(state)
    assert tree["model_P"] is state.model_P
    assert tree["kept"] == (None, [{"first": 1, "second": {"a": {"first": 2, "second": 3}}}])


def test_fields_go_by_name_not_by_place() -> None:
    assert refilled(State(0, ()), {"kept": (), "model_P": 7}) == State(7, ())


@pytest.mark.parametrize(("template", "tree"), [(None, torch.ones(3)), (torch.ones(3), None), (None, 4), (4, None)])
def test_entries_may_appear_and_disappear(template: Any, tree: Any) -> None:
    assert refilled(Inner(template, 0), {"first": tree, "second": 1}).first is tree


def test_tensors_go_to_where_the_templates_are() -> None:
    template = State(torch.zeros(2, device="meta"), ())
    assert refilled(template, {"model_P": torch.ones(2), "kept": ()}).model_P.device.type == "meta"


Other = namedtuple("Other", ["model_P"])


@pytest.mark.parametrize(
    ("template", "tree", "message"),
    [
        (
            Other(0),
            {"model": 0},
            r"^state must have the shape of a Other of model_P, got a dict of 'model': resume with",
        ),
        (Other(0), {"model_P": 0, "more": 1}, r"got a dict of 'model_P', 'more'"),
        (Other(0), (0,), r"got a tuple of 1"),
        (
            Other((0, 0)),
            {"model_P": (0,)},
            r"^state\['model_P'\] must have the shape of a tuple of 2, got a tuple of 1",
        ),
        (Other((0,)), {"model_P": [0]}, r"shape of a tuple of 1, got a list of 1"),
        ([{"a": 1}], [{1: 1}], r"^state\[0\] must have the shape of a dict of 'a', got a dict of 1"),
        (torch.ones(2), torch.ones(3), r"a float32 tensor \[2\], got a float32 tensor \[3\]"),
        (torch.ones(2), torch.ones(2).double(), r"a float32 tensor \[2\], got a float64 tensor \[2\]"),
        (torch.ones(2), 1.0, r"a float32 tensor \[2\], got float"),
        (1, True, r"shape of int, got bool"),
        (None, (1,), r"shape of NoneType, got a tuple of 1"),
        (torch.ones(()), {}, r"got a dict of nothing"),
        ({}, {str(number): 0 for number in range(9)}, r"'7', …: resume"),
    ],
)
def test_other_shapes_are_refused_with_both_and_the_place(template: Any, tree: Any, message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        refilled(template, tree)


class Odd(dict[str, Tensor]):
    """A dict that does something else."""


@pytest.mark.parametrize("value", [{1, 2}, Odd(), object(), b"bytes", 1j, torch.float32, range(3)])
def test_what_is_no_tree_is_refused_with_its_place(value: Any) -> None:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    with pytest.raises(InvalidCheckpoint, match=rf"got a {kind} at state\['kept'\]\[1\]: keep its parts as these"):
        plain(State(None, (0, value)))
