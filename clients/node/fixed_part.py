"""A node's copy of the model's fixed part: its own where it is the server's, and else the server's, sent once."""

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fed.errors import InvalidPayload
from fed.protocol import protocol_pb2 as pb
from fed.vectors.fixed_part import fixed_state, packed, unpack
from fed.wire.payloads import described, read

if TYPE_CHECKING:
    from fed.vectors.tensors import nn

__all__ = ["FIXED_PART", "FixedPartMissing", "hold_to_plan"]

FIXED_PART = "fixed-part"
"""Name of the file, in the node's folder, of a fixed part that the server has sent."""


class FixedPartMissing(InvalidPayload):
    """The model's fixed part is another than the server's, which has not been sent yet."""


def hold_to_plan(module: "nn.Module", plan: pb.Plan, folder: Path, sent: Path | None) -> None:
    """Give a model the fixed part of the server's plan.

    Args:
        module: the node's model; its fixed part is overwritten where it is another.
        plan: the server's plan.
        folder: folder of all that the node keeps between tasks.
        sent: file of the fixed part that the server has sent, which is moved to the folder; None: it has sent none.

    Raises:
        FixedPartMissing: if it must be sent.
        InvalidPayload: if the server's model has a fixed part of other sizes or types, or its numbers are not finite.
    """
    state = fixed_state(module)
    wanted = plan.fixed_part
    own = described(packed(state)) if state else pb.Payload()
    if own == wanted:
        return
    if list(own.tensors) != list(wanted.tensors):
        raise InvalidPayload(
            f"the fixed part of the server's model has {_numbers(wanted)} numbers, and that of this node's "
            f"{_numbers(own)}: give both the same model, and the same key model.train"
        )
    file = folder / FIXED_PART
    if sent is not None:
        shutil.move(sent, file)  # which may be on another file system
    if not _is_file_of(file, wanted):
        raise FixedPartMissing("the fixed part of this node's model is another than the server's")
    rows = read(file, wanted)
    if not all(bool(row.isfinite().all()) for row in rows if row.is_floating_point()):
        raise InvalidPayload("the fixed part of the server's model must be finite, got infinity or NaN")
    unpack(rows, state)


def _numbers(payload: pb.Payload) -> int:
    return sum(part.numbers for part in payload.tensors)


def _is_file_of(file: Path, payload: pb.Payload) -> bool:
    with suppress(FileNotFoundError), file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == payload.sha256
    return False
