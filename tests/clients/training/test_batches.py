"""How samples are cut into steps, over many sizes.

Shapes: N, a client's samples.
"""

from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fed.clients.training.batches import Batches, GroupSteps
from fed.config.experiment import Local

tasks = st.tuples(
    st.integers(1, 60),
    st.integers(1, 20),
    st.integers(1, 4),
    st.one_of(
        st.fixed_dictionaries({"epochs": st.integers(1, 4)}), st.fixed_dictionaries({"steps": st.integers(1, 30)})
    ),
    st.booleans(),
)
Task = tuple[int, int, int, dict[str, Any], bool]


def batches_of(task: Task) -> Batches:
    samples, batch_size, accumulate, length, never_single = task
    return Batches(Local(batch_size=batch_size, accumulate=accumulate, **length), samples, never_single)


@given(tasks)
def test_epoch_steps_have_one_size_but_the_last(task: Task) -> None:
    samples, batch_size, accumulate, _, never_single = task
    sizes = batches_of(task).sizes
    assert sum(sizes) == samples
    assert all(size == batch_size * accumulate for size in sizes[:-1])
    assert 1 <= sizes[-1] <= batch_size * accumulate + never_single
    assert not (never_single and samples > 1 and batch_size * accumulate > 1 and 1 in sizes)


@given(tasks)
def test_step_batches_have_one_size_but_the_last(task: Task) -> None:
    _, batch_size, accumulate, _, never_single = task
    batches = batches_of(task)
    assert batches.of_epoch == [part for parts in batches.within for part in parts]
    for step, parts in zip(batches.sizes, batches.within, strict=True):
        assert sum(parts) == step
        assert len(parts) <= accumulate
        assert all(part == batch_size for part in parts[:-1])
        assert 1 <= parts[-1] <= batch_size + never_single
        assert not (never_single and batch_size > 1 and step > 1 and 1 in parts)


@given(tasks)
def test_epochs_or_steps_determine_a_tasks_work(task: Task) -> None:
    _, _, _, length, _ = task
    batches = batches_of(task)
    assert batches.steps == length.get("steps", length.get("epochs", 0) * len(batches.sizes))
    orders = list(batches.orders(np.random.default_rng(0)))
    steps = list(islice(chain.from_iterable(batches.sizes for _ in orders), batches.steps))
    assert len(steps) == batches.steps
    assert sum(steps) == batches.seen
    assert len(orders) == -(-batches.steps // len(batches.sizes)), "no order is drawn that no step takes"


@given(tasks, st.integers(0, 2**32))
def test_orders_are_permutations_unless_batches_are_full(task: Task, seed: int) -> None:
    samples = task[0]
    batches, ours, theirs = batches_of(task), np.random.default_rng(seed), np.random.default_rng(seed)
    for order_N in batches.orders(ours):
        assert order_N.dtype == np.int64
        expected_N = np.arange(samples) if batches.keeps_order else theirs.permutation(samples)
        assert (order_N == expected_N).all()
    assert ours.integers(2**62) == theirs.integers(2**62), "nothing else is drawn"


@pytest.mark.parametrize(
    ("samples", "keys", "keeps"),
    [
        (4, {"batch_size": 4}, True),
        (5, {"batch_size": 4}, False),
        (3, {"batch_size": 2, "accumulate": 2}, False),
        (2, {"batch_size": 2, "accumulate": 2}, True),
    ],
)
def test_the_order_is_kept_only_where_it_means_nothing(samples: int, keys: dict[str, Any], keeps: bool) -> None:
    assert Batches(Local(**keys), samples).keeps_order is keeps


def test_last_single_sample_joins_the_step_before_if_required() -> None:
    alone, joined = (Batches(Local(batch_size=4), 9, never_single) for never_single in (False, True))
    assert (alone.sizes, joined.sizes) == ([4, 4, 1], [4, 5])
    assert Batches(Local(batch_size=4), 5, never_single=True).keeps_order, "5 samples, all in one step"
    assert Batches(Local(batch_size=4), 1, never_single=True).sizes == [1]


def test_kept_blocks_are_of_the_same_sizes_and_places() -> None:
    steps = GroupSteps(Local(batch_size=32), torch.device("cpu"), torch.float32)
    short, long = steps.plan(10, 2), steps.plan(20, 5)
    orders = [lambda: np.random.default_rng(0)] * 2
    groups = ([short, long], [1, 0]), ([long, short], [0, 1]), ([short, short], [0, 1])
    found = [steps.blocks(plans, orders, rows) for plans, rows in groups]
    seen = [[{*block.index_E[0].view(2, -1)[row].tolist()} for row in range(2)] for (block,) in map(list, found)]
    assert seen[0] == [{*range(10, 30)}, {*range(10)}]
    assert seen[1] == [{*range(20)}, {*range(20, 30)}]
    assert seen[2] == [{*range(10)}, {*range(10, 20)}]
    assert all(steps.blocks(plans, orders, rows) is kept for (plans, rows), kept in zip(groups, found, strict=True))
