"""Credentials of a server, a node and a peer: certificate, key, and the authority's, which checks the other side.

A folder has ``authority.pem``, ``certificate.pem`` and ``key.pem``; a server's has ``roster.json`` beside them, a
peer's may have a copy of it, and has ``revocations.json``.
"""

import ipaddress
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Self, cast

import grpc

from fed.errors import InvalidCredentials, InvalidInput, located, os_errors_as
from fed.identity.certificates import (
    CertificateFacts,
    Role,
    facts_of,
    fingerprint,
    is_issued_by,
    now,
    read_facts,
    read_pair,
    read_pem,
)
from fed.identity.identities import IDENTITIES_FILE, SignedIdentities
from fed.identity.revocations import REVOCATIONS_FILE, RevocationFile
from fed.identity.roster import Roster

__all__ = ["NodeCredentials", "PeerCredentials", "ServerCredentials", "hold_to_loopback", "peer_of"]

_WHOSE = {Role.SERVER: "the server's", Role.NODE: "a node's", Role.PEER: "a peer's", Role.AUTHORITY: "an authority's"}


@dataclass(frozen=True, kw_only=True)
class _Credentials:
    """Credentials that server and node have in common.

    Args:
        authority_pem: certificate of the authority, by which the other side is checked.
        certificate_pem: certificate of this side.
        key_pem: private key of that certificate.
        facts: contents of that certificate.
    """

    authority_pem: bytes
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)  # a logged object must not reveal it
    facts: CertificateFacts

    @property
    def name(self) -> str:
        """Name in the certificate."""
        return self.facts.name

    def for_dialling(self) -> grpc.ChannelCredentials:
        """Credentials for ``grpc.secure_channel``: who is dialled needs a certificate of this authority for servers.

        A peer's names the host that :func:`peer_host` tells.
        """
        return grpc.ssl_channel_credentials(self.authority_pem, self.key_pem, self.certificate_pem)

    def for_listening(self, on_connection: Callable[[], None] = lambda: None) -> grpc.ServerCredentials:
        """Credentials for ``server.add_secure_port``: who dials needs a certificate of this authority.

        It must be for a node or a peer. A roster or a list of revocations then admits or refuses each call.

        Args:
            on_connection: function that is called at each new connection, in a thread of gRPC's.
        """
        pair = (self.key_pem, self.certificate_pem)
        shown = grpc.ssl_server_certificate_configuration([pair], self.authority_pem)
        # gRPC asks at each connection for another certificate; there is no other way to hear of connections.
        return grpc.dynamic_ssl_server_credentials(
            shown,
            on_connection,  # type: ignore[arg-type]  # None, which means no change, is missing in the stubs
            require_client_authentication=True,
        )


@dataclass(frozen=True, kw_only=True)
class ServerCredentials(_Credentials):
    """Credentials of a server.

    Args:
        roster: roster of the nodes that are admitted.
        identities_file: path of the clients' signed identities.
    """

    roster: Roster
    identities_file: Path

    def identities(self) -> SignedIdentities:
        """The clients' identities as they are now, for secure aggregation.

        Raises:
            InvalidCredentials: if there are none, or the authority has not signed them.
        """
        found = _identities(self.identities_file, self.authority_pem)
        if found is None:
            raise InvalidCredentials(
                f"{self.identities_file} is missing, which secure_aggregation needs: issue or revoke a node with fed "
                "keys, which writes it, and copy the folder anew"
            )
        return found

    @classmethod
    def load(cls, folder: Path, *, clock: Callable[[], datetime] = now) -> Self:
        """Load a server's credentials from a folder.

        Args:
            folder: folder of the server, or the authority's folder that has it within.
            clock: function that returns the time, in UTC.

        Raises:
            InvalidCredentials: if a file is missing or damaged, others may read the key, the certificate has expired,
                or the folder is a node's.
        """
        # The authority's folder will do where server and authority share a machine.
        folder = folder / "server" if (folder / "server").is_dir() else folder
        own = _load(folder, Role.SERVER, clock)
        roster = Roster(folder / "roster.json", clock=clock)
        return cls(**vars(own), roster=roster, identities_file=folder / IDENTITIES_FILE)


@dataclass(frozen=True, kw_only=True)
class NodeCredentials(_Credentials):
    """Credentials of a node.

    Args:
        identities: identities of all clients, as the authority signed them; None where the folder is older than they
            are.
    """

    identities: SignedIdentities | None = None

    @classmethod
    def load(cls, folder: Path, *, clock: Callable[[], datetime] = now) -> Self:
        """Load a node's credentials from its folder.

        Args:
            folder: folder of the node.
            clock: function that returns the time, in UTC.

        Raises:
            InvalidCredentials: if a file is missing or damaged, others may read the key, the certificate has expired,
                or the folder is the server's or the authority's.
        """
        own = _load(folder, Role.NODE, clock)
        return cls(**vars(own), identities=_identities(folder / IDENTITIES_FILE, own.authority_pem))


@dataclass(frozen=True, kw_only=True)
class PeerCredentials(_Credentials):
    """Credentials of a peer.

    Args:
        roster: copy of the authority's roster; None: every peer is admitted that has a certificate.
        revocations: list of certificates that are not admitted any more, signed by the authority.
    """

    roster: Roster | None
    revocations: RevocationFile

    @classmethod
    def load(cls, folder: Path, *, clock: Callable[[], datetime] = now) -> Self:
        """Load a peer's credentials from its folder.

        Args:
            folder: folder of the peer.
            clock: function that returns the time, in UTC.

        Raises:
            InvalidCredentials: if a file is missing or damaged, others may read the key, the certificate has expired,
                or the folder is the server's, the authority's or a node's.
        """
        own = _load(folder, Role.PEER, clock)
        roster = folder / "roster.json"
        return cls(
            **vars(own),
            roster=Roster(roster, clock=clock) if roster.exists() else None,
            revocations=RevocationFile(folder / REVOCATIONS_FILE, own.authority_pem),
        )

    @property
    def is_revoked(self) -> bool:
        """True if the authority has revoked this peer's own certificate."""
        return fingerprint(self.certificate_pem) in self.revocations.latest().certificates

    def admits(self, name: str, certificate_pem: bytes) -> str | None:
        """Check that a peer is admitted with this certificate, which TLS has verified: None, or the reason."""
        if self.roster is not None and (reason := self.roster.admits(name, certificate_pem)) is not None:
            return reason
        revoked = self.revocations.latest().certificates
        try:
            role = _role_of(certificate_pem)
            is_revoked = bool(revoked) and _fingerprint_of(certificate_pem) in revoked
        except (InvalidCredentials, ValueError) as error:
            return f"its certificate {error}"
        if is_revoked:
            return f"{name!r} has a certificate that its authority has revoked"
        return None if role is Role.PEER else f"{name!r} has {_WHOSE[role]} certificate, and is no peer"

    def refusals(self, names: Collection[str]) -> Mapping[str, str]:
        """Reasons for which peers are not admitted, by name; of the others there is none.

        Args:
            names: names of the peers; their certificates need not be known.
        """
        revoked = self.revocations.latest().names
        found = {name: f"its authority has revoked the certificate of {name!r}" for name in names if name in revoked}
        if self.roster is None:
            return found
        try:
            entries = self.roster.entries()
        except InvalidCredentials as error:
            # A roster that cannot be read admits nobody.
            return dict.fromkeys(names, str(error))
        time = now()
        for name in names:
            status = entries[name].status(time) if name in entries else "not there"
            if status != "valid":
                found.setdefault(name, f"{name!r} is {status} on the roster")
        return found


# Kept, for every message of a stream is held to the list again.
@lru_cache(10_000)
def _fingerprint_of(certificate_pem: bytes) -> str:
    return fingerprint(certificate_pem)


@lru_cache(10_000)
def _role_of(certificate_pem: bytes) -> Role:
    return facts_of(certificate_pem).role


def peer_of(context: grpc.ServicerContext) -> tuple[str, bytes] | None:
    """Name and certificate (PEM) of the caller, taken from its certificate alone, for ``Roster.admits``.

    None if the connection has no certificate, as an insecure one has not.
    """
    properties = cast("Mapping[str, Sequence[bytes]]", context.auth_context())  # the stubs say less than there is
    names, certificates = ([*properties.get(key, ())] for key in ("x509_common_name", "x509_pem_cert"))
    if len(names) != 1 or len(certificates) != 1:  # with two common names the caller could be either
        return None
    return names[0].decode(errors="replace"), certificates[0]


def hold_to_loopback(address: str) -> None:
    """Refuse addresses beyond this machine, as a connection without certificates must stay on it.

    Args:
        address: HOST:PORT.

    Raises:
        InvalidInput: if it is of another machine, or of all that this one has.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise InvalidInput(
            f"--insecure allows loopback addresses alone, got {host}: write 127.0.0.1, or give --credentials"
        )


def _load(folder: Path, role: Role, clock: Callable[[], datetime]) -> _Credentials:
    if not folder.is_dir():
        raise InvalidCredentials(f"{folder}: no such folder: {_remedy(role)}")
    # The authority's key must not lie on the machine of a server or a node.
    if (folder / "authority").is_dir():
        raise InvalidCredentials(f"{folder} is the authority's folder: {_remedy(role)}")
    authority = folder / "authority.pem"
    certificate = folder / "certificate.pem"
    authority_pem = read_pem(authority)
    facts = read_facts(certificate)
    # Before the key is read: the likeliest mistake is the folder of another.
    if facts.role is not role:
        raise InvalidCredentials(f"{folder} holds {_WHOSE[facts.role]} certificate: {_remedy(role)}")
    pair = read_pair(certificate, folder / "key.pem")
    authority_facts = read_facts(authority)
    if authority_facts.role is not Role.AUTHORITY or not is_issued_by(pair.certificate_pem, authority_pem):
        raise InvalidCredentials(
            f"{certificate} must be signed by the authority in {authority}, and is not: copy both from the same folder"
        )
    # The authority comes first: where it has expired, another certificate of it would not help.
    if clock() >= authority_facts.expires:
        raise InvalidCredentials(
            f"{authority} expired on {authority_facts.expires:%Y-%m-%d}: begin a new authority with fed keys init"
        )
    if clock() >= facts.expires:
        command = "server" if role is Role.SERVER else "issue"
        raise InvalidCredentials(
            f"{certificate} expired on {facts.expires:%Y-%m-%d}: issue another with fed keys {command}"
        )
    return _Credentials(authority_pem=authority_pem, facts=facts, **pair._asdict())


def _identities(path: Path, authority_pem: bytes) -> SignedIdentities | None:
    """The signed identities in a file; None if there is none."""
    if not path.exists():
        return None
    with os_errors_as(InvalidCredentials, f"{path} cannot be read", "make it readable"):
        content = path.read_bytes()
    with located(path):
        return SignedIdentities.read(content, authority_pem)


def _remedy(role: Role) -> str:
    if role is Role.NODE:
        return "give the node's own, which fed keys issue writes into nodes/NAME"
    if role is Role.PEER:
        return "give the peer's own, which fed keys issue --peer writes into nodes/NAME"
    return "give the server's own, which fed keys init writes into server"
