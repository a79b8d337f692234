"""Checkpoints: the whole state of a run after some of its rounds. A run resumes from the newest whole one."""

import logging
from pathlib import Path

from safetensors import safe_open

from fed.errors import CheckpointFailed, InvalidCheckpoint, os_errors_as
from fed.quantities import bytes_text
from fed.storage.atomic_files import replaced, sync_folder
from fed.storage.checkpoint_files import file_name, flaw_of, newest_whole, numbers_in, remove_unfinished, write_sealed
from fed.storage.serialization import Tree, bytes_of, join_tree, plain, refilled, split_tree

__all__ = ["Checkpoints", "Tree", "plain", "refilled"]

_log = logging.getLogger(__name__)


class Checkpoints:
    """A folder of checkpoints, of which the newest few are kept.

    Each is a file that is whole or not there at all, even after a crash, and any change of its bytes is noticed. One
    process at a time writes into a folder.

    Args:
        folder: folder of the checkpoints; the first one makes it.
        keep: number of checkpoints that stay, ≥ 1.

    Example:
        >>> import torch
        >>> checkpoints = Checkpoints(Path("checkpoints"), keep=2)
        >>> for number in (5, 10, 15):
        ...     checkpoints.write(number, {"clock": 0.5 * number, "model": torch.full((2,), number)})
        >>> checkpoints.newest()
        (15, {'clock': 7.5, 'model': tensor([15, 15])})
        >>> sorted(path.name for path in Path("checkpoints").iterdir())
        ['round-000010.safetensors', 'round-000015.safetensors']
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def write(self, number: int, state: Tree) -> None:
        """Write the state after a round, then remove all but the newest ``keep`` checkpoints up to this round.

        Checkpoints of later rounds are removed too: a run that resumed from an earlier round has repeated those rounds.
        None is removed before the new one has been read back. At most one tensor is copied at a time.

        Args:
            number: number of the round, ≥ 0.
            state: state of the run, a tree. Its tensors may be on GPUs, and need not be contiguous. A tensor that
                occurs several times is written once.

        Raises:
            InvalidCheckpoint: if the state holds what a tree cannot.
            CheckpointFailed: if it cannot be written; earlier checkpoints are unchanged.
        """
        structure, tensors = split_tree(state)
        size_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True)
                # Without it a loss of power could take the new folder with all its files.
                sync_folder(self.folder.parent)
            remove_unfinished(self.folder)
            with replaced(self._path(number)) as file:
                # Map is lazy: one tensor at a time is copied from its device.
                write_sealed(
                    file,
                    number,
                    structure=structure,
                    tensors=map(bytes_of, tensors),
                    size_bytes=size_bytes,
                )
        except OSError as error:
            raise self._failure(number, error.strerror or str(error), len(structure) + size_bytes) from error
        # Read back before older ones go: some disks report that they have written what they have not.
        if (flaw := flaw_of(self._path(number), number)) is not None:
            self._path(number).unlink(missing_ok=True)
            raise self._failure(number, f"read back, it {flaw}", len(structure) + size_bytes)
        self._retire(number)

    def newest(self, rounds: int | None = None) -> tuple[int, Tree] | None:
        """The number and the state of the newest whole checkpoint; None if there is no checkpoint at all.

        A warning names each newer one with its flaw. Tensors come back on the CPU. One that occurred several times is
        one tensor again; all others have memory of their own.

        Args:
            rounds: the number of rounds with metrics, which no checkpoint may exceed; None: no matter.

        Raises:
            InvalidCheckpoint: if there are some, but none is whole.
        """
        with os_errors_as(InvalidCheckpoint, f"{self.folder} cannot be read", "make it readable, then resume"):
            number, flaws = newest_whole(self.folder, rounds)
        if number is not None:
            repeated = f", and rounds {number + 1} to {rounds} are repeated" if (rounds or 0) > number else ""
            for flaw in flaws:
                _log.warning("%s; the checkpoint of round %d is used%s", flaw, number, repeated)
            with safe_open(self._path(number), "pt") as file:
                structure = bytes_of(file.get_tensor("structure")).tobytes()
                return number, join_tree(structure, file.get_tensor("tensors"))
        if flaws:
            raise InvalidCheckpoint(
                f"there must be a whole checkpoint to resume from, got {'; '.join(flaws)}: restore what is damaged or "
                "missing, or run the experiment again with --overwrite"
            )
        return None

    def _path(self, number: int) -> Path:
        return self.folder / file_name(number)

    def _retire(self, number: int) -> None:
        """Remove old checkpoints. A run does not fail where that fails."""
        try:
            numbers = numbers_in(self.folder)
            stay = [other for other in numbers if other <= number][-self.keep :]
            for other in numbers:
                if other not in stay:
                    self._path(other).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s: earlier checkpoints cannot be removed (%s)", self.folder, error.strerror)

    def _failure(self, number: int, reason: str, size_bytes: int) -> CheckpointFailed:
        return CheckpointFailed(
            f"the checkpoint of round {number} cannot be written to {self.folder} ({reason}); earlier ones are kept: "
            f"make room there for {bytes_text(size_bytes)} that this process may write, then resume the run"
        )
