"""Post-local SGD: a mean after every step first, and local steps between means later.

Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020, arXiv 1808.07217.

Shapes: see :mod:`fed.vectors.layout`.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from pydantic import NonNegativeInt

from fed.aggregators.base import Aggregator, ClientWork, Reduced, Report
from fed.vectors.tensors import Tensor, torch

__all__ = ["PostLocalSGD", "State"]


class State(NamedTuple):
    """Server state."""

    model_P: Tensor
    rounds_1: Tensor  # number of rounds done


@dataclass(frozen=True, kw_only=True)
class PostLocalSGD(Aggregator):
    r"""Mini-batch SGD until a round, local SGD after it (Lin et al. 2020, 1808.07217).

    .. math::
        x ← \frac{1}{|S|} \sum_{i ∈ S} y_i, \qquad
        H_t = 1 \text{ for } t ≤ t', \; H \text{ after it}

    y_i is what the H_t local steps of round t make of x. The mean after every step finds a good region fast; local
    steps add the noise that generalises, and save communication. All clients count alike.

    Args:
        switch: t' ≥ 0, the last round of a single step. From the next round on clients take H steps, as many as the
            section local says. The paper switches where it first lowers the learning rate. 0: local SGD from the first
            round.
    """

    update_alone: ClassVar[bool] = True

    switch: NonNegativeInt = 10

    def init(self, params_P: Tensor) -> State:
        """The model, before the first round."""
        return State(params_P, params_P.new_zeros(1))  # a state's parts are tensors

    def steps(self, state: State) -> int | None:
        """Steps of a task: 1, and after the switch the experiment's."""
        return 1 if state.rounds_1 < self.switch else None

    def report(self, work: ClientWork) -> Report:
        """The update, weighted alike."""
        return Report((work.update_KP,), torch.ones_like(work.samples_K1))

    def apply(self, state: State, reduced: Reduced) -> State:
        """The mean model, and the next round's number."""
        return State(state.model_P + reduced.update_P, state.rounds_1 + 1)
