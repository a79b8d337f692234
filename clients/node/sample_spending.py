"""Spending of a node whose samples are private: the releases of its own steps, kept on its disk, and their limit."""

import json
from collections.abc import Mapping
from pathlib import Path

from fed.errors import InvalidCheckpoint, os_errors_as
from fed.privacy.accounting import epsilon
from fed.privacy.plan import PrivacyPlan
from fed.privacy.releases import Release
from fed.storage.atomic_files import write_atomically

__all__ = ["SPENDING_FILE", "SPENT", "SampleSpending"]

SPENDING_FILE = "sample-privacy.json"
"""Name of the file among what a client keeps."""

SPENT = "the client's samples have no privacy left to spend in this run: it trains no more"
"""Reason of a client that does not train any more, the same for all."""


class SampleSpending:
    """Releases of a client's tasks, written down before each task is done.

    Args:
        path: file of the releases.
        delta: δ in (0, 1).
        budget: ε that the client's samples may lose in the run; None: no limit.

    Raises:
        InvalidCheckpoint: if the file is damaged.
    """

    def __init__(self, path: Path, *, delta: float, budget: float | None) -> None:
        self._path = path
        self._delta = delta
        self._budget = budget
        self._releases: Mapping[Release, int] = {}
        if path.exists():
            try:
                self._releases = {Release.from_keys(keys): count for keys, count in json.loads(path.read_text())}
            except (TypeError, ValueError) as error:
                raise InvalidCheckpoint(
                    f"{path} says what the privacy of samples has cost, and is damaged: put a whole copy back"
                ) from error

    @property
    def epsilon(self) -> float:
        """ε of all tasks so far."""
        return epsilon(self._releases, self._delta)

    def spend(self, releases: Mapping[Release, int]) -> bool:
        """Write a task's releases down; False, and nothing is written, if they would pass the budget.

        Args:
            releases: releases of the task, with their counts.
        """
        after = PrivacyPlan.union(self._releases, releases)
        if self._budget is not None and epsilon(after, self._delta) > self._budget:
            return False
        written = json.dumps([[release.keys(), count] for release, count in after.items()])
        with os_errors_as(InvalidCheckpoint, f"{self._path} cannot be written to", "make room there"):
            write_atomically(self._path, written.encode(), mode=0o600)
        self._releases = after
        return True
