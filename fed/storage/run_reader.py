"""Reading of run folders: metrics, state, and the round that a run can resume after. It does not load PyTorch."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fed.config import yaml
from fed.errors import InvalidInput, os_errors_as
from fed.storage.checkpoint_files import newest_whole
from fed.storage.scores import metrics_of, score_of
from fed.storage.totals import Totals

if TYPE_CHECKING:
    from fed.config.experiment import Experiment

__all__ = [
    "KeptRun",
    "RunState",
    "is_run",
    "json_of",
    "kept_run",
    "metrics_lines",
    "runs_below",
    "state_of",
    "summary_of",
    "summary_so_far",
]

_Kind = TypeVar("_Kind", int, str)


class RunState(StrEnum):
    """The end of a run, as its folder tells it."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    UNFINISHED = "unfinished"
    """State of a run without a summary: it is under way, or was killed."""
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class KeptRun:
    """A run as its folder shows it.

    Args:
        folder: folder of the run.
        state: end of the run.
        reason: reason why the run failed or cannot be read; None otherwise.
        name: name of the experiment.
        algorithm: kind of the algorithm.
        rounds: number of rounds done.
        rounds_planned: number of rounds of the experiment, where it says so.
        metric: name of the first metric, or loss; None where nothing was measured.
        score: last value of that metric on test data.
        written: time of the run's end, or of the last write.
        epsilon: ε of all that a private run has released; None for any other run.
        checkpoint: round after which the run can resume, that of the newest whole checkpoint within the metrics; None
            for a run that is finished or has no such checkpoint.
    """

    folder: Path
    state: RunState
    reason: str | None = None
    name: str | None = None
    algorithm: str | None = None
    rounds: int = 0
    rounds_planned: int | None = None
    metric: str | None = None
    score: float | None = None
    epsilon: float | None = None
    written: datetime | None = None
    checkpoint: int | None = None


def is_run(path: Path) -> bool:
    """True for the folder of a run."""
    return (path / "environment.json").is_file()


def state_of(path: Path) -> RunState:
    """The end of the run in a folder; unreadable where there is none.

    Example:
        >>> state_of(Path("runs/none"))
        <RunState.UNREADABLE: 'unreadable'>
    """
    try:
        return _state(path, summary_of(path))
    except InvalidInput:
        return RunState.UNREADABLE


def kept_run(path: Path) -> KeptRun:
    """The run in a folder.

    The newest checkpoint of a run that is not finished is read, to see that it is whole. A file that cannot be read
    makes the run unreadable, with the reason, and raises nothing.

    Example:
        >>> kept_run(Path("runs/none")).reason
        'runs/none must hold a run, got none: fed simulate begins one there with --output'
    """
    try:
        summary = summary_of(path)
        state = _state(path, summary)
        experiment = yaml.load(path / "experiment.yaml")
        metrics = [line for line, _ in metrics_lines(path)]
    except InvalidInput as error:
        return KeptRun(folder=path, state=RunState.UNREADABLE, reason=str(error), written=_written(path))
    # From the lines, not from the summary, which a killed run does not have.
    rounds = metrics[-1]["round"] if metrics else 0
    metric, score = _last_score(summary, metrics) or (None, None)
    return KeptRun(
        folder=path,
        state=state,
        reason=_within(str, summary, "reason"),
        name=_within(str, experiment, "name"),
        algorithm=_within(str, experiment, "algorithm", "kind"),
        rounds=rounds,
        rounds_planned=_within(int, experiment, "rounds", "count"),
        metric=metric,
        score=score,
        epsilon=_epsilon(summary, metrics),
        written=_written(path),
        checkpoint=None if state is RunState.FINISHED else _resumes_after(path, rounds),
    )


def metrics_lines(path: Path, name: str = "metrics.jsonl") -> Iterator[tuple[dict[str, Any], bytes]]:
    """The whole lines of a run's metrics, each as a mapping and as bytes. A last line cut short by a crash is left out.

    They are read one by one, so that a long run takes no more memory than a short one.

    Args:
        path: folder of the run. Without the file there are no lines.
        name: name of the file, ``metrics.jsonl`` or another one with lines of rounds.

    Raises:
        InvalidInput: if the file cannot be read, or another line is not a round's.
    """
    file = path / name
    torn: tuple[int, bytes] | None = None
    for number, line in enumerate(_whole_lines(file), 1):
        if torn is not None:  # a crash tears the last line alone
            raise InvalidInput(
                f"{file}: line {torn[0]} must be a round's {file.stem}, got {torn[1][:40]!r}: restore the file, or run "
                "the experiment again with --overwrite"
            )
        measured = _line(line[:-1])
        if measured is None:
            # Not refused yet: only the lines after it show that it is not the last one.
            torn = (number, line[:-1])
        else:
            yield measured, line


def runs_below(folder: Path, unreadable: Callable[[OSError], None]) -> Iterator[Path]:
    """The folders of runs in a folder and below it, in the order of their names; none within a run's folder.

    Args:
        folder: folder to search.
        unreadable: function that is called with the error of every folder below that cannot be read.

    Raises:
        InvalidInput: if there is no such folder, or it cannot be read itself.
    """
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "no such folder"
        raise InvalidInput(f"{folder}: {problem}: give one that holds runs, as fed simulate writes them")

    def tell(error: OSError) -> None:
        if Path(error.filename) == folder:
            raise InvalidInput(f"{folder} cannot be read ({error.strerror}): make it readable")
        unreadable(error)

    for place, folders, files in os.walk(folder, onerror=tell):
        folders.sort()  # os.walk goes down this very list, which the file system orders
        if "environment.json" in files:
            folders.clear()  # nothing below a run is searched
            yield Path(place)


def _state(path: Path, summary: dict[str, Any] | None) -> RunState:
    if not is_run(path):
        raise InvalidInput(f"{path} must hold a run, got none: fed simulate begins one there with --output")
    if summary is None:
        return RunState.UNFINISHED
    status = summary.get("status")
    if status not in (RunState.FINISHED, RunState.INTERRUPTED, RunState.FAILED):
        raise InvalidInput(f"{path / 'summary.json'}: status must be finished, interrupted or failed, got {status!r}")
    return RunState(status)


def summary_of(path: Path) -> dict[str, Any] | None:
    """The summary of the run in a folder; None where there is none yet.

    Raises:
        InvalidInput: if it cannot be read.
    """
    return json_of(path / "summary.json")


def summary_so_far(path: Path, experiment: "Experiment", metrics: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of the run in a folder; a run without one yet gets the totals of its metrics.

    Args:
        path: folder of the run.
        experiment: experiment of the run.
        metrics: lines of the metrics, one a round.

    Raises:
        InvalidInput: if it cannot be read.
    """
    directions = {metric.called: metric.best for metric in experiment.metrics or ()}
    summary = summary_of(path)
    if summary is not None:
        return summary
    totals = Totals()
    for line in metrics:
        totals.add(line)
    return {"status": str(RunState.UNFINISHED), **totals.summary(experiment, directions)}


def json_of(file: Path) -> dict[str, Any] | None:
    """Content of one of a run's files; None where there is no such file.

    Raises:
        InvalidInput: if it cannot be read.
    """
    content = _content(file)
    if content is None:
        return None
    try:
        values = _json(content)
    except ValueError as error:
        raise InvalidInput(f"{file} must hold JSON ({error}): restore the file") from None
    if not isinstance(values, dict):
        raise InvalidInput(f"{file} must hold keys and values, got {type(values).__name__}: restore the file")
    return values


def _last_score(summary: Mapping[str, Any] | None, metrics: Sequence[Mapping[str, Any]]) -> tuple[str, float] | None:
    """Name and last value of the first metric; where no summary names it, the first one that the lines have."""
    if summary is not None and "metrics" in summary:
        first = metrics_of(summary)[0]
        metrics = [{first.test: line.get(first.test)} for line in metrics]
    return next((score for line in reversed(metrics) if (score := score_of(line))), None)


def _epsilon(summary: Mapping[str, Any] | None, metrics: Sequence[Mapping[str, Any]]) -> float | None:
    """ε of a private run: that of its summary, or of its last round while it has none."""
    found = [line["epsilon"] for line in [*metrics, summary or {}] if isinstance(line.get("epsilon"), int | float)]
    return float(found[-1]) if found else None


def _line(content: bytes) -> dict[str, Any] | None:
    try:
        line = _json(content)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("round"), int) else None


def _json(content: bytes) -> Any:
    try:
        return json.loads(content.decode(), parse_constant=lambda _: None)  # NaN, as others write it
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _within(kind: type[_Kind], section: Any, *keys: str) -> _Kind | None:
    """The value at nested keys, if it is there and of this kind."""
    for key in keys:
        section = section.get(key) if isinstance(section, dict) else None
    return section if isinstance(section, kind) else None


def _whole_lines(file: Path) -> Iterator[bytes]:
    """The lines of a file, one that is cut short left out; none where there is no such file."""
    with (
        os_errors_as(InvalidInput, f"{file} cannot be read", "make it readable"),
        suppress(FileNotFoundError),  # a look beforehand may be out of date by now
        file.open("rb") as content,
    ):
        for line in content:
            if line.endswith(b"\n"):
                yield line


def _content(file: Path) -> bytes | None:
    with os_errors_as(InvalidInput, f"{file} cannot be read", "make it readable"), suppress(FileNotFoundError):
        return file.read_bytes()  # a look beforehand may be out of date by now
    return None


def _written(path: Path) -> datetime | None:
    """The time of the summary, or else of the newest file."""
    summary = path / "summary.json"
    try:
        files = [summary] if summary.exists() else [*path.iterdir(), *(path / "checkpoints").glob("*")]
        return datetime.fromtimestamp(max(file.stat().st_mtime for file in files), UTC)
    except (OSError, ValueError):  # a run under way may just have replaced a file
        return None


def _resumes_after(path: Path, rounds: int) -> int | None:
    try:
        return newest_whole(path / "checkpoints", rounds)[0]
    except OSError:
        return None
