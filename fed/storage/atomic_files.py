"""Files that are seen whole or not at all, also after a crash or a loss of power."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from fed.errors import InvalidInput

__all__ = ["LOCK", "held", "replaced", "sync_folder", "write_atomically"]

LOCK = ".lock"
"""A file in a folder that a process has to itself; where that was killed, it means nothing."""


def write_atomically(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file in place of the one that may be there.

    Args:
        path: where.
        content: what.
        mode: who may read and write it, less what the process masks.

    Raises:
        OSError: if it cannot be written; what was there is as it was.

    Example:
        >>> write_atomically(Path("summary.json"), b"{}")
        >>> Path("summary.json").read_bytes()
        b'{}'
    """
    with replaced(path, mode=mode) as file:
        file.write(content)


@contextmanager
def replaced(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write into that takes the place of ``path`` when the block ends, on the disk and not in a cache alone.

    Until then it stands beside it as ``.NAME.PID``; after an error nothing of it is left.

    Args:
        path: where.
        mode: who may read and write it from the first byte on, less what the process masks.

    Raises:
        OSError: if it cannot be written; what was there is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)  # of an earlier process of that number: its mode would stay
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the disk knows which files a folder holds.

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
def held(folder: Path, remedy: str) -> Iterator[None]:
    """Have a folder to oneself among all processes that ask for it like this; it is made where it does not exist.

    The system lets go of it when a process is killed.

    Args:
        folder: which.
        remedy: what a user who cannot have it may do instead of waiting.

    Raises:
        InvalidInput: if another process has it, or it cannot be written to.

    Example:
        >>> with held(Path("state"), "choose another"):
        ...     print(*Path("state").iterdir())
        state/.lock
        >>> Path("state").exists()
        False
    """
    lock, was_there = FileLock(folder / LOCK, timeout=0), folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise InvalidInput(f"{folder} is in use by another process: wait until that has ended, or {remedy}") from None
    except OSError as error:
        raise InvalidInput(f"{folder} cannot be written to ({error.strerror}): {remedy}") from None
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / LOCK).unlink()  # while it is ours: who waits for this very file finds that it is gone
        lock.release()
        if not was_there:
            with suppress(OSError):  # it is no longer empty
                folder.rmdir()
