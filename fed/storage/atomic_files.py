"""Atomic files: each is seen whole or not at all, even after a crash or a loss of power."""

import errno
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from fed.errors import InvalidInput

__all__ = ["LOCK", "held", "replaced", "sync_folder", "unfinished", "write_atomically"]

_log = logging.getLogger(__name__)

LOCK = ".lock"
"""Name of the file by which a process locks a folder. The file of a killed process locks nothing."""


def write_atomically(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file in place of the one that may be there.

    Args:
        path: path of the file.
        content: bytes of the file.
        mode: permissions of the file, less the process's umask.

    Raises:
        OSError: if it cannot be written; the file that was there is unchanged.

    Example:
        >>> write_atomically(Path("summary.json"), b"{}")
        >>> Path("summary.json").read_bytes()
        b'{}'
    """
    with replaced(path, mode=mode) as file:
        file.write(content)


@contextmanager
def replaced(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of ``path`` when the block ends, on the disk and not only in a cache.

    During the block it stands beside ``path`` as ``.NAME.PID``. After an error it is removed.

    Args:
        path: path of the file.
        mode: permissions of the file from the first byte on, less the process's umask.

    Raises:
        OSError: if it cannot be written; the file that was there is unchanged.
    """
    # In the same folder: a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)  # an earlier process of this number left it: its mode would stay
        # Created with its mode: not even for a moment can others read a key.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        with temporary.open("wb") as file:
            yield file
            file.flush()
            # Before the rename: a loss of power would else leave the new name without its content.
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)  # the rename itself is lost with the power until the folder is on the disk


def unfinished(folder: Path, names: Iterable[str]) -> list[Path]:
    """The temporary files that a killed process left for files of these names; names may be patterns."""
    return [path for name in names for path in folder.glob(f".{name}.*") if path.suffix[1:].isdigit()]


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's list of files.

    Raises:
        OSError: if the disk fails.
    """
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems sync no folders
            raise
    finally:
        os.close(place)


@contextmanager
def held(folder: Path, remedy: str, *, waits: bool = False) -> Iterator[None]:
    """Lock a folder against all other processes that lock it, and make it where it does not exist.

    The system unlocks it when the process is killed.

    Args:
        folder: folder to lock.
        remedy: advice for a user who finds it locked, besides waiting.
        waits: True if it waits until no other process has it, and says so.

    Raises:
        InvalidInput: if another process has it, or it cannot be written to.

    Example:
        >>> with held(Path("state"), "choose another"):
        ...     print(*Path("state").iterdir())
        state/.lock
        >>> Path("state").exists()
        False
    """
    # Unless it is asked for, no waiting: another run may take days.
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        was_there = folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        _acquire(lock, folder, waits=waits)
    except Timeout:  # is an OSError too, so that it must come first
        raise InvalidInput(f"{folder} is in use by another process: wait until that has ended, or {remedy}") from None
    except OSError as error:
        raise InvalidInput(f"{folder} cannot be written to ({error.strerror}): {remedy}") from None
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / LOCK).unlink()  # while it is locked: a process that waits for this file finds it gone
        lock.release()
        if not was_there:
            with suppress(OSError):  # it is no longer empty
                folder.rmdir()


def _acquire(lock: FileLock, folder: Path, *, waits: bool) -> None:
    try:
        lock.acquire()
    except Timeout:
        if not waits:
            raise
        _log.warning("%s is in use by another process: waiting until that has ended", folder)
        lock.acquire(timeout=-1)
