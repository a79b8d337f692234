"""Masks: keystreams of AES-256, added to vectors of unsigned integers modulo 2ᴿ."""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice, repeat
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR, GCM

__all__ = ["Mask", "add_masks", "keystream_mode"]

_PIECE_BYTES = 128 << 10  # of the vector: it and the keystream stay in a core's cache while all keys pass over it
_MOST_CONTEXTS = 1024  # open at once, a kilobyte or so each
_ZEROS = bytes(_PIECE_BYTES)
_NONCE = bytes(12)  # each key makes one keystream


class Mask(NamedTuple):
    """A mask: the keystream of a key, added or subtracted.

    Args:
        key: 32 bytes, which make this keystream alone.
        is_added: True to add it, False to subtract it.
    """

    key: bytes
    is_added: bool


def add_masks(lanes: np.ndarray, masks: Iterable[Mask], *, threads: int = 1) -> None:
    """Add masks to a vector, in place, modulo 2ᴿ.

    A mask is AES-256 in counter mode with a nonce of zeros, from counter 2 (NIST SP 800-38A, 800-38D), read as
    little-endian integers.

    Args:
        lanes: unsigned integers of R bits, in one piece of memory.
        masks: the masks, any number of them.
        threads: number of threads that share the masks; each needs memory as long as the vector.

    Example:
        >>> lanes = np.zeros(3, dtype=np.uint32)
        >>> add_masks(lanes, [Mask(bytes(32), True), Mask(bytes(32), False)])
        >>> lanes.tolist()
        [0, 0, 0]
    """
    if threads > 1:
        masks = [*masks]
        with ThreadPoolExecutor(threads) as pool:  # ciphers and sums release the GIL
            for part in pool.map(_sum_of_masks, repeat(lanes), (masks[first::threads] for first in range(threads))):
                lanes += part
        return
    numbers = _PIECE_BYTES // lanes.itemsize
    keystream = np.empty(numbers + 16 // lanes.itemsize, dtype=lanes.dtype.newbyteorder("<"))  # a block more
    left = iter(masks)
    while some := list(islice(left, _MOST_CONTEXTS)):
        contexts = [(_context(mask.key, keystream_mode()), np.add if mask.is_added else np.subtract) for mask in some]
        # Pieces outside, keys inside: the piece stays in the cache while all masks pass over it.
        for start in range(0, len(lanes), numbers):
            piece = lanes[start : start + numbers]
            zeros = _ZEROS if len(piece) == numbers else _ZEROS[: piece.nbytes]
            for context, operation in contexts:
                context.update_into(zeros, keystream.data.cast("B"))
                operation(piece, keystream[: len(piece)], out=piece)


def _sum_of_masks(lanes: np.ndarray, masks: Iterable[Mask]) -> np.ndarray:
    part = np.zeros_like(lanes)
    add_masks(part, masks)
    return part


@cache
def keystream_mode() -> type[CTR] | type[GCM]:
    """The mode of AES that is faster on this machine; both make the same keystream."""
    # Which of them is faster depends on the processor and on the version of OpenSSL.
    return CTR if _duration_s(CTR) <= _duration_s(GCM) else GCM


def _context(key: bytes, mode: type[CTR] | type[GCM]) -> CipherContext:
    # GCM's own counter begins at 1, which its tag takes.
    return Cipher(AES(key), GCM(_NONCE) if mode is GCM else CTR(_NONCE + b"\0\0\0\2")).encryptor()


def _duration_s(mode: type[CTR] | type[GCM]) -> float:
    context = _context(bytes(32), mode)
    keystream = bytearray(_PIECE_BYTES + 16)
    durations_s = []
    # The least of five: anything else on the machine can only add to a time.
    for _ in range(5):
        begins_s = time.perf_counter()
        context.update_into(_ZEROS, keystream)
        durations_s.append(time.perf_counter() - begins_s)
    return min(durations_s)
