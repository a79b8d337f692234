"""Roster of nodes: the certificate last issued to each, and whether it is still valid.

TLS proves that a certificate is of the authority; the roster says whether its node is admitted. It is a JSON file that
people can read, and a server that runs rereads it when it changes::

    {
      "ann": {
        "sha256": "8f0c…",
        "issued": "2026-03-01T09:00:00+00:00",
        "expires": "2027-03-01T09:00:00+00:00",
        "revoked": null
      }
    }
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fed.errors import InvalidCredentials
from fed.identity.certificates import fingerprint, now
from fed.storage.atomic_files import write_atomically

__all__ = ["Entry", "Roster", "keep"]

_Entries = dict[str, "Entry"]
_State = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A node on the roster.

    Args:
        name: the node's.
        sha256: the fingerprint of the one certificate that counts.
        issued: when it was issued.
        expires: until when it is valid.
        revoked: when it was revoked; None while it is valid.
    """

    name: str
    sha256: str
    issued: datetime
    expires: datetime
    revoked: datetime | None = None

    def status(self, time: datetime) -> str:
        """One word: valid, expired or revoked."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if time >= self.expires else "valid"


class Roster:
    """Roster as its file has it at each moment; any number of threads may ask.

    Args:
        path: the file.
        clock: tells the time, in UTC.

    Raises:
        InvalidCredentials: if it cannot be read.
    """

    def __init__(self, path: Path, *, clock: Callable[[], datetime] = now) -> None:
        self.path = path
        self._clock = clock
        self._read = _read(path)

    def entries(self) -> Mapping[str, Entry]:
        """Every node, by name.

        Raises:
            InvalidCredentials: if the file has changed and cannot be read any more.
        """
        read = self._read  # one look at the attribute, which other threads replace
        if _state(self.path) != read[0]:  # a look at the file's state costs far less than reading it, at every message
            read = self._read = _read(self.path)
        return read[1]

    def admits(self, name: str, certificate_pem: bytes) -> str | None:
        """Check that a node is admitted with this certificate, which TLS has verified: None, or the reason for refusal.

        A roster that can no longer be read admits no node. A call costs one look at the file's state and one hash,
        about
        20 µs, so that every message can be checked: revoking also ends a connection that stands.
        """
        try:
            entry = self.entries().get(name)
        except InvalidCredentials as error:
            return str(error)
        if entry is None:
            return f"{name!r} is not on the roster: issue it a certificate with fed keys issue"
        if entry.revoked is not None:
            return f"{name!r} was revoked on {entry.revoked:%Y-%m-%d}"
        if self._clock() >= entry.expires:
            return f"the certificate of {name!r} expired on {entry.expires:%Y-%m-%d}: issue another with fed keys issue"
        if _fingerprint(certificate_pem) != entry.sha256:
            return f"{name!r} came with another certificate than the one that it was issued on {entry.issued:%Y-%m-%d}"
        return None


def keep(path: Path, entries: Iterable[Entry]) -> None:
    """Write a roster, whole or not at all.

    Raises:
        OSError: if it cannot be written; what was there is as it was.
    """
    content = {
        entry.name: {key: value for key, value in vars(entry).items() if key != "name"}
        for entry in sorted(entries, key=lambda entry: entry.name)
    }
    write_atomically(path, (json.dumps(content, indent=2, default=datetime.isoformat) + "\n").encode(), mode=0o600)


def _fingerprint(certificate_pem: bytes) -> str | None:
    try:
        return fingerprint(certificate_pem)
    except ValueError:
        return None


def _state(path: Path) -> _State | None:
    """Signature of a file's state: modification time, size and inode."""
    try:
        found = path.stat()
    except OSError:
        return None
    # a file replaced within one tick of the clock has another inode
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[_State, _Entries]:
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())  # of the file that is read: the path may name another by now
            content = file.read()
    except OSError as error:
        raise InvalidCredentials(f"{path} cannot be read ({error.strerror}): restore the roster") from None
    try:
        nodes = json.loads(content)
        if not isinstance(nodes, dict):
            raise TypeError("must be names and what belongs to each")
        entries = {name: _entry(name, values) for name, values in nodes.items()}
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidCredentials(f"{path} must be a roster as fed keys writes it ({error}): restore it") from None
    return (found.st_mtime_ns, found.st_size, found.st_ino), entries


def _entry(name: str, values: Any) -> Entry:
    try:
        sha256, revoked = values["sha256"].lower(), values["revoked"]
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ValueError(f"sha256 must be 64 hexadecimal digits, got {sha256}")
        return Entry(
            name=name,
            sha256=sha256,
            issued=_time(values["issued"]),
            expires=_time(values["expires"]),
            revoked=None if revoked is None else _time(revoked),
        )
    except KeyError as error:
        raise ValueError(f"{name}: {error} is missing") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: {error}") from None


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)  # by hand, a day is enough
