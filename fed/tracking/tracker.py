"""Interface of a tracker, which built-in ones and a user's own logger implement."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

from fed.errors import InvalidInput

__all__ = ["PackageTracker", "TrackedRun", "Tracker"]


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as its trackers see it.

    Args:
        name: name of the run; in a comparison that of its variant, with the seed.
        group: name that all runs of a comparison have in common, or all peers of a run; None for a run by itself.
        tags: texts to find runs by: ``algorithm``, ``seed``, and in a comparison ``variant``; each is "all" where the
            table of a comparison is told of.
        settings: dotted path of a key → its value, of the whole experiment with its defaults, or of the comparison.
        folder: folder of the run; None: nothing is written.
        rounds_done: number of rounds before a resume; 0 in a new run.
        kept_id: id that :meth:`Tracker.begin` returned before the resume; None in a new run.
        wait_s: seconds that the run waits for the tracker at its end, > 0.
    """

    name: str
    group: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    rounds_done: int = 0
    kept_id: str | None = None
    wait_s: float = 30.0


class Tracker(Protocol):
    """Receiver of a run's numbers. Its methods are called one after the other, in a thread of the tracker's own.

    An error that one of them raises ends the tracking, never the run.
    """

    def begin(self, run: TrackedRun) -> str | None:
        """Begin to track a run, or go on with it.

        Args:
            run: the run.

        Returns:
            The id by which to go on after a resume, kept in the run's folder; None if none is needed.
        """

    def log(self, number: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a round: scores, losses, bytes, times, and how many clients took part.

        Args:
            number: number of the round, from 1; after a resume, rounds may come once more, with the same values.
            values: name → value, as a line of ``metrics.jsonl`` has them; what a round did not measure is left out.
        """

    def keep(self, file: Path) -> None:
        """Take a file, such as the run's report.

        Args:
            file: path of the file, which stays.
        """

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """End the tracking, and wait until all is written.

        Args:
            status: "finished", "interrupted" or "failed".
            summary: figures of the run, as ``summary.json`` has them; of a comparison's table its numbers,
                each named ``VARIANT/NAME``.
        """


class PackageTracker:
    """Base of trackers that need a package, which is imported when a run begins.

    Attributes:
        package: package that is imported.
        installs: name to install it by, such as that of an extra.
    """

    package: ClassVar[str]
    installs: ClassVar[str]

    def check(self, folder: Path | None) -> None:
        """Refuse what cannot be tracked, before the run begins.

        Args:
            folder: folder of the run.

        Raises:
            InvalidInput: if the package is missing.
        """
        if find_spec(self.package) is None:
            raise InvalidInput(
                f"tracking with {self.package} needs that package, which is not installed: pip install "
                f"{self.installs}, or leave it out of tracking"
            )
