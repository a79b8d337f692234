"""Block-wise model-update filtering: momentum on the update of a whole block of local training.

Chen & Huo, "Scalable training of deep learning machines by incremental block training with intra-block parallel
optimization and blockwise model-update filtering", ICASSP 2016.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from pydantic import PositiveFloat

from fed.aggregators.base import Aggregator, Reduced
from fed.config.hyperparameters import DecayRate
from fed.vectors.tensors import Tensor, torch

__all__ = ["BMUF", "State"]


class State(NamedTuple):
    """Server state."""

    model_P: Tensor  # W(t), what users evaluate
    update_P: Tensor  # D(t), the filtered update of the last block


@dataclass(frozen=True, kw_only=True)
class BMUF(Aggregator):
    r"""Each block's mean update, filtered by a momentum (Chen & Huo, ICASSP 2016).

    .. math::
        G(t) = \bar W(t) - W_g(t-1), \qquad D(t) = η D(t-1) + ζ G(t), \qquad W(t) = W(t-1) + D(t)

    The next block starts at W_g(t) = W(t), or with ``nesterov`` at W_g(t) = W(t) + η D(t).

    Args:
        block_momentum: η in [0, 1), the share of the last block's D that stays. The paper's 1 − 1/N for a cohort of N
            is too much for small data; 0.9 is a good start.
        block_lr: ζ > 0, the factor of a block's mean update. With η = 0 and ζ = 1 this is FedAvg, to the bit.
        nesterov: True if the next block starts one momentum step ahead.
    """

    block_momentum: DecayRate = 0.9
    block_lr: PositiveFloat = 1.0
    nesterov: bool = False

    def init(self, params_P: Tensor) -> State:
        """The model, at rest."""
        return State(params_P, torch.zeros_like(params_P))

    def model_to_send(self, state: State) -> Tensor:
        """The model W_g(t) with which every client begins the next block."""
        return state.model_P + self.block_momentum * state.update_P if self.nesterov else state.model_P

    def apply(self, state: State, reduced: Reduced) -> State:
        """Filter the block's update and take it."""
        update_P = self.block_momentum * state.update_P + self.block_lr * reduced.update_P
        return State(state.model_P + update_P, update_P)
