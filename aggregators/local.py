"""Local training without communication: the floor of every comparison.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fed.aggregators.peer_rule import Descend, Mix, PeerRule
from fed.vectors.tensors import Tensor

__all__ = ["LocalOnly", "State"]


class State(NamedTuple):
    """Every client's model."""

    model_NP: Tensor


@dataclass(frozen=True, kw_only=True)
class LocalOnly(PeerRule):
    r"""Every client trains alone on its own data: the floor that a collaboration must beat.

    .. math:: x_i ← x_i - η ∇f_i(x_i)

    ``test_accuracy`` is the mean of the clients' own accuracies.
    """

    primitive: ClassVar[None] = None

    def init(self, params_NP: Tensor) -> State:
        """All clients start from one model."""
        return State(params_NP)

    def step(self, state: State, descend: Descend, mix: Mix) -> State:
        """Local steps."""
        return State(descend(state.model_NP))
