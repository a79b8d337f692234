"""MLflow: a run on a tracking server, or in a folder."""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fed.processes.clock import SYSTEM_CLOCK
from fed.tracking.tracker import PackageTracker, TrackedRun

__all__ = ["MLflow"]

_AT_ONCE = 100
"""Largest number of parameters, or of metrics, in one call: MLflow's own limit for parameters."""
_LETTERS = 500
"""Length at which a parameter is cut, which every MLflow accepts."""
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflow(PackageTracker):
    """A run of MLflow, with the experiment's keys as parameters and the group, seed and algorithm as tags.

    Args:
        uri: address of a tracking server, or of a store; null: ``MLFLOW_TRACKING_URI``, or else the folder ``mlruns``.
        experiment: MLflow's experiment, which holds runs; null: the comparison's name, or else ``fed``.
    """

    package = "mlflow"
    installs = "'fed[mlflow]'"

    def __init__(self, uri: str | None = None, experiment: str | None = None) -> None:
        self._uri = uri
        self._experiment = experiment
        self._client: Any = None
        self._make_metric: Any = None
        self._run_id = ""

    def begin(self, run: TrackedRun) -> str:
        """Make the run, or go on with the one that there was before a resume."""
        # A folder says nothing where users look for a page; a run must not wait for an answer to it.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow = importlib.import_module("mlflow")
        entities = importlib.import_module("mlflow.entities")
        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or (Path.cwd() / "mlruns").as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._make_metric = entities.Metric
        if run.kept_id is not None:
            self._run_id = run.kept_id
            self._client.update_run(self._run_id, status="RUNNING")
            return self._run_id
        tags = {**run.tags, **({} if run.group is None else {"group": run.group})}
        made = self._client.create_run(self._experiment_id(run), tags=tags, run_name=run.name)
        self._run_id = made.info.run_id
        settings = [entities.Param(key, str(value)[:_LETTERS]) for key, value in run.settings.items()]
        for first in range(0, len(settings), _AT_ONCE):
            self._client.log_batch(self._run_id, params=settings[first : first + _AT_ONCE])
        return self._run_id

    def _experiment_id(self, run: TrackedRun) -> str:
        exceptions = importlib.import_module("mlflow.exceptions")
        name = self._experiment or run.group or "fed"
        try:
            return str(self._client.create_experiment(name))
        except exceptions.MlflowException:  # there is one already, perhaps made by another run at this moment
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)

    def log(self, number: int, values: Mapping[str, float]) -> None:
        """Send a round's numbers."""
        now_ms = SYSTEM_CLOCK.wall_ns() // 1_000_000
        self._client.log_batch(
            self._run_id, [self._make_metric(name, value, now_ms, number) for name, value in values.items()]
        )

    def keep(self, file: Path) -> None:
        """Send a file."""
        self._client.log_artifact(self._run_id, str(file))

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Send the figures of the summary, and close the run."""
        now_ms = SYSTEM_CLOCK.wall_ns() // 1_000_000
        figures = [
            self._make_metric(f"summary/{name}", float(value), now_ms, 0)
            for name, value in summary.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        self._client.log_batch(self._run_id, figures)
        self._client.set_terminated(self._run_id, _STATUS.get(status, "FAILED"))
