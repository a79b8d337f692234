"""Numbers of a run as they were measured: a run's files hold null for those that are not finite, as JSON has none."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fed.storage.run_reader import metrics_lines, summary_of
from fed.storage.totals import Totals

if TYPE_CHECKING:
    from fed.config.experiment import Experiment

__all__ = ["as_measured", "run_as_measured"]


def as_measured(
    lines: Iterable[Mapping[str, Any]], metrics: Collection[str], evaluates: Callable[[int], bool]
) -> Iterable[dict[str, Any]]:
    """Lines of metrics with NaN in place of null where a scored round has no finite score.

    Args:
        lines: lines of the metrics, one a round, of a run that scores models.
        metrics: names of the metrics.
        evaluates: function that returns True if models are scored in the round of this number.

    Example:
        >>> line = {"round": 2, "test_loss": None, "train_loss": None}
        >>> list(as_measured([line], ["accuracy"], lambda number: number == 2))
        [{'round': 2, 'test_loss': nan, 'train_loss': None}]
    """
    scored = {"test_loss", *(f"test_{name}" for name in metrics)}
    starts = tuple(f"client_{name}_" for name in metrics)
    for line in lines:
        if not evaluates(line["round"]) or "test_loss" not in line:
            yield dict(line)
            continue
        yield {
            key: math.nan if value is None and (key in scored or key.startswith(starts)) else value
            for key, value in line.items()
        }


def run_as_measured(folder: Path, experiment: "Experiment", *, has_scores: bool) -> dict[str, Any]:
    """Metrics and summary of a run that has ended, with the numbers that its files could not hold.

    Args:
        folder: folder of the run.
        experiment: experiment of the run.
        has_scores: True if there were samples to score models on.

    Returns:
        ``metrics``, a mapping for each round, and ``summary``, as :func:`fed.simulate` returned them.

    Raises:
        InvalidInput: if they cannot be read, or there is no summary.
    """
    kept = summary_of(folder) or {}
    directions = kept.get("metrics") or {}
    lines: Iterable[dict[str, Any]] = (line for line, _ in metrics_lines(folder))
    if has_scores:
        lines = as_measured(lines, directions, experiment.rounds.make().evaluates)
    metrics = list(lines)
    totals = Totals()
    for line in metrics:
        totals.add(line)
    measured = totals.summary(experiment, directions)
    summary = {key: measured.get(key) if value is None else value for key, value in kept.items()}
    return {"metrics": metrics, "summary": summary}
