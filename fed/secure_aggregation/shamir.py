"""Secret sharing: any t of n shares recover a secret, and t − 1 say nothing of it.

Shamir 1979, "How to share a secret", doi 10.1145/359168.359176, over the integers modulo 2²⁵⁶ + 297, the smallest
prime above all secrets of 32 bytes.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import comb, prod

import numpy as np

from fed.errors import InvalidPayload

__all__ = ["SECRET_BYTES", "SHARE_BYTES", "recover", "share"]

SECRET_BYTES = 32
"""Bytes of a secret."""

SHARE_BYTES = 33
"""Bytes of a share."""

_PRIME = 2**256 + 297
_DRAWN_BYTES = 48  # reduced modulo the prime, a number of 384 bits is uniform but for 2⁻¹²⁸


def share(secret: bytes, threshold: int, shares: int, entropy: Callable[[int], bytes]) -> list[bytes]:
    """Shares of a secret: the values at 1, 2, … of a random polynomial of degree t − 1 that is the secret at 0.

    Args:
        secret: 32 bytes.
        threshold: t, number of shares that recover it.
        shares: n ≥ t, number of shares to make.
        entropy: function that returns so many random bytes, from a cryptographic source.

    Example:
        >>> import os
        >>> shares = share(bytes(range(32)), 2, 3, os.urandom)
        >>> recover({1: shares[0], 3: shares[2]}, 3) == bytes(range(32))
        True
    """
    drawn = entropy(_DRAWN_BYTES * (threshold - 1))
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [
        int.from_bytes(drawn[start : start + _DRAWN_BYTES], "big") % _PRIME
        for start in range(0, len(drawn), _DRAWN_BYTES)
    ]
    return [_value(coefficients, point).to_bytes(SHARE_BYTES, "big") for point in range(1, shares + 1)]


def recover(shares: Mapping[int, bytes], count: int) -> bytes:
    """The secret of these shares, t or more of those that :func:`share` made.

    Lagrange's interpolation at 0. For the points 1 … n the factor of a share is ±C(n, i); each of the missing points m
    multiplies it by (m − i)/m, so that a recovery costs one product for each pair of a share and a missing one.

    Args:
        shares: point, from 1, → share.
        count: n, number of shares that were made.

    Raises:
        InvalidPayload: if the result is 2²⁵⁶ or more. Most false shares give another secret instead: the caller must
            hold it to a commitment.
    """
    points = sorted(shares)
    missing = sorted(set(range(1, count + 1)).difference(points))
    of_all = _factors(count)
    factors = [of_all[point - 1] for point in points]
    differences = np.subtract.outer(np.array(missing, np.int64), np.array(points, np.int64))
    at_once = 63 // count.bit_length()  # whose product is still an integer of 64 bits
    for begin in range(0, len(missing), at_once):
        products = differences[begin : begin + at_once].prod(0).tolist()
        factors = [factor * product % _PRIME for factor, product in zip(factors, products, strict=True)]
    weighted = zip(factors, map(shares.__getitem__, points), strict=True)
    total = sum(factor * int.from_bytes(one, "big") for factor, one in weighted)
    # One inverse at the end, in place of one for each share.
    secret = total * pow(prod(missing), -1, _PRIME) % _PRIME
    if secret >> (8 * SECRET_BYTES):
        raise InvalidPayload("shares must be those of one secret of 32 bytes, got others")
    return secret.to_bytes(SECRET_BYTES, "big")


def _value(coefficients: list[int], point: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % _PRIME
    return value


@lru_cache(maxsize=64)
def _factors(count: int) -> list[int]:
    return [(-1) ** (point - 1) * comb(count, point) % _PRIME for point in range(1, count + 1)]
