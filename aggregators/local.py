"""No communication at all: the floor of every comparison. Shapes: P, a client's parameters."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fed.aggregators.base import Descend, Mix, PeerRule

__all__ = ["Local"]


@dataclass(frozen=True, kw_only=True)
class Local(PeerRule):
    r"""Every client trains alone on its own data: the floor that a collaboration must beat.

    .. math:: x_i ← x_i - η ∇f_i(x_i)

    ``test_accuracy`` is the mean of the clients' own accuracies.
    """

    primitive: ClassVar[None] = None

    def step(self, x_P: Tensor, descend: Descend, mix: Mix) -> Tensor:
        """Local steps."""
        return descend(x_P)
