"""Metrics of a run by name and direction, as its summary and its lines have them, and in words for people."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CLIENT_FIGURES", "LOSS", "NamedMetric", "metrics_of", "metrics_of_all", "score_of", "words_of"]

CLIENT_FIGURES = ("mean", "std", "worst_decile")
"""Figures of a metric over clients."""
_WORDS = {
    "macro_f1": "macro F1",
    "auroc": "AUROC",
    "log_loss": "log-loss",
    "mse": "MSE",
    "mae": "MAE",
    "r2": "R²",
    "c_index": "C-index",
}


@dataclass(frozen=True)
class NamedMetric:
    """Metric of a run: its name and its direction.

    Args:
        name: name in the keys of lines and summaries.
        higher_is_better: True if a higher value is better; False for errors and losses.

    Example:
        >>> mae = NamedMetric("mae", higher_is_better=False)
        >>> mae.test, mae.final, mae.of_clients("worst_decile"), mae.words
        ('test_mae', 'final_test_mae', 'client_mae_worst_decile', 'MAE')
        >>> mae.reaches(0.4, 0.5), mae.rank(0.4) > mae.rank(0.5)
        (True, True)
    """

    name: str
    higher_is_better: bool = True

    @property
    def test(self) -> str:
        """Key of its value in a line of the metrics."""
        return f"test_{self.name}"

    @property
    def final(self) -> str:
        """Key of its last value in a summary."""
        return f"final_test_{self.name}"

    def of_clients(self, figure: str) -> str:
        """Key of a figure over clients, one of ``CLIENT_FIGURES``."""
        return f"client_{self.name}_{figure}"

    @property
    def words(self) -> str:
        """Name for people."""
        return words_of(self.name)

    @property
    def title(self) -> str:
        """Name for people, with a capital."""
        return self.words[:1].upper() + self.words[1:]

    def reaches(self, value: float | None, target: float) -> bool:
        """True for a measured value that is as good as a target, or better."""
        return value is not None and (value >= target if self.higher_is_better else value <= target)

    def rank(self, value: float) -> float:
        """Number that is higher for a better value; the lowest for NaN."""
        if math.isnan(value):
            return -math.inf
        return value if self.higher_is_better else -value


LOSS = NamedMetric("loss", higher_is_better=False)
"""Metric that stands for the first one where a run has none."""
_SAMPLES = "test_samples"  # how many there were, which is no score


def metrics_of(summary: Mapping[str, Any]) -> list[NamedMetric]:
    """The metrics of a run, the first one first; the loss alone where it has none.

    Args:
        summary: summary of the run. One that does not name its metrics has the accuracy, if it was measured.

    Example:
        >>> [metric.name for metric in metrics_of({"metrics": {"auroc": "max", "accuracy": "max"}})]
        ['auroc', 'accuracy']
        >>> metrics_of({"metrics": {}}), metrics_of({"final_test_accuracy": 0.9})[0].name
        ([NamedMetric(name='loss', higher_is_better=False)], 'accuracy')
    """
    named = summary.get("metrics")
    # Summaries of earlier versions do not name their metrics.
    if named is None:
        named = {"accuracy": "max"} if summary.get("final_test_accuracy") is not None else {}
    return [NamedMetric(name, direction != "min") for name, direction in named.items()] or [LOSS]


def metrics_of_all(summaries: Iterable[Mapping[str, Any]]) -> list[NamedMetric]:
    """The metrics of several runs, each once; the loss alone where no run has any."""
    found = dict.fromkeys(metric for summary in summaries for metric in metrics_of(summary))
    return [metric for metric in found if metric != LOSS] or [LOSS]


def score_of(line: Mapping[str, Any]) -> tuple[str, float] | None:
    """Name and value of the first metric that a line of a run's metrics has a number for, or of the loss.

    Returns:
        None where the line has neither.

    Example:
        >>> score_of({"test_accuracy": None, "test_loss": 0.5, "test_mae": 0.25})
        ('mae', 0.25)
        >>> score_of({"test_accuracy": None, "test_loss": 0.5, "test_samples": 360})
        ('loss', 0.5)
    """
    metrics = [key for key in line if key.startswith("test_") and key not in (LOSS.test, _SAMPLES)]
    measured = (key for key in (*metrics, LOSS.test) if isinstance(line.get(key), int | float))
    key = next(measured, None)
    return None if key is None else (key.removeprefix("test_"), line[key])


def words_of(name: str) -> str:
    """A metric's name for people.

    Example:
        >>> words_of("accuracy"), words_of("balanced_accuracy"), words_of("auroc")
        ('accuracy', 'balanced accuracy', 'AUROC')
    """
    return _WORDS.get(name, name.replace("_", " "))
