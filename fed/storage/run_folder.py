"""Folder of a run, as it is written: metrics by round, who took part, a summary, the models."""

import errno
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pydantic_core

from fed.config import yaml
from fed.config.experiment import Experiment
from fed.errors import InvalidExperiment, InvalidInput, OutputExists, RunFailed, located, os_errors_as
from fed.storage.atomic_files import LOCK, held, replaced, unfinished, write_atomically
from fed.storage.checkpoint_files import remove_all
from fed.storage.model_files import write_model, write_models
from fed.storage.run_reader import is_run, json_of, metrics_lines, state_of
from fed.vectors.tensors import nn, torch
from fed.version import __version__

__all__ = ["RunFolder", "clear_run", "environment", "refuse_taken", "state_of", "to_json", "written_to"]

_log = logging.getLogger(__name__)

_missing_trackers: set[str] = set()
"""Reasons why trackers of runs could not be read; each is said once in a process, however many runs name them."""


class RunFolder:
    """A run's folder, readable during the run: each file appears whole, metrics line by line.

    Args:
        path: path of the folder; the run makes it when it begins.
        overwrite: True if a run in the folder may be replaced; it stays until this one begins, so that bad input costs
            no run.

    Raises:
        OutputExists: if the folder holds anything and ``overwrite`` is not given.
        InvalidInput: if the folder cannot be made.
    """

    LINES = ("metrics.jsonl", "participation.jsonl", "clients.jsonl")
    """Files with lines of rounds."""
    FILES = (
        *("experiment.yaml", "environment.json", *LINES),
        *("summary.json", "model.safetensors", "population.json", "models.safetensors", "report.html"),
        *("tracking.json", "ledger.jsonl"),
    )
    """Files of a run. There is ``models.safetensors`` where clients keep models, ``report.html`` once ``fed
    report`` has drawn it, ``tracking.json`` where trackers keep ids, and ``ledger.jsonl`` of a private run; there may
    be ``checkpoints/`` too."""

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = path
        with written_to(path):
            # A lock and the remains of a killed process are no run: the folder counts as empty.
            if not path.is_dir() or not set(path.iterdir()) <= {*unfinished(path, self.FILES), path / LOCK}:
                refuse_taken(path, overwrite=overwrite and (path / "environment.json").is_file())

    @classmethod
    def existing(cls, path: Path) -> "RunFolder":
        """The folder of an existing run, to be resumed.

        Raises:
            InvalidInput: if it holds none, or cannot be read.
        """
        with written_to(path):
            if not is_run(path):
                raise InvalidInput(f"{path} must be the folder of a run, got none there: fed runs lists what there is")
        return cls(path, overwrite=True)  # nothing is overwritten unless the run begins again

    def held(self) -> AbstractContextManager[None]:
        """Lock it against other processes during the run.

        Raises:
            InvalidInput: if another process has it, or there can be no such folder.
        """
        return held(self.path, "choose another --output")

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints, which may not exist."""
        return self.path / "checkpoints"

    @property
    def spool(self) -> Path:
        """The folder beside it of a server's files on their way, which is gone once its nodes are dismissed."""
        return self.path.with_name(f".{self.path.name}.spool")

    def begin(
        self, experiment: Experiment, given: Sequence[str] = (), parts: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Write the files that precede the first round, in place of an earlier run's files.

        The file that marks a run's folder comes first, so that an interruption leaves a folder that can be overwritten.

        Args:
            experiment: experiment to run.
            given: names of the parts given in Python beside it.
            parts: facts of the run's data and code that ``environment.json`` keeps.

        Raises:
            InvalidInput: if the folder cannot be made.
        """
        found = {**environment(), "given": list(given), **parts}
        with written_to(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            clear_run(self.path)
            write_atomically(self.path / "environment.json", to_json(found, indent=2).encode())
            self.keep_experiment(experiment)
            for name in self.LINES:
                write_atomically(self.path / name, b"")

    def keep_experiment(self, experiment: Experiment) -> None:
        """Write the experiment that is run.

        Raises:
            InvalidInput: if it cannot be written.
        """
        with written_to(self.path):
            write_atomically(self.path / "experiment.yaml", yaml.dump(experiment.dump()).encode())

    def experiment(self, objects: Mapping[str, Any] = MappingProxyType({})) -> Experiment:
        """The experiment that was run.

        Args:
            objects: section → object given again, where the file cannot name it.

        Raises:
            InvalidInput: if it cannot be read.
        """
        if not (self.path / "experiment.yaml").exists():
            raise InvalidInput(
                f"{self.path / 'experiment.yaml'} must hold the experiment to resume, got no such file: restore it, "
                "or run the experiment again with --overwrite"
            )
        return Experiment.load(self.path / "experiment.yaml", objects)

    def experiment_to_read(self, objects: Mapping[str, Any] = MappingProxyType({})) -> Experiment:
        """The experiment of a run that is read, not continued: trackers whose code is missing are left out.

        Args:
            objects: section → object given again, where the file cannot name it.

        Raises:
            InvalidInput: if it cannot be read.
        """
        try:
            return self.experiment(objects)
        except InvalidExperiment as error:
            keys = yaml.load(self.path / "experiment.yaml")
            if not keys.pop("tracking", None):
                raise
            with located(self.path / "experiment.yaml"):
                experiment = Experiment.of(keys, objects)
            reason = str(error).removeprefix(f"{self.path / 'experiment.yaml'}: ")
            if reason not in _missing_trackers:
                _missing_trackers.add(reason)
                _log.warning(
                    "%s; the run is read without its trackers, and so is each other one that names them", error
                )
            return experiment

    def given(self) -> list[str]:
        """The names of the parts given in Python beside the experiment.

        Raises:
            InvalidInput: if the file that says so cannot be read.
        """
        file = self.path / "environment.json"
        try:
            given = json.loads(file.read_bytes())["given"]
        except (OSError, ValueError, TypeError, KeyError):
            problem = "must be a run's, as it was written, got something else"
            raise InvalidInput(
                f"{file} {problem}: restore the file, or run the experiment again with --overwrite"
            ) from None
        return [name for name in given if isinstance(name, str)] if isinstance(given, list) else []

    def parts(self, name: str) -> dict[str, Any]:
        """One of the parts that the run began with, ``inputs`` or ``sha256``; empty in a folder of an earlier version.

        Raises:
            InvalidInput: if the file that says so cannot be read.
        """
        part = (json_of(self.path / "environment.json") or {}).get(name)
        return part if isinstance(part, dict) else {}

    def recorded_rounds(self) -> int:
        """The number of rounds, from the first on, whose lines of the metrics are whole; 0 without metrics.

        Raises:
            InvalidInput: if the metrics cannot be read.
        """
        file = self.path / "metrics.jsonl"
        size_bytes = 0
        rounds = 0
        for number, (line, text) in enumerate(metrics_lines(self.path), 1):
            size_bytes += len(text)
            # A line that is missing ends what counts: a run resumes after rounds without a gap.
            rounds += line["round"] == number
        if file.exists() and file.stat().st_size > size_bytes:
            _log.warning("%s: the last line is cut short, as a crash leaves it: it is dropped", file)
        return rounds

    def resume(self, after: int) -> None:
        """Remove the summary, the report, and the lines of rounds after one.

        Args:
            after: number of the last round that counts; 0: before the first.

        Raises:
            InvalidInput: if the metrics cannot be read; the folder is then as it was.
            RunFailed: if the folder cannot be written to.
        """
        for name in self.LINES:
            for _ in self._until(after, name):  # before anything is removed
                pass
        with self._written_on():
            ended = (self.path / name for name in ("summary.json", "population.json", "report.html"))
            for path in (*unfinished(self.path, self.FILES), *ended):
                path.unlink(missing_ok=True)
            for name in self.LINES:
                with replaced(self.path / name) as file:
                    file.writelines(self._until(after, name))

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines of ``metrics.jsonl``, one by one: None where a number was not finite.

        Raises:
            InvalidInput: if the metrics cannot be read.
        """
        return (line for line, _ in metrics_lines(self.path))

    def _until(self, last: int, name: str) -> Iterator[bytes]:
        return (text for line, text in metrics_lines(self.path, name) if line["round"] <= last)

    def sync(self) -> None:
        """Wait until the disk has all lines of rounds, so that a checkpoint never outlives the lines before it.

        Raises:
            RunFailed: if the disk fails.
        """
        for name in self.LINES:
            with self._written_on(), (self.path / name).open("rb") as file:
                os.fsync(file.fileno())  # of the file, though this descriptor only reads it

    def append(self, *lines: Mapping[str, Any], name: str = "metrics.jsonl") -> None:
        """Add a round's lines to a file, in one write: all of them or nothing.

        Args:
            lines: lines to add, each with its round.
            name: name of the file, one of ``LINES``.

        Raises:
            RunFailed: if there is no room.
        """
        content = "".join(f"{to_json(line)}\n" for line in lines).encode()
        # Unbuffered: one call of the system.
        with self._written_on(), (self.path / name).open("ab", buffering=0) as file:
            size_bytes = file.tell()
            written_bytes = file.write(content)
            if written_bytes != len(content):  # an almost full disk takes a part
                file.truncate(size_bytes)  # else the next line would continue this piece, and be unreadable with it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def keep(self, model: "nn.Module", models: "Mapping[int | str, nn.Module]" = MappingProxyType({})) -> None:
        """Write the tensors of the models. Other values of their states are left out.

        Args:
            model: model of the run.
            models: client → its own model, where clients keep models.

        Raises:
            RunFailed: if there is no room; an earlier file is unchanged.
        """
        with self._written_on():
            write_model(self.path / "model.safetensors", model)
            if models:
                write_models(self.path / "models.safetensors", models)

    def finish(self, summary: Mapping[str, Any], population: Mapping[str, Any]) -> None:
        """Write the summary, last: a folder with a summary has all other files but the report.

        Args:
            summary: summary of the run.
            population: facts of the clients that the report draws.

        Raises:
            RunFailed: if there is no room.
        """
        with self._written_on():
            write_atomically(self.path / "population.json", to_json(population).encode())
            # The summary is written last: its presence says that the run has ended.
            write_atomically(self.path / "summary.json", (to_json(summary, indent=2) + "\n").encode())

    def _written_on(self) -> AbstractContextManager[None]:
        """Turn a refusal of the system during a run into RunFailed."""
        remedy = "make room there that this process may write to, then resume the run"
        return os_errors_as(RunFailed, f"{self.path} cannot be written to any more, what it holds is kept", remedy)


def clear_run(folder: Path) -> None:
    """Remove a run's files and checkpoints; other files stay. The file that marks a run's folder goes last.

    Raises:
        OSError: if one cannot be removed.
    """
    remove_all(folder / "checkpoints")
    # environment.json goes last, since False sorts before True: it marks the folder as a run's.
    names = sorted(RunFolder.FILES, key="environment.json".__eq__)
    for path in (*unfinished(folder, names), *map(folder.joinpath, names)):
        path.unlink(missing_ok=True)


def refuse_taken(folder: Path, *, overwrite: bool) -> None:
    """Refuse to write into a folder that holds something, unless it may be overwritten.

    Args:
        folder: folder to write to.
        overwrite: True if the user allows it and the folder holds a result of the same kind.

    Raises:
        OutputExists: if it holds something and may not be overwritten, or is a file.
    """
    is_taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if is_taken and not overwrite:
        raise OutputExists(
            f"{folder} exists and is not an empty folder: choose another --output, or pass --overwrite where it holds "
            "an earlier result of the same kind"
        )


def written_to(folder: Path) -> AbstractContextManager[None]:
    """Turn a refusal of the system into the advice to choose another folder.

    Raises:
        InvalidInput: if the folder cannot be read, made or written to.
    """
    return os_errors_as(InvalidInput, f"{folder} cannot be written to", "choose another --output")


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON with null in place of NaN and infinity, which other readers refuse."""
    return pydantic_core.to_json(value, indent=indent, inf_nan_mode="null", fallback=_number).decode()


def _number(value: Any) -> Any:
    """A NumPy number, such as a client's id, as a plain one."""
    return value.item() if isinstance(value, np.generic) else value


def environment() -> dict[str, Any]:
    """Versions, hardware and the commit of the working folder, with which a reader can repeat a run."""
    commit = None
    try:
        # 5 seconds: a repository on a slow network drive must not hold up a run.
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
        commit = answer.stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        pass  # without git the commit is null: unknown
    return {
        "fed": __version__,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "numpy", "pydantic", "safetensors")},
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "git_commit": commit,
        "command": sys.argv,
    }
