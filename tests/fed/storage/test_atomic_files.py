"""Whole files: what reaches the disk, and in which order."""

import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fed.errors import InvalidInput
from fed.storage.atomic_files import held, replaced, sync_folder, write_atomically
from fed.storage.run_folder import RunFolder


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is synced, and "renamed", in their order."""
    seen: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(place: int) -> None:
        seen.append(Path(f"/proc/self/fd/{place}").readlink().name)
        fsync(place)

    def renamed(path: Path, target: Path) -> Path:
        seen.append("renamed")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    return seen


linux = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at open files as Linux shows them")


@linux
def test_content_is_synced_before_its_name(tmp_path: Path, steps: list[str]) -> None:
    write_atomically(tmp_path / "file", b"new")
    assert steps == [f".file.{os.getpid()}", "renamed", tmp_path.name]


@linux
def test_lines_of_metrics_reach_the_disk_when_asked_for(tmp_path: Path, steps: list[str]) -> None:
    for name in ("environment.json", *RunFolder.LINES):
        (tmp_path / name).touch()
    RunFolder.existing(tmp_path).sync()
    assert steps == ["metrics.jsonl", "participation.jsonl", "clients.jsonl"]


def test_file_has_its_mode_from_the_first_byte_on(tmp_path: Path) -> None:
    for name in ("secret", f".secret.{os.getpid()}"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o666)
    with replaced(tmp_path / "secret", mode=0o600) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def write() -> None:
        with replaced(tmp_path / "file") as file:
            file.write(b"new")
            raise error

    with pytest.raises(error):
        write()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


@pytest.mark.parametrize(("code", "is_told"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_unsyncable_folder_is_ignored_but_a_failing_disk_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_told: bool
) -> None:
    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    if is_told:
        with pytest.raises(OSError, match="Input/output error"):
            sync_folder(tmp_path)
    else:
        sync_folder(tmp_path)


HOLD = """
import sys, time
from pathlib import Path
from fed.storage.atomic_files import held
with held(Path(sys.argv[1]), "choose another"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_folder_lock_lasts_until_its_process_ends_or_dies(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for ends in (signal.SIGKILL, None):
        holds = [sys.executable, "-c", HOLD, str(folder)]
        with subprocess.Popen(holds, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(InvalidInput, match=r"folder is in use by another process: wait .*, or choose"):
                held(folder, "choose another").__enter__()
            if ends is not None:
                other.send_signal(ends)
            other.communicate()
        with held(folder, "choose another"):
            (folder / "mine").touch()
        assert [path.name for path in folder.iterdir()] == ["mine"]


def test_a_lock_that_waits_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = threading.Event()
    order: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.set()  # type: ignore[method-assign]  # the handler is this test's own
    logging.getLogger("fed.storage.atomic_files").addHandler(handler)

    def wait() -> None:
        with held(tmp_path, "choose another", waits=True):
            order.append("other")

    other = threading.Thread(target=wait)
    with held(tmp_path, "choose another"):
        other.start()
        assert said.wait(10)
        order.append("first")
    other.join(10)
    logging.getLogger("fed.storage.atomic_files").removeHandler(handler)
    assert order == ["first", "other"]
    assert "is in use by another process: waiting until that has ended" in caplog.text


def test_a_folder_that_was_held_for_nothing_is_as_before(tmp_path: Path) -> None:
    for folder in (tmp_path / "new", tmp_path):
        with held(folder, "choose another"):
            pass
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match=r"file/folder cannot be written to \(Not a directory\): choose another"):
        held(tmp_path / "file" / "folder", "choose another").__enter__()
