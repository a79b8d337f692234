"""Workers: whatever happens to them, every item is done once, with the same bits, and nothing is left."""

import contextlib
import functools
import logging
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fed import errors
from fed.clients.training.executor import Executor, InProcess, Item
from fed.errors import Diverged, FedError, InvalidData, InvalidInput, RunFailed
from fed.simulations.executors.pool import Workers
from fed.vectors.shared_memory import SharedTensor
from fed.vectors.torch_settings import current_settings
from tests.simulations.executors import pure_work as work

pytestmark = [
    pytest.mark.xdist_group("workers"),  # so that the pool of most tests is started once
    pytest.mark.skipif(sys.platform == "win32", reason="there are no workers"),
]
ROOT = Path(__file__).resolve().parents[3]
CAPACITY_BYTES = 1 << 20


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    with Workers(work.caller, work.devices(2), CAPACITY_BYTES) as workers:
        yield workers


@pytest.fixture
def one() -> Iterator[Workers]:
    with Workers(work.caller, work.devices(1), CAPACITY_BYTES) as workers:
        settled(workers, 1)
        yield workers


@pytest.fixture(autouse=True)
def _bound() -> Iterator[None]:
    """An item that is lost would be waited for."""

    def too_long(number: int, frame: object) -> None:
        raise TimeoutError("waited too long")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(int(4 * work.BOUND_S))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def run(executor: Executor, content: Any, *tensors: Tensor, label: str = "client 3 in round 5") -> Any:
    [(_, answer, results)] = executor.results([executor.submit(Item(content, tensors, label))])
    return (answer, *results) if results else answer


def settled(workers: Workers, count: int = 2) -> set[int]:
    """Wait until so many have begun and are idle; who they are."""
    found: set[int] = set()

    def all_answer() -> bool:
        tickets = [workers.submit(Item(work.who, (), "who")) for _ in range(2 * count)]
        found.update(answer[0] for _, answer, _ in workers.results(tickets))
        return len(found) == count

    work.await_that(all_answer, f"{count} workers")
    return found


def training(count: int, steps: int = 50) -> list[Item]:
    generator = torch.Generator().manual_seed(0)
    tensors = [(torch.randn(7, generator=generator), torch.randn(40, 7, generator=generator)) for _ in range(count)]
    return [Item(work.Train(seed, steps), pair, f"client {seed}") for seed, pair in enumerate(tensors)]


def expected(items: Sequence[Item]) -> list[tuple[int, list[list[float]]]]:
    return [exact(*work.call(item.content, item.tensors)) for item in items]


def exact(content: Any, tensors: Sequence[Tensor]) -> tuple[int, list[list[float]]]:
    return content[0], [tensor.double().flatten().tolist() for tensor in tensors]


def bits(tensor: Tensor) -> list[int]:
    found: list[int] = tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()
    return found


# The same results, in whatever process.


@pytest.mark.parametrize("count", [0, 1, 3])
def test_results_are_the_same_bits_however_many_workers_there_are(count: int) -> None:
    items = training(30)
    devices = work.devices(max(count, 1))
    with Workers(work.caller, devices, CAPACITY_BYTES) if count else InProcess(work.caller, devices) as executor:
        assert executor.is_parallel == (count > 0)
        tickets = [executor.submit(item) for item in items]
        done = {ticket: exact(content, tensors) for ticket, content, tensors in executor.results(tickets)}
    assert [done[ticket] for ticket in tickets] == expected(items)


def _without_kernels() -> set[torch.dtype]:
    """Types that PyTorch itself cannot copy yet, or whose tensors are more than numbers."""
    names = [f"{sign}int{size}" for sign in ("u", "") for size in range(1, 8)]
    names += ["qint8", "quint8", "qint32", "quint4x2", "quint2x4"]
    return {getattr(torch, name) for name in names}


DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - _without_kernels()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str))
def test_tensors_of_all_types_and_shapes_arrive_bit_for_bit(pool: Workers, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)

    def anything(*shape: int) -> Tensor:  # also what is not a number, in all its forms
        high = 2 if dtype == torch.bool else 256
        size = dtype.itemsize * torch.Size(shape).numel()
        return torch.randint(high, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)

    tensors = [anything(*shape) for shape in ((), (1,), (0,), (0, 3), (3, 0, 2), (5,), (2, 3, 4), (1000,))]
    tensors += [anything(4, 6).t()[1:], anything(3, 1).expand(3, 5), anything(40)[1::3], anything()]
    tensors += [anything(4).conj(), anything(6).view(2, 3).mH] if dtype.is_complex else []
    _, *arrived = run(pool, work.same, *tensors)
    assert [(tensor.dtype, tensor.shape) for tensor in arrived] == [(dtype, tensor.shape) for tensor in tensors]
    assert [bits(tensor) for tensor in arrived] == [bits(tensor) for tensor in tensors]


def test_no_tensors_and_those_that_need_gradients_arrive(pool: Workers) -> None:
    assert run(pool, work.same) is None
    _, arrived = run(pool, work.same, torch.nn.Parameter(torch.arange(3.0)))
    assert not arrived.requires_grad
    assert torch.equal(arrived, torch.arange(3.0))


def test_results_are_the_callers_own(pool: Workers) -> None:
    first = run(pool, work.same, torch.arange(9))[1]
    for number in range(9):
        run(pool, work.same, torch.full((9,), number))
    assert torch.equal(first, torch.arange(9))


def test_what_the_work_got_may_be_what_it_gives(pool: Workers) -> None:
    tensors = [torch.arange(20), torch.full((30,), 7), torch.ones(3)]
    _, *arrived = run(pool, work.turned, *tensors)
    assert all(map(torch.equal, arrived, tensors[::-1]))


def test_tensors_are_refused_that_are_more_than_rows_of_numbers(pool: Workers) -> None:
    with pytest.raises(InvalidInput, match=r"tensors between processes must be dense, got torch.sparse_coo"):
        run(pool, work.same, torch.eye(3).to_sparse())


def test_a_worker_computes_with_one_thread(pool: Workers) -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    assert run(pool, work.who)[1:] == (1, "1")
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_workers_map_shared_memory_and_take_the_parents_settings() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with Workers(work.Adder(SharedTensor(torch.arange(1000.0))), work.devices(1), CAPACITY_BYTES) as workers:
            (past_the_page, dtype), total = run(workers, None, torch.ones(1000))
    finally:
        torch.set_default_dtype(torch.float32)
    assert (past_the_page, dtype) == (0, torch.float64)
    assert torch.equal(total, torch.arange(1000.0) + 1)


def test_workers_are_set_to_whatever_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for holder, name in ((torch.backends.mkldnn, "enabled"), (torch.backends.cudnn, "benchmark")):
        monkeypatch.setattr(holder, name, not getattr(holder, name))
    with Workers(work.caller, work.devices(1), CAPACITY_BYTES) as workers:
        assert run(workers, work.settings) == current_settings()


def test_what_workers_do_may_have_processes_of_its_own(one: Workers) -> None:
    assert run(one, work.process_of_its_own) == 0


# What is done when, and whose results are whose.


@pytest.mark.parametrize("parallel", [False, True])
def test_priority_comes_first_then_cost_then_who_came_first(parallel: bool, one: Workers, tmp_path: Path) -> None:
    executor: Executor = one if parallel else InProcess(work.caller, work.devices(1))
    file, go = tmp_path / "order", tmp_path / "go"

    def submit(name: str, cost: float = 0.0, priority: int = 0, until: Path | None = None) -> int:
        return executor.submit(Item(work.Note(file, name, until), (), name, cost, priority))

    tickets = [submit("at work", cost=100.0, until=go)]
    tickets += [submit("small", 1.0), submit("large", 2.5), submit("later", 9.0, 1), submit("small too", 1.0)]
    tickets += [submit("now", 0.1, -1)] if parallel else []
    go.touch()
    names = [content for _, content, _ in executor.results(tickets)]
    assert names == ["at work", *(["now"] if parallel else []), "large", "small", "small too", "later"]
    assert work.notes(file) == names


@pytest.mark.parametrize("parallel", [False, True])
def test_results_of_other_tickets_are_kept_and_given_once(parallel: bool, pool: Workers) -> None:
    executor: Executor = pool if parallel else InProcess(work.caller, work.devices(1))
    items = training(6, steps=1)
    tickets = [executor.submit(item) for item in items]
    halves = [*executor.results(tickets[3:]), *executor.results(tickets[:3])]
    assert sorted(ticket for ticket, *_ in halves[:3]) == tickets[3:]
    assert sorted(ticket for ticket, *_ in halves) == tickets
    for over in (tickets[0], max(tickets) + 1):
        with pytest.raises(KeyError):
            next(executor.results([over]))
    assert list(executor.results([])) == []


def test_two_iterators_share_what_arrives(pool: Workers) -> None:
    tickets = [pool.submit(item) for item in training(8, steps=1)]
    even, odd = pool.results(tickets[::2]), pool.results(tickets[1::2])
    done = [ticket for pair in zip(even, odd, strict=True) for ticket, *_ in pair]
    assert sorted(done[::2]) == tickets[::2]
    assert sorted(done[1::2]) == tickets[1::2]


def test_what_waits_behind_long_work_goes_to_an_idle_worker(pool: Workers, tmp_path: Path) -> None:
    file, first, second = (tmp_path / name for name in ("order", "first", "second"))
    settled(pool)
    long = [pool.submit(Item(work.Note(file, until.name, until), (), "long")) for until in (first, second)]
    short = [pool.submit(Item(work.Note(file, str(number)), (), "short")) for number in range(2)]
    waiting = pool.results([long[1], *short])
    second.touch()
    assert sorted(content for _, content, _ in waiting) == ["0", "1", "second"]
    assert not first.exists()
    first.touch()
    assert [content for _, content, _ in pool.results(long[:1])] == ["first"]
    assert sorted(work.notes(file)) == ["0", "1", "first", "second"]


# Death.


def chaos(count: int, items: int, kills: int) -> int:
    """Kill a worker whenever some results have come, and see every item done once, as it should be; how many it hit."""
    generator = random.Random(0)
    todo = training(items)
    others = set(work.pids())
    with Workers(work.caller, work.devices(count), CAPACITY_BYTES) as workers:
        tickets = [workers.submit(item) for item in todo]
        done: dict[int, Any] = {}
        begun: set[int] = set()
        killed = 0
        for ticket, content, tensors in workers.results(tickets):
            assert ticket not in done
            done[ticket] = exact(content, tensors)
            begun.add(content[1])
            alive = sorted(begun.intersection(work.pids()))
            # An item whose worker was killed comes next, so that none is hit three times.
            if alive and len(done) % (items // (kills + 1)) == 0:
                os.kill(generator.choice(alive), signal.SIGKILL)
                killed += 1
    assert [done[ticket] for ticket in tickets] == expected(todo)
    assert set(work.pids()) == others
    return killed


def test_killed_workers_change_nothing() -> None:
    assert chaos(count=2, items=100, kills=3) >= 1


@pytest.mark.long
def test_many_killed_workers_change_nothing() -> None:
    assert chaos(count=7, items=1500, kills=40) >= 20


@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.long)])
def test_workers_that_are_all_killed_at_work_are_replaced(pool: Workers, tmp_path: Path, name: str) -> None:
    file, go = tmp_path / "order", tmp_path / "go"
    before = settled(pool)
    tickets = [pool.submit(Item(work.Note(file, str(number), go), (), "waits")) for number in range(5)]
    work.await_that(lambda: len(work.notes(file)) == 2, "both at work")
    for pid in before:
        os.kill(pid, getattr(signal, name))
    go.touch()
    assert sorted(content for _, content, _ in pool.results(tickets)) == ["0", "1", "2", "3", "4"]
    assert settled(pool).isdisjoint(before)
    assert sorted(work.notes(file)) == ["0", "0", "1", "1", "2", "3", "4"]


def test_a_killed_worker_that_was_idle_is_replaced(one: Workers) -> None:
    [before] = settled(one, 1)
    os.kill(before, signal.SIGKILL)
    assert settled(one, 1) != {before}


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
def test_workers_end_with_what_forked_them_and_are_replaced(pool: Workers) -> None:
    before = settled(pool)
    [loader] = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in before}
    assert loader != os.getpid()
    os.kill(loader, signal.SIGKILL)
    work.await_that(lambda: not any(map(work.is_alive, before)), "their end")
    assert settled(pool).isdisjoint(before)


@pytest.mark.long
def test_each_worker_has_its_device_and_so_has_its_successor() -> None:
    with Workers(work.placed, work.devices(2), CAPACITY_BYTES) as workers:
        found: dict[str, set[int]] = {}

        def meet(processes: int) -> None:
            def are_met() -> bool:
                tickets = [workers.submit(Item(None, (), "where")) for _ in range(4)]
                for _, (device, pid), _ in workers.results(tickets):
                    found.setdefault(device, set()).add(pid)
                return sum(map(len, found.values())) == processes

            work.await_that(are_met, f"{processes} workers")

        meet(2)
        assert found.keys() == {"cpu:0", "cpu:1"}
        [victim] = found["cpu:1"]
        os.kill(victim, signal.SIGKILL)
        meet(3)
        assert {device: len(pids) for device, pids in found.items()} == {"cpu:0": 1, "cpu:1": 2}


WAYS = {
    work.raises: rf"ValueError: bad batch \({work.__file__}:\d+ in raises\)",
    work.raises_in_torch: rf"RuntimeError: .* \({work.__file__}:\d+ in raises_in_torch\)",
    work.leaves: rf"SystemExit: 7 \({work.__file__}:\d+ in leaves\)",
    work.leaves_at_once: "ended with exit code 7",
    work.kills_itself: r"killed by signal 9 \(SIGKILL\): the system may have run out of memory",
    work.crashes: rf"ended by signal 11 \(SIGSEGV\), Fatal Python error: Segmentation fault, "
    rf"{work.__file__}:\d+ in crashes",
}
OFTEN = {
    work.raises_in_torch,
    work.leaves,
    work.leaves_at_once,
    work.kills_itself,
}  # more of the same takes long together


@pytest.mark.parametrize("how", [pytest.param(how, marks=pytest.mark.long if how in OFTEN else ()) for how in WAYS])
def test_item_that_kills_three_workers_ends_with_a_report(
    pool: Workers, how: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tries"
    label = "clients 3, 7 and 9 in round 5"
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(RunFailed, match=f"^{label} ended 3 worker processes; last words: {WAYS[how]}$"),
    ):
        run(pool, work.Fail(how, file), label=label)
    assert len(set(work.notes(file))) == 3, "each time in a fresh process"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert all(label in record.getMessage() for record in caplog.records)
    if how is work.raises:
        assert ["and more of it" in text and "Traceback" in text for text in caplog.messages] == [True, False, False]
    assert run(pool, work.same) is None


@pytest.mark.parametrize(("how", "times"), [(work.raises, 1), (work.kills_itself, 2)])
def test_what_fails_less_often_is_done(pool: Workers, how: Any, times: int, tmp_path: Path) -> None:
    pid, arrived = run(pool, work.Fail(how, tmp_path / "tries", times), torch.arange(3))
    assert torch.equal(arrived, torch.arange(3))
    tries = work.notes(tmp_path / "tries")
    assert len(set(tries)) == times + 1
    assert tries[-1] == str(pid)


def test_an_item_waiting_beside_the_fatal_one_is_innocent(one: Workers, tmp_path: Path) -> None:
    ends = one.submit(Item(work.Fail(work.kills_itself, tmp_path / "tries"), (), "ends", cost=9.0))
    waits = one.submit(Item(work.Note(tmp_path / "order", "waits"), (), "waits"))
    with pytest.raises(RunFailed, match=r"ends ended 3"):
        list(one.results([ends, waits]))
    assert [content for _, content, _ in one.results([waits])] == ["waits"]
    assert work.notes(tmp_path / "order") == ["waits"]


def test_what_was_lost_comes_first(one: Workers, tmp_path: Path) -> None:
    fails = work.Fail(work.raises, tmp_path / "tries", 1)
    tickets = [one.submit(Item(fails, (), "fails once", cost=1.0))]
    tickets += [one.submit(Item(work.same, (), "another", cost=2.0)) for _ in range(3)]
    order = [ticket for ticket, *_ in one.results(tickets)]
    assert tickets[0] in order[:2], "beside it one waited that costs more, and is lost as well"


# Errors that are no deaths.


@pytest.mark.parametrize("name", sorted(name for name in errors.__all__ if isinstance(getattr(errors, name), type)))
def test_errors_of_the_tree_reach_the_caller_as_they_are(pool: Workers, name: str) -> None:
    error = getattr(errors, name)("what is wrong")
    error.add_note("and where")
    before = set(work.pids())
    with pytest.raises(FedError) as caught:
        run(pool, work.Raise(error))
    assert (type(caught.value), str(caught.value)) == (type(error), "what is wrong")
    assert caught.value.__notes__ == ["and where"]
    assert set(work.pids()) == before, "no worker died of it"


def test_an_error_that_cannot_travel_is_replaced_by_the_nearest(pool: Workers) -> None:
    with pytest.raises(FedError, match=r"^one and two$") as caught:
        run(pool, work.raises_two_arguments)
    assert type(caught.value) is FedError
    with pytest.raises(InvalidData) as long:
        run(pool, work.Raise(InvalidData("x" * 600_000)))
    assert len(str(long.value)) == 10_000


def test_an_error_waits_for_who_asks_for_it(pool: Workers) -> None:
    wrong = pool.submit(Item(work.Raise(Diverged("too fast")), (), "wrong"))
    assert run(pool, work.same) is None
    with pytest.raises(Diverged, match="too fast"):
        next(pool.results([wrong]))
    with pytest.raises(KeyError):
        next(pool.results([wrong]))


def test_in_this_process_everything_is_raised_as_it_is(tmp_path: Path) -> None:
    executor = InProcess(work.caller, work.devices(1))
    with pytest.raises(ValueError, match="bad batch"):
        run(executor, work.Fail(work.raises, tmp_path / "tries"))
    assert len(work.notes(tmp_path / "tries")) == 1


def test_what_does_not_fit_is_refused(pool: Workers) -> None:
    room = torch.zeros(CAPACITY_BYTES, dtype=torch.uint8)
    assert len(run(pool, work.same, room)[1]) == CAPACITY_BYTES
    with pytest.raises(InvalidInput, match=r"^client 9: tensors must take at most 1\.05 MB .*, got 1\.05 MB"):
        run(pool, work.same, room, torch.zeros(1), label="client 9")
    with pytest.raises(InvalidInput, match=r"^the result of client 9: tensors must take at most 1\.05 MB .*, got 8 MB"):
        run(pool, functools.partial(_with, torch.zeros, 10**6, dtype=torch.float64), label="client 9")
    with pytest.raises(InvalidInput, match=r"^client 9: content must take at most 1\.05 MB .*, got 2 MB"):
        run(pool, functools.partial(_with, bytes(2 * 10**6)), label="client 9")


def _with(make: Any, *arguments: Any, **keys: Any) -> tuple[None, list[Tensor]]:
    return None, [make(*arguments, **keys)]


def test_a_content_that_cannot_be_pickled_is_refused_either_way(pool: Workers) -> None:
    before = set(work.pids())
    with pytest.raises(InvalidInput, match=r"^the result of client 3 in round 5: content must be picklable"):
        run(pool, work.answers_what_cannot_be_pickled)
    with pytest.raises(InvalidInput, match=r"^client 3 in round 5: content must be picklable"):
        run(pool, lambda: None)
    assert set(work.pids()) == before


# Workers that cannot begin.


def test_workers_that_cannot_be_made_say_so_at_once() -> None:
    before = set(work.pids())
    with (
        Workers(work.make_that_raises, work.devices(2), 0) as workers,
        pytest.raises(
            RunFailed,
            match=r"^worker processes cannot begin: ValueError: no work on cpu:\d "
            rf"\({work.__file__}:\d+ in make_that_raises\); "
            r"use workers: 0 to train in this process and see where it fails$",
        ),
    ):
        run(workers, work.same)
    with (
        Workers(work.make_that_diverges, work.devices(1), 0) as workers,
        pytest.raises(Diverged, match="round 5, client 'c'"),
    ):
        run(workers, work.same)
    assert set(work.pids()) == before


def test_workers_that_are_killed_before_they_begin_are_replaced_twice(tmp_path: Path) -> None:
    with Workers(work.KilledInTheMaking(tmp_path / "twice", 2), work.devices(1), 0) as workers:
        assert run(workers, work.same) is None


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
@pytest.mark.long
def test_workers_whose_loader_is_killed_before_they_begin_are_replaced(tmp_path: Path) -> None:
    making = work.KilledInTheMaking(tmp_path / "twice", 2, kills=work.kills_what_forked_it)
    with Workers(making, work.devices(1), 0) as workers:
        assert run(workers, work.same) is None


@pytest.mark.long
def test_workers_that_are_always_killed_before_they_begin_say_so(tmp_path: Path) -> None:
    with (
        Workers(work.KilledInTheMaking(tmp_path / "always", 9), work.devices(1), 0) as workers,
        pytest.raises(RunFailed, match=r"^worker processes cannot begin: killed by signal 9 .*; use workers: 0"),
    ):
        run(workers, work.same)
    assert len(work.notes(tmp_path / "always")) == 3


@pytest.mark.long
def test_a_worker_that_never_begins_is_done_without(tmp_path: Path) -> None:
    others = set(work.pids())
    with Workers(work.KilledInTheMaking(tmp_path / "always", 9, count=2), work.devices(2), 0) as workers:
        work.await_that(lambda: run(workers, work.who)[0] in work.pids() and len(work.pids()) == len(others) + 1, "it")
        assert len(work.notes(tmp_path / "always")) == 3
        [left] = set(work.pids()) - others
        assert settled(workers, 1) == {left}


def test_fewer_workers_than_one_are_refused() -> None:
    with pytest.raises(InvalidInput, match="there must be at least 1 worker, got 0"):
        Workers(work.caller, work.devices(0), 0)


def test_closed_workers_do_nothing(one: Workers) -> None:
    ticket = one.submit(Item(work.same, (), "item"))
    one.close()
    one.close()
    with pytest.raises(RunFailed, match="these workers are closed"):
        one.submit(Item(work.same, (), "item"))
    with pytest.raises(RunFailed, match="these workers are closed"):
        next(one.results([ticket]))


def test_closing_ends_workers_that_are_busy_frozen_or_unborn(tmp_path: Path) -> None:
    others = set(work.pids())
    Workers(work.caller, work.devices(1), CAPACITY_BYTES).close()
    with Workers(work.caller, work.devices(2), CAPACITY_BYTES) as workers:
        frozen, _ = settled(workers)
        waits = work.Note(tmp_path / "order", "waits", tmp_path / "never")
        for _ in range(3):
            workers.submit(Item(waits, (), "waits"))
        work.await_that(lambda: bool(work.notes(tmp_path / "order")), "one at work")
        os.kill(frozen, signal.SIGSTOP)
    assert set(work.pids()) == others


# Whole programs.

PROGRAM = """
import os, sys
from pathlib import Path
from fed.clients.training.executor import Item
from fed.vectors.shared_memory import SharedTensor
from fed.simulations.executors.pool import Workers
from fed.vectors.shared_memory import SharedTensor
from tests.simulations.executors import pure_work as work
import torch

def main():
    make = work.Adder(SharedTensor(torch.zeros(1000)), bytes({ballast}))
    with Workers({make}, work.devices(2), 1 << 16) as workers:
        print(*work.pids(), flush=True)
        file, never = Path(sys.argv[1]), Path(sys.argv[1]) / "never"
        tickets = [workers.submit(Item(work.Note(file, "busy", never), (), "busy")) for _ in range(8)]
        list(workers.results(tickets))

{guard}main()
"""
GUARD = 'if __name__ == "__main__":\n    '


@contextlib.contextmanager
def program(
    tmp_path: Path, guard: str = GUARD, make: str = "work.caller", ballast: int = 0
) -> Iterator["subprocess.Popen[str]"]:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(guard=guard, make=make, ballast=ballast), encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, file, tmp_path / "order"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,  # a foreground group of its own, as a terminal's Ctrl-C reaches it
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="nobody says which processes there are")
@pytest.mark.parametrize(
    "name", ["SIGKILL", *(pytest.param(name, marks=pytest.mark.long) for name in ("SIGINT", "SIGTERM"))]
)
def test_a_program_that_is_ended_leaves_nothing(name: str, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    with program(tmp_path) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        work.await_that(lambda: len(work.notes(tmp_path / "order")) == 2, "all at work")
        assert len(workers) == 2
        assert all(work.is_alive(pid) and work.is_deaf(pid) for pid in workers)
        if name == "SIGINT":
            os.killpg(parent.pid, signal.SIGINT)  # as Ctrl-C does: to all of them
        else:
            parent.send_signal(getattr(signal, name))
        said = parent.stderr.read()
        parent.wait()
    assert parent.returncode == -getattr(signal, name)
    assert said.count("Traceback") == (name == "SIGINT"), "workers say nothing"
    work.await_that(lambda: not any(map(work.is_alive, workers)), "the end of all workers")
    assert set(Path("/dev/shm").iterdir()) <= before


def test_a_program_without_main_guard_is_told_so(tmp_path: Path) -> None:
    """Even where what makes the work is more than a pipe holds, which nobody will read."""
    with program(tmp_path, guard="", make="make", ballast=10**6) as parent:
        _, said = parent.communicate(timeout=work.BOUND_S)
    assert parent.returncode == 1
    last = said.splitlines()[-1]
    assert ": a worker process could not start (ended with exit code 1): a program that uses workers" in last
    assert "under if __name__ == '__main__':, or use workers: 0" in last
    assert "RunFailed" not in said, "no traceback of its own"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("work.caller", ""),
        (
            "lines",
            r"<stdin>:6: worker processes do not find a part of .* 'lines' .*: define it in a file of its own .*\n",
        ),
    ],
)
def test_a_program_from_standard_input_has_workers(make: str, said: str) -> None:
    """It cannot be imported, and its workers do not try."""
    lines = (
        "from fed.simulations.executors.pool import Workers",
        "from tests.simulations.executors import pure_work as work",
        "",
        "def lines(device): pass",
        "",
        f"with Workers({make}, work.devices(1), 1 << 16, awaits=True): print(__file__)",
    )
    ended = subprocess.run(
        [sys.executable],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert re.fullmatch(said, ended.stderr)
    assert ended.stdout == ("" if said else "<stdin>\n")


def test_a_single_small_item_is_done_in_this_process(caplog: pytest.LogCaptureFixture) -> None:
    """One whose work fails here is given to workers: it may succeed, or end them as any other does."""
    with Workers(work.caller, work.devices(1), 1 << 16, small_bytes=1 << 10) as workers:
        here = run(workers, work.who)[0]
        tickets = [workers.submit(Item(work.who, (), "small")) for _ in range(2)]
        there = {content[0] for ticket in tickets for _, content, _ in workers.results([ticket])}
        (large,) = workers.results([workers.submit(Item(work.same, (torch.ones(999),), "large"))])
        assert here == os.getpid()
        assert here not in there
        assert torch.equal(large.tensors[0], torch.ones(999))
        with caplog.at_level(logging.CRITICAL), pytest.raises(RunFailed, match="client 3 in round 5"):
            run(workers, work.raises)
