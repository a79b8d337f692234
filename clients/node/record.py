"""Record of the rounds whose shares a node has revealed, on its disk, where it outlives process, run and server."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from fed.errors import InvalidCredentials, InvalidInput, os_errors_as
from fed.secure_aggregation.key_agreement import DIGEST_BYTES, digest
from fed.secure_aggregation.revealed_rounds import RevealedRounds
from fed.storage.atomic_files import write_atomically

__all__ = ["RECORD_FILE", "RevealedRecord"]

RECORD_FILE = "revealed-rounds"
"""Name of the record in the node's folder, and of its mark among the node's credentials."""

_HEAD = b"fed revealed rounds 1\n"
_SALT_BYTES = 32


class RevealedRecord:
    """The record of one node: a head with a salt, then the entries, of 32 bytes each.

    A mark among the node's credentials tells that there is a record: where it is gone, or is another one, the node
    refuses to take part, since it may have revealed rounds that it does not know of.

    Attributes:
        rounds: the entries.

    Args:
        folder: the node's.
        credentials: the folder of its credentials.
        begins_anew: True if the owner begins a new record in place of one that is gone.

    Raises:
        InvalidInput: if the record is gone or damaged, and the owner does not begin a new one; or if it cannot be
            written.
    """

    def __init__(self, folder: Path, credentials: Path, *, begins_anew: bool = False) -> None:
        self._path = folder / RECORD_FILE
        mark = credentials / RECORD_FILE
        with os_errors_as(InvalidInput, f"{folder} cannot be read", "make it readable"):
            content = self._path.read_bytes() if self._path.exists() else b""
            marked = mark.read_bytes() if mark.exists() else b""
        salt = content[len(_HEAD) : len(_HEAD) + _SALT_BYTES]
        is_whole = content.startswith(_HEAD) and len(salt) == _SALT_BYTES
        if (content and not is_whole) or (marked and _mark_of(salt) != marked):
            if not begins_anew:
                raise InvalidInput(
                    f"{self._path}, the record of the rounds that this node has revealed, is gone or damaged: put it "
                    "back, or give --new-record, after which a round that was revealed before may be revealed again"
                )
            is_whole = False
        if not is_whole:
            salt, content = secrets.token_bytes(_SALT_BYTES), b""
        entries = content[len(_HEAD) + _SALT_BYTES :]
        whole = len(entries) // DIGEST_BYTES  # the rest of one was cut off before its shares left
        self.rounds = RevealedRounds(
            salt, (entries[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES] for place in range(whole))
        )
        with os_errors_as(InvalidInput, f"{folder} cannot be written to", "make room there"):
            self._write()
        if _mark_of(salt) != marked:
            with os_errors_as(
                InvalidCredentials,
                f"{credentials} cannot be written to, where a node marks that it has a record of revealed rounds",
                "make it writable for the node",
            ):
                write_atomically(mark, _mark_of(salt), mode=0o600)

    def append(self, entries: Sequence[bytes]) -> None:
        """Write entries down; they are on the disk when this returns.

        Raises:
            OSError: if they cannot be written.
        """
        with self._path.open("ab") as file:
            begins = file.tell()
            try:
                file.write(b"".join(entries))
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(self._path, begins)  # half an entry would displace all after it
                raise

    def _write(self) -> None:
        """Write the whole record: so a start drops entries beyond the bound, and half ones."""
        write_atomically(self._path, _HEAD + self.rounds.salt + b"".join(self.rounds), mode=0o600)


def _mark_of(salt: bytes) -> bytes:
    """The mark of a record, by which it is known again."""
    return digest("record", salt).hex().encode() + b"\n"
