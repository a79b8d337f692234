"""The ledger of privacy: counted whole, and never lower after cuts, restores, changes and full disks."""

import hashlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fed.errors import InvalidInput, InvalidLedger, LedgerFailed
from fed.privacy.entries import Cost, LedgerChain, LedgerEntry
from fed.privacy.ledger import LEDGER_FILE, Ledger, ledger_folder
from fed.privacy.releases import Release

ONE = Release(noise_multiplier=1.0)
SAMPLED = Release(noise_multiplier=0.7, sampling=0.01)
IDENTITY = "federation 8f0c"


@contextmanager
def opened(place: Path, *, run: str = "run", is_resumed: bool = False) -> Iterator[Ledger]:
    """Open the ledger in ``state`` with its copy in ``run``, two folders of a place."""
    copy = place / "run" / LEDGER_FILE
    copy.parent.mkdir(exist_ok=True)
    with Ledger.open(place / "state", IDENTITY, run=run, copy=copy, is_resumed=is_resumed) as ledger:
        yield ledger


def spend(place: Path, rounds: range, *, run: str = "run") -> None:
    """Write an entry for each of these rounds."""
    with opened(place, run=run) as ledger:
        for number in rounds:
            ledger.append(number, [Cost(releases={ONE: 1})])


def spent(place: Path) -> int:
    """The number of releases that the ledger counts."""
    with opened(place, is_resumed=True) as ledger:
        return ledger.releases().total()


def own(place: Path) -> Path:
    """The ledger itself."""
    return place / "state" / LEDGER_FILE


def copy(place: Path) -> Path:
    """The copy beside the run."""
    return place / "run" / LEDGER_FILE


def test_entries_add_up_over_runs_restarts_and_attempts(tmp_path: Path) -> None:
    spend(tmp_path, range(1, 4))
    spend(tmp_path, range(3, 5), run="another")
    with opened(tmp_path) as ledger:
        assert ledger.append(3, [Cost(releases={SAMPLED: 2})]).attempt == 1
        assert ledger.releases() == {ONE: 5, SAMPLED: 2}
        assert ledger.releases(run="another") == {ONE: 2}
        assert ledger.releases(last_round=3) == {ONE: 4, SAMPLED: 2}
        assert ledger.head.count == len(ledger.entries) == 6


def test_clients_bear_what_names_them_and_what_names_nobody() -> None:
    ledger = Ledger.in_memory(IDENTITY)
    ledger.append(1, [Cost(releases={ONE: 1}, clients=(1, 2)), Cost(releases={SAMPLED: 3}, clients=(3,))])
    ledger.append(2, [Cost(releases={ONE: 1}, clients=(2,))])
    assert ledger.largest() == [{ONE: 2}, {SAMPLED: 3}] or ledger.largest() == [{SAMPLED: 3}, {ONE: 2}]
    ledger.append(3, [Cost(releases={ONE: 1})])
    assert ledger.for_client(1) == {ONE: 2}
    assert ledger.for_client(2) == {ONE: 3}
    assert ledger.for_client(3) == {SAMPLED: 3, ONE: 1}
    assert ledger.for_client("absent") == {ONE: 1}
    assert {frozenset(one.items()) for one in ledger.largest()} == {
        frozenset({(ONE, 3)}),
        frozenset({(SAMPLED, 3), (ONE, 1)}),
    }
    assert ledger.releases() == {ONE: 3, SAMPLED: 3}


def test_repeated_noise_is_counted_once_where_it_releases_the_same() -> None:
    ledger = Ledger.in_memory(IDENTITY, repeats_noise=True)
    cost = [Cost(releases={ONE: 1})]
    first = ledger.append(1, cost, content="a" * 64)
    assert ledger.append(1, cost, content="a" * 64) is first
    assert ledger.append(1, cost, content="b" * 64).attempt == 1
    assert ledger.append(2, cost, content="a" * 64).attempt == 0
    assert ledger.append(1, [Cost(releases={SAMPLED: 1})], content="a" * 64).attempt == 2
    assert ledger.releases() == {ONE: 3, SAMPLED: 1}


def test_fresh_noise_is_counted_whenever_it_is_released() -> None:
    ledger = Ledger.in_memory(IDENTITY)
    for attempt in range(3):
        assert ledger.append(1, [Cost(releases={ONE: 1})], content="a" * 64).attempt == attempt
    assert ledger.releases() == {ONE: 3}


def test_files_are_for_their_user_alone(tmp_path: Path) -> None:
    spend(tmp_path, range(1, 2))
    assert stat.S_IMODE(own(tmp_path).stat().st_mode) == 0o600
    assert stat.S_IMODE(own(tmp_path).parent.stat().st_mode) == 0o700
    assert copy(tmp_path).read_bytes() == own(tmp_path).read_bytes()


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(InvalidInput, match="in use by another process"), opened(tmp_path):
        pass


def test_ledger_that_is_closed_or_read_takes_no_entry(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.append(1, [Cost(releases={ONE: 1})])
    for closed in (ledger, Ledger.read(copy(tmp_path))):
        with pytest.raises(LedgerFailed, match="reading alone"):
            closed.append(1, [Cost(releases={ONE: 1})])


def rehashed(path: Path, change: Callable[[LedgerEntry], LedgerEntry]) -> None:
    """Change each entry of a file, and make the chain of hashes whole again."""
    before, _ = LedgerChain.read(path.read_bytes())
    after = LedgerChain(before.identity)
    for entry in before.entries:
        changed = change(entry)
        after.add(changed)
    path.write_bytes(after.content)


def cheaper(path: Path) -> None:
    """Put more noise into each entry than there was, with the right hashes."""
    less = Cost(releases={Release(noise_multiplier=100.0): 1})
    rehashed(path, lambda one: LedgerEntry(run=one.run, round=one.round, attempt=one.attempt, costs=(less,)))


def bytes_of(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the bytes of a file."""

    def changed(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return changed


def lines_of(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    """Change the lines of a file."""
    return bytes_of(lambda content: b"".join(change(content.splitlines(keepends=True))))


HARMS: dict[str, Callable[[Path], None]] = {
    "removed": Path.unlink,
    "truncated to zero": lambda path: os.truncate(path, 0),
    "last entry cut": lines_of(lambda lines: lines[:-1]),
    "first entry cut": lines_of(lambda lines: [lines[0], *lines[2:]]),
    "middle entry cut": lines_of(lambda lines: [*lines[:3], *lines[4:]]),
    "name cut": lines_of(lambda lines: lines[1:]),
    "reordered": lines_of(lambda lines: [lines[0], lines[2], lines[1], *lines[3:]]),
    "number changed": bytes_of(lambda content: content.replace(b"1.0", b"9.0", 1)),
    "number changed in the last entry": lines_of(lambda lines: [*lines[:-1], lines[-1].replace(b"1.0", b"9.0")]),
    "torn": lambda path: os.truncate(path, path.stat().st_size - 9),
    "end of line cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "space added": lines_of(lambda lines: [*lines[:-1], lines[-1].replace(b",", b", ", 1)]),
    "zeros": bytes_of(lambda content: bytes(len(content))),
    "rehashed": cheaper,
    "another ledger's": bytes_of(lambda content: LedgerChain("federation other").content),
}
LESS = ("torn", "end of line cut", "last entry cut", "removed")
"""Harms after which a file is a shorter ledger, or none."""
REFUSED = {
    "rehashed": "contradict each other from line 2 on",
    "another ledger's": "is the ledger of 'federation other'",
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("place", [own, copy], ids=["ledger", "copy"])
def test_harm_to_one_file_is_mended_or_refused(
    place: Callable[[Path], Path], harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spend(tmp_path, range(1, 6))
    HARMS[harm](place(tmp_path))
    if harm in REFUSED:
        with pytest.raises(InvalidLedger, match=r"contradict each other|is the ledger of"):
            spent(tmp_path)
        return
    assert spent(tmp_path) == 5
    assert str(place(tmp_path)) in caplog.text
    caplog.clear()
    assert spent(tmp_path) == 5
    assert own(tmp_path).read_bytes() == copy(tmp_path).read_bytes()
    assert not caplog.text


@pytest.mark.parametrize("harm", [harm for harm in HARMS if harm not in {*REFUSED, *LESS}])
def test_harm_to_both_files_is_refused(harm: str, tmp_path: Path) -> None:
    spend(tmp_path, range(1, 6))
    for place in (own, copy):
        HARMS[harm](place(tmp_path))
    with pytest.raises(InvalidLedger, match=r"no other copy that is whole: put one back"):
        spent(tmp_path)


def test_entry_that_was_torn_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spend(tmp_path, range(1, 4))
    line = own(tmp_path).read_bytes().splitlines(keepends=True)[-1]
    for end in (1, 9, len(line) // 2, len(line) - 2, len(line) - 1):
        content = b"".join(copy(tmp_path).read_bytes().splitlines(keepends=True)[:3])
        own(tmp_path).write_bytes(content + line[:end])
        copy(tmp_path).write_bytes(content)
        caplog.clear()
        assert spent(tmp_path) == 2
        assert "the last line was not whole" in caplog.text


def test_older_copy_in_both_places_is_found_by_its_head(tmp_path: Path) -> None:
    spend(tmp_path, range(1, 4))
    older = own(tmp_path).read_bytes()
    spend(tmp_path, range(4, 6))
    with opened(tmp_path) as ledger:
        head = ledger.head
    for place in (own, copy):
        place(tmp_path).write_bytes(older)
    with opened(tmp_path) as ledger:
        with pytest.raises(InvalidLedger, match="has 3 entries, and the checkpoint of round 5 is of another"):
            ledger.check(head, "the checkpoint of round 5")
        for number in range(4, 6):
            ledger.append(number, [Cost(releases={SAMPLED: 1})])
        assert not ledger.holds(head)  # as many entries, and other ones


def test_older_ledger_under_a_damaged_longer_copy_is_refused(tmp_path: Path) -> None:
    spend(tmp_path, range(1, 4))
    older = own(tmp_path).read_bytes()
    spend(tmp_path, range(4, 6))
    own(tmp_path).write_bytes(older)
    HARMS["number changed"](copy(tmp_path))
    with pytest.raises(InvalidLedger, match="has more lines than"):
        spent(tmp_path)


def test_two_histories_after_a_restore_are_refused(tmp_path: Path) -> None:
    spend(tmp_path, range(1, 4))
    older = own(tmp_path).read_bytes()
    spend(tmp_path, range(4, 6))
    (tmp_path / "run").rename(tmp_path / "first")
    own(tmp_path).write_bytes(older)
    spend(tmp_path, range(1, 2), run="another")
    (tmp_path / "run").rename(tmp_path / "second")
    (tmp_path / "first").rename(tmp_path / "run")
    with pytest.raises(InvalidLedger, match="contradict each other from line 5 on"):
        spent(tmp_path)


def test_ledger_on_a_disk_that_is_away_is_refused(tmp_path: Path) -> None:
    """A new one in its place would have ε begin at 0."""
    spend(tmp_path, range(1, 4))
    copy(tmp_path).unlink()
    disk = tmp_path / "disk"
    own(tmp_path).rename(disk)
    own(tmp_path).symlink_to(disk)
    assert spent(tmp_path) == 3
    copy(tmp_path).unlink()
    disk.rename(tmp_path / "unmounted")
    with pytest.raises(InvalidLedger, match=r"is a link to .*disk, which is not there: bring that back"):
        spent(tmp_path)
    (tmp_path / "unmounted").rename(disk)
    assert spent(tmp_path) == 3


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
@pytest.mark.parametrize("place", [own, copy])
def test_what_is_no_file_is_refused(
    make: Callable[[Path], None], place: Callable[[Path], Path], tmp_path: Path
) -> None:
    spend(tmp_path, range(1, 2))
    place(tmp_path).unlink()
    make(place(tmp_path))
    with pytest.raises(InvalidLedger, match=r"ledger.jsonl is no file: remove it, or put the ledger there"):
        spent(tmp_path)


def test_folder_that_no_system_takes_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be written to"), Ledger.open(tmp_path / ("a" * 300), "a", run="run"):
        pass


def test_full_disk_lets_nothing_be_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as ledger:
        ledger.append(1, [Cost(releases={ONE: 1})])
        before = own(tmp_path).read_bytes()
        with monkeypatch.context() as full:
            full.setattr("os.fsync", _is_full)
            with pytest.raises(LedgerFailed, match=r"no space left.*: make room there, and resume the run: nothing of"):
                ledger.append(2, [Cost(releases={ONE: 1})])
        assert own(tmp_path).read_bytes() == before
        assert ledger.append(2, [Cost(releases={ONE: 1})]).attempt == 0
    assert spent(tmp_path) == 2


@pytest.mark.parametrize("harm", ["removed", "last entry cut", "truncated to zero"])
def test_ledger_harmed_while_a_run_goes_on(harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as ledger:
        for number in range(1, 4):
            ledger.append(number, [Cost(releases={ONE: 1})])
        HARMS[harm](copy(tmp_path))
        ledger.append(4, [Cost(releases={ONE: 1})])
        assert copy(tmp_path).read_bytes() == own(tmp_path).read_bytes()
        assert "written anew" in caplog.text
        HARMS[harm](own(tmp_path))
        with pytest.raises(LedgerFailed, match=r"has been changed while|cannot be written to"):
            ledger.append(5, [Cost(releases={ONE: 1})])
    assert spent(tmp_path) == 4


def test_folder_of_a_ledger_is_named_by_its_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FED_STATE", str(tmp_path))
    assert ledger_folder(IDENTITY) == tmp_path / "privacy" / "federation-8f0c"


def test_lines_have_the_form_that_is_documented() -> None:
    chain = LedgerChain("federation 8f0c")
    costs = (Cost(releases=Counter({SAMPLED: 2}), clients=("ann", "bob")),)
    entry = LedgerEntry(run="r", round=3, attempt=0, costs=costs)
    chain.add(entry)
    first, second = map(json.loads, chain.content.splitlines())
    assert second.pop("hash") == chain.head.sha256
    assert first == {"hash": second["previous"], "ledger": "federation 8f0c", "previous": "", "version": 1}
    assert second == {
        "attempt": 0,
        "content": None,
        "costs": [{"clients": ["ann", "bob"], "releases": [[{"noise_multiplier": 0.7, "sampling": 0.01}, 2]]}],
        "previous": first["hash"],
        "round": 3,
        "run": "r",
    }


_ENTRY = {"attempt": 0, "content": None, "round": 1, "run": "r"}
_GAUSSIAN: dict[str, object] = {"noise_multiplier": 1.0, "sampling": 1.0}
_OF_NOBODY = object()


def _forged(
    release: dict[str, object] = _GAUSSIAN, count: int = 1, client: object = _OF_NOBODY, **keys: object
) -> bytes:
    """A ledger with one entry that nobody has written, whose hashes are right."""
    chain = LedgerChain(IDENTITY)
    cost = {"clients": None if client is _OF_NOBODY else [client], "releases": [[release, count]]}
    entry = {**_ENTRY, "costs": [cost], "previous": chain.head.sha256, **keys}
    unhashed = json.dumps(entry, sort_keys=True, separators=(",", ":"))
    sha256 = hashlib.sha256(unhashed.encode()).hexdigest()
    line = json.dumps({**entry, "hash": sha256}, sort_keys=True, separators=(",", ":"))
    return chain.content + line.encode() + b"\n"


_FORGERIES = {
    # Which would take all other releases back:
    "negative bound": _forged({**_GAUSSIAN, "skellam_l2": 1.0, "skellam_l1": -1e9}),
    "no bound": _forged({**_GAUSSIAN, "skellam_l2": 0.0, "skellam_l1": 1.0}),
    "bound that is no number": _forged({**_GAUSSIAN, "skellam_l2": math.nan, "skellam_l1": 1.0}),
    "too much noise": _forged({**_GAUSSIAN, "noise_multiplier": 1e308}),
    "too little noise": _forged({**_GAUSSIAN, "noise_multiplier": 1e-300}),
    "too many releases": _forged(count=10**400),
    "client that is a list": _forged(client=[1]),
    "client that is null": _forged(client=None),
    "content that is a list": _forged(content=[1]),
    "facts that are a number": _forged(told=5),
    "fact that is no number": _forged(told={"clip": math.nan}),
    "other unit": _forged(unit="house"),
    "deep line": LedgerChain(IDENTITY).content + b"[" * 100_000 + b"\n",
    "deep first line": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("forgery", _FORGERIES)
def test_forged_entries_are_damage(forgery: str, tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    path.write_bytes(_FORGERIES[forgery])
    with pytest.raises(InvalidLedger, match=r"has been damaged: line [12] "):
        Ledger.read(path)


def test_entry_of_another_hand_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    path.write_bytes(_forged(client="ann"))
    assert Ledger.read(path).for_client("ann") == Counter({ONE: 1})


def _is_full(_: int) -> None:
    raise OSError(28, "no space left on device")
