"""Conclusions of a comparison in a sentence or two, no stronger than its seeds support."""

from collections.abc import Mapping, Sequence
from typing import Any

from fed.config.compatibility import Feature, lacks
from fed.config.experiment import Experiment
from fed.quantities import bytes_text, count_text, mean_text
from fed.reports.difference_texts import against_the_baseline
from fed.reports.summary import ComparisonResult
from fed.secure_aggregation.settings import settings_of
from fed.storage.scores import NamedMetric, words_of

__all__ = ["count_of_runs", "failures", "final_text", "finding", "seen_by_coordinator", "unlike"]

_BOUNDS = {"centralized": ("the floor", "the ceiling"), "local": ("the ceiling", "the floor")}
"""Words for the bound that each sets: where a lower value is better, and where a higher value is."""


def finding(result: ComparisonResult) -> str:
    """The best variant by the first metric, those that differ from the baseline beyond the noise, and the cheapest.

    Differences are those to the comparison's baseline (:mod:`fed.reports.differences`). The algorithms ``centralized``
    and ``local``, which bound the others, stand apart. Without a metric the loss decides.
    """
    metric = result.metrics()[0]
    measured = [row for row in result.rows if row.get(metric.final) is not None]
    if not measured:
        return "No variant was measured to the end."
    if difference := unlike(result):
        return difference
    # A bound, such as centralized training, nearly always wins: it trains on other terms, and is no rival.
    rivals = [row for row in measured if row["algorithm"] not in _BOUNDS] or measured
    against = against_the_baseline(result, [row["name"] for row in rivals])
    sentences = [_best(rivals, metric), *([against] if against else [])]
    bounds = [row for row in measured if row["algorithm"] in _BOUNDS and row not in rivals]
    if bounds:
        bounds.sort(key=lambda row: list(_BOUNDS).index(row["algorithm"]))
        bound = {name: words[metric.higher_is_better] for name, words in _BOUNDS.items()}
        texts = [f"{row['name']}, {bound[row['algorithm']]}, ends at {final_text(row, metric)}" for row in bounds]
        sentences.append(f"{'; '.join(texts)}.")
    if result.comparison.target is not None:
        sentences.append(_cheapest(rivals, result.comparison.target))
    return " ".join(sentences)


def unlike(result: ComparisonResult) -> str:
    """Note on variants whose scores do not compare, of other metrics or on other samples; else empty."""
    metric = result.metrics()[0]
    names = {row["name"]: row.get("metric") or metric.name for row in result.rows}  # older rows have no such key
    measured = [row for row in result.rows if row.get(f"final_test_{names[row['name']]}") is not None]
    others = [row["name"] for row in measured if names[row["name"]] != metric.name]
    if others:
        ours = [row["name"] for row in measured if row["name"] not in others]
        theirs = [f"{name} by {words_of(names[name])}" for name in others]
        return (
            f"Scores do not compare: {_sequence(ours)} {'is' if len(ours) == 1 else 'are'} scored by {metric.words}, "
            f"{_sequence(theirs)}. Write metrics in the base to score all alike."
        )
    scored = result.scored_by_clients()
    by_clients = [row["name"] for row in measured if row["name"] in scored]
    by_coordinator = [row["name"] for row in measured if row["name"] not in by_clients]
    if not by_clients or not by_coordinator:
        return ""
    return (
        f"Scores do not compare: clients score {_sequence(by_clients)} on samples of their own, the coordinator "
        f"{_sequence(by_coordinator)} on the test set. Write evaluation: clients in the base to score all alike."
    )


def seen_by_coordinator(
    experiment: Experiment, metrics: Sequence[Mapping[str, Any]], *, is_deployed: bool = False
) -> str:
    """Sentences on what a run's coordinator could see of its clients; empty where there is none.

    Args:
        experiment: experiment that was run.
        metrics: lines of the metrics, one a round.
        is_deployed: True if it was run on nodes, where the protocol runs whatever the section's mode.
    """
    if lacks(experiment.algorithm.make(), Feature.REPORTS):
        return ""
    secure = settings_of(experiment)
    if secure is None:
        whom = (
            "its edges could see those of their clients" if experiment.hierarchy else "the coordinator could see them"
        )
        return f"Each client's update, number of samples and training loss travelled in clear: {whom}."
    sums = [line["replied"] for line in metrics if line["replied"]]
    if not sums:
        return "No sum was revealed: in no round were enough clients left."
    of = f"{sums[0]}" if len({*sums}) == 1 else f"{min(sums)} to {max(sums)}"
    # Nodes run the protocol whatever the section says of simulations.
    is_emulated = secure.mode == "emulated" and not is_deployed
    subject = "With the protocol, which was emulated here, a" if is_emulated else "The"
    said = (
        f"{subject} coordinator could see who took part and when, and the sums of {len(sums)} rounds, each over {of} "
        "clients: of updates, weights, samples and losses, and how much was clipped or capped. It could see no update, "
        "weight, number of samples or loss of a single client. No sum was to be of fewer than "
        f"{secure.minimum_cohort} clients."
    )
    sentences = [said]
    if without := sum(1 for line in metrics if line["selected"] and not line["replied"]):
        ended = f"{without} rounds ended without a sum."
        if is_deployed:
            ended = (
                f"{without} rounds ended without a sum that counts; of those in which the coordinator was interrupted, "
                "it may have seen one."
            )
        sentences.append(ended)
    clipped = max(line.get("clipped_share") or 0.0 for line in metrics)
    sentences.append(
        f"At most {100 * clipped:.2g} % of a round's numbers were clipped." if clipped else "Nothing was clipped."
    )
    capped = sum(line.get("capped_weights") or 0 for line in metrics)
    sentences += [f"{capped} weights were capped."] if capped else []
    return " ".join(sentences)


def _best(rows: Sequence[dict[str, Any]], metric: NamedMetric) -> str:
    best = max(rows, key=lambda row: metric.rank(row[metric.final]))
    end = "highest" if metric.higher_is_better else "lowest"
    said = f"{best['name']} ends with the {end} test {metric.words}, {final_text(best, metric)}"
    if len(rows) == 1:
        return f"{best['name']} ends with a test {metric.words} of {final_text(best, metric)}."
    # One run has no spread: the sentence must not sound like a result.
    if any(row["runs"] == 1 for row in rows):
        return f"{said}; with one seed nobody can say how much of that is chance."
    return f"{said} over {count_of_runs(best)}."


def _cheapest(rows: Sequence[dict[str, Any]], target: float) -> str:
    # A mean over those seeds that were fast enough would flatter a variant that often fails to arrive.
    there = [row for row in rows if row["reached"] and row["reached"] == row["runs"]]
    if not there:
        return f"None reaches {target:g} with every seed."
    first = min(there, key=lambda row: row["rounds_to_target"])
    least = min(there, key=lambda row: row["bytes_to_target"])
    said = f"{first['name']} is the first at {target:g}, after {count_text(first['rounds_to_target'])} rounds"
    if least["bytes_to_target"] == 0:
        return f"{said}."
    if least is first:
        return f"{said}, and sends the fewest bytes to get there, {bytes_text(least['bytes_to_target'])}."
    return f"{said}; {least['name']} sends the fewest bytes to get there, {bytes_text(least['bytes_to_target'])}."


def failures(result: ComparisonResult) -> list[str]:
    """A line for each variant that failed: its name, and each reason once, with the seeds that it stopped."""
    return [f"{row['name']}: {row['reason']}" for row in result.rows if row["reason"]]


def final_text(row: dict[str, Any], metric: NamedMetric) -> str:
    """The final value of a row, and ± its standard deviation where there are seeds enough; a dash where it has none."""
    return mean_text(row.get(metric.final), row.get(f"{metric.final}_std"))


def count_of_runs(row: Mapping[str, Any]) -> str:
    """Number of seeds of a row, and of their folds.

    Example:
        >>> count_of_runs({"seeds": [0, 1, 2], "runs": 3}), count_of_runs({"seeds": [0], "runs": 5})
        ('3 seeds', '5 folds of one seed')
    """
    seeds = len(row["seeds"])
    if row["runs"] == seeds:
        return f"{seeds} seeds"
    return f"{row['runs']} folds of one seed" if seeds == 1 else f"{seeds} seeds, with {row['runs']} folds in all"


def _sequence(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
