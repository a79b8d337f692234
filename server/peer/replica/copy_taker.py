"""Copies of others' states, for a replica that sums alone cannot bring forward: asked for, received and kept."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fed.processes.clock import Clock
from fed.protocol import protocol_pb2 as pb
from fed.server.peer.replica.replica_files import ReplicaFiles, Snapshot
from fed.vectors.tensors import torch
from fed.wire.payloads import Incoming, TensorSpec

__all__ = ["CopyTaker"]

_AGAIN_S = 3.0  # seconds after which a copy that makes no progress is asked for again
_MOST_BYTES_PER_NUMBER = 1024
_MOST_OTHER_BYTES = 1 << 28


@dataclass(kw_only=True)
class CopyTaker:
    """Receiver of copies.

    Args:
        disk: files of this replica.
        numbers: M, the number of summed numbers.
        clock: clock of this replica.
        ask: function that asks a member, by its name, for a copy.
        is_wanted: True if this replica takes a copy.
        lacks_sums: True if this replica needs sums that may be nowhere any more.
        copy: a copy that has come and waits for the run; None: there is none.
    """

    disk: ReplicaFiles
    numbers: int
    clock: Clock
    ask: Callable[[str], None]
    is_wanted: bool = False
    lacks_sums: bool = False
    copy: Snapshot | None = None
    _coming: Incoming | None = None
    _received_bytes: int = 0
    _asked_s: float = -math.inf

    def ask_one_of(self, holders: Sequence[str]) -> None:
        """Ask one of these for a copy of its state, unless one is on its way."""
        now_s = self.clock.monotonic_s()
        received_bytes = 0 if self._coming is None else self._coming.received_bytes
        if not holders or now_s - self._asked_s < _AGAIN_S:
            return
        self._asked_s = now_s
        if received_bytes == self._received_bytes:  # none is on its way, or it has stalled
            self.ask(random.choice(holders))
        self._received_bytes = received_bytes

    def incoming(self, path: Path, payload: pb.Payload) -> Incoming:
        """Make the file that a copy is put into."""
        # A state has several vectors of the model's length, and tables of all members.
        most_bytes = _MOST_OTHER_BYTES + _MOST_BYTES_PER_NUMBER * self.numbers
        self._coming = Incoming(path, payload, [TensorSpec(torch.uint8, most_bytes, True)])
        return self._coming

    def arrived(self, path: Path, number: int) -> None:
        """Keep a copy of the state after a round, from a file that is whole."""
        self.copy = self.disk.take_copy(path, number)
