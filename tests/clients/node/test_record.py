"""The record of revealed rounds: what is on the disk after it was cut off, removed, or written to in vain."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fed.clients.node.record import RECORD_FILE, RevealedRecord
from fed.errors import InvalidInput

ENTRIES = [bytes([number]) * 32 for number in range(9)]


def cut(path: Path) -> None:
    """Leave half an entry at the end."""
    os.truncate(path, path.stat().st_size - 16)


def behead(path: Path) -> None:
    """Leave less than the head."""
    os.truncate(path, 5)


def lengthen(path: Path) -> None:
    """Add half an entry, as a write in vain does whose cut is in vain, too."""
    with path.open("ab") as file:
        file.write(b"x" * 16)


@pytest.mark.parametrize("harm", [cut, behead, lengthen, os.remove])
def test_record_harmed_while_a_node_runs_keeps_all_rounds(harm: Callable[[Path], None], tmp_path: Path) -> None:
    record = RevealedRecord(tmp_path, begins_anew=True)
    record.append(ENTRIES[:3])
    harm(tmp_path / RECORD_FILE)
    record.append(ENTRIES[3:6])
    record.append(ENTRIES[6:])
    assert [*RevealedRecord(tmp_path).rounds] == ENTRIES


def test_record_without_its_folder_lets_no_shares_leave(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    record = RevealedRecord(folder, begins_anew=True)
    (folder / RECORD_FILE).unlink()
    folder.rmdir()
    with pytest.raises(OSError, match="No such file"):
        record.append(ENTRIES[:3])
    with pytest.raises(InvalidInput, match="is not there"):
        RevealedRecord(folder)


def test_full_disk_leaves_no_half_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = RevealedRecord(tmp_path, begins_anew=True)
    record.append(ENTRIES[:3])
    with monkeypatch.context() as full:
        full.setattr("os.fsync", _is_full)
        with pytest.raises(OSError, match="no space left"):
            record.append(ENTRIES[3:6])
    assert [*RevealedRecord(tmp_path).rounds] == ENTRIES[:3]
    record.append(ENTRIES[6:])
    assert [*RevealedRecord(tmp_path).rounds] == [*ENTRIES[:3], *ENTRIES[6:]]


def _is_full(_: int) -> None:
    raise OSError("no space left")
