"""Availability of simulated clients over time: spells drawn from each client's own stream, or read from a file.

Times are seconds since the run began, which is midnight.
"""

import csv
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, ValidationError

from fed.clients.data import ClientId
from fed.config.components import keys_of
from fed.config.hyperparameters import Hyperparameters
from fed.config.validation import sentences
from fed.errors import InvalidData
from fed.vectors.randomness import Streams

__all__ = [
    "Always",
    "Availability",
    "Daily",
    "Membership",
    "OnOff",
    "Spell",
    "Spells",
    "TraceAvailability",
    "of_trace",
    "read_table",
]

_Traced = TypeVar("_Traced")
_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S


class Spell(NamedTuple):
    """State of a client, available or not, and the time at which it changes.

    Attributes:
        is_there: True if the client is available.
        until_s: time at which this state ends, in seconds since the run began; infinite if it never ends.
        is_member: True if the client is registered: it has come, and has not left for good.
    """

    is_there: bool
    until_s: float
    is_member: bool = True


class _Presence(NamedTuple):
    begins_s: float
    ends_s: float


class Spells(ABC):
    """Availability of one client over time."""

    @abstractmethod
    def at(self, time_s: float) -> Spell:
        """Spell at a time ≥ 0; the end of a spell belongs to the next one."""


@dataclass(frozen=True, kw_only=True)
class Availability(Hyperparameters, ABC):
    """Availability of all clients."""

    @abstractmethod
    def of(self, client: ClientId, streams: Streams) -> Spells | None:
        """Spells of a client; None: it is always available."""


@dataclass(frozen=True, kw_only=True)
class Always(Availability):
    """Every client is always available."""

    def of(self, client: ClientId, streams: Streams) -> None:  # noqa: D102
        return None


@dataclass(frozen=True, kw_only=True)
class Daily(Availability):
    """Every client is available for some hours of each day, as phones that train while they charge at night.

    Args:
        hours: number of hours of each day in which a client is available.
        begins_hour: hour at which they begin, in the mean over clients; 0 is midnight.
        spread_hours: standard deviation of that hour over clients.
    """

    hours: Annotated[float, Field(gt=0, lt=24)] = 8.0
    begins_hour: Annotated[float, Field(ge=0, lt=24)] = 23.0
    spread_hours: NonNegativeFloat = 1.5

    def of(self, client: ClientId, streams: Streams) -> Spells:  # noqa: D102
        away_hours = streams.normals("daily", client)[0] * self.spread_hours
        begins_s = (self.begins_hour + away_hours) * _HOUR_S % _DAY_S
        return _Pattern([(begins_s, begins_s + self.hours * _HOUR_S)], _DAY_S)


@dataclass(frozen=True, kw_only=True)
class OnOff(Availability):
    """Clients alternate at random: available and unavailable spells both have exponentially distributed lengths.

    At the beginning of a run each client is available with its long-run probability.

    Args:
        on_s: mean length in seconds of a spell in which a client is available.
        off_s: mean length in seconds of a spell in which it is not.
    """

    on_s: PositiveFloat = 1800.0
    off_s: PositiveFloat = 5400.0

    def of(self, client: ClientId, streams: Streams) -> Spells:  # noqa: D102
        return _Alternating(self, streams.generator("on and off", client))


@dataclass(frozen=True, kw_only=True)
class TraceAvailability(Availability):
    """Clients are available as a file says: a table with the columns client, begins_s and ends_s, a row for each spell.

    A client that the file names has its own spells; any other draws those of one that it names.

    Args:
        path: path of the CSV file.
        period_s: seconds after which all spells begin anew; never unless given.

    Raises:
        InvalidData: if there is no such table, or a spell does not end after it begins, before the next, within the
            period.
    """

    path: str
    period_s: PositiveFloat | None = None

    def of(self, client: ClientId, streams: Streams) -> Spells:  # noqa: D102
        return _Pattern(of_trace(self._spells, client, streams, "trace"), self.period_s or math.inf)

    @cached_property
    def _spells(self) -> dict[str, list[tuple[float, float]]]:
        spells: dict[str, list[tuple[float, float]]] = {}
        for name, presence in read_table(self.path, _Presence):
            spells.setdefault(name, []).append(presence)
        for name, of_client in spells.items():
            of_client.sort()
            times_s = [0.0, *(time_s for spell in of_client for time_s in spell), self.period_s or math.inf]
            rises = [before < after for before, after in zip(times_s[1:-1:2], times_s[2:-1:2], strict=True)]
            if times_s != sorted(times_s) or not all(rises):
                period = "" if self.period_s is None else f" and within the period of {self.period_s:g} s"
                raise InvalidData(
                    f"{self.path}: each spell must begin at 0 s or later, end after it begins, and before the next "
                    f"one{period}, got (begins_s, ends_s) of {_few(of_client)} for client {name}"
                )
        return spells


def of_trace(trace: Mapping[str, _Traced], client: ClientId, streams: Streams, purpose: str) -> _Traced:
    """A client's own entry of a trace, or one that it draws where the trace does not name it.

    Args:
        trace: client's name in the file → its entry.
        client: identifier of the client.
        streams: random streams of the run.
        purpose: name of the stream that the entry is drawn from.
    """
    if str(client) in trace:
        return trace[str(client)]
    entries = list(trace.values())
    place = int(streams.uniforms(purpose, client)[0] * len(entries))
    return entries[place]


def read_table(path: str, row: Callable[..., _Traced]) -> list[tuple[str, _Traced]]:
    """Each client's name with a row of a CSV file, whose columns are ``client`` and the row's fields, and any others.

    Raises:
        InvalidData: if the file cannot be read, lacks a column or a row, or a number is none or out of range.
    """
    keys = keys_of(row)
    columns = ("client", *keys.model_fields)
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
            table = csv.DictReader(file, skipinitialspace=True)
            found = table.fieldnames or []
            if missing := [name for name in columns if name not in found]:
                raise InvalidData(
                    f"{path} must have the columns {', '.join(columns)}, got none named {missing[0]}: its first line "
                    f"must name them, separated by commas, and is {','.join(found)!r}"
                )
            lines = [{name: cells[name] or "" for name in columns} for cells in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidData(
            f"{path} cannot be read as a table ({reason}): give the path of a CSV file in UTF-8, relative to the "
            "working directory"
        ) from None
    if not lines:
        raise InvalidData(f"{path} must have at least one row beneath its header, got none")
    rows = []
    for number, cells in enumerate(lines, start=2):
        client = cells.pop("client")
        try:
            # Not strict: cells of a CSV file are texts, whatever they hold.
            rows.append((client, row(**dict(keys.model_validate_strings(cells, strict=False)))))
        except ValidationError as error:
            raise InvalidData(f"{path}, line {number}: " + "; ".join(sentences(error))) from None
    return rows


def _few(spells: Sequence[tuple[float, float]]) -> str:
    shown = ", ".join(f"({begins_s:g}, {ends_s:g})" for begins_s, ends_s in spells[:5])
    return f"{shown} and {len(spells) - 5} more" if len(spells) > 5 else shown


class Membership(Spells):
    """Spells of a client that registers during a run, and may leave it.

    Args:
        joins_s: time at which the client registers, in seconds since the run began.
        leaves_s: time at which the client leaves for good; infinite if it stays.
        within: spells of the client between these times; None if it is available throughout.
    """

    def __init__(self, joins_s: float, leaves_s: float, within: Spells | None) -> None:
        self._joins_s = joins_s
        self._leaves_s = leaves_s
        self._within = within

    def at(self, time_s: float) -> Spell:
        """Spell at a time; before it registers and after it has left the client is not available."""
        if time_s < self._joins_s:
            return Spell(False, self._joins_s, is_member=False)
        if time_s >= self._leaves_s:
            return Spell(False, math.inf, is_member=False)
        spell = self._within.at(time_s) if self._within else Spell(True, math.inf)
        return spell._replace(until_s=min(spell.until_s, self._leaves_s))


class _Pattern(Spells):
    """Same spells in each period; they may run over its end."""

    def __init__(self, spells: Sequence[tuple[float, float]], period_s: float) -> None:
        self._changes_s = [time_s for spell in spells for time_s in spell]
        self._period_s = period_s

    def at(self, time_s: float) -> Spell:
        changes_s = self._changes_s
        if math.isfinite(self._period_s):
            period = math.floor(time_s / self._period_s)
            # A spell of the period before may not have ended.
            changes_s = [change + (period + k) * self._period_s for k in (-1, 0, 1, 2) for change in changes_s]
        place = bisect_right(changes_s, time_s)
        is_there = place % 2 == 1  # changes alternate: a spell begins, a spell ends
        return Spell(is_there, changes_s[place] if place < len(changes_s) else math.inf)


class _Alternating(Spells):
    """Random spells, drawn only as far as they are asked for."""

    def __init__(self, lengths: OnOff, generator: np.random.Generator) -> None:
        self._generator = generator
        # The long-run probability, so that the fleet does not begin with a wave of arrivals.
        self._starts_there = generator.random() < lengths.on_s / (lengths.on_s + lengths.off_s)
        self._means_s = (lengths.on_s, lengths.off_s) if self._starts_there else (lengths.off_s, lengths.on_s)
        self._changes_s: list[float] = []

    def at(self, time_s: float) -> Spell:
        changes_s = self._changes_s
        while not changes_s or changes_s[-1] <= time_s:  # drawn in order, whenever they are asked for
            mean_s = self._means_s[len(changes_s) % 2]
            last_s = changes_s[-1] if changes_s else 0.0
            changes_s.append(last_s + self._generator.exponential(mean_s))
        place = bisect_right(changes_s, time_s)
        is_as_at_first = place % 2 == 0
        return Spell(is_as_at_first == self._starts_there, changes_s[place])
