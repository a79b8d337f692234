"""TensorBoard: event files in the run's folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fed.errors import InvalidInput
from fed.tracking.tracker import PackageTracker, TrackedRun

__all__ = ["TensorBoard"]


class TensorBoard(PackageTracker):
    """Event files for TensorBoard: ``tensorboard --logdir runs`` shows all runs below a folder.

    Args:
        path: folder of the event files; null: ``tensorboard`` in the run's folder.
    """

    package = "tensorboard"
    installs = "'fed[tensorboard]'"

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._writer: Any = None

    def check(self, folder: Path | None) -> None:
        """Refuse also a run without a place for the files."""
        super().check(folder)
        if folder is None and self._path is None:
            raise InvalidInput(
                "tracking with tensorboard writes into the run's folder, got none: give output, or the tracker a path"
            )

    def begin(self, run: TrackedRun) -> None:
        """Open the event files; rounds after the one that a run resumes from are marked as void."""
        from torch.utils.tensorboard import SummaryWriter

        place = Path(self._path) / run.name if self._path is not None else Path(run.folder or ".") / "tensorboard"
        self._writer = SummaryWriter(str(place), purge_step=run.rounds_done + 1 if run.rounds_done else None)
        # A text: its page of hyper-parameters would need each of them in an event file of its own.
        rows = "\n".join(f"| {key} | {value} |" for key, value in {**run.tags, **run.settings}.items())
        self._writer.add_text("experiment", f"| key | value |\n|---|---|\n{rows}", run.rounds_done)

    def log(self, number: int, values: Mapping[str, float]) -> None:
        """Write a round's numbers."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)

    def keep(self, file: Path) -> None:
        """Write where the file is: TensorBoard holds none."""
        self._writer.add_text(file.name, str(file.resolve()))

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Write the end of the run."""
        self._writer.add_text("status", status)
        self._writer.close()
