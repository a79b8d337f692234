"""Files of a replica that must outlive its process: its record, and the sums of the last rounds."""

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.json_format import MessageToDict, ParseDict

from fed.errors import InvalidCheckpoint, InvalidPayload, RunFailed, os_errors_as
from fed.protocol import protocol_pb2 as pb
from fed.server.peer.replica.ballots import NO_BALLOT, Ballot, Record, Value, Vote
from fed.server.peer.replica.ring import RoundSum
from fed.storage.atomic_files import sync_folder, write_atomically
from fed.storage.checkpoint_files import file_name
from fed.storage.checkpoints import Checkpoints, Tree
from fed.vectors.tensors import Tensor, torch
from fed.wire.payloads import read, written

__all__ = ["ReplicaFiles", "Snapshot"]

_RECORD = "record.json"
_ROOM = "make room there, then resume the run"


class Snapshot(NamedTuple):
    """State of a replica after a round.

    Args:
        round: the round that the state comes after, from 0.
        state: state that all replicas have in common, with the value that was agreed on.
    """

    round: int
    state: Tree


class ReplicaFiles:
    """Folder of a replica's record, and of the sums of the last rounds, each named by its hash.

    Args:
        folder: directory that this replica alone uses.
        numbers: M, the number of summed numbers.
    """

    def __init__(self, folder: Path, numbers: int) -> None:
        self._folder = folder
        self._numbers = numbers
        self._payloads: dict[str, pb.Payload] = {}
        self._copies = Checkpoints(folder / "copies", 1)

    def restore(self) -> tuple[Record, tuple[str, ...]]:
        """Read the record and the first round's members; files other than whole sums are removed.

        Raises:
            InvalidCheckpoint: if the record is damaged, so that the promises in it are not known.
        """
        for path in self._folder.glob("*.sum"):
            try:
                payload = ParseDict(json.loads(path.with_suffix(".json").read_text()), pb.Payload())
                # Its hash was checked before the file took this place: its size is enough.
                is_whole = path.stat().st_size == payload.size_bytes and path.stem == payload.sha256
            except (OSError, ValueError):
                is_whole = False
            if is_whole:
                self._payloads[path.stem] = payload
        # All other files are parts and copies that were on their way when the peer was killed.
        kept = {*self._payloads, Path(_RECORD).stem}
        for path in self._folder.iterdir():
            if path.is_file() and path.stem not in kept:
                path.unlink()
        if not (path := self._folder / _RECORD).exists():
            return Record(), ()
        try:
            record, founders = json.loads(path.read_text())
            return _record(*record), tuple(founders)
        except (OSError, ValueError, TypeError) as error:
            raise InvalidCheckpoint(
                f"{path} must hold this peer's promises, got {error}: without them it must not vote again; "
                f"remove the run's folder and {self._folder}, and let the peer join anew under another name"
            ) from None

    def persist(self, record: Record, founders: Sequence[str]) -> None:
        """Have the record on disk.

        Raises:
            RunFailed: if it cannot be written.
        """
        with os_errors_as(RunFailed, f"{self._folder} cannot be written to", _ROOM):
            write_atomically(self._folder / _RECORD, json.dumps([record, founders]).encode())

    @property
    def held(self) -> Collection[str]:
        """Hashes of the sums that are on disk."""
        return self._payloads.keys()

    def write(self, path: Path, tensors: Sequence[Tensor]) -> pb.Payload:
        """Write a sum down; it is held once :meth:`take` has taken it.

        Raises:
            RunFailed: if it cannot be written.
        """
        with os_errors_as(RunFailed, f"{self._folder} cannot be written to", _ROOM):
            return written(path, tensors)

    def take(self, path: Path, payload: pb.Payload) -> None:
        """Keep a sum whose hash has been checked, on the disk and not only in a cache.

        Raises:
            InvalidPayload: if the file is no sum.
            RunFailed: if it cannot be kept.
        """
        # Read for its errors: a sum of another shape must not take a place on the disk.
        RoundSum.read(read(path, payload), self._numbers)
        with os_errors_as(RunFailed, f"{self._folder} cannot be written to", _ROOM):
            _sync(path)
            place = self._path(payload.sha256)
            # The description first: a sum without it is removed at a restart.
            write_atomically(place.with_suffix(".json"), json.dumps(MessageToDict(payload)).encode())
            path.replace(place)
            sync_folder(self._folder)
        self._payloads[payload.sha256] = payload

    def write_copy(self, path: Path, number: int, state: Tree) -> pb.Payload:
        """Write a copy of a state to a file, for another replica.

        Args:
            path: file to write.
            number: the round that the state comes after, from 0.
            state: state to copy.

        Returns:
            Size, hash and tensors of the file.

        Raises:
            CheckpointFailed: if it cannot be written.
        """
        given = Checkpoints(self._folder / "given", 1)
        given.write(number, state)
        file = given.folder / file_name(number)
        return written(path, [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)])

    def take_copy(self, path: Path, number: int) -> Snapshot:
        """Keep a copy of another's state, on the disk and not only in a cache.

        Args:
            path: file of the copy, which is moved.
            number: the round that the copied state comes after.

        Raises:
            InvalidPayload: if the file is no copy of that state.
            RunFailed: if it cannot be kept.
        """
        with os_errors_as(RunFailed, f"{self._folder} cannot be written to", _ROOM):
            self._copies.folder.mkdir(exist_ok=True)
            _sync(path)
            path.replace(self._copies.folder / file_name(number))
            sync_folder(self._copies.folder)
        try:
            newest = self._copies.newest()
        except InvalidCheckpoint as error:
            raise InvalidPayload(str(error)) from None
        if newest is None or newest[0] != number:
            raise InvalidPayload(f"the copy of the state after round {number} is damaged, or is of another round")
        return Snapshot(*newest)

    def keep_copy(self, snapshot: Snapshot) -> None:
        """Keep this replica's own state as the last copy.

        Raises:
            CheckpointFailed: if it cannot be written.
        """
        self._copies.write(snapshot.round, snapshot.state)

    def copy(self) -> Snapshot | None:
        """The last copy that was taken, if there is a whole one."""
        try:
            newest = self._copies.newest()
        except InvalidCheckpoint:
            return None
        return None if newest is None else Snapshot(*newest)

    def sum(self, sha256: str) -> RoundSum:
        """A sum that is on disk."""
        return RoundSum.read(read(self._path(sha256), self._payloads[sha256]), self._numbers)

    def file(self, sha256: str) -> tuple[Path, pb.Payload] | None:
        """The file of a sum, and its payload; None if the sum is not here."""
        payload = self._payloads.get(sha256)
        return None if payload is None else (self._path(sha256), payload)

    def drop(self, sha256: str) -> None:
        """Remove a sum."""
        del self._payloads[sha256]
        for path in (self._path(sha256), self._path(sha256).with_suffix(".json")):
            path.unlink(missing_ok=True)

    def _path(self, sha256: str) -> Path:
        return self._folder / f"{sha256}.sum"


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _record(number: int, members: Any, promised: Any, vote: Any, decided: Any) -> Record:
    last = None if vote is None else Vote(Ballot(*vote[0]), _value(*vote[1]))
    rounds = tuple((its, _value(*value)) for its, value in decided)
    return Record(
        round=number,
        members=tuple(members),
        promised=Ballot(*promised) if promised[0] else NO_BALLOT,
        vote=last,
        decided=rounds,
    )


def _value(sum_sha256: str, contributors: Sequence[str], members: Sequence[str]) -> Value:
    return Value(sum_sha256, contributors=tuple(contributors), members=tuple(members))
