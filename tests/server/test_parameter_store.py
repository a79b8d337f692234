"""The store in one thread: against a plain model of it, and each refusal.

A push of one's own power of two names itself: every value tells which pushes it holds.
"""

import math
import threading
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from fed.errors import FedError, InvalidInput, RunFailed, ValueRange
from fed.server.parameter_store import ParameterStore, State
from tests.clocks import HandClock

workers = st.sampled_from(["ann", "bob", 3, 4])
BOUNDS = [0, 1, 2, math.inf]


def filled(bound: float = 0, *registered: int | str) -> ParameterStore:
    store = ParameterStore(bound=bound)
    store.set("w", torch.zeros(3))
    for worker in registered:
        store.register(worker)
    return store


def same(one: State, other: State) -> bool:
    keys = one["values"].keys()
    return (
        (one["bound"], one["slowest"], one["clocks"]) == (other["bound"], other["slowest"], other["clocks"])
        and keys == other["values"].keys()
        and all(torch.equal(one["values"][key], other["values"][key]) for key in keys)
    )


class StoreAgainstModel(RuleBasedStateMachine):
    """Every call does to the store what it does to a table of clocks and two sets of pushes."""

    @initialize(bound=st.sampled_from(BOUNDS))
    def create(self, bound: float) -> None:
        self.bound = bound
        self.store = ParameterStore(bound=bound)
        self.clocks: dict[int | str, int] = {}
        self.floor = 0
        self.made = 0
        self.holds: dict[int | str, int] = {"w": 0, 7: 0}
        self.pushes: list[tuple[int, int]] = []  # (clock, its power of two), to key w
        self.pulls: list[tuple[int, int]] = []  # (clock, what it saw), of key w
        for key in self.holds:
            self.store.set(key, torch.zeros(2, 2, dtype=torch.int64))

    def may_proceed(self, worker: int | str) -> bool:
        return self.clocks[worker] - min(self.clocks.values()) <= self.bound

    def refused(self, call: Callable[[], object], error: type[FedError] = InvalidInput) -> None:
        before = self.store.state()
        with pytest.raises(error):
            call()
        assert same(before, self.store.state())

    @rule(worker=workers)
    def register(self, worker: int | str) -> None:
        if worker in self.clocks:
            return self.refused(lambda: self.store.register(worker))
        self.store.register(worker)
        self.clocks[worker] = min(self.clocks.values(), default=self.floor)
        return None

    @rule(worker=workers)
    def leave(self, worker: int | str) -> None:
        if worker not in self.clocks:
            return self.refused(lambda: self.store.leave(worker))
        self.floor = min(self.clocks.values())
        self.store.leave(worker)
        del self.clocks[worker]
        return None

    @rule(worker=workers)
    def tick(self, worker: int | str) -> None:
        if worker not in self.clocks or not self.may_proceed(worker):
            return self.refused(lambda: self.store.tick(worker))
        self.store.tick(worker)
        self.clocks[worker] += 1
        return None

    @rule(worker=workers, key=st.sampled_from(["w", 7]))
    def push(self, worker: int | str, key: int | str) -> None:
        power = 2**self.made
        pushed = torch.full((2, 2), power)
        if worker not in self.clocks or not self.may_proceed(worker):
            return self.refused(lambda: self.store.push(key, pushed, worker=worker))
        self.store.push(key, pushed, worker=worker)
        pushed.zero_()  # the sender's tensor is its own again
        self.made += 1
        self.holds[key] += power
        if key == "w":
            self.pushes.append((self.clocks[worker], power))
        return None

    @rule(worker=workers)
    def pull(self, worker: int | str) -> None:
        if worker not in self.clocks:
            return self.refused(lambda: self.store.pull("w", worker=worker, timeout_s=0))
        if not self.may_proceed(worker):
            return self.refused(lambda: self.store.pull("w", worker=worker, timeout_s=0), RunFailed)
        seen = self.store.pull("w", worker=worker)
        assert torch.equal(seen, torch.full((2, 2), self.holds["w"]))
        self.pulls.append((self.clocks[worker], int(seen[0, 0])))
        seen.zero_()  # a copy
        return None

    @rule()
    def set_again(self) -> None:
        self.store.set(7, torch.zeros(2, 2, dtype=torch.int64))
        self.holds[7] = 0

    @precondition(lambda self: self.made % 5 == 4)
    @rule()
    def restore(self) -> None:
        state = self.store.state()
        restored = ParameterStore.restore(state)
        assert same(state, restored.state())
        for value in state["values"].values():
            value.zero_()  # copies on both sides
        self.store = restored

    @invariant()
    def values_are_those_of_the_model(self) -> None:
        for key, power in self.holds.items():
            assert torch.equal(self.store.get(key), torch.full((2, 2), power))

    @invariant()
    def clocks_are_those_of_the_model_and_somebody_may_proceed(self) -> None:
        for worker, clock in self.clocks.items():
            assert self.store.clock(worker) == clock
            assert self.store.may_proceed(worker) == self.may_proceed(worker)
        assert not self.clocks or any(map(self.store.may_proceed, self.clocks))

    @invariant()
    def nobody_is_further_ahead_than_waiting_needs(self) -> None:
        """Whoever runs is at most s ahead of the slowest; who is one further has ended its period, and waits."""
        assert not self.clocks or max(self.clocks.values()) - min(self.clocks.values()) <= self.bound + 1

    @invariant()
    def no_pull_misses_what_it_must_have(self) -> None:
        """Pushes made after a pull count too: none may still come that it should have seen."""
        for clock, seen in self.pulls:
            assert all(seen & power for at, power in self.pushes if at <= clock - self.bound - 1)


# Fewer steps than an int64 has bits for powers of two.
StoreAgainstModel.TestCase.settings = settings(
    deadline=None, derandomize=True, max_examples=100, stateful_step_count=50
)
TestStoreAgainstModel = StoreAgainstModel.TestCase


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda store: store.set(["w", "v"], [torch.ones(3)] * 2),
            r"a key must be a whole number or a text, got \['w'",
        ),
        (lambda store: store.get(["w", "v"]), r"give one key and one tensor a call"),
        (lambda store: store.get("v"), r"a key must be set before it is used, got 'v'; known: 'w'"),
        (lambda store: store.push("w", torch.ones(3), worker="x"), r"worker 'x' must be registered, and is not"),
        (lambda store: store.may_proceed("x"), r"worker 'x' must be registered"),
        (lambda store: store.register("a"), r"a worker registers once, got 'a' again: let it leave first"),
        (
            lambda store: store.push("w", torch.ones(2), worker="a"),
            r"'a' pushes to key 'w' must be torch\.float32 \(3,\) like the stored value, got torch\.float32 \(2,\)",
        ),
        (lambda store: store.push("w", torch.ones(1), worker="a"), r"got torch\.float32 \(1,\): convert it, or set"),
        (lambda store: store.push("w", torch.ones(3).double(), worker="a"), r"got torch\.float64 \(3,\): convert it"),
        (
            lambda store: store.push("w", torch.tensor([0.0, math.nan, math.inf]), worker="a"),
            r"what worker 'a' pushes to key 'w' must be finite, got 2 of 3 numbers that are not",
        ),
        (lambda store: store.push("w", [1.0], worker="a"), r"must be a dense tensor, got list"),
        (lambda store: store.push("w", torch.ones(3).to_sparse(), worker="a"), r"must be a dense tensor"),
        (lambda store: store.set("w", torch.tensor(-math.inf)), r"the value of key 'w' must be finite, got 1 of 1"),
        (lambda store: store.wait("a", timeout_s=-1), r"timeout_s must be at least 0, or None .*, got -1"),
        (lambda store: store.pull("w", worker="a", timeout_s=math.nan), r"timeout_s must be at least 0, .* got nan"),
        (
            lambda store: store.tick("b"),
            r"worker 'b' may not push or tick while it waits at clock 1 for 'a' \(clock 0\)",
        ),
        (lambda store: store.push("w", torch.ones(3), worker="b"), r"because the bound is 0: call wait first"),
    ],
)
def test_invalid_calls_are_refused_and_change_nothing(call: Callable[[ParameterStore], object], sentence: str) -> None:
    store = filled(0, "a", "b")
    store.tick("b")
    before = store.state()
    with pytest.raises(InvalidInput, match=sentence):
        call(store)
    assert same(before, store.state())


@pytest.mark.parametrize("bound", [-1, 0.5, 2.0, math.nan, -math.inf, True, "1", None])
def test_a_bound_that_is_no_number_of_clocks_is_refused(bound: float) -> None:
    with pytest.raises(ValueRange, match=r"bound must be a whole number of clocks, at least 0, or math\.inf, got "):
        ParameterStore(bound=bound)


def test_an_updater_says_what_a_push_does() -> None:
    asked = []

    def halfway(key: int | str, stored: Tensor, pushed: Tensor) -> Tensor:
        asked.append(key)
        return stored.add_(pushed).div_(2)  # its arguments are its own

    store = ParameterStore(updater=halfway)
    store.set(5, torch.tensor([4.0]))
    store.register("a")
    pushed = torch.tensor([2.0])
    store.push(5, pushed, worker="a")
    assert (store.get(5).tolist(), pushed.tolist(), asked) == ([3.0], [2.0], [5])


def test_a_value_is_nobody_elses_tensor() -> None:
    kept: list[Tensor] = []

    def assign(key: int | str, stored: Tensor, pushed: Tensor) -> Tensor:
        kept.append(pushed)
        return pushed

    store = ParameterStore(updater=assign)
    first = torch.zeros(2, requires_grad=True)
    store.set("w", first)
    store.register("a")
    before, state = store.get("w"), store.state()
    with torch.no_grad():
        first.add_(9)
    assert store.get("w").tolist() == [0.0, 0.0]
    assert not store.get("w").requires_grad
    store.push("w", torch.ones(2), worker="a")
    store.tick("a")
    kept[0].add_(9)
    store.get("w").add_(9)
    store.pull("w", worker="a").add_(9)
    store.state()["values"]["w"].add_(9)
    assert store.get("w").tolist() == [1.0, 1.0]
    assert before.tolist() == state["values"]["w"].tolist() == [0.0, 0.0]
    assert state["clocks"] == {"a": 0}


@pytest.mark.parametrize(
    ("updater", "error", "sentence"),
    [
        (lambda key, stored, pushed: stored / 0, InvalidInput, "what the updater makes of key 'w' must be finite"),
        (
            lambda key, stored, pushed: stored[:2],
            InvalidInput,
            r"what the updater makes of key 'w' must be torch\.float32",
        ),
        (lambda key, stored, pushed: stored.half(), InvalidInput, r"got torch\.float16 \(3,\)"),
        (lambda key, stored, pushed: None, InvalidInput, "must be a dense tensor, got NoneType"),
        (lambda key, stored, pushed: stored.add_(1) and 0, RuntimeError, "ambiguous"),  # fails halfway, by itself
    ],
)
def test_an_updater_that_fails_changes_nothing(
    updater: Callable[[int | str, Tensor, Tensor], Tensor], error: type[Exception], sentence: str
) -> None:
    store = ParameterStore(updater=updater)
    store.set("w", torch.ones(3))
    store.register("a")
    before = store.state()
    with pytest.raises(error, match=sentence):
        store.push("w", torch.ones(3), worker="a")
    assert same(before, store.state())


def test_who_waits_in_vain_is_told_for_whom() -> None:
    store = filled(1, "quick", "slow", "last")
    for _ in range(2):
        store.tick("quick")
    sentence = (
        r"^after 0\.01 s worker 'quick' still waits at clock 2 for 'slow' \(clock 0\), 'last' \(clock 0\), because the "
        r"bound is 1: let them tick or leave, or raise timeout_s or the bound$"
    )
    with pytest.raises(RunFailed, match=sentence):
        store.pull("w", worker="quick", timeout_s=0.01)
    store.tick("last")
    with pytest.raises(RunFailed, match=r"at clock 2 for 'slow' \(clock 0\), because"):
        store.wait("quick", timeout_s=0)


def test_waits_end_by_the_given_clock() -> None:
    """An hour of it takes no hour."""
    clock = HandClock()
    store = ParameterStore(bound=0, clock=clock)
    for worker in ("quick", "slow"):
        store.register(worker)
    store.tick("quick")
    mover = threading.Timer(0.05, clock.move, [3600.0])
    mover.start()
    with pytest.raises(RunFailed, match="after 3600 s worker 'quick' still waits"):
        store.wait("quick", timeout_s=3600.0)
    mover.join()


def test_of_many_the_first_are_named() -> None:
    store = filled(0, "quick", *range(1000))
    store.tick("quick")
    with pytest.raises(RunFailed, match=r"for 0 \(clock 0\), .* 9 \(clock 0\) and 990 more, because"):
        store.wait("quick", timeout_s=0)


def test_who_may_proceed_does_not_wait_however_long_it_would() -> None:
    store = filled(0, "a")
    for timeout_s in (None, 0, 1e300, math.inf):
        before_s = time.monotonic()
        store.wait("a", timeout_s=timeout_s)
        assert time.monotonic() - before_s < 60


def test_workers_that_may_proceed_are_found_in_order() -> None:
    store = ParameterStore(bound=1)
    for worker in "abcde":
        store.register(worker)
    for worker in "aacee":
        store.tick(worker)
    assert store.ready("edcba") == {0: ["d", "b"], 1: ["c"]}
    store.tick("b")
    store.tick("d")
    assert store.ready("edcba") == {2: ["e", "a"], 1: ["d", "c", "b"]}
    with pytest.raises(InvalidInput, match="worker 'z' must be registered"):
        store.ready("az")


def test_a_restored_store_goes_on() -> None:
    store = filled(1, "quick", "slow")
    for _ in range(2):
        store.push("w", torch.ones(3), worker="quick")
        store.tick("quick")
    restored = ParameterStore.restore(store.state(), updater=lambda key, stored, pushed: stored - pushed)
    assert not restored.may_proceed("quick")
    restored.tick("slow")
    restored.push("w", torch.ones(3), worker="quick")
    assert (restored.get("w").tolist(), store.get("w").tolist()) == ([1.0] * 3, [2.0] * 3)
    everybody_gone = filled(0, "a")
    everybody_gone.tick("a")
    everybody_gone.leave("a")
    again = ParameterStore.restore(everybody_gone.state())
    again.register("b")
    assert again.clock("b") == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"slowest": 1}, r"slowest must be the smallest of its clocks, got 1 and 0"),
        ({"clocks": {"a": -1}}, r"slowest must be the smallest of its clocks, got 0 and -1"),
        (
            {"more": 1},
            r"a store's state has the keys bound, slowest, values, clocks, got bound, .*, more: restore what",
        ),
        ({"bound": -1}, r"bound must be a whole number of clocks"),
        ({"values": {"w": torch.tensor(math.nan)}}, r"the value of key 'w' must be finite"),
    ],
)
def test_what_is_no_state_is_refused(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        ParameterStore.restore({**filled(0, "a").state(), **change})  # type: ignore[typeddict-item]


def test_a_call_costs_the_same_however_many_workers_there_are() -> None:
    """Looking for the smallest clock among 200,000 in each of 20,000 calls would take minutes."""
    store = filled(0, *range(200_000))
    for worker in range(10_000):
        store.tick(worker)
        assert not store.may_proceed(worker)
