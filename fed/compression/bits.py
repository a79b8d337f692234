"""Numbers of few bits packed into bytes, and Golomb–Rice codes of positions.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed.errors import InvalidPayload

__all__ = [
    "pack",
    "pack_into",
    "packed_bytes",
    "positions_bytes",
    "read_positions",
    "rice_bits",
    "unpack",
    "write_positions",
]

_GOLDEN = (math.sqrt(5) - 1) / 2


def packed_bytes(numbers: int, bits: int) -> int:
    """Bytes of a vector of numbers with so many bits each.

    Example:
        >>> packed_bytes(9, 2)
        4
    """
    return bits * -(-numbers // 8)


def pack(codes_KM: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Pack numbers below 2^bits: all their lowest bits, then all the next ones, each plane in whole bytes.

    Args:
        codes_KM: numbers, [..., M]; booleans where they have one bit.
        bits: bits of a number, 1 to 16.

    Returns:
        Bytes, [..., ``packed_bytes(M, bits)``].

    Example:
        >>> pack(np.array([1, 2, 3], np.uint8), 2).tolist()
        [160, 96]
    """
    packed_KO = np.empty((*codes_KM.shape[:-1], packed_bytes(codes_KM.shape[-1], bits)), np.uint8)
    pack_into(packed_KO, codes_KM, bits=bits, begin=0)
    return packed_KO


def pack_into(packed_KO: NDArray[np.uint8], codes_KM: NDArray[Any], bits: int, begin: int) -> None:
    """Write a part of the bytes that :func:`pack` returns.

    Args:
        packed_KO: the bytes of all numbers.
        codes_KM: some of the numbers.
        bits: bits of a number.
        begin: place of the first of them, a multiple of 8.
    """
    width = packed_KO.shape[-1] // bits
    first = begin // 8
    place = slice(first, first + -(-codes_KM.shape[-1] // 8))
    for bit in range(bits):
        # Packbits reads bytes, and takes any but 0 for a one.
        byte_KM = codes_KM if bits <= 8 else (codes_KM >> (bit & 8)).astype(np.uint8)
        plane_KM = byte_KM & (1 << (bit & 7)) if bits > 1 else byte_KM
        packed_KO[..., bit * width : (bit + 1) * width][..., place] = np.packbits(plane_KM, axis=-1)


def unpack(packed_KO: NDArray[np.uint8], bits: int, numbers: int, begin: int = 0) -> NDArray[np.unsignedinteger]:
    """Reverse :func:`pack`, or a part of it.

    Args:
        packed_KO: bytes of all numbers, [..., ``packed_bytes(M, bits)``].
        bits: bits of a number.
        numbers: number of values that are wanted.
        begin: place of the first of them, a multiple of 8.
    """
    width = packed_KO.shape[-1] // bits
    first = begin // 8
    place = slice(first, first + -(-numbers // 8))
    codes_KM = np.zeros((*packed_KO.shape[:-1], numbers), np.uint8 if bits <= 8 else np.uint16)
    for bit in reversed(range(bits)):
        plane_KO = packed_KO[..., bit * width : (bit + 1) * width][..., place]
        codes_KM += codes_KM  # where a shift takes ten times as long
        codes_KM |= np.unpackbits(plane_KO, axis=-1, count=numbers)
    return codes_KM


def rice_bits(count: int, numbers: int) -> int:
    r"""The best number of bits for the remainder of a gap between random positions (Sattler et al. 2019, 1903.02891).

    .. math:: b^* = 1 + ⌊\log_2 \frac{\log(φ - 1)}{\log(1 - p)}⌋, \qquad φ = \frac{1 + \sqrt 5}{2}

    with the share p of the numbers that are at such positions.

    Args:
        count: number of positions.
        numbers: number of places that they are chosen from.

    Example:
        >>> rice_bits(1, 64), rice_bits(1, 1000), rice_bits(2, 2)
        (5, 9, 0)
    """
    if not 0 < count < numbers:
        return 0
    return max(0, 1 + math.floor(math.log2(math.log(_GOLDEN) / math.log1p(-count / numbers))))


def positions_bytes(count: int, numbers: int) -> int:
    """The most bytes that :func:`write_positions` makes of so many positions among so many numbers."""
    bits = rice_bits(count, numbers)
    return packed_bytes(count + ((numbers - count) >> bits), 1) + packed_bytes(count, bits)


def write_positions(positions: NDArray[np.int64], numbers: int) -> NDArray[np.uint8]:
    """Golomb–Rice code of ascending positions.

    A gap g between two positions is ⌊g / 2^b⌋ zeros and a one, and b bits for the rest, with b of :func:`rice_bits`;
    the rests of all follow the zeros and ones of all.

    Args:
        positions: positions, each in [0, ``numbers``).
        numbers: number of places that they are chosen from.

    Example:
        >>> positions = np.array([3, 70, 90])
        >>> read_positions(write_positions(positions, 200), 3, 200).tolist()
        [3, 70, 90]
    """
    bits = rice_bits(len(positions), numbers)
    gaps = np.diff(positions, prepend=-1) - 1
    ones = np.cumsum((gaps >> bits) + 1) - 1
    # Zeros and ones of all positions in one array: a loop over positions would take most of the time.
    unary = np.zeros(int(ones[-1]) + 1 if len(ones) else 0, np.uint8)
    unary[ones] = 1
    rests = (gaps & ((1 << bits) - 1)).astype(np.uint32)
    planes = [np.packbits((rests >> bit & 1).astype(np.uint8)) for bit in range(bits)]
    return np.concatenate([*planes, np.packbits(unary)])


def read_positions(code: NDArray[np.uint8], count: int, numbers: int) -> NDArray[np.int64]:
    """Reverse :func:`write_positions`, of untrusted bytes.

    Args:
        code: bytes of the code.
        count: number of positions.
        numbers: number of places that they are chosen from.

    Raises:
        InvalidPayload: if the bytes are no such code.
    """
    bits = rice_bits(count, numbers)
    rest_bytes = packed_bytes(count, bits)
    most_bytes = positions_bytes(count, numbers)
    # Before anything is unpacked, since the code may come from anyone.
    if not rest_bytes <= len(code) <= most_bytes:
        raise InvalidPayload(
            f"the code of {count} positions must take {rest_bytes} to {most_bytes} bytes, got {len(code)}"
        )
    ones = np.flatnonzero(np.unpackbits(code[rest_bytes:]))
    # More ones would be more positions than there are values.
    if len(ones) != count:
        raise InvalidPayload(f"there must be {count} positions, got {len(ones)}")
    gaps = (np.diff(ones, prepend=-1) - 1) << bits
    for bit in range(bits):
        plane = code[bit * -(-count // 8) : (bit + 1) * -(-count // 8)]
        gaps += np.unpackbits(plane, count=count).astype(np.int64) << bit
    positions = np.cumsum(gaps + 1) - 1
    if count and positions[-1] >= numbers:
        raise InvalidPayload(f"positions must be below {numbers}, got {positions[-1]}")
    return positions
