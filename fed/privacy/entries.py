"""Entries of the ledger of privacy as lines of a file, each with the hash of the line before.

A line is a JSON object in one form alone: keys in ascending order, no spaces, ASCII. ``hash`` is the SHA-256 of the
line without it, and ``previous`` the hash of the line before. The first line names the ledger::

    {"hash":"51…","ledger":"federation 8f0c…","previous":"","version":1}
    {"attempt":0,"content":null,"costs":[{"clients":null,"releases":[[{"noise_multiplier":1.0,"sampling":0.01},1]]}],
     "hash":"c4…","previous":"51…","round":1,"run":"0d…"}
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from fed.privacy.releases import Release

__all__ = ["Cost", "DamagedChain", "Head", "LedgerChain", "LedgerEntry", "releases_together", "uncontained"]

_VERSION = 1
_NO_ENTRY = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)  # of untrusted lines
_MOST_RELEASES = 2**40  # of one cost, far more than any has


class DamagedChain(Exception):
    """Lines that are no whole chain.

    Args:
        problem: clause on the first line that does not fit.
        lines: number of lines that were found, the first line included.
    """

    def __init__(self, problem: str, lines: int) -> None:
        super().__init__(problem)
        self.lines = lines


@dataclass(frozen=True)
class Head:
    """State of a ledger in two values, by which an older copy of it is known.

    Args:
        count: number of entries.
        sha256: hash of the last line, in hexadecimal digits.
    """

    count: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a round, borne by some clients or by all.

    Args:
        releases: release → how often, all of one client.
        clients: ids of the clients that each bear it, in ascending order; None: every client.
    """

    releases: Mapping[Release, int]
    clients: Sequence[int | str] | None = None

    def __post_init__(self) -> None:
        """Refuse a cost that is none."""
        if not self.releases or any(
            type(count) is not int or not 1 <= count <= _MOST_RELEASES for count in self.releases.values()
        ):
            raise ValueError(
                f"a cost must have releases, each from once to {_MOST_RELEASES} times, got {dict(self.releases)}"
            )


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """Record of one round's release, written before it is released.

    Args:
        run: name of the run.
        round: number of the round, from 1.
        attempt: number of entries that the ledger had of this run and round before.
        costs: costs of the round; a client bears all that name it.
        content: SHA-256 of what is released, in hexadecimal digits; None where it is not asked for.
        told: facts that a node was told with the task, which JSON can hold; None at a coordinator.
        unit: unit whose cost the releases are, all data of a client, ``client``, or one ``sample``.
    """

    run: str
    round: int
    attempt: int
    costs: Sequence[Cost]
    content: str | None = None
    told: Mapping[str, Any] | None = None
    unit: str = "client"

    def keys(self) -> dict[str, Any]:
        """The entry as JSON has it."""
        costs = []
        for cost in self.costs:
            releases = [[release.keys(), count] for release, count in cost.releases.items()]
            costs.append({"clients": None if cost.clients is None else [*cost.clients], "releases": releases})
        told = {} if self.told is None else {"told": dict(self.told)}
        unit = {} if self.unit == "client" else {"unit": self.unit}
        return {
            **told,
            **unit,
            "attempt": self.attempt,
            "content": self.content,
            "costs": costs,
            "round": self.round,
            "run": self.run,
        }

    @classmethod
    def from_keys(cls, keys: Mapping[str, Any]) -> Self:
        """The entry that :meth:`keys` wrote down.

        Raises:
            ValueError: if it is none; likewise KeyError and TypeError.
        """
        costs = []
        for cost in keys["costs"]:
            releases: Counter[Release] = Counter()
            for release, count in cost["releases"]:
                releases[Release.from_keys(release)] += count
            clients = None if cost["clients"] is None else tuple(cost["clients"])
            if clients is not None and any(type(client) not in (int, str) for client in clients):
                raise ValueError(f"a client must have a number or a name, got {clients}")
            costs.append(Cost(releases=releases, clients=clients))
        number = keys["round"]
        attempt = keys["attempt"]
        if type(number) is not int or type(attempt) is not int or not isinstance(keys["run"], str):
            raise ValueError(f"an entry must have a run, a round and an attempt, got {keys}")
        content = keys["content"]
        told = keys.get("told")
        unit = keys.get("unit", "client")
        if not (content is None or isinstance(content, str)) or not (told is None or isinstance(told, dict)):
            raise ValueError(
                f"an entry must have a content that is text and facts with names, got {content} and {told}"
            )
        if unit not in ("client", "sample"):
            raise ValueError(f"an entry must be of a client or a sample, got {unit}")
        return cls(
            run=keys["run"],
            round=number,
            attempt=attempt,
            costs=tuple(costs),
            content=content,
            told=told,
            unit=unit,
        )


class LedgerChain:
    """Lines of one ledger, in memory; a line is made when somebody asks for one.

    Attributes:
        identity: name of the ledger.
        entries: entries in their order.

    Args:
        identity: name of a ledger that begins.
    """

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.entries: list[LedgerEntry] = []
        line, sha256 = _line({"ledger": identity, "previous": "", "version": _VERSION})
        self._lines = [line]
        self._hashes = [sha256]
        self._size_bytes = len(line)

    @property
    def lines(self) -> Sequence[bytes]:
        """Lines, that of the name first, each with its end."""
        self._make_lines()
        return self._lines

    @property
    def hashes(self) -> Sequence[str]:
        """Hash of each line, that of the first line before those of the entries."""
        self._make_lines()
        return self._hashes

    @property
    def size_bytes(self) -> int:
        """Bytes of all lines."""
        self._make_lines()
        return self._size_bytes

    @property
    def head(self) -> Head:
        """The number of entries, and the hash of the last line."""
        return Head(len(self.entries), self.hashes[-1])

    @property
    def content(self) -> bytes:
        """All lines, as a file holds them."""
        return b"".join(self.lines)

    def line_of(self, entry: LedgerEntry) -> bytes:
        """The line that the entry has once it is added."""
        return _line({**entry.keys(), "previous": self.hashes[-1]})[0]

    def add(self, entry: LedgerEntry) -> None:
        """Add an entry at the end."""
        self.entries.append(entry)

    def _make_lines(self) -> None:
        """Make the lines of entries that have none yet."""
        for entry in self.entries[len(self._lines) - 1 :]:
            line, sha256 = _line({**entry.keys(), "previous": self._hashes[-1]})
            self._lines.append(line)
            self._hashes.append(sha256)
            self._size_bytes += len(line)

    def begins(self, other: "LedgerChain") -> bool:
        """True if the other chain has all lines of this one, in the same places."""
        count = len(self.hashes)
        # A hash stands for all lines up to it.
        return count <= len(other.hashes) and other.hashes[count - 1] == self.hashes[-1]

    def holds(self, head: Head) -> bool:
        """True if this chain once had that head."""
        return 0 <= head.count < len(self.hashes) and self.hashes[head.count] == head.sha256

    @classmethod
    def read(cls, content: bytes) -> tuple[Self, bool]:
        """Read lines, and check each.

        Args:
            content: untrusted content of a file.

        Returns:
            The chain, and True if the last line was torn: its write was cut off. What it would have recorded was never
            released, and it is left out.

        Raises:
            DamagedChain: if a line is missing, changed or in another's place.
        """
        *lines, rest = content.split(b"\n")
        if not lines:
            problem = "its first line is not whole" if rest else "it is empty"
            raise DamagedChain(problem, len(lines))
        chain = cls(_identity(lines[0], len(lines)))
        if chain.lines[0] != lines[0] + b"\n":
            raise DamagedChain("line 1 is not as it was written", len(lines))
        for place, line in enumerate(lines[1:], start=2):
            try:
                keys = json.loads(line)
                found = chain.hashes[-1] == keys["previous"]
                entry = LedgerEntry.from_keys(keys)
                as_written = chain.line_of(entry)
            except _NO_ENTRY:
                raise DamagedChain(f"line {place} is no entry", len(lines)) from None
            if not found:
                raise DamagedChain(f"line {place} does not follow the line before it", len(lines))
            chain.add(entry)
            # Each entry has one form, so that this compares its hash, too.
            if as_written != line + b"\n":
                raise DamagedChain(f"line {place} is not as it was written", len(lines))
        return chain, bool(rest)


def _identity(line: bytes, lines: int) -> str:
    try:
        keys = json.loads(line)
        identity = keys["ledger"]
        version = keys["version"]
    except _NO_ENTRY:
        raise DamagedChain("line 1 names no ledger", lines) from None
    if version != _VERSION or not isinstance(identity, str):
        raise DamagedChain(f"line 1 must name a ledger of version {_VERSION}", lines)
    return identity


def _line(keys: Mapping[str, Any]) -> tuple[bytes, str]:
    """The line of an object, and its hash."""
    sha256 = hashlib.sha256(_canonical(keys)).hexdigest()
    return _canonical({**keys, "hash": sha256}) + b"\n", sha256


def _canonical(keys: Mapping[str, Any]) -> bytes:
    return json.dumps(keys, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def releases_together(costs: Iterable[Cost]) -> Counter[Release]:
    """Releases of several costs together, as if one client bore all."""
    total: Counter[Release] = Counter()
    for cost in costs:
        total.update(cost.releases)
    return total


def uncontained(borne: Iterable[Counter[Release]]) -> list[Counter[Release]]:
    """Releases of clients that are not contained in another's: those that cost most are among them."""
    kept: list[Counter[Release]] = []
    different = {frozenset(own.items()): own for own in borne}
    for own in sorted(different.values(), key=Counter.total, reverse=True):
        if not any(own <= other for other in kept):
            kept.append(own)
    return kept
