"""X.509 certificates with ECDSA P-256 keys: an authority's, its server's, its nodes' and its peers'.

A certificate states its permitted use (RFC 5280, 4.2.1.12): a node's cannot serve, and the server's cannot
report as a node, because both ends of TLS check its extended key usage. A peer's may do both, and names no host but
the peer itself: whoever dials checks who answers, at whatever address, and no node takes a peer for its server. All are
PEM.
"""

import hashlib
import ipaddress
import ssl
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fed.errors import InvalidCredentials, located, os_errors_as

__all__ = [
    "PEER_HOST",
    "CertificateFacts",
    "Pair",
    "Role",
    "facts_of",
    "fingerprint",
    "is_issued_by",
    "issue",
    "now",
    "peer_host",
    "private_key_of",
    "public_key_of",
    "read_facts",
    "read_pair",
    "read_pem",
]

PEER_HOST = "peer.fed.invalid"
"""Host that every peer's certificate names, for those who do not know yet which peer they dial."""

_CLOCKS_DIFFER = timedelta(days=1)
"""A certificate is valid from that long before it is issued: the clock of a node may be behind."""


class Role(StrEnum):
    """Role of a certificate's owner."""

    AUTHORITY = "authority"
    SERVER = "server"
    NODE = "node"
    PEER = "peer"


_SERVES = ExtendedKeyUsageOID.SERVER_AUTH
_DIALS = ExtendedKeyUsageOID.CLIENT_AUTH
_PURPOSES = {
    Role.SERVER: frozenset([_SERVES]),
    Role.NODE: frozenset([_DIALS]),
    Role.PEER: frozenset([_SERVES, _DIALS]),
}


class Pair(NamedTuple):
    """A certificate and its private key, as PEM."""

    certificate_pem: bytes
    key_pem: bytes


@dataclass(frozen=True, kw_only=True)
class CertificateFacts:
    """Contents of a certificate.

    Args:
        role: role of the certificate's owner, by the uses that it permits.
        name: common name; a node's is its identity.
        hosts: names and addresses under which a server may be reached.
        expires: time until which the certificate is valid.
    """

    role: Role
    name: str
    hosts: tuple[str, ...]
    expires: datetime


def peer_host(name: str) -> str:
    """Host that the certificate of one peer names, and no other: a name may have letters that no host has.

    Example:
        >>> peer_host("ann")
        '49915e0d7d4b402e3017d010bc1c0e83.peer.fed.invalid'
    """
    return f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.{PEER_HOST}"


def now() -> datetime:
    """The time, in whole seconds, as certificates hold it."""
    return datetime.now(UTC).replace(microsecond=0)


def issue(
    role: Role, name: str, *, issued: datetime, expires: datetime, by: Pair | None = None, hosts: Sequence[str] = ()
) -> Pair:
    """A new key, and a certificate for it.

    Args:
        role: role of the certificate's owner.
        name: common name, of at most 64 characters.
        issued: time from which the certificate is valid.
        expires: time until which the certificate is valid.
        by: authority that signs; the new key itself unless given.
        hosts: names and addresses under which a server is reached.

    Raises:
        InvalidCredentials: if ``by`` is not a certificate and its key.
    """
    # P-256, the curve that every TLS library has.
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer_key = key if by is None else private_key_of(by.key_pem)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if by is None else _certificate(by.certificate_pem).subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(issued - _CLOCKS_DIFFER)
        .not_valid_after(expires)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    for extension, is_critical in _uses(role, name, hosts):
        builder = builder.add_extension(extension, critical=is_critical)
    certificate_pem = builder.sign(issuer_key, SHA256()).public_bytes(Encoding.PEM)
    return Pair(certificate_pem, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def fingerprint(certificate_pem: bytes) -> str:
    """The SHA-256 of a certificate, as ``openssl x509 -fingerprint -sha256`` counts it, in 64 hexadecimal digits.

    Raises:
        ValueError: if it is not PEM.
    """
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate_pem.decode())).hexdigest()


def public_key_of(certificate_pem: bytes) -> ec.EllipticCurvePublicKey:
    """The public key of a certificate.

    Raises:
        InvalidCredentials: if it is no certificate with an elliptic-curve key.
    """
    key = _certificate(certificate_pem).public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InvalidCredentials(f"must be of an elliptic-curve key, got {type(key).__name__}: restore it")
    return key


def private_key_of(key_pem: bytes) -> ec.EllipticCurvePrivateKey:
    """The private key in a PEM file's content.

    Raises:
        InvalidCredentials: if it is no elliptic-curve key.
    """
    try:
        key = load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        problem = "must be a private key as PEM without a password, got something else: restore it"
        raise InvalidCredentials(problem) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidCredentials(f"must be an elliptic-curve key, got {type(key).__name__}: restore it")
    return key


def is_issued_by(certificate_pem: bytes, authority_pem: bytes) -> bool:
    """True if an authority signed a certificate."""
    try:
        _certificate(certificate_pem).verify_directly_issued_by(_certificate(authority_pem))
    # TypeError: its key is of another kind than an authority's.
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def read_facts(path: Path) -> CertificateFacts:
    """Parse the certificate in a file.

    Raises:
        InvalidCredentials: if it cannot be read, or is none that fed issues.
    """
    certificate_pem = read_pem(path)
    with located(path):
        return facts_of(certificate_pem)


def facts_of(certificate_pem: bytes) -> CertificateFacts:
    """Parse a certificate.

    Raises:
        InvalidCredentials: if it is none that fed issues.
    """
    certificate = _certificate(certificate_pem)
    role = Role.AUTHORITY
    hosts: tuple[str, ...] = ()
    try:
        # The role is read from the uses that TLS checks: a name may be anything that the issuer chose.
        if not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            purposes = frozenset(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
            role = {purposes_of: role for role, purposes_of in _PURPOSES.items()}[purposes]
        (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        if role is Role.SERVER:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            hosts = tuple(str(entry.value) for entry in names)
    except (x509.ExtensionNotFound, ValueError, KeyError):
        raise InvalidCredentials("must be a certificate that fed keys issued, got another one: restore it") from None
    expires = certificate.not_valid_after_utc
    return CertificateFacts(role=role, name=str(name.value), hosts=hosts, expires=expires)


def read_pair(certificate: Path, key: Path) -> Pair:
    """A certificate and its private key, from two files.

    Raises:
        InvalidCredentials: if one cannot be read, they do not belong together, or others may read the key.
    """
    pair = Pair(read_pem(certificate), read_pem(key))
    mode = stat.S_IMODE(key.stat().st_mode)
    if mode & stat.S_IRWXO:
        raise InvalidCredentials(f"{key} must be for its owner alone, got mode {mode:04o}: chmod 600 {key}")
    with located(key):
        public_key = private_key_of(pair.key_pem).public_key()
    with located(certificate):
        is_theirs = _certificate(pair.certificate_pem).public_key() == public_key
    if not is_theirs:
        raise InvalidCredentials(f"{key} does not belong to {certificate}: restore both from the same folder")
    return pair


def read_pem(path: Path) -> bytes:
    """Read a PEM file.

    Raises:
        InvalidCredentials: if it cannot be read.
    """
    with os_errors_as(InvalidCredentials, f"{path} cannot be read", "make it readable"):
        if not path.exists():
            raise InvalidCredentials(f"{path}: no such file: restore the whole folder that fed keys wrote")
        return path.read_bytes()


def _uses(role: Role, name: str, hosts: Sequence[str]) -> list[tuple[x509.ExtensionType, bool]]:
    """Extensions of a role, each with X.509's mark "critical": who does not understand it must refuse."""
    is_authority = role is Role.AUTHORITY
    signs = {"key_cert_sign": is_authority, "crl_sign": is_authority, "digital_signature": not is_authority}
    never = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    usage = x509.KeyUsage(**signs, **dict.fromkeys(never, False), decipher_only=False)
    common: list[tuple[x509.ExtensionType, bool]] = [
        # An authority certifies no other authority.
        (x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), True),
        (usage, True),
    ]
    if is_authority:
        return common
    names = [_host(host) for host in hosts]
    if role is Role.NODE:
        # No host: whatever a node is called, no client that looks for a server takes it for one.
        names = [x509.UniformResourceIdentifier(f"urn:fed:node:{name}")]
    elif role is Role.PEER:
        names = [x509.DNSName(peer_host(name)), x509.DNSName(PEER_HOST)]
    return [
        *common,
        (x509.ExtendedKeyUsage(sorted(_PURPOSES[role], key=str)), True),
        (x509.SubjectAlternativeName(names), False),
    ]


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise InvalidCredentials("must be a certificate as PEM, got something else: restore it") from None
