"""Files on a node's disk after its processes were killed in any phase: no message of it, and nothing for others."""

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fed.protocol import protocol_pb2 as pb
from fed.vectors.tensors import Tensor
from tests.server.deployed import Program, free_port
from tests.server.hostile.coordinator import NodeRefuses
from tests.server.hostile.nodes import COHORT, GUEST, Field
from tests.server.hostile.plans import Run, Session

NAMES = (*COHORT[:2], GUEST)
PHASES = ("keys", "shares", "masked", "consent", "unmasking")
AT_LEAST = 12
"""Bytes in a row that are taken for a part of the message: three numbers of it."""


@pytest.mark.parametrize(
    "phase", [phase if phase == "masked" else pytest.param(phase, marks=pytest.mark.long) for phase in PHASES]
)
def test_killed_node_leaves_no_message_on_its_disk(phase: str, field: Field, tmp_path: Path) -> None:
    state = f"node-{phase}"
    program = guest(field, state, dies_at=phase)
    run, task = begun(field, f"disk, {phase}")
    with pytest.raises(NodeRefuses, match="its stream has ended"):
        run.sum_of(dict.fromkeys(NAMES, task))
    assert program.end() == -signal.SIGKILL
    hold_to_privacy(field.state(state), run, task, tmp_path)
    hold_to_clean_start(field, state)


@pytest.mark.parametrize("phase", [pytest.param(phase, marks=pytest.mark.long) for phase in PHASES])
def test_killed_training_process_leaves_no_message_on_the_disk(phase: str, field: Field, tmp_path: Path) -> None:
    state = f"training-{phase}"
    program = guest(field, state)
    run, task = begun(field, f"disk of training, {phase}")
    session = run.session(dict.fromkeys(NAMES, task))
    for reached in steps(session):
        if reached == phase:
            for child in program.children():
                os.kill(child, signal.SIGKILL)
            hold_to_privacy(field.state(state), run, task, tmp_path)
    program.kill()
    hold_to_privacy(field.state(state), run, task, tmp_path)
    hold_to_clean_start(field, state)


def guest(field: Field, state: str, *, dies_at: str = "") -> Program:
    """The guest, once it has joined."""
    program = field.start(GUEST, state=state, dies_at=dies_at)
    field.coordinator.wait_to_join([GUEST], field.coordinator.views[GUEST].connections + 1)
    return program


def begun(field: Field, name: str) -> tuple[Run, pb.Assignment]:
    """A run, and a task of a model that no other has."""
    run = Run(field.coordinator, name)
    run.tell(NAMES)
    return run, run.task(run.model(100 + len(field.programs)))


def steps(session: Session) -> Iterator[str]:
    """The phases of a session, each once the nodes have reached it."""
    session.assign()
    yield "keys"
    session.share()
    yield "shares"
    session.take_masked()
    yield "masked"
    session.consent()
    yield "consent"
    session.reveal()
    yield "unmasking"


def hold_to_privacy(folder: Path, run: Run, task: pb.Assignment, place: Path) -> None:
    """Check that no file holds a part of the guest's message, and that all are for their owner alone."""
    trained_V = run.trained(GUEST, task, place)
    model_V = torch.frombuffer(bytearray(run.coordinator.content(task.payload)), dtype=torch.float32)
    plain = run.message(GUEST, task, place), trained_V, trained_V - model_V
    secrets = [piece for numbers in plain for piece in pieces(numbers)]
    assert len(secrets) > 20
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} has {mode:o}"
        if path.is_file():
            content = path.read_bytes()
            assert not any(piece in content for piece in secrets), path


def pieces(numbers: Tensor) -> Iterator[bytes]:
    """Parts of a vector's bytes that cannot be others' by chance."""
    content = numbers.numpy().tobytes()
    for begin in range(0, len(content) - AT_LEAST, numbers.element_size()):
        piece = content[begin : begin + AT_LEAST]
        if len(set(piece)) > AT_LEAST // 2:  # else it may be of small whole numbers, or zeros
            yield piece


def hold_to_clean_start(field: Field, state: str) -> None:
    """Start the node where no server is, and see what was on its way gone before it has found that out."""
    (field.state(state) / "files" / "left").write_bytes(b"of a transfer that broke off")
    program = field.start(GUEST, state=state, begins_record=False, port=free_port())
    try:
        program.wait_to_say("cannot be reached")
        assert not [*(field.state(state) / "files").iterdir()]
    finally:
        program.kill()
