"""Weights & Biases, and what has the same functions, such as trackio."""

import importlib
import logging
import netrc
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from fed.tracking.tracker import PackageTracker, TrackedRun

__all__ = ["Trackio", "WandB"]

_log = logging.getLogger(__name__)


class _ProjectTracker(PackageTracker):
    """Run in a project of wandb, or of a package with its functions.

    Args:
        project: project that the run belongs to.
    """

    def __init__(self, project: str = "fed") -> None:
        self._project = project
        self._run: Any = None

    def log(self, number: int, values: Mapping[str, float]) -> None:
        """Write a round's numbers."""
        self._run.log(dict(values), step=number)


class WandB(_ProjectTracker):
    """A run of Weights & Biases, in the group of its comparison, with the experiment's keys as its config.

    Without a key (in ``WANDB_API_KEY``, or in the file ``.netrc`` that ``wandb login`` writes) the run is kept on this
    machine, and nobody is asked for one.

    Args:
        mode: online, offline, or disabled; null: ``WANDB_MODE``, or else online with a key and offline without one.
    """

    package = "wandb"
    installs = "'fed[wandb]'"

    def __init__(self, project: str = "fed", mode: Literal["online", "offline", "disabled"] | None = None) -> None:
        super().__init__(project)
        self._mode = mode

    def begin(self, run: TrackedRun) -> str:
        """Make the run, or go on with the one that there was before a resume."""
        wandb = importlib.import_module("wandb")
        mode = self._mode or os.environ.get("WANDB_MODE")
        if mode is None and not _has_key():
            mode = "offline"
            _log.warning(
                "tracking with wandb is offline, for there is no API key: wandb login makes one, and wandb "
                "sync sends what is kept in %s",
                run.folder or Path.cwd(),
            )
        self._run = wandb.init(
            project=self._project,
            name=run.name,
            group=run.group,
            tags=[f"{key}: {value}"[:64] for key, value in run.tags.items()],
            config={**run.settings, **run.tags},
            dir=str(run.folder or Path.cwd()),
            mode=mode,
            id=run.kept_id,
            resume="allow",
            # Runs of one process, one beside another, are runs of their own.
            reinit="create_new",
            # Half: wandb's own hook waits once more as the process ends, for a server that never answers.
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                x_disable_stats=True,
                init_timeout=run.wait_s / 2,
                finish_timeout=run.wait_s / 2,
            ),
        )
        return str(self._run.id)

    def keep(self, file: Path) -> None:
        """Copy a file into the run."""
        self._run.save(str(file), base_path=str(file.parent), policy="now")

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Write the figures of the summary, and wait until all is written or sent."""
        figures = {name: value for name, value in summary.items() if isinstance(value, int | float | str)}
        self._run.summary.update({"status": status, **figures})
        self._run.finish(exit_code=0 if status == "finished" else 1)


class Trackio(_ProjectTracker):
    """A run of trackio, a tracker on this machine with the functions of wandb."""

    package = "trackio"
    installs = "trackio"

    def begin(self, run: TrackedRun) -> str:
        """Make the run, or go on with the newest one of this name."""
        trackio = importlib.import_module("trackio")
        # A run is found again by its name alone, which comparisons have in common.
        name = run.kept_id or (run.name if run.group is None else f"{run.group}: {run.name}")
        self._run = trackio.init(
            project=self._project,
            name=name,
            group=run.group,
            config={**run.settings, **run.tags},
            resume="never" if run.kept_id is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return name

    def keep(self, file: Path) -> None:
        """Copy a file into the run, as an artifact of the project."""
        self._run.log_artifact(str(file), name=f"{file.stem}-{self._run.id}", type="report")

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Write the figures of the summary, and wait until all is written."""
        figures = {
            f"summary/{name}": value
            for name, value in summary.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        self._run.log(figures)
        self._run.finish()


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False
