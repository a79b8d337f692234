"""A node's copy of the fixed part: sent once, kept, and checked each time."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from fed.clients.node.fixed_part import FIXED_PART, FixedPartMissing, hold_to_plan
from fed.errors import InvalidPayload
from fed.protocol.protocol_pb2 import Plan
from fed.vectors.fixed_part import fixed_state, packed
from fed.wire.payloads import written

MEMORY = Path("/dev/shm")


def model(fill: float, width: int = 3) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, width).requires_grad_(False), nn.Linear(width, 1))
    for part in fixed_state(made).values():
        part.fill_(fill)
    return made


def told(server: nn.Module, file: Path) -> Plan:
    return Plan(fixed_part=written(file, packed(fixed_state(server))))


@pytest.fixture(params=["the same file system", "another"])
def spool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder for what comes, which over Flower is the machine's for temporary files."""
    if request.param == "another" and (not MEMORY.is_dir() or MEMORY.stat().st_dev == tmp_path.stat().st_dev):
        pytest.skip("there is one file system")
    folder = Path(tempfile.mkdtemp(dir=MEMORY if request.param == "another" else tmp_path))
    yield folder
    shutil.rmtree(folder)


def test_what_was_sent_is_kept_for_the_next_start(spool: Path, tmp_path: Path) -> None:
    plan = told(model(7.0), spool / "sent")
    first, second = model(1.0), model(2.0)
    with pytest.raises(FixedPartMissing):
        hold_to_plan(first, plan, tmp_path, None)
    hold_to_plan(first, plan, tmp_path, spool / "sent")
    assert not (spool / "sent").exists()
    hold_to_plan(second, plan, tmp_path, None)
    for node in (first, second):
        assert {float(number) for row in packed(fixed_state(node)) for number in row} == {7.0}


@pytest.mark.parametrize("flaw", ["short", "changed", "gone"])
def test_a_damaged_copy_is_sent_again(flaw: str, tmp_path: Path) -> None:
    plan = told(model(7.0), tmp_path / "sent")
    hold_to_plan(model(1.0), plan, tmp_path, tmp_path / "sent")
    kept = tmp_path / FIXED_PART
    content = kept.read_bytes()
    kept.write_bytes({"short": content[:-1], "changed": b"x" + content[1:], "gone": b""}[flaw])
    if flaw == "gone":
        kept.unlink()
    with pytest.raises(FixedPartMissing):
        hold_to_plan(model(1.0), plan, tmp_path, None)


def test_another_model_or_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidPayload, match="has 12 numbers, and that of this node's 9"):
        hold_to_plan(model(1.0), told(model(1.0, 4), tmp_path / "sent"), tmp_path, None)
    with pytest.raises(InvalidPayload, match="has 0 numbers, and that of this node's 9"):
        hold_to_plan(model(1.0), Plan(), tmp_path, None)
    plan = told(model(torch.nan), tmp_path / "sent")
    with pytest.raises(InvalidPayload, match="must be finite"):
        hold_to_plan(model(1.0), plan, tmp_path, tmp_path / "sent")
