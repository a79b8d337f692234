"""Totals of a run's metrics, added up line by line, so that a long run takes no more memory than a short one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fed.config.experiment import Experiment

__all__ = ["Totals"]


@dataclass
class Totals:
    """Totals of a run's metrics, added up line by line: a part of its summary.

    Attributes:
        rounds: number of lines, one a round.
        replied: number of updates that counted.
        late: number of updates that came too late to count.
    """

    rounds: int = 0
    replied: int = 0
    late: int = 0
    _empty: int = 0
    _unanswered: int = 0
    _diverged: int | None = None
    _alone: int | None = None
    _bytes_up: int = 0
    _bytes_down: int = 0
    _evaluated: Mapping[str, Any] = field(default_factory=lambda: {"test_accuracy": None, "test_loss": None})
    _wall_s: float = 0.0
    _virtual_s: float = 0.0

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a round's line of the metrics."""
        self.rounds += 1
        self.replied += line["replied"]
        self.late += line["late"]
        self._empty += not line["selected"]
        self._unanswered += bool(line["selected"] and not line["replied"])
        # None rather than 0 where it cannot happen, so that summaries have no such key.
        if "diverged" in line:
            self._diverged = (self._diverged or 0) + line["diverged"]
        if "alone" in line:
            self._alone = (self._alone or 0) + line["alone"]
        self._bytes_up += line["bytes_up"]
        self._bytes_down += line["bytes_down"]
        # The last line that measured something: not each round is evaluated.
        if line["test_loss"] is not None:
            self._evaluated = line
        self._wall_s = line["wall_s"]
        self._virtual_s = line["virtual_s"]

    def summary(self, experiment: "Experiment", directions: Mapping[str, str]) -> dict[str, Any]:
        """The totals as a part of the summary.

        Args:
            experiment: experiment of the run.
            directions: name of a metric → "max" or "min", the best of its values.
        """
        last = self._evaluated
        kept = ("test_", "client_", "consensus_distance")
        own = {f"final_{name}": value for name, value in last.items() if name.startswith(kept)}
        return {
            "experiment": experiment.name,
            "algorithm": experiment.algorithm.kind,
            "rounds": self.rounds,
            "empty_rounds": self._empty,
            "unanswered_rounds": self._unanswered,
            **({} if self._diverged is None else {"diverged": self._diverged}),
            **({} if self._alone is None else {"rounds_alone": self._alone}),
            "final_test_accuracy": last["test_accuracy"],
            "final_test_loss": last["test_loss"],
            "metrics": dict(directions),
            "bytes_up": self._bytes_up,
            "bytes_down": self._bytes_down,
            "wall_s": self._wall_s,
            "virtual_s": self._virtual_s,
            "seed": experiment.seed,
            **own,
        }
