"""Gang: the parent's side of the rank processes that train one client, which end together.

Shapes: see :mod:`fed.vectors.layout`.
"""

import contextlib
import signal
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fed.clients.training.parallel.rank_process import Meeting, RankReply, packed_message, serve_rank
from fed.clients.training.parallel.setup import SharedSetup
from fed.clients.training.parallel.way import Rank
from fed.clients.training.working_process import FAULT_BYTES, fault_in
from fed.errors import DeviceFailed, FedError, InvalidExperiment, RunFailed, in_one_sentence, os_errors_as
from fed.processes.child_processes import spawned
from fed.processes.crash_report import words_of_exit
from fed.vectors.layout import Layout
from fed.vectors.shared_memory import Place, SharedMemory, packed
from fed.vectors.tensors import Tensor, torch

__all__ = ["Gang"]


_LAST_WORDS_S = 0.5
"""Time in which a rank may tell an error of its own when another has ended."""

_STOPPED_S = 30
"""Time for which a rank may be stopped by a signal, as by SIGSTOP, in whole seconds."""

_SILENT_S = 3600.0
"""Time for which ranks wait in an exchange for another one, in seconds."""

_NO_START = (
    "a process of local.devices could not start ({words}): a program that uses several devices must do so under "
    "if __name__ == '__main__':, or set local.devices to 1"
)


_TRAIN_ALONE = "set local.devices to 1 to train in this process and see where it fails"


class _Member(NamedTuple):
    """The parent's side of a rank."""

    process: BaseProcess
    connection: Connection


@dataclass
class _Deaths:
    """Ends of ranks.

    Attributes:
        order: numbers of the ranks in the order in which they have ended; those that were ended come last.
        stopped: numbers of those that a signal had stopped for too long.
        ended: numbers of those that were ended since another one had.
    """

    order: list[int] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


class Gang:
    """Rank processes of one client's training. If one ends, all are ended at once, and the task fails.

    One that a signal stops for long is ended. Where one lives, and leaves the others waiting, these end after an hour.

    They do not see Ctrl-C, and end when this process does, however that happens.

    Attributes:
        vector_V: vector of the model's state, which the ranks read their pieces from and write them to.
        integers_I: integers of the state.

    Args:
        setup: setup of all ranks.
        layout: layout of the model.
        devices: device of each rank.
        context_bytes: bytes for the tensors of a task's context.

    Raises:
        RunFailed: if a rank cannot be started, or ends before it is ready.
        FedError: if a rank refuses the setup.
    """

    def __init__(
        self, setup: SharedSetup, layout: Layout, devices: "Sequence[torch.device]", context_bytes: int
    ) -> None:
        if sys.platform != "linux":
            raise InvalidExperiment("local.devices above 1 needs Linux: set it to 1 on this system")
        places, size_bytes = _places(layout, context_bytes)
        self._memory = SharedMemory(size_bytes + FAULT_BYTES)
        self._context_place = places[2]
        self.vector_V, self.integers_I = (place.in_(self._memory.all_bytes) for place in places[:2])
        self._deaths = _Deaths()
        self._members: list[_Member] = []
        meeting = Meeting()
        with os_errors_as(RunFailed, "a process of local.devices cannot be started", "use fewer devices"):
            for number, device in enumerate(devices):
                rank = Rank(number, len(devices), device, patience_s=_SILENT_S)
                process, connection = spawned(
                    serve_rank,
                    setup,
                    self._memory,
                    places,
                    meeting,
                    rank,
                    name=f"worker rank {number}",
                    daemon=True,
                )
                self._members.append(_Member(process, connection))
        # Without a reference to this object, or it would never be collected.
        watched = (tuple(member.process for member in self._members), self._deaths)
        self._watch = threading.Thread(target=_end_together, args=watched, name="watch ranks", daemon=True)
        self._watch.start()
        self._finalizer = weakref.finalize(self, _close, tuple(self._members))
        self._is_ready = False
        self._replies(RankReply.READY)
        self._is_ready = True

    @property
    def process_ids(self) -> list[int]:
        """Ids of the ranks' processes, in their order."""
        return [member.process.pid or 0 for member in self._members]

    @property
    def is_alive(self) -> bool:
        """True until a rank has ended."""
        return self._watch.is_alive()

    def context_places(self, tensors: Sequence[Tensor]) -> list[Place]:
        """Write tensors of a task's context, and tell their places among the bytes of contexts.

        Args:
            tensors: tensors that take ``context_bytes`` at most.
        """
        places, _ = packed(tensors)
        room = self._context_place.in_(self._memory.all_bytes)
        for place, tensor in zip(places, tensors, strict=True):
            place.in_(room).copy_(tensor)
        return places

    def tell(self, messages: Sequence[Any]) -> None:
        """Send each rank its message, or all the only one.

        Raises:
            RunFailed: if a rank has ended.
            FedError: if a rank has refused.
        """
        packages = [packed_message(message) for message in messages]
        if len(packages) == 1:
            packages *= len(self._members)
        for member, package in zip(self._members, packages, strict=True):
            try:
                member.connection.send_bytes(package)
            except OSError:
                self._fail()

    def losses(self) -> list[float]:
        """Each rank's part of the sum of losses, once the task has ended.

        Raises:
            RunFailed: if a rank has ended.
            FedError: if a rank has refused.
        """
        return [float(content) for content in self._replies(RankReply.ENDED)]

    def close(self) -> None:
        """End the processes."""
        self._finalizer()

    def _replies(self, expected: RankReply) -> list[Any]:
        contents: list[Any] = []
        for member in self._members:
            try:
                reply, content = member.connection.recv()
            except (EOFError, OSError):
                self._fail()
            if reply is not expected:
                self._fail({len(contents): (reply, content)})
            contents.append(content)
        return contents

    def _fail(self, heard: dict[int, tuple[RankReply, Any]] | None = None) -> NoReturn:
        """Raise the error of the rank that ended first of itself.

        Args:
            heard: replies of ranks that have been read.
        """
        said = dict(heard or {})
        self._watch.join()  # all have ended, since one has
        for number, member in enumerate(self._members):
            with contextlib.suppress(EOFError, OSError):
                while number not in said or said[number][0] in (RankReply.READY, RankReply.ENDED):
                    said[number] = member.connection.recv()
        self.close()
        nothing: tuple[Any, Any] = (None, None)
        for number in self._deaths.order:
            reply, content = said.get(number, nothing)
            if reply is RankReply.REFUSED:
                assert isinstance(content, FedError)
                raise content
            if reply is RankReply.RAISED and not content[2]:
                raise self._failure(number, f"{content[0]}: correct it", content[1])
        silent = [number for number in self._deaths.order if said.get(number, nothing)[0] is not RankReply.RAISED]
        for number in silent:
            if number not in self._deaths.ended:
                raise self._silent_failure(number, self._members[number].process.exitcode)
        number = self._deaths.order[0]  # it tells of its connection to another
        words, details, _ = said[number][1]
        if silent and _has_waited(words):
            words = f"the others waited {_SILENT_S:g} s for it, which hangs"
            raise self._failure(silent[0], f"{words}: {_TRAIN_ALONE}", details)
        raise self._failure(number, f"{words}: {_TRAIN_ALONE}", details)

    def _silent_failure(self, number: int, code: int | None) -> FedError:
        """Error of a rank that has told none, and was not ended for another one's."""
        if number in self._deaths.stopped:
            words = f"a signal had stopped its process for {_STOPPED_S} s, so that it was ended"
            return self._failure(number, f"{words}: let it run, or train where nothing stops it")
        words = words_of_exit(code, fault_in(self._memory))
        if not self._is_ready and code is not None and code >= 0:
            return in_one_sentence(RunFailed(_NO_START.format(words=words)))
        if code == -signal.SIGKILL:
            return self._failure(number, f"{words}; lower local.batch_size, or share the model among more devices")
        return self._failure(number, f"{words}: {_TRAIN_ALONE}")

    def _failure(self, number: int, words: str, details: str = "") -> DeviceFailed:
        failure = DeviceFailed(f"device {number} of {len(self._members)} failed: {words}")
        if details:
            failure.add_note(details)
        return failure


def _places(layout: Layout, context_bytes: int) -> tuple[tuple[Place, Place, Place], int]:
    """Places of the vector, the integers and a task's context in the memory of the ranks, and its bytes."""
    vector_bytes = _up(layout.size * layout.dtype.itemsize)
    integer_bytes = _up(8 * layout.integer_count)
    places = (
        Place(0, layout.dtype, (layout.size,)),
        Place(vector_bytes, torch.int64, (layout.integer_count,)),
        Place(vector_bytes + integer_bytes, torch.uint8, (context_bytes,)),
    )
    return places, vector_bytes + integer_bytes + context_bytes


def _up(size_bytes: int) -> int:
    """Bytes rounded up, so that what follows is aligned."""
    return -(-size_bytes // 64) * 64


def _end_together(processes: Sequence[BaseProcess], deaths: _Deaths) -> None:
    """Wait until a process ends, or has been stopped for too long, and end all.

    Args:
        processes: processes of all ranks.
        deaths: record of ends, which is filled.
    """
    stopped_s = [0] * len(processes)
    ready: set[Any] = set()
    while not ready:
        # Counted second by second, so that a time in which this process was stopped, too, does not count.
        ready = set(wait([process.sentinel for process in processes], 1))
        stopped_s = [
            so_far + 1 if _is_stopped(process) else 0 for so_far, process in zip(stopped_s, processes, strict=True)
        ]
        for number, process in enumerate(processes):
            if not ready and stopped_s[number] >= _STOPPED_S:
                deaths.stopped.add(number)
                _end(process)
                ready.add(process.sentinel)
    first = [number for number, process in enumerate(processes) if process.sentinel in ready]
    # One that was killed comes before one that had time to find its connection closed.
    first.sort(key=lambda number: _exit_code(processes[number]))
    deaths.order.extend(first)
    for number, process in enumerate(processes):
        if number not in first:
            if not wait([process.sentinel], _LAST_WORDS_S):
                deaths.ended.add(number)
                _end(process)
            deaths.order.append(number)


def _end(process: BaseProcess) -> None:
    process.kill()
    wait([process.sentinel])


def _has_waited(words: str) -> bool:
    """True for words of a rank that has waited for another one in vain."""
    return "timed out" in words.lower() or "timeout" in words.lower()


def _is_stopped(process: BaseProcess) -> bool:
    """True if a signal has stopped a process."""
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended
        return False


def _exit_code(process: BaseProcess) -> int:
    code = process.exitcode
    return 0 if code is None else code


def _close(members: Sequence[_Member]) -> None:
    for member in members:
        member.connection.close()
        member.process.kill()
    for member in members:
        member.process.join()
