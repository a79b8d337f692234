"""Cryptography that is cheap in many transcripts: signatures by a table, and X25519 that remembers what it found."""

import hashlib
import hmac
import random
from functools import cache
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fed.secure_aggregation import client, key_agreement, terms

_POOL = 1 << 12


class Entropy:
    """Source of secrets: those of 32 bytes come from a pool, each once in a transcript, so that X25519 may remember.

    Args:
        rng: draws all else.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._drawn = 0

    def __call__(self, count: int) -> bytes:
        """Draw this number of bytes."""
        if count != 32 or self._drawn == _POOL:
            return self._rng.randbytes(count)
        self._drawn += 1
        return hashlib.sha256(f"pool {self._drawn}".encode()).digest()


class RememberingKey:
    """X25519 as the library computes it, once for each pair of keys."""

    def __init__(self, private: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(private)
        self._public = self._key.public_key()
        self._raw = self._public.public_bytes_raw()

    def public_key(self) -> X25519PublicKey:
        return self._public

    def exchange(self, public: X25519PublicKey) -> bytes:
        pair = tuple(sorted([self._raw, public.public_bytes_raw()]))
        if pair not in _SECRETS:
            if len(_SECRETS) > 1 << 17:
                _SECRETS.clear()
            _SECRETS[pair] = self._key.exchange(public)
        return _SECRETS[pair]


_SECRETS: dict[tuple[bytes, ...], bytes] = {}


class _Keys:
    from_private_bytes = staticmethod(cache(RememberingKey))


class _Publics:
    from_public_bytes = staticmethod(cache(X25519PublicKey.from_public_bytes))


_RAW: dict[int, tuple[Any, bytes]] = {}  # by id, since keys have no hash; the key, too, so that its id stays its own


def _raw(key: EllipticCurvePublicKey) -> bytes:
    if id(key) not in _RAW:
        _RAW[id(key)] = key, key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
    return _RAW[id(key)][1]


def _raw_of_private(key: EllipticCurvePrivateKey) -> bytes:
    if id(key) not in _RAW:
        _RAW[id(key)] = key, key.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
    return _RAW[id(key)][1]


def sign(key: EllipticCurvePrivateKey, signed: bytes) -> bytes:
    """Signature that nobody in a transcript forges, since nobody there computes it without the private key."""
    return hmac.digest(_raw_of_private(key), signed, "sha512")


def is_signed(key: EllipticCurvePublicKey, signed: bytes, signature: bytes) -> bool:
    return hmac.digest(_raw(key), signed, "sha512") == signature


def use(patch: pytest.MonkeyPatch) -> None:
    """Put the cheap cryptography in place of the real one."""
    for module in (client, key_agreement):
        patch.setattr(module, "sign", sign)
    patch.setattr(terms, "is_signed", is_signed)
    substitutes: dict[str, Any] = {"X25519PrivateKey": _Keys, "X25519PublicKey": _Publics}
    for name, substitute in substitutes.items():
        patch.setattr(key_agreement, name, substitute)
