"""Keys of a session: agreement by X25519, keys derived by HKDF, sealed boxes, and signatures of long-term identities.

RFC 7748 (X25519), RFC 5869 (HKDF), FIPS 186-5 (ECDSA over P-256), NIST SP 800-38D (AES-GCM).
"""

import hashlib
from collections.abc import Callable

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed, decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fed.errors import InvalidPayload

__all__ = [
    "DIGEST_BYTES",
    "KEY_BYTES",
    "SIGNATURE_BYTES",
    "TAG_BYTES",
    "AgreementKey",
    "digest",
    "is_signed",
    "open_box",
    "seal",
    "sign",
]

KEY_BYTES = 32
"""Bytes of a private, a public and a derived key."""

DIGEST_BYTES = 32
"""Bytes of a digest."""

SIGNATURE_BYTES = 64
"""Bytes of a signature: the two numbers of ECDSA, 32 bytes each, big-endian."""

TAG_BYTES = 16
"""Bytes of AES-GCM's tag, by which a box is longer than what it holds."""

_NONCE = bytes(12)  # each key seals one box


def digest(purpose: str, *parts: bytes | memoryview) -> bytes:
    """SHA-256 of a purpose and parts, each with its length before it, so that no two lists of parts are alike.

    Args:
        purpose: text that keeps the digests of different things apart.
        parts: any number of parts.
    """
    hasher = hashlib.sha256()
    for part in (f"fed secure aggregation: {purpose}".encode(), *parts):
        # Else ("ab", "c") and ("a", "bc") would be signed as one.
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.digest()


class AgreementKey:
    """A private X25519 key of one session: with another client's public key it gives a secret that both know.

    Args:
        private: 32 random bytes.

    Raises:
        InvalidPayload: by :meth:`agree`, if the other side's key is no point of X25519.
    """

    def __init__(self, private: bytes) -> None:
        self.private = private
        self._key = X25519PrivateKey.from_private_bytes(private)
        self._secrets: dict[bytes, bytes] = {}  # an agreement takes four times as long as a derivation

    @classmethod
    def draw(cls, entropy: Callable[[int], bytes]) -> "AgreementKey":
        """Fresh key from a source of random bytes."""
        return cls(entropy(KEY_BYTES))

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def agree(self, public: bytes, session: bytes, purpose: str) -> bytes:
        """The 32-byte key that both sides derive for this session and this purpose alone.

        Args:
            public: public key of the other side.
            session: id of the session.
            purpose: use of the key, which keeps the keys of different uses apart.
        """
        secret = self._secrets.get(public)
        if secret is None:
            try:
                secret = self._key.exchange(X25519PublicKey.from_public_bytes(public))
            except ValueError:  # of another length, or a point of small order, which would make the secret zero
                raise InvalidPayload("a public key of a session must be a point of X25519, got another") from None
            self._secrets[public] = secret
        # The session is the salt: keys of another attempt tell nothing of these.
        return HKDF(SHA256(), KEY_BYTES, session, f"fed secure aggregation: {purpose}".encode()).derive(secret)


def seal(key: bytes, content: bytes) -> bytes:
    """Encrypt and authenticate with AES-256-GCM, under a key that seals nothing else."""
    return AESGCM(key).encrypt(_NONCE, content, None)


def open_box(key: bytes, box: bytes) -> bytes:
    """The content of a box that :func:`seal` has sealed.

    Raises:
        InvalidPayload: if it was not sealed with this key, or has changed.
    """
    try:
        return AESGCM(key).decrypt(_NONCE, box, None)
    except InvalidTag:
        raise InvalidPayload("a box must be sealed by its sender for its receiver, got another") from None


def sign(key: EllipticCurvePrivateKey, signed: bytes) -> bytes:
    """Sign a digest with a long-term identity: ECDSA over P-256, 64 bytes."""
    numbers = decode_dss_signature(key.sign(signed, ECDSA(Prehashed(SHA256()))))
    return b"".join(number.to_bytes(SIGNATURE_BYTES // 2, "big") for number in numbers)


def is_signed(key: EllipticCurvePublicKey, signed: bytes, signature: bytes) -> bool:
    """Tell whether a signature of a digest was made with this key.

    Args:
        key: public key of the signer.
        signed: digest that was signed.
        signature: untrusted bytes of a signature; a valid one has 64.
    """
    # A fixed length rather than DER, of which one signature may have several forms.
    if len(signature) != SIGNATURE_BYTES:
        return False
    half = SIGNATURE_BYTES // 2
    r = int.from_bytes(signature[:half], "big")
    s = int.from_bytes(signature[half:], "big")
    try:
        key.verify(encode_dss_signature(r, s), signed, ECDSA(Prehashed(SHA256())))
    except InvalidSignature:
        return False
    return True
