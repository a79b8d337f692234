"""Shared memory for several processes, without files that could be left behind.

On Linux it is anonymous memory with a file descriptor, which the size of ``/dev/shm`` does not limit; elsewhere a
temporary file that has no name. Either is freed when the last process that has it ends, however that happens.
"""

import contextlib
import math
import mmap
import os
import pickle
import sys
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from multiprocessing import context, reduction
from pathlib import Path
from typing import Any, NamedTuple

from fed.errors import InvalidInput, RunFailed, os_errors_as
from fed.quantities import bytes_text
from fed.vectors.tensors import Tensor, torch

__all__ = ["CONTENT_BYTES", "Parcel", "Place", "SharedMemory", "SharedTensor", "Slot", "packed"]

CONTENT_BYTES = 1 << 20
"""Largest size of a pickled content."""

_ALIGNMENT_BYTES = 64


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Place(NamedTuple):
    """Place of a tensor in a piece of memory."""

    begin: int
    dtype: "torch.dtype"
    shape: tuple[int, ...]

    def in_(self, memory: Tensor) -> Tensor:
        """Tensor that shares this part of the memory."""
        end = self.begin + self.dtype.itemsize * math.prod(self.shape)
        return memory[self.begin : end].view(self.dtype).view(self.shape)


def packed(tensors: Sequence[Tensor]) -> tuple[list[Place], int]:
    """Places of tensors packed one after the other, and the bytes that they take.

    Raises:
        InvalidInput: if one of them is not an array of numbers in rows and columns.

    Example:
        >>> places, size_bytes = packed([torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64)])
        >>> [place.begin for place in places], size_bytes
        ([0, 64], 128)
    """
    places = []
    end = 0
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise InvalidInput(f"tensors between processes must be dense, got {tensor.layout} of {tensor.dtype}")
        places.append(Place(end, tensor.dtype, tuple(tensor.shape)))
        end += _aligned(tensor.nbytes)
    return places, end


class SharedMemory:
    """Memory that this process sees, and every process that is spawned with this object among its arguments.

    Args:
        size_bytes: number of bytes. They are zero at first, and claimed from the system at once.
        is_private: True if a spawned process's changes are seen by that process alone.

    Attributes:
        all_bytes: tensor of all the bytes; it begins at the beginning of a page.
        fd: descriptor of the file that holds the memory.

    Raises:
        RunFailed: if there is no such room.
        InvalidInput: on Windows, which has no such memory.
    """

    def __init__(self, size_bytes: int, *, is_private: bool = False) -> None:
        self._access_in_child = mmap.ACCESS_COPY if is_private else mmap.ACCESS_WRITE
        size_bytes = max(size_bytes, 1)  # an empty file cannot be mapped
        self._map(_claimed(size_bytes), size_bytes, mmap.ACCESS_WRITE)

    def _map(self, fd: int, size_bytes: int, access: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd).atexit = False
        with _room_for(size_bytes):
            self.mapped = mmap.mmap(fd, size_bytes, access=access)
        # Shares the memory, and keeps the mapping alive.
        self.all_bytes = torch.frombuffer(self.mapped, dtype=torch.uint8)

    def __getstate__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)  # in any other pickle a descriptor means nothing
        return reduction.DupFd(self.fd), len(self.mapped), self._access_in_child

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        handle, size_bytes, access = state
        fd = handle.detach()
        os.set_inheritable(fd, False)  # a process of the worker's own would keep the memory
        self._map(fd, size_bytes, access)


class SharedTensor:
    """Copy of tensors, joined along the first dimension, that spawned processes map instead of copying it.

    It must not change once a process has it. A process that writes to it gets those pages for itself alone, so that the
    others compute with the original.

    Args:
        tensors: tensors to copy, of one type, alike in all dimensions but the first; at least one.

    Attributes:
        tensor: copy of the joined tensors.

    Example:
        >>> SharedTensor(torch.arange(3), torch.ones(1, dtype=torch.int64)).tensor
        tensor([0, 1, 2, 1])
    """

    def __init__(self, *tensors: Tensor) -> None:
        packed(tensors)  # refuses what has no bytes in a row
        rows = sum(map(len, tensors))
        _, *others = tensors[0].shape
        place = Place(0, tensors[0].dtype, (rows, *others))
        memory = SharedMemory(sum(tensor.nbytes for tensor in tensors), is_private=True)
        self.__setstate__((memory, place))
        torch.cat([tensor.detach() for tensor in tensors], out=self.tensor)

    def __getstate__(self) -> tuple[SharedMemory, Place]:
        return self._memory, self._place

    def __setstate__(self, state: tuple[SharedMemory, Place]) -> None:
        self._memory, self._place = state
        self.tensor = self._place.in_(self._memory.all_bytes)


class Parcel(NamedTuple):
    """Content of a :class:`Slot` beside the tensors' numbers, and the places of those."""

    pickled: bytes
    places: list[Place]

    @classmethod
    def of(cls, content: Any, tensors: Sequence[Tensor] = (), capacity_bytes: int = 0, what: str = "") -> "Parcel":
        """Pack a content and tensors.

        Args:
            content: object to send, which takes at most 1 MiB when it is pickled.
            tensors: tensors that go with the content.
            capacity_bytes: largest size of all the tensors together, each rounded up to 64 bytes.
            what: name of the content in errors, such as "clients 3, 7 and 9 in round 5".

        Raises:
            InvalidInput: if it is too large, or cannot be pickled.
        """
        places, size_bytes = packed(tensors)
        try:
            pickled = pickle.dumps((content, places), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise InvalidInput(f"{what}: content must be picklable to go between processes: {error}") from error
        # Refused here, where the item has a name: beyond the slot it would overwrite the next one.
        for name, size, limit in (("tensors", size_bytes, capacity_bytes), ("content", len(pickled), CONTENT_BYTES)):
            if size > limit:
                raise InvalidInput(
                    f"{what}: {name} must take at most {bytes_text(limit)} between processes, got {bytes_text(size)}"
                )
        return cls(pickled, places)


class Slot:
    """Part of shared memory where one process leaves a content with tensors for another.

    One byte says whether the content is recalled; what is pickled follows, and then the tensors.

    Args:
        memory: memory that holds the slot.
        index: number of the slot in the memory, from 0.
        capacity_bytes: largest size of all tensors together, each rounded up to 64 bytes.
    """

    def __init__(self, memory: SharedMemory, index: int, capacity_bytes: int) -> None:
        self._begin = index * self.size_bytes(capacity_bytes)
        self._mapped = memory.mapped
        first = self._begin + _ALIGNMENT_BYTES + CONTENT_BYTES
        self._tensor_bytes = memory.all_bytes[first : first + capacity_bytes]

    @staticmethod
    def size_bytes(capacity_bytes: int) -> int:
        """Bytes of a slot."""
        return _ALIGNMENT_BYTES + CONTENT_BYTES + _aligned(capacity_bytes)

    @property
    def is_recalled(self) -> bool:
        """True if the content is no longer wanted."""
        return self._mapped[self._begin] != 0

    @is_recalled.setter
    def is_recalled(self, value: bool) -> None:
        self._mapped[self._begin] = value

    def write(self, parcel: Parcel, tensors: Sequence[Tensor]) -> int:
        """Write a parcel and its tensors; returns the size that :meth:`read` asks for."""
        begin = self._begin + _ALIGNMENT_BYTES
        self._mapped[begin : begin + len(parcel.pickled)] = parcel.pickled
        for place, tensor in zip(parcel.places, tensors, strict=True):
            place.in_(self._tensor_bytes).copy_(tensor.detach())
        return len(parcel.pickled)

    def read(self, size: int) -> tuple[Any, list[Tensor]]:
        """Read the content and the tensors, which change when something else is written here."""
        begin = self._begin + _ALIGNMENT_BYTES
        content, places = pickle.loads(self._mapped[begin : begin + size])  # noqa: S301  # from a process of ours
        return content, [place.in_(self._tensor_bytes) for place in places]

    def apart(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of those tensors that lie in the memory to be written to; the others as they are."""
        whole = self._tensor_bytes.untyped_storage()
        begin = whole.data_ptr()
        end = begin + whole.nbytes()
        return [tensor.clone() if begin <= tensor.data_ptr() < end else tensor for tensor in tensors]


def _claimed(size_bytes: int) -> int:
    """Descriptor of a file without a name, filled with zeros, for which the system has set memory apart."""
    if sys.platform == "win32":
        raise InvalidInput("worker processes need memory that Windows does not have: use workers: 0")
    with _room_for(size_bytes):
        if size_bytes > (available := _available_bytes()):  # the system kills processes rather than refuse memory
            raise OSError(f"{bytes_text(available)} are available")
        # Not /dev/shm, which containers limit to 64 MiB.
        fd = os.memfd_create("fed") if hasattr(os, "memfd_create") else _temporary_file()
        try:
            _fill(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise
    return fd


def _room_for(size_bytes: int) -> AbstractContextManager[None]:
    problem = f"cannot have {bytes_text(size_bytes)} of memory that processes share"
    return os_errors_as(RunFailed, problem, "use fewer workers or a smaller model")


def _temporary_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())  # the file has no name, and lives as long as a descriptor


def _fill(fd: int, size_bytes: int) -> None:
    """Claim the room now: memory that is missing later ends a process without a word."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size_bytes)
        return
    zeros = bytes(min(size_bytes, 1 << 20))
    for begin in range(0, size_bytes, len(zeros)):
        os.pwrite(fd, zeros[: size_bytes - begin], begin)


def _available_bytes() -> float:
    """Bytes that this machine and this process's containers have left; infinite where no limit is known."""
    meminfo = _numbers(Path("/proc/meminfo"))
    machine = math.inf
    if "MemAvailable" in meminfo:
        machine = 1024 * (meminfo["MemAvailable"] + meminfo.get("SwapFree", 0))  # the file counts in KiB
    return min(machine, *map(_left_in, _control_groups()))


_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_THOSE_OF_THIS_PROCESS = Path("/proc/self/cgroup")


def _control_groups() -> list[Path]:
    """Folders of all groups that limit this process's memory, in either version of control groups."""
    try:
        lines = [line.split(":", 2)[1:] for line in _THOSE_OF_THIS_PROCESS.read_text().splitlines()]
    except OSError:
        lines = []
    paths = [Path(f"{controller}{path}") for controller, path in lines if controller in ("", "memory")]
    # A container may be told its path in the whole tree, and see its own group as the root: the root is looked at, too.
    relative = {part for path in paths for part in (path, *path.parents)}
    return [_CONTROL_GROUPS, *(_CONTROL_GROUPS / str(path).lstrip("/") for path in relative)]


def _left_in(group: Path) -> float:
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # the other version, no limit, or out of sight
            most, now = (int((group / name).read_text()) for name in (limit, used))
            # Cached files count as used, and are given up when memory is asked for.
            return most - now + _numbers(group / "memory.stat").get(cached, 0)
    return math.inf


def _numbers(path: Path) -> dict[str, int]:
    """Numbers of one of the system's files, by name, from its lines "name: number …"; none if it is missing."""
    try:
        words = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {name: int(number) for name, number, *_ in words}
