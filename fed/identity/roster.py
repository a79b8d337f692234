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

It is a list apart from :mod:`fed.identity.identities`, and unsigned: a node is revoked where the authority's key is
not, and whoever steals that key still admits nobody without writing to the server's folder. Nodes get the identities,
which name neither dates nor revocations.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter, ValidationError

from fed.errors import InvalidCredentials, os_errors_as
from fed.identity.certificates import fingerprint, now
from fed.storage.atomic_files import write_atomically

__all__ = ["Entry", "Roster", "file_state", "keep"]

_State = tuple[int, int, int]


def _time(text: object) -> datetime:
    """A time as ISO 8601 writes it, of UTC unless it says otherwise; by hand, a day is enough."""
    if not isinstance(text, str):  # pydantic would take a number for the seconds since 1970
        raise ValueError("must be a date or a time in quotation marks")
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


_Time = Annotated[datetime, PlainValidator(_time)]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A node on the roster.

    Args:
        sha256: fingerprint of the only certificate that counts.
        issued: time at which the certificate was issued.
        expires: time until which the certificate is valid.
        revoked: time at which the certificate was revoked; None while it is valid.
    """

    sha256: Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$"), AfterValidator(str.lower)]
    issued: _Time
    expires: _Time
    revoked: _Time | None

    def status(self, time: datetime) -> str:
        """One word: valid, expired or revoked."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if time >= self.expires else "valid"


_ENTRIES = TypeAdapter(dict[str, Entry])


class Roster:
    """Roster as its file has it at each moment; any number of threads may ask.

    Args:
        path: path of the file.
        clock: function that returns the time, in UTC.

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
        # At every message: a look at the file's state costs far less than reading it.
        if file_state(self.path) != read[0]:
            read = self._read = _read(self.path)
        return read[1]

    def admits(self, name: str, certificate_pem: bytes) -> str | None:
        """Check that a node is admitted with this certificate, which TLS has verified: None, or the reason for refusal.

        A roster that can no longer be read admits no node. A call costs one look at the file's state and one hash,
        about 20 µs, so that every message can be checked: revoking also ends an open connection.
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
        sha256 = None
        with suppress(ValueError):  # it is not PEM
            sha256 = fingerprint(certificate_pem)
        # A node that lost its key gets another certificate, and the lost one must not count.
        if sha256 != entry.sha256:
            return f"{name!r} came with another certificate than the one that it was issued on {entry.issued:%Y-%m-%d}"
        return None


def keep(path: Path, entries: Mapping[str, Entry]) -> None:
    """Write a roster, whole or not at all.

    Raises:
        OSError: if it cannot be written; the former file stays.
    """
    # Sorted and indented, for people read it and compare it.
    text = json.dumps(dict(sorted(entries.items())), indent=2, default=_plain)
    write_atomically(path, f"{text}\n".encode(), mode=0o600)


def _plain(value: Entry | datetime) -> object:
    return value.isoformat() if isinstance(value, datetime) else vars(value)


def file_state(path: Path) -> _State | None:
    """Signature of a file's state: modification time, size and inode; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    # A file replaced within one tick of the clock has another inode.
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[_State, dict[str, Entry]]:
    with os_errors_as(InvalidCredentials, f"{path} cannot be read", "restore the roster"), path.open("rb") as file:
        found = os.fstat(file.fileno())  # of the file that is read: the path may name another by now
        content = file.read()
    try:
        entries = _ENTRIES.validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise InvalidCredentials(f"{path} must be a roster as fed keys writes it ({problem}): restore it") from None
    return (found.st_mtime_ns, found.st_size, found.st_ino), entries
