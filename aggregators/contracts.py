"""The contracts that algorithms keep: over ``mean``, over ``mix``, and within a client's local steps.

Shapes: P, a model's trainable parameters; N, simulated peers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from fed.hyperparameters import Hyperparameters

__all__ = ["Aggregator", "Descend", "LocalRule", "Mix", "PeerRule"]

Descend: TypeAlias = Callable[[Tensor], Tensor]
"""x → y: a peer's local steps, from x; of all peers at once in simulation."""

Mix: TypeAlias = Callable[[Tensor], Tensor]
"""x → W x: the weighted average with one's neighbours."""


@dataclass(frozen=True, kw_only=True)
class Aggregator(Hyperparameters, ABC):
    """An algorithm over ``mean``: how the clients' mean update moves the model.

    A subclass is a frozen dataclass of hyper-parameters, and its state a named tuple of float64 tensors whose field
    ``model_P`` is the model that users evaluate.
    """

    primitive: ClassVar[str] = "mean"
    linear: ClassVar[bool] = True
    """Whether the mean of the updates is all it needs, so that groups of clients may be reduced where they train."""

    @abstractmethod
    def init(self, params_P: Tensor) -> Any:
        """The state before the first round."""

    def start(self, state: Any) -> Tensor:
        """Where every client begins the next round: [P]."""
        model_P: Tensor = state.model_P
        return model_P

    @abstractmethod
    def apply(self, state: Any, mean_update_P: Tensor) -> Any:
        """The state after a round whose replies' weighted mean of (trained − start) is ``mean_update_P``."""


@dataclass(frozen=True, kw_only=True)
class PeerRule(Hyperparameters, ABC):
    """An algorithm over ``mix``: what a peer does in a round, with its local steps and its neighbours.

    The same code runs for all simulated peers at once (x_NP, and ``mix`` a sparse product) and for one real peer (x_P,
    and ``mix`` a round of messages).
    """

    primitive: ClassVar[str | None] = "mix"

    @abstractmethod
    def step(self, x_P: Tensor, descend: Descend, mix: Mix) -> Tensor:
        """A peer's model after a round."""


@runtime_checkable
class LocalRule(Protocol):
    """A correction of the gradient in flat space; elementwise, so that [P] and [clients, P] use the same code.

    An algorithm of either primitive that has one is its own local rule.
    """

    def correct(
        self, gradient_P: Tensor, x_P: Tensor, anchor_P: Tensor, client_state: Any, broadcast: tuple[Tensor, ...]
    ) -> Tensor:
        """The gradient that the optimizer gets.

        Args:
            gradient_P: of the client's loss at x_P.
            x_P: the client's model.
            anchor_P: the model that the task started from.
            client_state: what the client keeps from task to task.
            broadcast: what came with the task beside the model.
        """
        ...
