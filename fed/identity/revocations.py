"""Certificates that an authority has revoked, signed by it: peers pass the list on, and none can make one up.

A signed file (:mod:`fed.identity.signed_files`) with a ``version``, the ``certificates`` as SHA-256 fingerprints, and
the ``names`` that have no other certificate. A later version takes the place of an earlier one, never the other way
round.
"""

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fed.errors import InvalidCredentials, located, os_errors_as
from fed.identity.roster import file_state
from fed.identity.signed_files import read_signed, signed
from fed.storage.atomic_files import write_atomically

__all__ = ["REVOCATIONS_FILE", "RevocationFile", "Revocations", "signed_revocations"]

REVOCATIONS_FILE = "revocations.json"
"""Name of the file, in the server's folder and in each peer's."""

_KIND = "revocations"
_MOST_BYTES = 1 << 20  # a message between peers has no more; room for 15,000 certificates
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Revocations:
    """Content of a file of revocations.

    Args:
        version: number that grows with every change; 0: no list yet.
        certificates: SHA-256 fingerprints of the revoked certificates.
        names: names of nodes and peers that have no other certificate.
        content: the whole file.
    """

    version: int = 0
    certificates: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    content: bytes = b""

    @classmethod
    def read(cls, content: bytes, authority_pem: bytes) -> Self:
        """Revocations that the authority has signed.

        Args:
            content: untrusted content of the file.
            authority_pem: the authority's certificate.

        Raises:
            InvalidCredentials: if the authority has not signed the content.
        """
        said = read_signed(_KIND, content, authority_pem=authority_pem, most_bytes=_MOST_BYTES)
        return cls(
            version=said["version"],
            certificates=frozenset(said["certificates"]),
            names=frozenset(said["names"]),
            content=content,
        )


def signed_revocations(
    before: Revocations, certificates: Collection[str], names: Collection[str], authority_key_pem: bytes
) -> bytes:
    """The content of the next file; that of the last one where nothing is new.

    Args:
        before: the revocations of the last file.
        certificates: SHA-256 fingerprints of revoked certificates; those in ``before`` stay.
        names: names of nodes and peers whose certificate is revoked.
        authority_key_pem: the authority's private key, which signs.

    Raises:
        InvalidCredentials: if the key cannot be used, or the list is too long.
    """
    all_certificates = before.certificates | frozenset(certificates)
    # An unchanged list keeps its version: another would go round among all peers.
    if before.content and (all_certificates, frozenset(names)) == (before.certificates, before.names):
        return before.content
    said = {"version": before.version + 1, "certificates": sorted(all_certificates), "names": sorted(names)}
    content = signed(_KIND, said, authority_key_pem)
    if len(content) > _MOST_BYTES:
        raise InvalidCredentials(
            f"the revocations must have at most {_MOST_BYTES} bytes, got {len(content)}: begin a new authority with "
            "fed keys init"
        )
    return content


class RevocationFile:
    """The latest list that a peer's file has had or others have sent; threads may share it.

    Args:
        path: path of the file, which need not be there.
        authority_pem: the authority's certificate.

    Raises:
        InvalidCredentials: if the file is there, and the authority has not signed it.
    """

    def __init__(self, path: Path, authority_pem: bytes) -> None:
        self.path = path
        self._authority_pem = authority_pem
        # The service's loop and TLS ask for it in threads of their own.
        self._lock = threading.Lock()
        self._state = file_state(path)
        self._latest = self._read() if path.exists() else Revocations()

    def latest(self) -> Revocations:
        """The latest list; a file that has changed is read again, and one that is damaged changes nothing."""
        state = file_state(self.path)
        if state is not None and state != self._state:
            self._state = state
            try:
                self._adopt(self._read())
            except InvalidCredentials as error:
                _log.warning("%s", error)
        return self._latest

    def take(self, content: bytes) -> None:
        """Take a list that another has sent if it is a later one, and write it down.

        Args:
            content: untrusted content of a file.

        Raises:
            InvalidCredentials: if the authority has not signed it.
        """
        if content == self._latest.content or not self._adopt(Revocations.read(content, self._authority_pem)):
            return
        # The list is in force by now, even where it cannot be written.
        try:
            with os_errors_as(InvalidCredentials, f"{self.path} cannot be written", "make its folder writable"):
                write_atomically(self.path, content, mode=0o600)
        except InvalidCredentials as error:
            _log.warning("the list of revocations cannot be kept, and this peer forgets it when it stops: %s", error)

    def _adopt(self, found: Revocations) -> bool:
        with self._lock:
            # An earlier list would admit again who was revoked.
            is_later = found.version > self._latest.version
            if is_later:
                self._latest = found
        return is_later

    def _read(self) -> Revocations:
        with os_errors_as(InvalidCredentials, f"{self.path} cannot be read", "make it readable"):
            content = self.path.read_bytes()
        with located(self.path):
            return Revocations.read(content, self._authority_pem)
