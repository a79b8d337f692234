"""Rounds whose shares a client has revealed, in a file that outlives its process."""

from pathlib import Path

from fed.errors import SessionFailed
from fed.secure_aggregation.key_agreement import digest
from fed.storage.atomic_files import write_atomically

__all__ = ["RevealedRounds"]


class RevealedRounds:
    """Rounds in which a client has revealed shares: it joins no other session of them.

    From two sums of the same message with different clients the coordinator could find the difference. The round is on
    the disk before the shares leave, so that a client that is killed knows it after a restart.

    Args:
        path: of the file.
        run: names the run; the rounds of other runs are forgotten.
    """

    def __init__(self, path: Path, run: str) -> None:
        # a digest, since the server chooses the name, which may have line breaks
        self._path, self._run, self._last = path, digest("run", run.encode()).hex(), 0
        if path.exists():
            name, number = path.read_text().splitlines()
            self._last = int(number) if name == self._run else 0

    def check(self, number: int) -> None:
        """Check that a session of a round may be joined.

        Raises:
            SessionFailed: if shares of this round, or of a later one, were revealed.
        """
        if number <= self._last:
            raise SessionFailed(f"shares of round {self._last} were revealed: no other session of round {number}")

    def note(self, number: int) -> None:
        """Note that shares of a round are revealed, before they are.

        Raises:
            OSError: if it cannot be written.
        """
        self._last = max(number, self._last)
        write_atomically(self._path, f"{self._run}\n{self._last}\n".encode(), mode=0o600)
