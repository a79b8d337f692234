"""Secure aggregation as docs/protocol.md says it, without the product's code: for the checker and its coordinators."""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from math import prod

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SHARE_BYTES = 33
_PRIME = 2**256 + 297
_TEXT = "fed secure aggregation: "


def digest(purpose: str, *parts: bytes) -> bytes:
    hasher = hashlib.sha256()
    for part in (f"{_TEXT}{purpose}".encode(), *parts):
        hasher.update(len(part).to_bytes(8, "big") + part)
    return hasher.digest()


@lru_cache(maxsize=1 << 14)
def public_of(private: bytes) -> bytes:
    """Public key of X25519."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


@lru_cache(maxsize=1 << 17)
def _exchanged(private: bytes, public: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))


@lru_cache(maxsize=1 << 12)
def agreed(private: bytes, public: bytes, session: bytes, purpose: str) -> bytes:
    """Key that two clients derive for a session and a purpose."""
    return HKDF(SHA256(), 32, session, f"{_TEXT}{purpose}".encode()).derive(_exchanged(private, public))


def box_key(private: bytes, public: bytes, session: bytes, sender: int, receiver: int) -> bytes:
    """Key of the box that one place, from 0, seals for another."""
    return agreed(private, public, session, f"box from {sender} to {receiver}")


def sealed(key: bytes, content: bytes) -> bytes:
    return AESGCM(key).encrypt(bytes(12), content, None)


def opened(key: bytes, box: bytes) -> bytes:
    return AESGCM(key).decrypt(bytes(12), box, None)


def stream(key: bytes, lanes: int, bits: int) -> np.ndarray:
    """Mask of a key: unsigned integers of so many bits."""
    cipher = Cipher(AES(key), CTR(bytes(12) + b"\0\0\0\2")).encryptor()
    return np.frombuffer(cipher.update(bytes(lanes * bits // 8)), f"<u{bits // 8}")


def value_at_zero(values: Mapping[int, int]) -> int:
    """Lagrange's interpolation: the value at 0 of the polynomial of least degree with these values at these points."""
    total = 0
    for point, value in values.items():
        others = [other for other in values if other != point]
        below = prod(other - point for other in others)
        total += value * prod(others) * pow(below, -1, _PRIME)
    return total % _PRIME


def shares_of(secret: bytes, points: int) -> list[bytes]:
    """Shares of a polynomial of degree 0: a colluder hides nothing from the coordinator."""
    return [int.from_bytes(secret, "big").to_bytes(SHARE_BYTES, "big")] * points
