"""Checkpoints: what is written is read, what is damaged is noticed, what is good is never lost."""

import errno
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from fed.errors import CheckpointFailed, InvalidCheckpoint
from fed.storage import checkpoint_files, checkpoints
from fed.storage.checkpoint_files import file_name, flaw_of, numbers_in, remove_all
from fed.storage.checkpoints import Checkpoints
from fed.storage.serialization import Tree
from tests.fed.storage.random_trees import same, trees

SMALL: Tree = {"round": 3, 7: (torch.arange(3, dtype=torch.int16), None, -0.0)}
ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 600


def of_rounds(folder: Path, *numbers: int, keep: int = 9) -> Checkpoints:
    kept = Checkpoints(folder, keep)
    for number in numbers:
        kept.write(number, {"of": number})
    return kept


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@given(trees, st.integers(0, 10**9))
def test_what_is_read_is_what_was_written_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, tree: Tree, number: int
) -> None:
    kept = Checkpoints(tmp_path_factory.mktemp("run") / "checkpoints", keep=1)
    kept.write(number, tree)
    assert same(kept.newest(), (number, tree))


def test_same_state_makes_the_same_file(tmp_path: Path) -> None:
    for name in "ab":
        Checkpoints(tmp_path / name, 1).write(3, SMALL)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_checkpoint_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    Checkpoints(tmp_path, 1).write(3, SMALL)
    path = tmp_path / "round-000003.safetensors"
    assert load_file(path).keys() == {"structure", "tensors"}
    (tmp_path / "plain").write_bytes(b"")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_there_is_none_before_the_first(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none", 1).newest() is None
    assert Checkpoints(tmp_path, 1).newest() is None
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_few_are_kept(tmp_path: Path, keep: int) -> None:
    numbers = [2, 999_999, 1_000_000, 20_000_000]
    kept = of_rounds(tmp_path, *numbers, keep=keep)
    assert numbers_in(tmp_path) == numbers[-keep:]
    assert kept.newest() == (20_000_000, {"of": 20_000_000})


def test_what_is_not_a_checkpoint_stays(tmp_path: Path) -> None:
    names = ("notes.txt", "round-3.safetensors", "round-0000003.safetensors", "round-000003.safetensors.bak")
    for name in names:
        (tmp_path / name).write_text("mine")
    kept = of_rounds(tmp_path, 1, 2, keep=1)
    assert set(contents(tmp_path)) == {*names, "round-000002.safetensors"}
    assert numbers_in(tmp_path) == [2]
    assert kept.newest() == (2, {"of": 2})


def test_resuming_from_an_earlier_checkpoint_drops_later_ones(tmp_path: Path) -> None:
    kept = of_rounds(tmp_path, 5, 10, 15, keep=2)
    spoil(tmp_path / file_name(15))
    assert kept.newest() == (10, {"of": 10})
    kept.write(11, {"of": "another course"})
    assert (numbers_in(tmp_path), kept.newest()) == ([10, 11], (11, {"of": "another course"}))


def test_rewriting_a_round_replaces_a_damaged_checkpoint(tmp_path: Path) -> None:
    kept = of_rounds(tmp_path, 5, 10)
    spoil(tmp_path / file_name(10))
    kept.write(10, {"of": "ten"})
    assert kept.newest() == (10, {"of": "ten"})


def test_what_cannot_be_kept_costs_no_checkpoint(tmp_path: Path) -> None:
    kept = of_rounds(tmp_path, 1, keep=1)
    before = contents(tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"got a builtins.set at state\['a'\]"):
        kept.write(2, {"a": {1}})
    assert contents(tmp_path) == before


# Damage


def notices(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    with pytest.raises(InvalidCheckpoint) as caught:
        Checkpoints(path.parent, 1).newest()
    return str(path) in str(caught.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("small")
    Checkpoints(folder, 1).write(3, SMALL)
    return folder / file_name(3), (folder / file_name(3)).read_bytes()


@pytest.mark.parametrize(
    "change", [0x01, *(pytest.param(bits, marks=pytest.mark.long) for bits in (0x20, 0x80, 0xFF)), None]
)
def test_every_byte_that_changes_is_noticed(small: tuple[Path, bytes], change: int | None) -> None:
    path, whole = small
    for place, byte in enumerate(whole):
        other = byte ^ change if change is not None else (9 if byte == 32 else 32)  # blanks are alike to JSON
        assert notices(path, whole[:place] + bytes([other]) + whole[place + 1 :]), place
    path.write_bytes(whole)
    assert same(Checkpoints(path.parent, 1).newest(), (3, SMALL))


def test_every_length_but_the_whole_is_noticed(small: tuple[Path, bytes]) -> None:
    path, whole = small
    assert all(notices(path, whole[:length]) for length in range(len(whole)))
    assert all(
        notices(path, whole[:length].ljust(len(whole), b"\0"))
        for length in range(len(whole) - 1)
        if any(whole[length:])
    )


@given(more=st.binary(min_size=1, max_size=5000))
def test_bytes_behind_the_end_are_noticed(small: tuple[Path, bytes], more: bytes) -> None:
    assert notices(small[0], small[1] + more)


@given(data=st.data())
def test_parts_that_change_places_are_noticed(small: tuple[Path, bytes], data: st.DataObject) -> None:
    path, whole = small
    a, b, c = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=3, max_size=3)))
    swapped = whole[:a] + whole[b:c] + whole[a:b] + whole[c:]
    assert swapped == whole or notices(path, swapped)


@given(st.binary(max_size=300))
def test_anything_else_is_no_checkpoint(small: tuple[Path, bytes], content: bytes) -> None:
    assert notices(small[0], content)


def test_a_part_of_another_checkpoint_is_noticed(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, 2)
    for number in (1, 2):
        kept.write(number, torch.full((4000,), number, dtype=torch.int64))
    first, second = (contents(tmp_path)[file_name(number)] for number in (1, 2))
    assert len(first) == len(second)
    path = tmp_path / file_name(2)
    for cut in (200, 300, 4096, 20_000):
        path.write_bytes(first[:cut] + second[cut:])
        assert flaw_of(path, 2) is not None
    path.write_bytes(first)
    assert flaw_of(path, 2) == "is the checkpoint of round 1 under another name"


def test_damaged_checkpoint_is_named_and_the_previous_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = of_rounds(tmp_path, 5, 10, 15, 20)
    spoil(tmp_path / file_name(20))
    (tmp_path / file_name(15)).write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert kept.newest() == (10, {"of": 10})
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        f"{tmp_path / file_name(20)} is damaged: its content does not have the checksum that it names; "
        "the checkpoint of round 10 is used"
    )
    assert second.startswith(f"{tmp_path / file_name(15)} is empty; ")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


def test_a_whole_one_is_used_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    of_rounds(tmp_path, 1, 2).newest()
    assert caplog.records == []


def test_error_names_all_damaged_checkpoints_with_the_remedy(tmp_path: Path) -> None:
    kept = of_rounds(tmp_path, 5, 10)
    spoil(tmp_path / file_name(5))
    (tmp_path / file_name(10)).unlink()
    (tmp_path / file_name(10)).mkdir()
    with pytest.raises(InvalidCheckpoint) as caught:
        kept.newest()
    message = str(caught.value)
    assert message.startswith(
        f"there must be a whole checkpoint to resume from, got {tmp_path / file_name(10)} cannot "
    )
    assert f"; {tmp_path / file_name(5)} is damaged" in message
    assert message.endswith("or run the experiment again with --overwrite")
    assert "\n" not in message


def test_another_format_is_told_from_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "_SEAL", checkpoint_files._SEAL.replace("format 1", "format 2"))
    with pytest.raises(CheckpointFailed, match="is of format 2, which this version of fed cannot read"):
        of_rounds(tmp_path, 1)


def test_unreadable_folder_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(InvalidCheckpoint, match=r"cannot be read \(Not a directory\): make it readable"):
        Checkpoints(tmp_path / "checkpoints", 1).newest()


# No room


@contextmanager
def no_more_than(size_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond this, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room_bytes", [0, 10, 300, 5_000])
def test_failed_write_leaves_earlier_checkpoints_and_nothing_else(tmp_path: Path, room_bytes: int) -> None:
    kept = of_rounds(tmp_path, 5, 10, keep=2)
    before = contents(tmp_path)
    with no_more_than(room_bytes), pytest.raises(CheckpointFailed) as caught:
        kept.write(15, torch.zeros(3000))
    assert contents(tmp_path) == before
    assert str(caught.value) == (
        f"the checkpoint of round 15 cannot be written to {tmp_path} (File too large); earlier ones are kept: "
        "make room there for 12.1 kB that this process may write, then resume the run"
    )
    assert caught.value.exit_code == 1
    kept.write(15, torch.zeros(3000))
    assert numbers_in(tmp_path) == [10, 15]


@pytest.mark.parametrize("at", ["fsync", "open"])
def test_an_error_of_the_disk_at_any_step_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    kept = of_rounds(tmp_path, 1)
    before = contents(tmp_path)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail) if at == "fsync" else patched.setattr(Path, "open", fail)
        with pytest.raises(CheckpointFailed, match=r"Input/output error.*earlier ones are kept"):
            kept.write(2, SMALL)
    assert contents(tmp_path) == before


def test_what_cannot_be_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointFailed, match=r"file/deep \(Not a directory\); earlier ones are kept: make room"):
        Checkpoints(tmp_path / "file" / "deep", 1).write(1, None)


def test_nothing_goes_before_the_new_one_has_been_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = of_rounds(tmp_path, 1, keep=1)
    sealed = checkpoint_files.write_sealed

    def lose_a_bit(file: Any, number: int, **parts: Any) -> None:
        sealed(file, number, **parts)
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")

    monkeypatch.setattr(checkpoints, "write_sealed", lose_a_bit)
    with pytest.raises(CheckpointFailed, match="read back, it is damaged"):
        kept.write(2, SMALL)
    assert (numbers_in(tmp_path), kept.newest()) == ([1], (1, {"of": 1}))


def test_one_that_cannot_be_removed_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = of_rounds(tmp_path, 1, keep=1)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == file_name(1):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    kept.write(2, None)
    assert "earlier checkpoints cannot be removed (Operation not permitted)" in caplog.text
    assert kept.newest() == (2, None)


# Killed


def run(*arguments: str) -> None:
    command = [sys.executable, "-m", "tests.fed.storage.checkpoint_deaths", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_killed_at_any_point_writers_leave_whole_checkpoints(tmp_path: Path) -> None:
    run("killed", str(tmp_path / "checkpoints"), "60")


def test_writers_ended_before_any_system_call_leave_whole_checkpoints(tmp_path: Path) -> None:
    run("stepwise", str(tmp_path))


# Memory, and going


@pytest.mark.long
def test_no_more_than_a_tensor_is_copied_at_a_time(tmp_path: Path) -> None:
    peak = """
import resource, sys, torch
from pathlib import Path
from fed.storage.checkpoints import Checkpoints
kept = Checkpoints(Path(sys.argv[1]), keep=1)
kept.write(1, [torch.zeros(2)]); kept.newest()
state = [torch.ones(2_000_000).view(1000, 2000).T for _ in range(40)]  # 320 MB, none contiguous
def peak_bytes(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak_bytes()
kept.write(2, state)
print(peak_bytes() - before)
"""
    command = [sys.executable, "-c", peak, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert int(done.stdout) < 80e6, "a few tensors of 8 MB, not 320 MB"


def test_removing_all_leaves_what_is_not_ours(tmp_path: Path) -> None:
    remove_all(tmp_path / "none")
    of_rounds(tmp_path / "ours", 1, 2)
    (tmp_path / "ours" / f".{file_name(3)}.77").write_bytes(b"half")
    remove_all(tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    of_rounds(tmp_path / "shared", 1)
    (tmp_path / "shared" / "notes.txt").write_text("mine")
    remove_all(tmp_path / "shared")
    assert set(contents(tmp_path / "shared")) == {"notes.txt"}
