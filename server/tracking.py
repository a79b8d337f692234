"""Trackers of a run: what their observers make of the run's events."""

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fed.config.experiment import Experiment
from fed.errors import InvalidInput, RunFailed, cause_of
from fed.server.observer import Essential, Event, Kinds, Observer, RoundEnded, RunBegan, RunEnded
from fed.storage.atomic_files import write_atomically
from fed.storage.run_reader import json_of
from fed.tracking.tracker import TrackedRun, Tracker

__all__ = ["RunLabel", "Tracking", "tracked", "trackings_of"]

_log = logging.getLogger(__name__)
_IDS = "tracking.json"
_METHODS = ("begin", "log", "keep", "end")


@dataclass(frozen=True)
class RunLabel:
    """Place of a run among others.

    Args:
        name: name of the run; None: its experiment's.
        group: name of all of them; None: it is by itself.
        tags: texts to find the run by, beside its algorithm and seed, or in their place.
        settings: keys of what is tracked, in the place of those of the experiment; None: the experiment's.
    """

    name: str | None = None
    group: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] | None = None


class _Shared:
    """Things that the trackers of one run have in common: the file of their ids, and the report, drawn once."""

    def __init__(self, draw: Callable[[Path], Path] | None = None) -> None:
        self._lock = threading.Lock()
        self._draw = draw or _drawn
        self._drawing: threading.Thread | None = None
        self._report: Path | Exception | None = None

    def kept_id(self, folder: Path, name: str) -> str | None:
        with self._lock:
            kept = (json_of(folder / _IDS) or {}).get(name)
        return kept if isinstance(kept, str) else None

    def keep_id(self, folder: Path, name: str, run_id: str) -> None:
        with self._lock:
            ids = {**(json_of(folder / _IDS) or {}), name: run_id}
            write_atomically(folder / _IDS, json.dumps(ids, indent=2).encode())

    def report(self, folder: Path, within_s: float) -> Path | None:
        """The report of the run, or None where it cannot be drawn, or not in this time; the log says so."""
        with self._lock:
            if self._drawing is None:
                # On a thread of its own, which trackers leave behind: they have to be ended, whatever the report does.
                self._drawing = threading.Thread(target=self._make_report, args=(folder,), daemon=True)
                self._drawing.start()
        self._drawing.join(within_s)
        if isinstance(self._report, Path):
            return self._report
        reason = f"it was not drawn within {within_s:g} s" if self._report is None else str(self._report)
        _log.warning("trackers do not get the report of %s: %s; fed report draws it", folder, reason)
        return None

    def _make_report(self, folder: Path) -> None:
        try:
            self._report = self._draw(folder)
        except Exception as error:
            self._report = error


class Tracking:
    """Observer that tells a tracker of a run.

    Attributes:
        name: name of the tracker in the log, with that of the run where there are others.

    Args:
        tracker: the tracker.
        name: name of the tracker, and of its id in the run's folder; None: that of its class.
        wait_s: seconds that a run waits for it at its end, > 0.
        report: True if the run's report is drawn and handed to it.
        part: place of the run among others.
        shared: ids and report that it shares with other trackers of the run; None: it has its own.

    Raises:
        InvalidInput: if it is no tracker.
    """

    kinds: Kinds = (RunBegan, RoundEnded, RunEnded)

    def __init__(
        self,
        tracker: Tracker,
        name: str | None = None,
        *,
        wait_s: float = 30.0,
        report: bool = True,
        part: RunLabel = RunLabel(),  # it is frozen
        shared: _Shared | None = None,
    ) -> None:
        self._key = name or type(tracker).__name__
        # The log of a comparison is that of all its runs.
        self.name = f"{self._key} of {part.name}" if part.name else self._key
        missing = [method for method in _METHODS if not callable(getattr(tracker, method, None))]
        if isinstance(tracker, type) or missing:
            raise InvalidInput(
                f"a tracker must be an object with the methods {', '.join(_METHODS)}, got {self._key} without "
                f"{', '.join(missing) or 'being made'}: see docs/trackers.md"
            )
        self.closes_within_s = wait_s
        self._tracker = tracker
        self._wants_report = report
        self._part = part
        self._shared = shared or _Shared()
        self._folder: Path | None = None

    def check(self, folder: Path | None) -> None:
        """Refuse a tracker that cannot track the run, where it can tell so.

        Args:
            folder: folder of the run.

        Raises:
            InvalidInput: if its package is missing, or another thing that it needs.
        """
        if (check := getattr(self._tracker, "check", None)) is not None:
            check(folder)

    def observe(self, event: Event) -> None:
        """Tell the tracker."""
        if isinstance(event, RunBegan):
            self._begin(event)
        elif isinstance(event, RoundEnded):
            values = {name: value for name, value in event.line.items() if _is_number(value) and name != "round"}
            self._tracker.log(event.round, values)
        elif isinstance(event, RunEnded):
            if self._wants_report and self._folder is not None and event.status == "finished":
                report = self._shared.report(self._folder, within_s=self.closes_within_s / 2)
                if report is not None:
                    self._tracker.keep(report)
            self._tracker.end(event.status, event.summary)

    def _begin(self, event: RunBegan) -> None:
        experiment = event.experiment
        settings = self._part.settings
        self._folder = event.folder
        kept_id = None if event.folder is None else self._shared.kept_id(event.folder, self._key)
        run = TrackedRun(
            name=self._part.name or experiment.name,
            group=self._part.group,
            tags={"algorithm": experiment.algorithm.kind, "seed": str(experiment.seed), **self._part.tags},
            settings=_flat(experiment.dump() if settings is None else settings),
            folder=event.folder,
            rounds_done=event.rounds_done,
            kept_id=kept_id,
            wait_s=self.closes_within_s,
        )
        try:
            run_id = self._tracker.begin(run)
        except Exception as error:
            raise RunFailed(
                f"it cannot begin ({cause_of(error)}): check its keys in tracking, its "
                "server and your credentials there; the run goes on, and its own folder keeps the numbers"
            ) from error
        if run_id is not None and event.folder is not None:
            self._shared.keep_id(event.folder, self._key, run_id)


def trackings_of(
    experiment: Experiment,
    folder: Path | None,
    part: RunLabel = RunLabel(),  # it is frozen
    draw: Callable[[Path], Path] | None = None,
) -> list[Tracking]:
    """The observers of an experiment's trackers.

    Args:
        experiment: experiment whose section ``tracking`` names them.
        folder: folder of the run; None: nothing is written.
        part: place of the run among others.
        draw: function that draws the report in a folder, and returns its path; None: the report of a run.

    Raises:
        InvalidInput: if one cannot track the run, as its package is missing.
    """
    shared = _Shared(draw)
    found: list[Tracking] = []
    sections = experiment.tracking or ()
    kinds = [section.kind for section in sections]
    for place, section in enumerate(sections):
        alike = kinds[:place].count(section.kind)
        tracking = Tracking(
            section.make(),
            section.kind if not alike else f"{section.kind} {alike + 1}",
            wait_s=section.wait_s,
            report=section.report,
            part=part,
            shared=shared,
        )
        tracking.check(folder)
        found.append(tracking)
    return found


def tracked(
    observers: Iterable[Observer | Essential],
    experiment: Experiment,
    folder: Path | None,
    part: RunLabel = RunLabel(),  # it is frozen
) -> list[Observer | Essential]:
    """Observers of a run, with those of its experiment's trackers.

    Args:
        observers: observers that were given; a :class:`Tracking` among them takes the place of the experiment's own.
        experiment: experiment of the run.
        folder: folder of the run; None: nothing is written.
        part: place of the run among others.

    Raises:
        InvalidInput: if they are no list, or a tracker cannot track the run.
    """
    if not isinstance(observers, Iterable):
        return observers  # which is refused with all other mistakes about observers
    given = list(observers)
    if any(isinstance(observer, Tracking) for observer in given):
        return given
    return [*given, *trackings_of(experiment, folder, part)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flat(keys: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Dotted path of each key → its value, of nested mappings."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        inner = f"{path}.{key}" if path else key
        found |= _flat(value, inner) if isinstance(value, Mapping) and value else {inner: value}
    return found


def _drawn(folder: Path) -> Path:
    """Draw the report of a run."""
    # Loaded when it is drawn: with graphs it takes a tenth of the time in which a run starts.
    from fed.reports.html import write_run_report

    return write_run_report(folder)
