"""Workers where they pay: the bound against schedules played step by step, and the border on both sides."""

import heapq
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fed.simulations import speed_up
from fed.simulations.speed_up import RunTimes

# Made-up seconds, of about the size of those in docs/simulation.md.
DIGITS = RunTimes(rounds=1e6, items=5, item_s=0.0003, main_s=0.00008, sending_s=0.0003)
MNIST = RunTimes(rounds=100, items=4, item_s=0.12, main_s=0.001, sending_s=0.0005)
CNN = RunTimes(rounds=200, items=10, item_s=0.032, main_s=0.002, sending_s=0.001)

seconds = st.floats(1e-5, 1.0)
run_times = st.builds(
    RunTimes,
    rounds=st.integers(1, 10_000).map(float),
    items=st.integers(1, 64),
    item_s=seconds,
    main_s=seconds,
    sending_s=seconds,
    evaluation_s=st.floats(0, 1000),
    evaluation_items=st.integers(1, 64),
)


@pytest.mark.parametrize(("times", "workers"), [(DIGITS, 0), (MNIST, 2), (CNN, 2)], ids=["digits", "mnist", "cnn"])
def test_small_items_stay_here_and_large_ones_get_workers(times: RunTimes, workers: int) -> None:
    assert times.workers(most=2, cores=2) == workers


@pytest.mark.parametrize("cores", [2, 8, 64])
def test_border_lies_where_both_sides_of_the_rule_are_equal(cores: int) -> None:
    """With nothing beside the items, R n t = 1.1 (S + R (n / w + 1 − 1 / w) t), solved for R."""
    plain = RunTimes(rounds=1, items=64, item_s=0.1, main_s=0, sending_s=0)
    waves = 64 / cores + 1 - 1 / cores
    border = 1.1 * speed_up._START_S / (0.1 * (64 - 1.1 * waves))
    assert replace(plain, rounds=0.999 * border).workers(cores, cores) == 0
    assert replace(plain, rounds=1.001 * border).workers(cores, cores) == cores


def test_evaluation_alone_pays_if_it_has_several_items() -> None:
    idle = RunTimes(rounds=1, items=2, item_s=0, main_s=0, sending_s=0, evaluation_s=100)
    assert idle.workers(2, 2) == 0
    assert replace(idle, evaluation_items=2).workers(2, 2) == 2


def test_workers_beyond_the_main_processs_pace_are_not_hired() -> None:
    busy = RunTimes(rounds=1000, items=1000, item_s=0.0099, main_s=0.0004, sending_s=0.0001)
    found = busy.workers(64, 64)
    assert found == pytest.approx(0.01 / 0.0005, abs=1)
    assert busy.with_workers_s(64, 64) == busy.with_workers_s(found, 64)


@given(run_times, st.integers(2, 63), st.integers(2, 64))
def test_more_workers_or_cores_are_never_expected_slower(times: RunTimes, workers: int, cores: int) -> None:
    now_s = times.with_workers_s(workers, cores)
    assert times.with_workers_s(workers + 1, cores) <= now_s * (1 + 1e-12)
    assert times.with_workers_s(workers, cores + 1) <= now_s


@given(run_times, st.floats(1, 100))
def test_dearer_sending_never_turns_none_into_some(times: RunTimes, factor: float) -> None:
    dearer = replace(times, sending_s=factor * times.sending_s)
    assert bool(dearer.workers(8, 8)) <= bool(times.workers(8, 8))


@given(run_times, st.floats(1, 100))
def test_longer_runs_never_turn_some_into_none(times: RunTimes, factor: float) -> None:
    longer = replace(times, rounds=factor * times.rounds, evaluation_s=factor * times.evaluation_s)
    assert bool(longer.workers(8, 8)) >= bool(times.workers(8, 8))


@settings(max_examples=50)
@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=40), st.integers(2, 8))
def test_no_schedule_of_unequal_items_exceeds_the_bound(items_s: list[float], workers: int) -> None:
    """Each item goes to the worker that is free first. The mean item is t of the sum, the longest t of the rest."""
    free = [0.0] * workers
    for item_s in items_s:
        heapq.heapreplace(free, free[0] + item_s)
    longest_s = max(items_s)
    times = RunTimes(rounds=1, items=len(items_s), item_s=longest_s, main_s=0, sending_s=0)
    assert max(free) <= (times.with_workers_s(workers, workers) - speed_up._START_S) * (1 + 1e-12)
