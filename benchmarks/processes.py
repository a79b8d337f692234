"""Run a command, and watch how much memory it and all its descendants take together."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

_PROC = Path("/proc")
_INTERVAL_S = 0.02
_TO_END_S = 10.0


class CommandFailed(Exception):
    """A command ended with another status than 0; the message holds what it wrote last."""


@dataclass(frozen=True)
class Finished:
    """Result of a command.

    Args:
        stdout: text that the command wrote.
        wall_s: seconds from the command's start to its end.
        peak_resident_mb: the largest sum over its processes of resident memory, pages shared by several counted for
            each; None where there is no ``/proc``.
        peak_mb: the same with each shared page counted once.
    """

    stdout: str
    wall_s: float
    peak_resident_mb: float | None = None
    peak_mb: float | None = None


def run(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, watch_memory: bool = False
) -> Finished:
    """Run a command to its end, in the repository's folder.

    Args:
        command: program and arguments.
        environment: variables beside those of this process.
        watch_memory: look at its memory every 20 ms.

    Raises:
        CommandFailed: if it fails.
    """
    begin_s = perf_counter()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        memory = _Memory(process.pid) if watch_memory and _PROC.is_dir() else None
        stdout, stderr = process.communicate()
        wall_s = perf_counter() - begin_s
        peak_resident_mb, peak_mb = memory.stop() if memory else (None, None)
    if process.returncode:
        raise CommandFailed(f"{' '.join(command)} ended with status {process.returncode}:\n{stderr[-2000:]}")
    return Finished(stdout, wall_s, peak_resident_mb, peak_mb)


@contextlib.contextmanager
def started(
    log: Path, *command: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A command under way, which is asked to end in the end, and then gone with all processes of its session.

    Args:
        log: file for the command's output.
        command: program and arguments.
        environment: variables beside those of this process.
    """
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TO_END_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class _Memory:
    """Watches a process and its descendants from a thread."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._peak_resident = self._peak = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[float, float]:
        self._is_over.set()
        self._thread.join()
        return self._peak_resident / 1e6, self._peak / 1e6

    def _watch(self) -> None:
        while not self._is_over.wait(_INTERVAL_S):
            sizes = [_memory_of(process) for process in _with_descendants(self._root)]
            resident, proportional = (sum(column) for column in zip((0, 0), *sizes, strict=True))
            self._peak_resident = max(self._peak_resident, resident)
            self._peak = max(self._peak, proportional)


def _with_descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue  # it has ended
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def _memory_of(process: int) -> tuple[int, int]:
    """Resident bytes, and the same with each page divided by how many processes share it."""
    try:
        lines = (_PROC / str(process) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0  # it has ended
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
    return kilobytes.get("Rss", 0) * 1024, kilobytes.get("Pss", 0) * 1024
