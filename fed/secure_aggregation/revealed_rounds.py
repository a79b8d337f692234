"""Rounds whose shares a client has revealed, of all runs: it joins no other sum of them.

From two sums of the same message with different clients the coordinator could find the difference.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fed.secure_aggregation.key_agreement import digest
from fed.vectors.tensors import Tensor

__all__ = ["RevealedRounds"]

_MOST_ROUNDS = 1 << 16
_ENTRIES_A_ROUND = 3
_PIECE_BYTES = 1 << 30  # of a message: AES-GCM takes 2³¹ − 1 bytes at most
_NONCE = bytes(12)


class RevealedRounds:
    """Digests of the rounds in which a client has revealed shares, each in three ways.

    - the run's name and the round, so that another attempt of the round is known with another model, too;
    - the plan and the task without any name, so that the round is known under another run's name;
    - the round and the client's message itself, which the coordinator cannot choose.

    The newest 65,536 rounds are kept, of all runs together.

    Args:
        salt: 32 random bytes, without which nobody can try whether a message is among the entries.
        entries: entries that were kept before, the oldest first.
    """

    def __init__(self, salt: bytes, entries: Iterable[bytes] = ()) -> None:
        self.salt = salt
        self._cipher = AESGCM(digest("revealed messages", salt))
        self._entries: dict[bytes, None] = {}  # in the order in which they came
        self.add(entries)

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the entries, the oldest first."""
        return iter(self._entries)

    def __len__(self) -> int:
        """The number of entries."""
        return len(self._entries)

    def holds(self, entry: bytes) -> bool:
        """True if the entry is there."""
        return entry in self._entries

    def add(self, entries: Iterable[bytes]) -> None:
        """Add entries; the oldest are forgotten beyond the bound."""
        for entry in entries:
            # An entry that comes again is the newest, and must be the last to be forgotten.
            self._entries.pop(entry, None)
            self._entries[entry] = None
        while len(self._entries) > _MOST_ROUNDS * _ENTRIES_A_ROUND:
            del self._entries[next(iter(self._entries))]

    def of_round(self, run: str, number: int) -> bytes:
        """Entry of a round by its names.

        Args:
            run: the name of the run.
            number: the number of the round, from 1.
        """
        return self._entry("round", run.encode(), number.to_bytes(8, "big"))

    def of_task(self, plan_sha256: bytes, task_sha256: bytes) -> bytes:
        """Entry of a round by the plan and the task that its clients were given.

        Args:
            plan_sha256: digest of the plan.
            task_sha256: digest of all that the round's tasks have in common.
        """
        return self._entry("task", plan_sha256, task_sha256)

    def of_message(self, number: int, lanes: Tensor) -> bytes:
        """Entry of a message before it is masked. In another round it may be the same, such as an update of zeros.

        Args:
            number: the number of the round, from 1.
            lanes: the message, signed integers of R bits.
        """
        content = np.ascontiguousarray(lanes.numpy()).data.cast("B")
        # GMAC takes a tenth of the time of SHA-256; without the key nobody can find two messages with one tag.
        pieces = (content[first : first + _PIECE_BYTES] for first in range(0, len(content), _PIECE_BYTES))
        # One nonce for all is safe here: nothing is encrypted, and no tag leaves this object but hashed.
        tags = [self._cipher.encrypt(_NONCE, b"", piece) for piece in pieces]
        return self._entry("message", number.to_bytes(8, "big"), *tags)

    def _entry(self, kind: str, *parts: bytes | memoryview) -> bytes:
        return digest(f"revealed {kind}", self.salt, *parts)
