"""Run: its results in memory, as it ended or as its folder tells them."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fed.config.experiment import Experiment
from fed.errors import InvalidInput
from fed.storage.model_files import ModelInputs, read_model, read_models
from fed.storage.run_folder import RunFolder
from fed.storage.run_reader import metrics_lines, summary_so_far
from fed.storage.run_tables import arrays, columns_of, participation_of, rows_of
from fed.vectors.randomness import seeded_torch
from fed.vectors.tensors import nn, torch

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Run", "RunOnDisk"]


@dataclass(frozen=True, repr=False)
class Run:
    """A run, finished or as far as it came.

    Args:
        experiment: the experiment, with every default resolved.
        metrics: one mapping for each round. ``virtual_s`` and ``wall_s`` count from the run's beginning. Bytes, counts
            and losses are those of the round. A value that a round did not measure is None.
        summary: the run in one mapping: totals of bytes, the last measured accuracy and loss, the status, in
            ``training`` how clients trained, in groups or one by one, and the reason, and of a private run ``epsilon``
            and ``delta``.
        model: the trained module.
        models: client id → module, where clients keep models of their own; empty otherwise.
        directory: folder of the run, or None.
    """

    experiment: Experiment
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    model: "nn.Module" = field(repr=False)
    models: "Mapping[int | str, nn.Module]" = field(default_factory=dict, repr=False)
    directory: Path | None = None

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        model: "Callable[[], nn.Module] | nn.Module | None" = None,
        objects: Mapping[str, Any] = MappingProxyType({}),
    ) -> "Run":
        """The run in a folder, as :func:`fed.simulate` returned it; a run under way as far as it has come.

        Its models are read when they are first asked for, and each takes the memory of one. A number of the metrics
        that was not finite is None.

        Args:
            folder: folder of the run.
            model: factory of modules, or module, that the run was given in Python.
            objects: section → object that it was given in Python, where no file can name it.

        Raises:
            InvalidInput: if there is no run, or it cannot be read.

        Example:
            >>> import fed
            >>> experiment = fed.Experiment(rounds={"count": 1, "cohort": 2}, data={"clients": 10})
            >>> run = fed.simulate(experiment, output="runs/one")
            >>> fed.Run.load("runs/one").metrics == run.metrics
            True
        """
        return _Kept(Path(folder), model, objects)

    def __repr__(self) -> str:
        """The run in a line: its name, its status, its last scores, and how clients trained."""
        # Four digits are enough to read, and null stands for a metric that the run does not have.
        scores = {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in self.summary.items()
            if name.startswith("final_") and value is not None
        }
        first = {name: self.summary[name] for name in ("experiment", "algorithm", "status", "rounds")}
        last: dict[str, Any] = {
            name: self.summary[name] for name in ("epsilon", "delta", "training") if name in self.summary
        }
        parts = {**first, **scores, **last, "directory": None if self.directory is None else str(self.directory)}
        return f"Run({', '.join(f'{name}={value!r}' for name, value in parts.items())})"

    @property
    def participation(self) -> list[dict[str, Any]]:
        """The clients of each round as the run's folder has them; empty without a folder.

        A mapping holds ``round`` and the lists ``asked``, ``replied``, ``late`` and ``failed`` of ids.
        """
        return [] if self.directory is None else participation_of(self.directory)

    @property
    def clients(self) -> list[dict[str, Any]]:
        """The scores of each client in each evaluated round, as ``clients.jsonl`` of the run's folder has them."""
        return [] if self.directory is None else rows_of(self.directory, "clients")

    def table(self, what: str = "metrics") -> "dict[str, np.ndarray]":
        """Columns of equal length, as ``pandas.DataFrame`` takes them: of a run with a folder.

        Numbers are int64, or float64 with NaN where there is none; all else are objects.

        Args:
            what: name of the table: ``metrics``, a row a round; ``clients``, a row for each client and evaluated round;
                or ``participation``, a row for each round, client and ``event``: asked, replied, late or failed.

        Raises:
            InvalidInput: if the run has no folder, or there is no such table.
        """
        if self.directory is None:
            raise InvalidInput("table needs a run with a folder, got one without: give fed.simulate(…, output=…)")
        return arrays(columns_of(self.directory, what))


class RunOnDisk(Run):
    """A run that has just ended, whose metrics are read from its folder when they are first asked for.

    Args:
        lines: function that reads the metrics, a mapping for each round.
        others: all other arguments of :class:`Run`.
    """

    _lines: Callable[[], Iterable[dict[str, Any]]]

    def __init__(self, lines: Callable[[], Iterable[dict[str, Any]]], **others: Any) -> None:
        for name, value in {**others, "_lines": lines}.items():
            object.__setattr__(self, name, value)  # it is frozen

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One mapping for each round."""
        return [*self._lines()]


class _Kept(Run):
    """A run as its folder tells it."""

    directory: Path
    _kept: RunFolder
    _factory: "Callable[[], nn.Module] | nn.Module | None"

    def __init__(
        self, folder: Path, factory: "Callable[[], nn.Module] | nn.Module | None", objects: Mapping[str, Any]
    ) -> None:
        kept = RunFolder.existing(folder)
        experiment = kept.experiment_to_read(objects)
        metrics = [line for line, _ in metrics_lines(folder)]
        summary = summary_so_far(folder, experiment, metrics)
        values = {"experiment": experiment, "metrics": metrics, "summary": summary, "directory": folder}
        for name, value in {**values, "_kept": kept, "_factory": factory}.items():
            object.__setattr__(self, name, value)  # it is frozen

    @cached_property
    def model(self) -> "nn.Module":
        """The trained module."""
        path = self.directory / "model.safetensors"
        if not path.exists():
            raise InvalidInput(f"{path} must hold the run's model, got no such file: a run writes it at its end")
        return read_model(path, self._made())

    @cached_property
    def models(self) -> "Mapping[int | str, nn.Module]":
        """Client → its own module."""
        return read_models(self.directory / "models.safetensors", self._made)

    def _made(self) -> "nn.Module":
        """A module of the run's shape."""
        with seeded_torch(0, torch.device("cpu")):  # so that the global generator stays as it is
            # A copy, since each client's model may be read into one, and the user's own must stay as it is.
            if isinstance(self._factory, nn.Module):
                return copy.deepcopy(self._factory)
            if self._factory is not None:
                return self._factory()
            section = self.experiment.model
            inputs = self._kept.parts("inputs")
            if section is None or not inputs:
                why = "was given in Python" if section is None else "is of an earlier version"
                raise InvalidInput(
                    f"the model of {self.directory} {why}, and cannot be rebuilt from its folder alone: give "
                    "fed.Run.load(…, model=…) a function that makes it"
                )
            return ModelInputs(**inputs).make(section)
