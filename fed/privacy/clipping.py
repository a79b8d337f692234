"""Clipping of clients' messages, with room for all that is rounded afterwards.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math

from fed.vectors.tensors import Tensor, torch

__all__ = [
    "LARGEST_CLIP",
    "SMALLEST_CLIP",
    "bits_behind",
    "clipped",
    "grid_step",
    "is_within",
    "joint_norm",
    "largest_norm",
    "mean_of_clipped",
]

SMALLEST_CLIP = 1e-100
"""Smallest clip that moves: the squares of longer messages are numbers."""

LARGEST_CLIP = 1e100
"""Largest clip that moves: its square is a number."""

_GRID_BITS = 28  # sums of a million messages are whole numbers of steps, exact in float64
_ON_THE_WIRE = 2.0**-22  # share of the clip that rounding to float32, and that of sums, may take


def grid_step(clip: float) -> float:
    """The step of the grid that sums are rounded to: a power of two, of which the clip has at most 2²⁸.

    A sum and its noise are whole numbers of steps, so that the low bits of what is released say nothing of who is in it
    (Mironov 2012, 10.1145/2382196.2382264).

    Args:
        clip: C > 0.

    Example:
        >>> grid_step(1.0) == 2.0**-28, grid_step(1.5) == 2.0**-27
        (True, True)
    """
    return 2.0 ** (math.ceil(math.log2(clip)) - _GRID_BITS)


def largest_norm(clip: float, numbers: int) -> float:
    r"""Largest L2 norm of a message, so that no client changes the rounded sum by more than the clip.

    .. math:: (1 - 2^{-22}) C - s \sqrt{M}

    Each of the M numbers of a sum moves by half a step s at most when it is rounded, with the client and without.

    Args:
        clip: C > 0.
        numbers: M ≥ 0.
    """
    return (1 - _ON_THE_WIRE) * clip - math.sqrt(numbers) * grid_step(clip)


def joint_norm(bit_weight: float) -> float:
    r"""Largest L2 norm of a message of norm 1 and the bit behind it: :math:`\sqrt{1 + β^2/4}`.

    Args:
        bit_weight: β ≥ 0, weight of the number b − ½; 0 where there is none.
    """
    return math.hypot(1.0, bit_weight / 2)


def _scales(update_KM: Tensor, clip: float, unit: float) -> Tensor:
    """Factors [K, 1] that shorten messages and put them into units; 0 for one whose norm is beyond all numbers."""
    norms_K1 = torch.linalg.vector_norm(update_KM, dim=1, keepdim=True)
    # A little less, for the rounding to the type on the wire.
    largest = (1 - _ON_THE_WIRE) * largest_norm(clip, update_KM.shape[1])
    return torch.where(norms_K1 > largest * unit, largest / norms_K1, 1 / unit)


def clipped(update_KM: Tensor, clip: float, unit: float = 1.0) -> Tensor:
    r"""Messages in units, shortened to the clip.

    .. math:: \frac{u}{U} \min(1, \frac{C' U}{‖u‖})

    C' is a little below C, as :func:`largest_norm` says. A message that is not finite becomes 0.

    Args:
        update_KM: messages [K, M], in float64.
        clip: C > 0, in units.
        unit: U > 0, the value of a unit.

    Example:
        >>> messages = torch.tensor([[3.0, 4.0], [0.0, 0.5]], dtype=torch.float64)
        >>> [round(norm, 6) for norm in clipped(messages, 1.0).norm(dim=1).tolist()]
        [1.0, 0.5]
    """
    scales_K1 = _scales(update_KM, clip, unit)
    short_KM = update_KM * scales_K1
    if not torch.isfinite(short_KM.sum()):
        short_KM[~torch.isfinite(update_KM).all(1)] = 0
    return short_KM


def mean_of_clipped(update_KM: Tensor, clip: float, unit: float = 1.0) -> Tensor:
    """The mean [M] of messages as :func:`clipped` gives them, in a third of its time.

    Args:
        update_KM: finite messages [K, M], in float64.
        clip: C > 0, in units.
        unit: U > 0, the value of a unit.
    """
    return (_scales(update_KM, clip, unit).flatten() / len(update_KM)) @ update_KM


def bits_behind(update_KM: Tensor, clip: float) -> Tensor:
    """The number b − ½ behind each message, [K, 1] in float64: ½ if it was no longer than the clip, −½ if it was.

    Args:
        update_KM: messages [K, M], in float64.
        clip: C > 0.
    """
    norms_K1 = torch.linalg.vector_norm(update_KM, dim=1, keepdim=True)
    return torch.where(norms_K1 <= clip, 0.5, -0.5).double()


def is_within(update_M: Tensor, clip: float) -> bool:
    """True if a message is no longer than :func:`clipped` leaves it.

    Args:
        update_M: message, untrusted.
        clip: C > 0.
    """
    norm = float(torch.linalg.vector_norm(update_M.double()))
    return norm <= largest_norm(clip, len(update_M))
