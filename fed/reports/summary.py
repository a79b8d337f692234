"""Summary of a comparison's runs: one row of figures for each variant.

*To the target* means through the first evaluated round whose first metric on test data is as good as the target or
better: that round's number, the bytes that all clients sent and received up to and with it (between peers a message
counts at both ends), and its virtual time. Each is the mean over the seeds that reach the target; how many do stands
beside it, and it is None where none does.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from fed.config.comparison import Comparison, Repetition, repetition_of, repetition_text, seed_of
from fed.errors import located
from fed.reports.differences import PairedDifference, differences
from fed.storage.comparison_reader import contents_of, run_folders
from fed.storage.run_reader import metrics_lines
from fed.storage.scores import CLIENT_FIGURES, LOSS, NamedMetric, metrics_of_all
from fed.vectors.randomness import Streams

__all__ = ["ComparisonResult", "Record", "Runs", "has_finished", "row_of", "sent_through", "spread"]

Record: TypeAlias = dict[str, Any]
"""Run as a mapping: ``metrics``, a line a round, and ``summary``, in whose ``status`` finished means its end."""
Runs: TypeAlias = dict[str, dict[Any, Record]]
"""Name of a variant → seed, or with folds (seed, fold) → its run."""


@dataclass(frozen=True, repr=False)
class ComparisonResult:
    """Result of a comparison. Printed, it is one line: each variant with its final value, and the folder.

    Args:
        comparison: description of the comparison.
        rows: figures of each variant, in order, from :func:`row_of`.
        runs: name of a variant → seed, or with folds (seed, fold) → ``{"metrics": [...], "summary": {...}}``; a failed
            run is there as far as it came. ``metrics`` is the run's curve: one mapping for each round.
        status: finished, or interrupted.
        directory: folder of the comparison, or None.
    """

    comparison: Comparison
    rows: list[dict[str, Any]]
    runs: Runs
    status: str = "finished"
    directory: Path | None = None

    def __repr__(self) -> str:
        # The curves of all runs, as of a plain dataclass, would fill many screens.
        metric = next(iter(self.metrics()), None)
        finals = [_in_words(row, None if metric is None else row.get(metric.final)) for row in self.rows]
        of = "" if metric is None else f"{metric.name} of "
        place = "" if self.directory is None else f"; {self.directory}"
        return f"<ComparisonResult {self.comparison.name}, {self.status}: {of}{', '.join(finals)}{place}>"

    def metrics(self) -> list[NamedMetric]:
        """The metrics of all finished runs, each once, the first run's first one first."""
        return metrics_of_all(
            run["summary"] for by_seed in self.runs.values() for run in by_seed.values() if has_finished(run)
        )

    @classmethod
    def load(cls, folder: str | Path) -> "ComparisonResult":
        """The result of the comparison in a folder, with the curves of its runs.

        A number of the metrics that was not finite is None.

        Args:
            folder: folder of the comparison.

        Raises:
            InvalidInput: if there is no comparison that has ended, or it cannot be read.
        """
        folder = Path(folder)
        contents = contents_of(folder)
        with located(folder / "comparison.json"):
            comparison = Comparison(**contents["comparison"])
        runs: Runs = {name: {} for name in contents["runs"]}
        for name, key, place in run_folders(folder, contents):
            metrics = [line for line, _ in metrics_lines(place)]
            runs[name][repetition_of(key)] = {"metrics": metrics, "summary": contents["runs"][name][key]}
        return cls(
            comparison=comparison,
            rows=contents["rows"],
            runs=runs,
            status=contents["status"],
            directory=folder,
        )

    def scored_by_clients(self) -> set[str]:
        """Names of the variants whose final values are over clients' own samples, not of one test set."""
        worst = self.metrics()[0].of_clients("worst_decile")
        kinds = {name: variant.evaluation.kind for name, variant in self.comparison.variants().items()}
        return {row["name"] for row in self.rows if row.get(worst) is not None and kinds[row["name"]] != "both"}

    @cached_property
    def differences(self) -> list[PairedDifference]:
        """Differences to the baseline in the first metric, of variants that were scored by it on the same samples."""
        comparison = self.comparison
        metric = self.metrics()[0]
        baseline = comparison.baseline_in_force()
        by_clients = self.scored_by_clients()
        finals = {row["name"]: _finals(self.runs[row["name"]], metric) for row in self.rows}
        values = {
            # A mean over clients' own samples and a value of one test set are not of the same samples.
            name: of_it
            for name, of_it in finals.items()
            if of_it and (name in by_clients) == (baseline in by_clients)
        }
        if baseline not in values:
            return []
        # Resamples follow from the comparison alone: a report that is drawn again has the same intervals.
        streams = Streams(comparison.seeds[0])
        return differences(values, baseline, confidence=comparison.confidence, folds=comparison.folds, streams=streams)


def row_of(
    name: str, algorithm: str, runs: Mapping[Any, Record], repetitions: Sequence[Repetition], target: float | None
) -> dict[str, Any]:
    """The figures of one variant.

    Args:
        name: name of the variant.
        algorithm: kind of its algorithm.
        runs: seed, or with folds (seed, fold) → run, for the runs that have finished or failed.
        repetitions: repetitions that the comparison asks for.
        target: value of the first metric to reach, or None.

    Returns:
        ``name``, ``algorithm``, ``seeds`` that came to their end, ``runs``, the number of runs that did, and of these:
        ``metric``, the name of the first metric, or loss, or None without such a run; the mean and the sample standard
        deviation (None for a single run) of ``final_test_accuracy``, ``final_test_loss`` and ``final_test_<name>`` of
        every metric, over seeds, each the mean of its folds, or over the folds of a single seed; ``rounds_to_target``,
        ``bytes_to_target``, ``virtual_s_to_target`` and ``reached``, the number of runs that reach it; the means of
        ``bytes_up``, ``bytes_down``, ``wall_s``, ``virtual_s``, ``idle_share`` and ``uplink_pays_below_bytes_per_s``;
        the means of the last measured ``client_<name>_mean``, ``client_<name>_std`` and ``client_<name>_worst_decile``
        of every metric; of all tasks the shares ``late`` and ``failed``, and of all replies the mean ``staleness``;
        ``epsilon``, the largest ε of a run, finished or not, and its ``delta``, both None without privacy; ``status``
        (finished, failed if any run failed, or interrupted if one is missing) and ``reason``: each once, with the
        seeds.
    """
    finished = {repetition: run for repetition, run in sorted(runs.items()) if has_finished(run)}
    # Runs often fail for one reason: it is told once, with the seeds.
    reasons = dict[str, list[Repetition]]()
    for repetition, run in sorted(runs.items()):
        if repetition not in finished:
            reasons.setdefault(str(run["summary"]["reason"]), []).append(repetition)
    summaries = [run["summary"] for run in finished.values()]
    metrics = metrics_of_all(summaries)
    of_clients = [metric.of_clients(figure) for metric in metrics for figure in CLIENT_FIGURES]
    status = "finished" if len(finished) == len(repetitions) else "interrupted"
    return {
        "name": name,
        "algorithm": algorithm,
        "seeds": list(dict.fromkeys(map(seed_of, finished))),
        "runs": len(finished),
        "metric": metrics[0].name if summaries else None,
        **_final(finished, ["final_test_accuracy", *(metric.final for metric in metrics), LOSS.final]),
        **_to_target([run["metrics"] for run in finished.values()], metrics[0], target),
        **{
            key: spread(summary.get(key) for summary in summaries)[0]
            for key in ("bytes_up", "bytes_down", "wall_s", "virtual_s", "idle_share", "uplink_pays_below_bytes_per_s")
        },
        **{key: spread(_last_measured(run["metrics"], key) for run in finished.values())[0] for key in of_clients},
        **_of_tasks([line for run in finished.values() for line in run["metrics"]]),
        **_privacy(run["summary"] for run in runs.values()),
        "status": "failed" if reasons else status,
        "reason": "; ".join(f"{_seeds(which)}: {reason}" for reason, which in reasons.items()) or None,
    }


def _seeds(which: Sequence[Repetition]) -> str:
    return f"seed{'s' if len(which) > 1 else ''} {', '.join(repetition_text(one, ' ') for one in which)}"


def _in_words(row: Mapping[str, Any], value: float | None) -> str:
    """A variant's name with its final value, and that runs of it have failed.

    Example:
        >>> _in_words({"name": "A", "status": "finished"}, 0.5), _in_words({"name": "B", "status": "failed"}, None)
        ('A 0.5', 'B (failed)')
    """
    words = row["name"] if value is None else f"{row['name']} {value:.4g}"
    if row.get("status") != "failed":
        return words
    return f"{words} (failed)" if value is None else f"{words} (some runs failed)"


def _finals(runs: Mapping[Any, Record], metric: NamedMetric) -> dict[Repetition, float]:
    """Final value of each run that finished with one."""
    found = {repetition: run["summary"].get(metric.final) for repetition, run in runs.items() if has_finished(run)}
    return {repetition: value for repetition, value in found.items() if value is not None and math.isfinite(value)}


def _final(finished: Mapping[Any, Record], keys: Iterable[str]) -> dict[str, float | None]:
    """The mean and the standard deviation of these keys over seeds, each the mean of its folds."""
    spreads = {key: _over_seeds(finished, key) for key in keys}
    return {name: value for key, of in spreads.items() for name, value in zip((key, f"{key}_std"), of, strict=True)}


def _over_seeds(finished: Mapping[Any, Record], key: str) -> tuple[float | None, float | None]:
    by_seed: dict[int, list[float | None]] = {}
    for repetition, run in finished.items():
        by_seed.setdefault(seed_of(repetition), []).append(run["summary"].get(key))
    # Of a single seed only its folds tell how results spread.
    if len(by_seed) == 1:
        return spread(next(iter(by_seed.values())))
    return spread(values[0] if len(values) == 1 else spread(values)[0] for values in by_seed.values())


def _to_target(
    metrics_of_runs: Iterable[list[dict[str, Any]]], metric: NamedMetric, target: float | None
) -> dict[str, Any]:
    if target is None:
        return dict.fromkeys(("rounds_to_target", "bytes_to_target", "virtual_s_to_target", "reached"))
    found = [
        (next((line for line in metrics if metric.reaches(line.get(metric.test), target)), None), metrics)
        for metrics in metrics_of_runs
    ]
    # Runs that never reach the target are left out of the means; how many reach it stands beside them.
    there = [(line, metrics) for line, metrics in found if line is not None]
    return {
        "rounds_to_target": spread(line["round"] for line, _ in there)[0],
        "bytes_to_target": spread(sent_through(line["round"], metrics) for line, metrics in there)[0],
        "virtual_s_to_target": spread(line["virtual_s"] for line, _ in there)[0],
        "reached": len(there),
    }


def _of_tasks(lines: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    counts = (sum(line.get(key, 0) for line in lines) for key in ("selected", "replied", "late", "failed"))
    asked, replied, late, failed = counts
    # A mean over replies, so that rounds count by how many clients replied.
    stale = math.fsum(line.get("staleness_mean", 0.0) * line.get("replied", 0) for line in lines)
    return {
        "late": late / asked if asked else None,
        "failed": failed / asked if asked else None,
        "staleness": stale / replied if replied else None,
    }


def _privacy(summaries: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """Largest ε of a run, with its δ; a run that failed has spent its ε, too."""
    private = [summary for summary in summaries if summary.get("epsilon") is not None]
    if not private:
        return {"epsilon": None, "delta": None}
    most = max(private, key=lambda summary: summary["epsilon"])
    return {"epsilon": most["epsilon"], "delta": most["delta"]}


def has_finished(run: Mapping[str, Any]) -> bool:
    """True if a run finished."""
    return bool(run["summary"]["status"] == "finished")


def sent_through(number: int, metrics: Iterable[Mapping[str, Any]], ways: Sequence[str] = ("up", "down")) -> int:
    """Bytes of all rounds up to one, with it.

    Args:
        number: number of the round, from 1.
        metrics: lines of the metrics, one a round.
        ways: directions to count: "up", "down", or both.
    """
    return sum(line[f"bytes_{way}"] for line in metrics if line["round"] <= number for way in ways)


def _last_measured(metrics: Iterable[Mapping[str, Any]], key: str) -> float | None:
    """A key's value in the last round that has one."""
    return next((line[key] for line in reversed(list(metrics)) if line.get(key) is not None), None)


def spread(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation of the measured values; None where there are too few.

    Example:
        >>> spread([1.0, None, 3.0])
        (2.0, 1.4142135623730951)
        >>> spread([1.0]), spread([])
        ((1.0, None), (None, None))
    """
    measured = [value for value in values if value is not None]
    if not all(map(math.isfinite, measured)):  # which statistics would not take
        return sum(measured) / len(measured), math.nan if len(measured) > 1 else None
    mean = statistics.fmean(measured) if measured else None
    return mean, statistics.stdev(measured) if len(measured) > 1 else None
