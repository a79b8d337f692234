"""Results of clients' local steps, the messages made of them, and their means.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fed.aggregators.local_rule import Broadcast
from fed.vectors.tensors import Tensor

__all__ = ["ClientWork", "Reduced", "Report"]

_STREAM = partial(np.random.default_rng, 0)  # for a result that is made outside of a run


@dataclass(frozen=True)
class ClientWork:
    """Result of a client's local steps; of K clients at once, each in a row of its own.

    Args:
        update_KP: y − x̂, the trained models minus those at which the steps began, in float64 as all numbers here but
            the two models below.
        anchor_P: x, the model that came with the task, [P] in the model's own type, which float64 represents exactly;
            [K, P] where the clients were asked at different times.
        began_KP: x̂, the models at which the steps began, in the model's own type: x unless
            :meth:`Aggregator.local_start` says otherwise.
        samples_K1: number of samples that each client holds.
        steps_K1: τ, number of optimizer steps that each client took.
        lr: η, the step size of those steps, > 0.
        momentum: ρ, the momentum of those steps, in [0, 1).
        train_loss_K1: mean loss over the samples that each client trained on.
        client_state: state that each client kept until now: a named tuple of [K, ·], or None.
        broadcast: tensors that came with the task beside the model.
        population: N, the number of clients in the run.
        start_loss_K1: f(x), the loss on the client's own data; only where the algorithm asks for the "loss".
        start_gradient_KP: ∇f(x) on the client's own data; only where the algorithm asks for the "gradient".
        places_K: each client's number from 0 to N − 1; only where the algorithm asks for the "place".
        nesterov: True if the momentum of those steps is Nesterov's.
    """

    update_KP: Tensor
    anchor_P: Tensor
    began_KP: Tensor
    samples_K1: Tensor
    steps_K1: Tensor
    lr: float
    momentum: float
    train_loss_K1: Tensor
    client_state: Any = None
    broadcast: Broadcast = ()
    population: int = 1
    start_loss_K1: Tensor | None = None
    start_gradient_KP: Tensor | None = None
    places_K: Tensor | None = None
    nesterov: bool = False

    @property
    def gradients_K1(self) -> Tensor:  # noqa: N802  # a shape suffix
        r"""Number of gradients that an update holds, ‖a‖₁: :math:`y - x̂ = -η \sum_s a_s g_s`.

        Without momentum, and under Adam, each step counts once: τ. With momentum it counts in later steps, too:

        .. math:: ‖a‖_1 = \frac{1}{1 - ρ} \left(τ - ρ \frac{1 - ρ^τ}{1 - ρ}\right)

        and with Nesterov's, which looks one step ahead, ρ² in place of the ρ before the fraction.
        """
        rho = self.momentum
        ahead = 2 if self.nesterov else 1
        return (self.steps_K1 - rho**ahead * (1 - rho**self.steps_K1) / (1 - rho)) / (1 - rho)


class Report(NamedTuple):
    """Message of a client, and the state that it keeps; of K clients at once, each in a row of its own.

    Args:
        message: the parts, [K, ·] each, whose weighted mean the coordinator learns.
        weight_K1: each client's weight in that mean, > 0.
        client_state: state that each client keeps for its next task: a named tuple of [K, ·], or None.
    """

    message: tuple[Tensor, ...]
    weight_K1: Tensor
    client_state: Any = None


@dataclass(frozen=True)
class Reduced:
    """Result of a round: the means of the clients' messages.

    Args:
        mean: the weighted mean of each part of the clients' messages, in float64.
        clients: |S|, the number of answers in the mean.
        population: N, the number of clients in the run.
        stream: function that returns the round's own random stream, at its beginning.
    """

    mean: tuple[Tensor, ...]
    clients: int
    population: int
    stream: Callable[[], np.random.Generator] = _STREAM

    @property
    def update_P(self) -> Tensor:  # noqa: N802  # a shape suffix
        """The mean of the messages' first part: the mean update, unless an algorithm sends something else there."""
        return self.mean[0]
