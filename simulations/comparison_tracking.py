"""Tracking of a comparison: the group of its runs, and a run of its own with the table and the report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fed.config.comparison import Comparison
from fed.reports.summary import ComparisonResult
from fed.server.observer import RunBegan, RunEnded
from fed.server.telling import Observers
from fed.server.tracking import RunLabel, trackings_of

__all__ = ["group_of", "track"]


def group_of(comparison: Comparison, folder: Path | None) -> str:
    """Name that trackers group the runs of a comparison by, with its folder's, so that a second one is another group.

    Args:
        comparison: the comparison.
        folder: folder of the comparison; None: nothing is written.
    """
    if folder is None or folder.name in ("", comparison.name):
        return comparison.name
    return f"{comparison.name} ({folder.name})"


def track(result: ComparisonResult) -> None:
    """Give the trackers of a comparison's first variant the table and the report, as a run in the group of the others.

    Args:
        result: result of the comparison.
    """
    experiment = next(iter(result.comparison.variants().values()))
    folder = result.directory
    if not experiment.tracking:
        return
    group = group_of(result.comparison, folder)
    part = RunLabel(
        name=f"{result.comparison.name}: the table",
        group=group,
        tags=dict.fromkeys(("algorithm", "seed", "variant"), "all"),
        settings=result.comparison.dump(),
    )
    observers = Observers(trackings_of(experiment, folder, part, draw=lambda place: place / "report.html"))
    observers.tell(RunBegan(experiment, rounds_done=0, clients=(), folder=folder))
    observers.tell(RunEnded("finished", _figures(result)))
    observers.close()


def _figures(result: ComparisonResult) -> Mapping[str, Any]:
    """Every number of the table by variant and name."""
    return {
        f"{row['name']}/{key}": value
        for row in result.rows
        for key, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
