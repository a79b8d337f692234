"""Record, on a node's disk, of the rounds whose shares it has revealed: it outlives process, run and server."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from fed.errors import InvalidInput, os_errors_as
from fed.secure_aggregation.key_agreement import DIGEST_BYTES
from fed.secure_aggregation.revealed_rounds import RevealedRounds
from fed.storage.atomic_files import write_atomically

__all__ = ["RECORD_FILE", "RevealedRecord"]

RECORD_FILE = "revealed-rounds"
"""Name of the record in the node's folder."""

_HEAD = b"fed revealed rounds 1\n"
_SALT_BYTES = 32


class RevealedRecord:
    """The record of one node: a head with a salt, then the entries, of 32 bytes each.

    A node without its record may have revealed rounds that it does not know of, so that it takes no part until its
    owner begins a new record: at its first start, or where the folder is gone.

    Attributes:
        rounds: the entries.

    Args:
        folder: folder of the node.
        begins_anew: True if the owner begins a record where there is none; a whole record that is there is kept.

    Raises:
        InvalidInput: if the record is not there or damaged, and the owner begins none; or if it cannot be written.
    """

    def __init__(self, folder: Path, *, begins_anew: bool = False) -> None:
        self._path = folder / RECORD_FILE
        self._size_bytes = 0  # of the file, as this process has left it
        with os_errors_as(InvalidInput, f"{folder} cannot be read", "make it readable"):
            content = self._path.read_bytes() if self._path.exists() else b""
        # The salt stands in the file, so that entries are of use to this record alone.
        salt = content[len(_HEAD) : len(_HEAD) + _SALT_BYTES]
        if not content.startswith(_HEAD) or len(salt) != _SALT_BYTES:
            if not begins_anew:
                raise InvalidInput(
                    f"{self._path}, the record of the rounds that this node has revealed, is "
                    f"{'damaged' if content else 'not there'}: give --new-record if this is the node's first start "
                    "with --secure; else put the record back, for without it a round may be revealed twice"
                )
            salt = secrets.token_bytes(_SALT_BYTES)
            content = b""
        entries = content[len(_HEAD) + _SALT_BYTES :]
        whole = len(entries) // DIGEST_BYTES  # a half entry was cut off before its shares left
        self.rounds = RevealedRounds(
            salt, (entries[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES] for place in range(whole))
        )
        with os_errors_as(InvalidInput, f"{folder} cannot be written to", "make room there"):
            # Written at the start, too: a disk that is full or read-only is found before a round needs it.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write()

    def append(self, entries: Sequence[bytes]) -> None:
        """Write entries down; they are on the disk when this returns.

        Raises:
            OSError: if they cannot be written.
        """
        self.rounds.add(entries)
        if not self._path.exists() or self._path.stat().st_size != self._size_bytes:
            self._write()  # it was removed or cut off: entries behind that could not be read
            return
        content = b"".join(entries)
        # no buffer: on a full disk its rest would be written when the file closes, behind the cut below
        with self._path.open("ab", buffering=0) as file:
            try:
                left = memoryview(content)
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                os.truncate(self._path, self._size_bytes)  # half an entry would displace all after it
                raise
        self._size_bytes += len(content)

    def _write(self) -> None:
        """Write the whole record, so that a start drops half entries and entries beyond the bound."""
        content = _HEAD + self.rounds.salt + b"".join(self.rounds)
        write_atomically(self._path, content, mode=0o600)
        self._size_bytes = len(content)
