"""Clipping of clients' messages onto a grid on which floating-point numbers hide nothing.

Shapes: see :mod:`fed.vectors.layout`.
"""

import math

from fed.vectors.tensors import Tensor, torch

__all__ = ["clipped", "grid_step", "is_within"]

_GRID_BITS = 24  # whole numbers up to 2²⁴ are exact in float32, the type on the wire
_BELOW = 1 - 2.0**-40  # a scaled row is rounded, and must not be longer than the clip for that


def grid_step(clip: float) -> float:
    """The step of the grid: a power of two, of which the clip has at most 2²⁴.

    Sums of clipped messages are whole multiples of it, exact in float64, so that the low bits of a sum say nothing of
    who is in it (Mironov 2012, 10.1145/2382196.2382264).

    Args:
        clip: C > 0.

    Example:
        >>> grid_step(1.0) == 2.0**-24, grid_step(1.5) == 2.0**-23
        (True, True)
    """
    return 2.0 ** (math.ceil(math.log2(clip)) - _GRID_BITS)


def clipped(update_KM: Tensor, clip: float) -> Tensor:
    r"""Rows of an L2 norm of at most the clip, on the grid.

    .. math:: s ⌊ \frac{u}{s} \min(1, \frac{C}{‖u‖}) ⌋_0

    Numbers are cut towards zero, which makes no row longer. A row that is not finite becomes 0.

    Args:
        update_KM: messages [K, M], in float64.
        clip: C > 0.

    Example:
        >>> clipped(torch.tensor([[3.0, 4.0], [0.0, 0.5]], dtype=torch.float64), 1.0).norm(dim=1).tolist()
        [0.9999999403953552, 0.5]
    """
    step = grid_step(clip)
    norms_K1 = torch.linalg.vector_norm(update_KM, dim=1, keepdim=True)
    scales_K1 = torch.where(norms_K1 > clip, clip * _BELOW / norms_K1, 1.0)
    units_KM = (update_KM * (scales_K1 / step)).trunc_()
    if not torch.isfinite(norms_K1).all():
        units_KM[~torch.isfinite(norms_K1).flatten()] = 0
    return units_KM.mul_(step)


def is_within(update_M: Tensor, clip: float) -> bool:
    """True if a message is one that :func:`clipped` may give.

    Args:
        update_M: message, untrusted.
        clip: C > 0.
    """
    numbers_M = update_M.double()
    on_grid = torch.equal((numbers_M / grid_step(clip)).trunc() * grid_step(clip), numbers_M)
    return on_grid and float(torch.linalg.vector_norm(numbers_M)) <= clip
