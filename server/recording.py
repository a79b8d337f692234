"""Observers that every run has: its totals, its files and its log."""

import logging
from collections.abc import Mapping
from typing import Any

from fed.server.observer import Event, Kinds, RoundEnded, TaskFailed
from fed.storage.run_folder import RunFolder
from fed.storage.totals import Totals

__all__ = ["RunFiles", "RunLog", "Tally"]

_log = logging.getLogger(__name__)
_MOST_CLIPPED = 1e-3  # share of a round's coordinates that may be clipped without a warning


class Tally:
    """Totals of a run's metrics, for its summary, and their lines where they stay in memory.

    Attributes:
        totals: totals of all rounds that have ended.
        lines: line of each of these rounds; empty where lines are not kept.

    Args:
        keeps_lines: True if the lines stay in memory.
    """

    kinds: Kinds = (RoundEnded,)

    def __init__(self, *, keeps_lines: bool) -> None:
        self.totals = Totals()
        self.lines: list[dict[str, Any]] = []
        self._keeps_lines = keeps_lines

    def observe(self, event: Event) -> None:
        """Count a round."""
        assert isinstance(event, RoundEnded)
        self.count(event.line)

    def count(self, line: Mapping[str, Any]) -> None:
        """Count a round by its line of the metrics."""
        line = dict(line)  # a copy: other observers are given the line itself, and the totals keep the last one
        self.totals.add(line)
        if self._keeps_lines:
            self.lines.append(line)


class RunFiles:
    """Writer of a run's lines: ``participation.jsonl``, ``clients.jsonl`` and ``metrics.jsonl``.

    It is essential: results rest on these files, and a checkpoint must not outlive the lines of its rounds.

    Args:
        folder: folder of the run.
    """

    kinds: Kinds = (RoundEnded,)

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def observe(self, event: Event) -> None:
        """Write a round's lines.

        Raises:
            RunFailed: if there is no room.
        """
        assert isinstance(event, RoundEnded)
        # The metrics last, so that a round with metrics has all its lines.
        self._folder.append(event.participation.line(event.round), name="participation.jsonl")
        self._folder.append(*({"round": event.round, **row} for row in event.clients), name="clients.jsonl")
        self._folder.append(event.line)


class RunLog:
    """Writer of the log's lines about rounds: who failed and why, and what the user should look at."""

    kinds: Kinds = (RoundEnded, TaskFailed)

    def __init__(self) -> None:
        self._is_unanswered = False  # True after a round without an answer that counts
        self._warned_share = 0.0
        self._has_capped = False

    def observe(self, event: Event) -> None:
        """Say what is worth a line."""
        if isinstance(event, TaskFailed):
            # A client that fails is everyday, numbers that are not finite are not.
            level = logging.WARNING if event.has_diverged else logging.INFO
            _log.log(level, "round %d: client %r failed: %s", event.round, event.client, event.reason)
        elif isinstance(event, RoundEnded):
            self._warn_unanswered(event.round, event.line)
            self._warn_of_clipping(event.round, event.line)

    def _warn_unanswered(self, number: int, line: Mapping[str, Any]) -> None:
        """Warn of a round without an answer that counts, once for all such rounds in a row."""
        is_unanswered = line["selected"] > 0 and not line["replied"]
        if is_unanswered and not self._is_unanswered:
            _log.warning(
                "round %d: no answer counts, of %d clients that were asked (%d were late, %d failed), so no update "
                "moves the model; the next such warning comes after an answer has counted",
                number,
                line["selected"],
                line["late"],
                line["failed"],
            )
        self._is_unanswered = is_unanswered

    def _warn_of_clipping(self, number: int, line: Mapping[str, Any]) -> None:
        """Warn when a share is clipped that is twice what was warned of, and at the first weight that is capped."""
        share = line.get("clipped_share") or 0.0
        # Only twice as much is worth a line: else each round would warn of a little more.
        if share > max(_MOST_CLIPPED, 2 * self._warned_share):
            self._warned_share = share
            _log.warning(
                "round %d: %.3g %% of the numbers that clients sent were clipped: raise secure_aggregation.clip",
                number,
                100 * share,
            )
        capped = line.get("capped_weights")
        if capped and not self._has_capped:
            self._has_capped = True
            _log.warning(
                "round %d: the weights of %d clients were capped: raise secure_aggregation.max_weight", number, capped
            )
