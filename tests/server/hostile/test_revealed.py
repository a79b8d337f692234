"""A coordinator that wants a second sum of a round whose shares a node has revealed."""

import os
import resource
import shutil
import stat
from pathlib import Path

import pytest
import torch

from fed.clients.node.record import RECORD_FILE, RevealedRecord
from fed.errors import InvalidInput
from fed.protocol import protocol_pb2 as pb
from fed.secure_aggregation import revealed_rounds
from fed.secure_aggregation.reasons import Reason
from tests.server.hostile.coordinator import NodeRefuses
from tests.server.hostile.nodes import COHORT, GUEST, Field
from tests.server.hostile.plans import KEYS, Run

NAMES = (*COHORT[:2], GUEST)
RENAMED = {"name": "another"}
CLIPPED = {"secure_aggregation": {**KEYS["secure_aggregation"], "max_drop_out": 0.1}}


def test_revealed_round_has_no_second_sum(field: Field) -> None:
    run = Run(field.coordinator, "revealed")
    run.tell()
    task = run.task(run.model(40))
    run.sum_of(dict.fromkeys(COHORT, task))
    for other in (run.task(run.model(40)), run.task(run.model(41)), run.task(run.model(40), attempt=1)):
        refuses(run, other)
    for name in ("of another run", "of a third"):  # as of a server that is started again, with the same experiment
        again = Run(field.coordinator, name)
        again.tell()
        refuses(again, run.task(run.model(40)))


@pytest.mark.parametrize("changed", [RENAMED, CLIPPED], ids=["name", "settings"])
def test_message_that_was_revealed_is_not_masked_again(changed: dict[str, object], field: Field) -> None:
    # a plan of which a trifle has changed has the clients make the same messages
    run = Run(field.coordinator, f"message {changed}")
    run.tell()
    model_V = run.model(42 if changed is RENAMED else 43)
    run.sum_of(dict.fromkeys(COHORT, run.task(model_V)))
    other = Run(field.coordinator, f"message again {changed}", changed)
    other.tell()
    with pytest.raises(NodeRefuses, match=Reason.REVEALED):
        other.sum_of(dict.fromkeys(COHORT, other.task(model_V)))


def test_node_knows_revealed_rounds_after_it_was_killed(field: Field) -> None:
    coordinator = field.coordinator
    program = field.start(GUEST, state="killed")
    coordinator.wait_to_join([GUEST], coordinator.views[GUEST].connections + 1)
    run = Run(coordinator, "killed")
    run.tell(NAMES)
    task = run.task(run.model(44))
    run.sum_of(dict.fromkeys(NAMES, task))
    program.kill()
    program = field.start(GUEST, state="killed", begins_record=False)
    try:
        coordinator.wait_to_join([GUEST], coordinator.views[GUEST].connections + 1)
        for name in ("killed", "of another run, killed"):
            again = Run(coordinator, name)
            again.tell([GUEST])
            refuses(again, run.task(run.model(44)), GUEST)
        assert len((field.state("killed") / RECORD_FILE).read_bytes()) == 22 + 32 + 3 * 32
    finally:
        program.kill()


@pytest.mark.long
def test_node_without_its_record_refuses_to_start(field: Field) -> None:
    coordinator = field.coordinator
    program = field.start(GUEST, state="gone")
    coordinator.wait_to_join([GUEST], coordinator.views[GUEST].connections + 1)
    program.kill()
    shutil.rmtree(field.state("gone"))
    refusing = field.start(GUEST, state="gone", begins_record=False)
    assert refusing.end() == 2
    assert "give --new-record" in refusing.said
    beginning = field.start(GUEST, state="gone")
    coordinator.wait_to_join([GUEST], coordinator.views[GUEST].connections + 1)
    beginning.kill()


@pytest.mark.parametrize("damage", ["gone", "empty", "head", "salt"])
def test_damaged_record_is_refused_until_another_is_begun(damage: str, tmp_path: Path) -> None:
    RevealedRecord(tmp_path, begins_anew=True).append([bytes(32)] * 3)
    path = tmp_path / RECORD_FILE
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "head": b"x" + content[1:], "salt": content[:30]}[damage])
    with pytest.raises(InvalidInput, match="--new-record"):
        RevealedRecord(tmp_path)
    assert not len(RevealedRecord(tmp_path, begins_anew=True).rounds)
    assert not len(RevealedRecord(tmp_path).rounds)


def test_owner_who_begins_a_record_keeps_the_one_there(tmp_path: Path) -> None:
    RevealedRecord(tmp_path, begins_anew=True).append([bytes(32)] * 3)
    assert [*RevealedRecord(tmp_path, begins_anew=True).rounds] == [bytes(32)]


def test_record_that_is_cut_keeps_whole_entries(tmp_path: Path) -> None:
    first = RevealedRecord(tmp_path, begins_anew=True)
    entries = [bytes([number]) * 32 for number in range(6)]
    first.append(entries[:3])
    first.append(entries[3:])
    path = tmp_path / RECORD_FILE
    os.truncate(path, path.stat().st_size - 40)  # of the last entry, and a part of the one before it
    again = RevealedRecord(tmp_path)
    assert [*again.rounds] == entries[:4]
    again.append(entries[5:])  # which begins where an entry begins
    assert [*RevealedRecord(tmp_path).rounds] == [*entries[:4], entries[5]]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("room_bytes", [0, 32, 40, 64])
def test_full_disk_leaves_the_record_as_it_was(room_bytes: int, tmp_path: Path) -> None:
    record = RevealedRecord(tmp_path, begins_anew=True)
    path = tmp_path / RECORD_FILE
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room_bytes, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            record.append([bytes([number]) * 32 for number in range(3)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    record.append([bytes([9]) * 32])
    assert [*RevealedRecord(tmp_path).rounds] == [bytes([9]) * 32]


def test_record_is_bounded_by_its_newest_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revealed_rounds, "_MOST_ROUNDS", 2)
    record = RevealedRecord(tmp_path, begins_anew=True)
    rounds = [
        [record.rounds.of_round("run", number), record.rounds.of_message(number, torch.zeros(2)), bytes([number]) * 32]
        for number in range(1, 5)
    ]
    for entries in rounds:
        record.rounds.add(entries)
        record.append(entries)
    assert [*record.rounds] == [*rounds[2], *rounds[3]]
    assert [*RevealedRecord(tmp_path).rounds] == [*record.rounds]
    assert (tmp_path / RECORD_FILE).stat().st_size == 22 + 32 + 6 * 32


def refuses(run: Run, task: pb.Assignment, name: str = COHORT[0]) -> None:
    """Check that a node joins no session of a task."""
    with pytest.raises(NodeRefuses, match=Reason.REVEALED):
        run.session({name: task}).assign()
    run.coordinator.tell(name, withdrawal=pb.Withdrawal(task=task.task))
