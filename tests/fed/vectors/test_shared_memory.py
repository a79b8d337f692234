"""Shared memory: what a spawned process maps is what was copied, and what cannot be had is said."""

import gc
import multiprocessing
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch

from fed.clients.training.executor import Item
from fed.errors import InvalidInput, RunFailed
from fed.simulations.executors.pool import Workers
from fed.vectors import shared_memory
from fed.vectors.shared_memory import SharedMemory, SharedTensor
from tests.simulations.executors import pure_work as work
from tests.thinned import thinned

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no such memory")
on_linux = pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="asks what Linux says of itself")


def write(memory: SharedMemory, tensor: SharedTensor) -> None:
    """In a process of its own."""
    memory.all_bytes[:3] = tensor.tensor
    tensor.tensor.zero_()


@pytest.mark.parametrize("memfd", thinned([True, False], quick=1))
def test_a_spawned_process_sees_the_same(memfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not memfd:
        monkeypatch.delattr(os, "memfd_create", raising=False)
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    memory, tensor = SharedMemory(3_000_000), SharedTensor(torch.arange(5, 8, dtype=torch.uint8))
    process = multiprocessing.get_context("spawn").Process(target=write, args=(memory, tensor))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert memory.all_bytes[:5].tolist() == [5, 6, 7, 0, 0]
    assert len(memory.all_bytes) == 3_000_000
    assert tensor.tensor.tolist() == [5, 6, 7], "what is shared by all is written to by none"


def test_writing_to_a_shared_tensor_stays_private() -> None:
    start = torch.arange(10_000)
    tensor = SharedTensor(start)
    with Workers(work.Overwriter(tensor), work.devices(2), 1 << 20) as workers:
        tickets = [workers.submit(Item(None, (), "overwrites")) for _ in range(20)]
        seen: dict[int, int] = {}
        for _, pid, (found,) in workers.results(tickets):
            seen[pid] = seen.get(pid, 0) + 1
            assert torch.equal(found, start + seen[pid])
    assert torch.equal(tensor.tensor, start)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex128])
def test_a_copy_is_equal_and_begins_at_a_page(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.ones(shape).to(dtype)
    copy = SharedTensor(tensor).tensor
    assert (copy.dtype, copy.shape) == (dtype, tensor.shape)
    assert torch.equal(copy, tensor)
    assert copy.data_ptr() % os.sysconf("SC_PAGE_SIZE") == 0


def test_joined_tensors_lie_one_after_the_other() -> None:
    parts = [torch.full((rows, 2), rows, dtype=torch.float64) for rows in (1, 0, 3)]
    joined = SharedTensor(*parts).tensor
    assert torch.equal(joined, torch.cat(parts))


@on_linux
def test_what_cannot_be_had_is_said_in_one_sentence() -> None:
    with pytest.raises(
        RunFailed, match=r"^cannot have 1 PB of memory that processes share \(.* available\): use fewer workers"
    ):
        SharedMemory(10**15)


@on_linux
def test_files_that_do_not_grow_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, begin: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    gc.collect()  # or descriptors of earlier tests go meanwhile
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(RunFailed, match=r"\(No space left on device\)"):
        SharedMemory(100)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


@pytest.mark.parametrize(
    ("version", "place", "group"),
    [(2, "0::/job/step", "job"), (2, "0::/outside/of/sight", "."), (1, "7:memory:/job", "memory/job")],
)
def test_the_limit_of_a_container_counts(
    version: int, place: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / group
    folder.mkdir(parents=True, exist_ok=True)
    limit, used = [
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("memory.max", "memory.current"),
    ][version - 1]
    (folder / limit).write_text("5000000\n")
    (folder / used).write_text("4000000\n")
    (folder / "memory.stat").write_text("anon 3000000\ninactive_file 500000\ntotal_inactive_file 500000\n")
    (tmp_path / "groups").write_text(f"5:cpu:/else\n{place}\n")
    monkeypatch.setattr(shared_memory, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(shared_memory, "_THOSE_OF_THIS_PROCESS", tmp_path / "groups")
    with pytest.raises(RunFailed, match=r"cannot have 2 MB .* \(1\.5 MB are available\)"):
        SharedMemory(2_000_000)
    assert len(SharedMemory(1_000_000).all_bytes) == 1_000_000
    (folder / limit).write_text("max\n")
    assert len(SharedMemory(2_000_000).all_bytes) == 2_000_000


@on_linux
def test_memory_is_given_back() -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        SharedMemory(10_000)
        SharedTensor(torch.zeros(10))
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_it_goes_to_spawned_processes_alone() -> None:
    for memory in (SharedMemory(1), SharedTensor(torch.zeros(1))):
        with pytest.raises(RuntimeError, match="through inheritance"):
            pickle.dumps(memory)


def test_windows_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(InvalidInput, match="memory that Windows does not have: use workers: 0"):
        SharedMemory(1)
