"""Identities of all clients, signed by their authority, by which clients know each other under secure aggregation.

A file of two lines: a JSON object with a ``version`` and the ``clients``, name → public key (a point of P-256,
compressed, in hexadecimal digits), and the authority's signature of that line. Whoever has the authority's certificate
can check it, wherever it comes from; a later version takes the place of an earlier one, and never the other way round.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fed.identity.certificates import public_key_of
from fed.identity.signed_files import read_signed, signed
from fed.protocol.limits import NODE_NAME
from fed.secure_aggregation.key_agreement import digest
from fed.secure_aggregation.terms import Identities

__all__ = ["IDENTITIES_FILE", "SignedIdentities", "signed_identities"]

IDENTITIES_FILE = "identities.json"
"""Name of the file, in the server's folder and in each node's."""

_KIND = "identities"
_MOST_BYTES = 32 << 20


@dataclass(frozen=True)
class SignedIdentities:
    """Content of a file of identities.

    Args:
        version: number that grows with every change.
        points: name → public key, in hexadecimal digits.
        content: bytes of the whole file.
    """

    version: int
    points: Mapping[str, str]
    content: bytes

    @classmethod
    def read(cls, content: bytes, authority_pem: bytes) -> "SignedIdentities":
        """Identities that the authority has signed.

        Args:
            content: untrusted content of the file.
            authority_pem: certificate of the authority.

        Raises:
            InvalidCredentials: if the authority has not signed them.
        """
        said = read_signed(_KIND, content, authority_pem=authority_pem, most_bytes=_MOST_BYTES)
        return cls(said["version"], said["clients"], content)

    @classmethod
    def newest(cls, *found: "SignedIdentities | None") -> "SignedIdentities | None":
        """The one of the latest version; None if there is none."""
        there = [one for one in found if one is not None]
        return max(there, key=lambda one: one.version) if there else None

    def known(self) -> Identities:
        """Identities as sessions use them."""
        return Identities(_Keys(self.points), digest("identities known", self.content))


class _Keys(Mapping[str, ec.EllipticCurvePublicKey]):
    """Public keys by name, each made when it is asked for."""

    def __init__(self, points: Mapping[str, str]) -> None:
        self._points = points
        self._made: dict[str, ec.EllipticCurvePublicKey] = {}

    def __getitem__(self, name: str) -> ec.EllipticCurvePublicKey:
        # A point takes long to check, and a session has few of many clients.
        if name not in self._made:
            point = bytes.fromhex(self._points[name])
            self._made[name] = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
        return self._made[name]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)


def signed_identities(
    version: int, certificates_pem: Mapping[str, bytes], points: Mapping[str, str], authority_key_pem: bytes
) -> bytes:
    """The content of a file of identities.

    Args:
        version: number that grows with every change.
        certificates_pem: name → certificate, of the clients whose certificates are at hand.
        points: name → public key as the file writes it, of the other clients.
        authority_key_pem: private key of the authority, which signs.

    Raises:
        InvalidCredentials: if a certificate or the key cannot be used.
    """
    found = dict(points)
    for name, certificate_pem in certificates_pem.items():
        key = public_key_of(certificate_pem)
        found[name] = key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint).hex()
    # An authority issues to such names alone: another one is a mistake of this program.
    assert all(map(NODE_NAME.fullmatch, found))
    return signed(_KIND, {"version": version, "clients": dict(sorted(found.items()))}, authority_key_pem)
