"""The store under threads: recorded histories against what they must obey.

Every push adds a power of two that no other push adds, to each number of a tensor: a value tells which pushes it holds,
and a torn one that it is torn. Stamps lease what one thread did before another.
"""

import itertools
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

from fed.errors import InvalidInput
from fed.server.parameter_store import ParameterStore

LONG_S = 20.0  # nothing takes so long unless it hangs
NUMBERS = 2048


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_together(*tasks: Callable[[], None]) -> None:
    """Run each in a thread of its own, all at once; what one of them raises is raised here."""
    start = threading.Barrier(len(tasks))
    errors: list[BaseException] = []

    def run(task: Callable[[], None]) -> None:
        try:
            start.wait(LONG_S)
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "somebody hangs"


def until_it_waits(thread: threading.Thread) -> None:
    """Until a thread stands in a wait on a condition; whoever takes the condition's lock then finds it waiting."""
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        frame = sys._current_frames().get(thread.ident or 0)
        if frame and frame.f_code is threading.Condition.wait.__code__:
            return
        time.sleep(0)
    raise AssertionError("it never waited")


def power(index: int) -> Tensor:
    return torch.full((NUMBERS,), 2**index)


def pushes_in(value: Tensor) -> frozenset[int]:
    """Which pushes a value holds."""
    number = int(value[0])
    assert torch.equal(value, torch.full_like(value, number)), "torn"
    return frozenset(index for index in range(62) if number >> index & 1)


@dataclass
class History:
    """Pushes and gets of one key, each with the stamps of its beginning and its end."""

    pushes: dict[int, tuple[int, int]] = field(default_factory=dict)
    gets: list[tuple[frozenset[int], int, int]] = field(default_factory=list)

    def violations(self) -> Iterator[str]:
        """Why there is no lease of all operations, consistent with real time, that explains every get.

        Nothing found: put each push before the first get that holds it, in the chain of what gets hold; real time never
        contradicts that lease.
        """
        for (one, _, one_ended), (other, other_began, _) in itertools.product(self.gets, repeat=2):
            if not (one <= other or other <= one):
                yield f"gets disagree on the lease of {sorted(one ^ other)}"
            if one_ended < other_began and not one <= other:
                yield f"a later get lost {sorted(one - other)}"
        for seen, began, ended in self.gets:
            for push, (push_began, push_ended) in self.pushes.items():
                if push_ended < began and push not in seen:
                    yield f"a get misses {push}, which was over before it began"
                if ended < push_began and push in seen:
                    yield f"a get holds {push}, which began after it"
                if push in seen:
                    earlier = {other for other, (_, other_ended) in self.pushes.items() if other_ended < push_began}
                    if not earlier <= seen:
                        yield f"a get holds {push}, but not {sorted(earlier - seen)}, which were over before it began"


@pytest.mark.parametrize(
    ("pushes", "gets", "violation"),
    [
        ({0: (0, 1), 1: (2, 3)}, [({0}, 4, 5)], "a get misses 1"),
        ({0: (0, 1), 1: (6, 7)}, [({0, 1}, 2, 3)], "a get holds 1, which began after it"),
        ({0: (0, 9), 1: (0, 9)}, [({0}, 1, 4), ({1}, 2, 5)], "gets disagree on the lease"),
        ({0: (0, 9)}, [({0}, 1, 2), (set(), 3, 4)], "a later get lost"),
        ({0: (0, 1), 1: (2, 9)}, [({1}, 0, 8)], "a get holds 1, but not"),
        ({0: (0, 5), 1: (3, 9)}, [(set(), 1, 2), ({1}, 4, 6), ({0, 1}, 7, 8)], None),
    ],
)
def test_a_planted_violation_is_found(
    pushes: dict[int, tuple[int, int]], gets: list[tuple[set[int], int, int]], violation: str | None
) -> None:
    history = History(pushes, [(frozenset(seen), began, ended) for seen, began, ended in gets])
    found = list(history.violations())
    assert any(violation in text for text in found) if violation else found == []


def add_in_halves(key: int | str, stored: Tensor, pushed: Tensor) -> Tensor:
    """In place, and letting others run in between."""
    stored[: NUMBERS // 2] += pushed[: NUMBERS // 2]
    time.sleep(0)
    stored[NUMBERS // 2 :] += pushed[NUMBERS // 2 :]
    return stored


@pytest.mark.parametrize("updater", [None, add_in_halves])
@pytest.mark.parametrize("attempt", range(3))
def test_pushes_and_gets_are_linearizable_by_key(attempt: int, updater: Callable[..., Tensor] | None) -> None:
    store = ParameterStore(bound=math.inf, **({"updater": updater} if updater else {}))  # type: ignore[arg-type]
    histories = {"v": History(), "w": History()}
    stamps = itertools.count()
    for key in histories:
        store.set(key, torch.zeros(NUMBERS, dtype=torch.int64))

    def push(worker: int) -> None:
        store.register(worker)
        for index in range(15 * worker, 15 * worker + 15):
            for key, history in histories.items():
                pushed = power(index)
                began = next(stamps)
                store.push(key, pushed, worker=worker)
                history.pushes[index] = began, next(stamps)

    def get() -> None:
        for _ in range(150):
            for key, history in histories.items():
                began = next(stamps)
                value = store.get(key)
                ended = next(stamps)
                history.gets.append((pushes_in(value), began, ended))

    run_together(*(partial(push, worker) for worker in range(4)), get, get)
    for key, history in histories.items():
        assert list(history.violations()) == []
        assert pushes_in(store.get(key)) == frozenset(range(60)), "lost updates"


@dataclass(frozen=True)
class Period:
    """What a worker did in one clock; from which stamp to which it was surely there, and from which it ran."""

    worker: int
    clock: int
    seen: frozenset[int]
    pushed: int
    ran_from: int
    there_from: int
    there_to: int


@pytest.mark.parametrize("bound", [0, 1, 3, math.inf])
@pytest.mark.parametrize("attempt", range(3))
def test_pulls_are_complete_and_workers_stay_within_the_bound(bound: float, attempt: int) -> None:
    """Of five workers two leave early and two others come late; each at its own speed."""
    store = ParameterStore(bound=bound)
    store.set("w", torch.zeros(NUMBERS, dtype=torch.int64))
    stamps, indices = itertools.count(), itertools.count()
    periods: list[Period] = []
    everybody = threading.Barrier(5)

    def work(worker: int, clocks: int, *, is_late: bool = False) -> None:
        rest = random.Random(f"{attempt} {worker}")
        if is_late:
            while store.get("w")[0] < 2**10:  # until ten pushes have been made
                time.sleep(0)
        store.register(worker)
        if not is_late:
            everybody.wait(LONG_S)
        for _ in range(clocks):
            there_from = next(stamps)
            seen = pushes_in(store.pull("w", worker=worker, timeout_s=LONG_S))
            ran_from = next(stamps)
            for _ in range(rest.choice([0, 0, 5, 40])):
                store.get("w")
            index = next(indices)
            store.push("w", power(index), worker=worker)
            clock = store.clock(worker)
            periods.append(Period(worker, clock, seen, index, ran_from, there_from, next(stamps)))
            store.tick(worker)
        store.leave(worker)

    run_together(
        *(partial(work, worker, 10) for worker in (0, 1, 2)),
        *(partial(work, worker, 4) for worker in (3, 4)),
        *(partial(work, worker, 6, is_late=True) for worker in (5, 6)),
    )
    assert pushes_in(store.get("w")) == frozenset(range(50))
    for one, other in itertools.product(periods, repeat=2):
        if other.clock <= one.clock - bound - 1:
            assert other.pushed in one.seen
        if one.ran_from < other.there_to and other.there_from < one.there_to:  # at some instant both were there
            assert one.clock - other.clock <= bound


@pytest.mark.parametrize("release", ["tick", "leave"])
def test_waiting_workers_proceed_when_the_slowest_ticks_or_leaves(release: str) -> None:
    store = ParameterStore(bound=0)
    store.set("w", torch.zeros(1))
    store.register("slow")
    got: list[float] = []
    threads = []
    for worker in range(3):
        store.register(worker)
        store.tick(worker)
        pull = partial(store.pull, "w", worker=worker)
        threads.append(threading.Thread(target=lambda pull=pull: got.append(pull().item()), daemon=True))
        threads[-1].start()
        until_it_waits(threads[-1])
    store.push("w", torch.ones(1), worker="slow")
    getattr(store, release)("slow")
    for thread in threads:
        thread.join(LONG_S)
    assert got == [1.0] * 3


def test_who_leaves_while_it_waits_is_told() -> None:
    store = ParameterStore(bound=0)
    for worker in ("quick", "slow"):
        store.register(worker)
    store.tick("quick")
    told: list[str] = []

    def wait() -> None:
        with pytest.raises(InvalidInput) as error:
            store.wait("quick")
        told.append(str(error.value))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    until_it_waits(waiting)
    store.leave("quick")
    waiting.join(LONG_S)
    assert told == ["worker 'quick' must be registered, and is not, or has left: register it first"]


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_nobody_hangs_however_workers_come_and_go(bound: int) -> None:
    """Workers leave at random clocks, even without a word to those that wait, and come again."""
    store = ParameterStore(bound=bound)
    store.set("w", torch.zeros(1))

    def work(worker: int) -> None:
        chance = random.Random(worker)
        for _ in range(20):
            store.register(worker)
            for _ in range(chance.randrange(6)):
                store.pull("w", worker=worker, timeout_s=LONG_S)
                store.tick(worker)
            store.leave(worker)

    run_together(*(partial(work, worker) for worker in range(8)))
