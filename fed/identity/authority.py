"""Private certificate authority in a folder: issues the server's, the nodes' and the peers' certificates.

::

    DIR/
    ├── authority/       certificate.pem and key.pem, by which all else is signed
    ├── server/          authority.pem, certificate.pem, key.pem, roster.json, identities.json and revocations.json
    └── nodes/NAME/      authority.pem, certificate.pem, key.pem, identities.json; of a peer revocations.json, too

``server`` has all that a server needs, and ``nodes/NAME`` all that a node or a peer needs.

An authority certifies and a roster admits; what they issued is loaded and used through ``ServerCredentials``,
``NodeCredentials`` and ``PeerCredentials``. Folders are for their owner alone (0700), and so are files (0600).
"""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self

from fed.errors import InvalidCredentials, OutputExists, os_errors_as
from fed.identity.certificates import (
    CertificateFacts,
    Role,
    facts_of,
    fingerprint,
    issue,
    now,
    read_facts,
    read_pair,
    read_pem,
)
from fed.identity.hosts import valid_hosts
from fed.identity.identities import IDENTITIES_FILE, SignedIdentities, signed_identities
from fed.identity.revocations import REVOCATIONS_FILE, RevocationFile, Revocations, signed_revocations
from fed.identity.roster import Entry, Roster, keep
from fed.protocol.limits import NODE_NAME
from fed.storage.atomic_files import replaced, write_atomically

__all__ = ["Authority"]

_MOST_DAYS = 36_500


@dataclass(frozen=True)
class Authority:
    """A private authority, as its folder holds it.

    Args:
        folder: folder of the authority.
        clock: function that returns the time, in UTC.

    Example:
        >>> from fed.identity.credentials import NodeCredentials, ServerCredentials
        >>> authority = Authority.create(Path("keys"))
        >>> node = NodeCredentials.load(authority.issue("ann"))
        >>> roster = ServerCredentials.load(Path("keys")).roster
        >>> roster.admits(node.name, node.certificate_pem)  # None: it is
        >>> _ = authority.revoke("ann")
        >>> roster.admits(node.name, node.certificate_pem)
        "'ann' was revoked on ..."
    """

    folder: Path
    clock: Callable[[], datetime] = now

    @classmethod
    def create(
        cls,
        folder: Path,
        *,
        hosts: Sequence[str] | None = None,
        days: int = 3650,
        clock: Callable[[], datetime] = now,
    ) -> Self:
        """A new authority, with a certificate for its server and an empty roster.

        Args:
            folder: new or empty folder.
            hosts: names and addresses under which nodes reach the server; those of this machine unless given.
            days: days for which the authority's certificate is valid; no other certificate is valid longer.
            clock: function that returns the time, in UTC.

        Raises:
            OutputExists: if the folder holds something.
            InvalidCredentials: if a host is none, a lifetime out of range, or the folder cannot be written.
        """
        authority = cls(folder, clock)
        hosts = valid_hosts(hosts)
        started = clock()
        expires = _expiry(started, days)
        with _written_into(folder), _new_folder(folder):
            # TLS looks an issuer up by its name, which two authorities must not share.
            name = f"fed authority {secrets.token_hex(4)}"
            pair = issue(Role.AUTHORITY, name, issued=started, expires=expires)
            authority._write("authority", {"certificate.pem": pair.certificate_pem, "key.pem": pair.key_pem})
            _make_private(folder / "nodes")
            authority._issue("server", role=Role.SERVER, name="fed server", days=365, hosts=hosts)
            keep(authority._roster_file, {})
            authority._sign({})
        return authority

    @classmethod
    def load(cls, folder: Path, *, clock: Callable[[], datetime] = now) -> Self:
        """The authority in a folder. Its key is not read before something is to be signed.

        Raises:
            InvalidCredentials: if there is none, or its roster cannot be read.
        """
        authority = cls(folder, clock)
        if not (folder / "authority").is_dir():
            raise InvalidCredentials(f"{folder} must be an authority's folder, got none: make one with fed keys init")
        # Read now: damage must not be found only when a node calls.
        _ = authority.roster
        return authority

    def identifies(self, name: str) -> bool:
        """True if the signed identities name a node, as they do until they are signed anew after its revocation."""
        file = self.folder / "server" / IDENTITIES_FILE
        return file.exists() and name in json.loads(file.read_bytes().partition(b"\n")[0])["clients"]

    def identities(self) -> SignedIdentities | None:
        """The identities as they were signed last; None: no node was ever issued.

        Raises:
            InvalidCredentials: if they cannot be read.
        """
        file = self.folder / "server" / IDENTITIES_FILE
        own = read_pem(self.folder / "authority" / "certificate.pem")
        return SignedIdentities.read(file.read_bytes(), own) if file.exists() else None

    def revocations(self) -> Revocations:
        """The revocations as they were signed last.

        Raises:
            InvalidCredentials: if they cannot be read.
        """
        own = read_pem(self.folder / "authority" / "certificate.pem")
        return RevocationFile(self.folder / "server" / REVOCATIONS_FILE, own).latest()

    @property
    def facts(self) -> CertificateFacts:
        """Contents of its certificate.

        Raises:
            InvalidCredentials: if it cannot be read.
        """
        return read_facts(self.folder / "authority" / "certificate.pem")

    @property
    def server_facts(self) -> CertificateFacts:
        """Contents of its server's certificate.

        Raises:
            InvalidCredentials: if it cannot be read.
        """
        return read_facts(self.folder / "server" / "certificate.pem")

    @property
    def roster(self) -> Roster:
        """The nodes that it issued certificates to.

        Raises:
            InvalidCredentials: if it cannot be read.
        """
        return Roster(self._roster_file, clock=self.clock)

    def issue(self, name: str, *, days: int = 365, is_peer: bool = False) -> Path:
        """Issue a new key and certificate for a node or a peer, and enter it on the roster.

        A node that was revoked or has expired gets another; its former certificate is not admitted any more.

        Args:
            name: name of the node: up to 64 letters, digits, dots, hyphens and underscores, the first a letter or a
                digit.
            days: days for which the certificate is valid; never longer than the authority's certificate.
            is_peer: True if other peers may dial it, too.

        Returns:
            The folder that belongs on the node, and nowhere else.

        Raises:
            OutputExists: if it has a certificate that is valid, or its folder is there without one.
            InvalidCredentials: if the name or the lifetime is out of range, the authority has expired, or its folder
                cannot be read and written.
        """
        if not NODE_NAME.fullmatch(name):
            raise InvalidCredentials(
                "a node's name must be up to 64 letters, digits, dots, hyphens and underscores, the first a letter or "
                f"a digit, got {name!r}"
            )
        with self._locked():
            entries = self.roster.entries()
            self._check_free(name, entries)
            place = f"nodes/{name}"
            with ExitStack() as undo:  # a folder without its entry on the roster would block the name
                if not (self.folder / place).exists():
                    undo.callback(shutil.rmtree, self.folder / place, ignore_errors=True)
                role = Role.PEER if is_peer else Role.NODE
                entries = {**entries, name: self._issue(place, role=role, name=name, days=days)}
                self._sign(entries)
                # The roster last, for it is what makes the certificate count.
                keep(self._roster_file, entries)
                undo.pop_all()
        return self.folder / place

    def issue_server(self, *, hosts: Sequence[str] | None = None, days: int = 365) -> Path:
        """Issue a new key and certificate for the server, in place of its former ones; the roster stays.

        The former certificate stays valid until it expires: the holder of its key can pose as the server until then.

        Args:
            hosts: names and addresses under which nodes reach it; those that it has unless given.
            days: days for which the certificate is valid; never longer than the authority's certificate.

        Returns:
            The folder that belongs on the server, and nowhere else.

        Raises:
            InvalidCredentials: if a host is none, the lifetime out of range, the authority has expired, or its folder
                cannot be read and written.
        """
        # Nodes go on dialling what they were told.
        hosts = self.server_facts.hosts if hosts is None else valid_hosts(hosts)
        with self._locked():
            self._issue("server", role=Role.SERVER, name="fed server", days=days, hosts=hosts)
        return self.folder / "server"

    def revoke(self, name: str) -> Entry:
        """Revoke a node's admission; a server that runs with this roster refuses it at once.

        Returns:
            The node, revoked now, or since when it was before.

        Raises:
            InvalidCredentials: if it is not on the roster, or the roster cannot be read and written.
        """
        with self._locked():
            entries = dict(self.roster.entries())
            if name not in entries:
                raise InvalidCredentials(
                    f"{name!r} is not on the roster of {self.folder}: fed keys list {self.folder} shows who is"
                )
            if entries[name].revoked is None:
                entries[name] = replace(entries[name], revoked=self.clock())
                # The roster first: it refuses the node at once, whatever becomes of the signatures.
                keep(self._roster_file, entries)
                with suppress(InvalidCredentials):  # the authority's key may be kept elsewhere
                    self._sign(entries)
        return entries[name]

    def sign_identities(self) -> Path:
        """Sign anew the identities of all nodes that are not revoked, and the revocations.

        That is needed after a revocation on a machine without the authority's key.

        Returns:
            The file, which belongs on the server; nodes that take part later hear of it there.

        Raises:
            InvalidCredentials: if the authority's key or folder cannot be used.
        """
        with self._locked():
            self._sign(self.roster.entries())
        return self.folder / "server" / IDENTITIES_FILE

    @property
    def _roster_file(self) -> Path:
        return self.folder / "server" / "roster.json"

    def _check_free(self, name: str, entries: Mapping[str, Entry]) -> None:
        entry = entries.get(name)
        if entry is None:
            other = next((other for other in entries if other.lower() == name.lower()), None)
            if other is not None:  # some file systems keep one folder for both
                raise InvalidCredentials(
                    f"{name} must differ from {other} of the roster in more than case: choose another name"
                )
            if (self.folder / "nodes" / name).exists():
                raise OutputExists(
                    f"{self.folder / 'nodes' / name} exists, and {name} is not on the roster: move it away"
                )
        elif entry.status(self.clock()) == "valid":
            raise OutputExists(
                f"{name} has a certificate that is valid until {entry.expires:%Y-%m-%d}: to replace it, first "
                f"fed keys revoke {self.folder} {name}"
            )

    def _issue(self, place: str, role: Role, name: str, days: int, hosts: Sequence[str] = ()) -> Entry:
        """Write a new key and certificate into a folder, with the authority's certificate."""
        issued = self.clock()
        last = self.facts.expires
        if issued >= last:
            raise InvalidCredentials(
                f"{self.folder} can issue nothing, its own certificate expired on {last:%Y-%m-%d}: begin a new "
                "authority with fed keys init"
            )
        expires = min(_expiry(issued, days), last)  # TLS refuses what an expired authority has signed
        own = read_pair(self.folder / "authority" / "certificate.pem", self.folder / "authority" / "key.pem")
        pair = issue(role, name, issued=issued, expires=expires, by=own, hosts=hosts)
        files = {"certificate.pem": pair.certificate_pem, "key.pem": pair.key_pem}
        self._write(place, {"authority.pem": own.certificate_pem, **files})
        return Entry(sha256=fingerprint(pair.certificate_pem), issued=issued, expires=expires, revoked=None)

    def _sign(self, entries: Mapping[str, Entry]) -> None:
        """Sign the identities of all nodes that are not revoked, and the revocations, for the folders here."""
        own = read_pair(self.folder / "authority" / "certificate.pem", self.folder / "authority" / "key.pem")
        before = self.identities()
        admitted = [name for name, entry in entries.items() if entry.revoked is None]
        folders = {name: self.folder / "nodes" / name for name in admitted}
        here = {name: read_pem(folder / "certificate.pem") for name, folder in folders.items() if folder.is_dir()}
        # Folders that were moved to their nodes are not here any more, and their keys stay known.
        points = {name: before.points[name] for name in admitted if before and name in before.points}
        content = signed_identities(
            before.version + 1 if before else 1,
            certificates_pem=here,
            points=points,
            authority_key_pem=own.key_pem,
        )
        # The roster has, too, what was revoked without the key, and gets another certificate now.
        known = [*self.roster.entries().values(), *entries.values()]
        certificates = {entry.sha256 for entry in known if entry.revoked is not None}
        names = [name for name, entry in entries.items() if entry.revoked is not None]
        revocations = signed_revocations(
            self.revocations(), certificates=certificates, names=names, authority_key_pem=own.key_pem
        )
        # A node speaks with its server alone, which has the list.
        peers = [name for name, certificate_pem in here.items() if facts_of(certificate_pem).role is Role.PEER]
        for folder in (self.folder / "server", *(folders[name] for name in here)):
            write_atomically(folder / IDENTITIES_FILE, content, mode=0o600)
        for folder in (self.folder / "server", *(folders[name] for name in peers)):
            write_atomically(folder / REVOCATIONS_FILE, revocations, mode=0o600)

    def _write(self, place: str, files: Mapping[str, bytes]) -> None:
        """Write files into a folder, all or, if there is no room, none of them."""
        _make_private(self.folder / place)
        # All files take their places when the block ends: a key without its certificate is of no use.
        with ExitStack() as stack:
            for name, content in files.items():
                file = stack.enter_context(replaced(self.folder / place / name, mode=0o600))
                file.write(content)
                file.flush()  # a full disk fails here, before any file has taken its place

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the roster: one process at a time reads and writes it."""
        with _written_into(self.folder):
            place = os.open(self.folder, os.O_RDONLY)
            try:
                fcntl.flock(place, fcntl.LOCK_EX)  # the system unlocks it when the process dies
                yield
            finally:
                os.close(place)


def _expiry(started: datetime, days: int) -> datetime:
    if not 1 <= days <= _MOST_DAYS:
        raise InvalidCredentials(f"days must be from 1 to {_MOST_DAYS}, got {days}")
    return started + timedelta(days=days)


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """A folder that is new or empty, and is so again if the block fails."""
    was_there = folder.is_dir()
    if folder.exists() and (not was_there or any(folder.iterdir())):
        raise OutputExists(f"{folder} exists and is not an empty folder: give another, or move it away")
    try:
        _make_private(folder)
        folder.chmod(0o700)  # an empty folder that was there may be open to others
        yield
    except BaseException:  # Ctrl-C too must leave no half of an authority
        for path in [*folder.glob("*")] if was_there else [folder]:
            shutil.rmtree(path, ignore_errors=True)
        raise


def _written_into(folder: Path) -> AbstractContextManager[None]:
    remedy = "make room, or give a folder that can be"
    return os_errors_as(InvalidCredentials, f"{folder} cannot be written to", remedy)
