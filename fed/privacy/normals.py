"""Normal numbers of a keystream: ChaCha20 (RFC 8439) with a key from a stream of draws, turned by Box and Muller.

NumPy's normal numbers of a cryptographic bit generator take thirty times as long. Here the cipher is OpenSSL's, and
the rest is computed on whole vectors.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms
from numpy.lib.introspect import opt_func_info
from numpy.typing import NDArray

from fed.vectors.tensors import Tensor, torch

__all__ = ["Normals"]

_NUMBERS_AT_ONCE = 1 << 16
_FRACTION = (1 << 52) - 1
_ONE = 0x3FF0_0000_0000_0000  # exponent of float64's numbers from 1 to 2
_TARGET: str = opt_func_info(func_name="^tan$", signature="float64")["tan"]["dd"]["current"]
# NumPy's tangent takes a fifth of PyTorch's time where it is made for AVX-512, and three times as long elsewhere.
_IS_NUMPY_FASTER = not _TARGET.startswith("baseline")


class Normals:
    """Independent normal numbers of clients, a vector each step.

    Args:
        streams: each client's stream, of which 32 bytes are drawn as the key of its cipher.
        numbers: Q, the number of normal numbers of a step.
        steps: L, the number of steps.

    Example:
        >>> normals = Normals([np.random.default_rng(0), np.random.default_rng(1)], numbers=5, steps=3)
        >>> normals.next(2).shape, normals.next(1).shape
        (torch.Size([2, 5]), torch.Size([1, 5]))
    """

    def __init__(self, streams: Sequence[np.random.Generator], numbers: int, steps: int) -> None:
        self._ciphers = [_keystream(stream.bytes(32)) for stream in streams]
        self._numbers = numbers
        self._half = -(-numbers // 2)
        self._at_once = max(1, _NUMBERS_AT_ONCE // (numbers * len(streams)))
        self._left = steps
        self._drawn_KLQ = torch.empty(len(streams), 0, 2 * self._half, dtype=torch.float64)
        self._taken = 0

    def next(self, clients: int) -> Tensor:
        """Numbers [K, Q] of the next step for the first clients, in float64, which are the caller's."""
        if self._taken == self._drawn_KLQ.shape[1]:
            count = min(self._at_once, max(self._left, 1))
            self._left -= count
            self._drawn_KLQ = self._draw(clients, count)
            self._taken = 0
        normals_KQ = self._drawn_KLQ[:clients, self._taken, : self._numbers]
        self._taken += 1
        return normals_KQ

    def _draw(self, clients: int, steps: int) -> Tensor:
        """Numbers of some steps: each step of a client has its own part of the keystream."""
        size_bytes = steps * 2 * self._half * 8
        zeros = bytes(size_bytes)
        words = bytearray(clients * size_bytes)
        memory = memoryview(words)
        for client, cipher in enumerate(self._ciphers[:clients]):
            cipher.update_into(zeros, memory[client * size_bytes : (client + 1) * size_bytes])
        bits = np.frombuffer(words, dtype=np.int64).reshape(clients, steps, 2, self._half)
        # Numbers of 52 random bits, uniform in [1, 2).
        np.bitwise_and(bits, _FRACTION, out=bits)
        uniforms = np.bitwise_or(bits, _ONE, out=bits).view(np.float64)
        # 2 − u is in (0, 1]: its logarithm is finite.
        length = np.subtract(2, uniforms[:, :, 0])
        np.log(length, out=length)
        length *= -2
        np.sqrt(length, out=length)
        # An angle's cosine and sine are 2 / (1 + t²) − 1 and 2 t / (1 + t²), where t is the tangent of its half.
        half_angle = np.subtract(uniforms[:, :, 1], 1.5)
        half_angle *= math.pi
        tangent = _tangents(half_angle)
        quotient = np.square(tangent)
        quotient += 1
        np.divide(length, quotient, out=quotient)
        quotient *= 2
        normals = np.empty(bits.shape)
        np.subtract(quotient, length, out=normals[:, :, 0])
        np.multiply(quotient, tangent, out=normals[:, :, 1])
        return torch.from_numpy(normals).flatten(2)


def _tangents(angles: NDArray[np.float64]) -> NDArray[np.float64]:
    """Tangents, which overwrite the angles."""
    if _IS_NUMPY_FASTER:
        return np.tan(angles, out=angles)
    torch.from_numpy(angles).tan_()
    return angles


def _keystream(key: bytes) -> CipherContext:
    return Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
