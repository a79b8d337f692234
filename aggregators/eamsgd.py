"""Elastic averaging with momentum: each worker's velocity lasts from one exchange to the next.

Zhang, Choromanska & LeCun, "Deep learning with elastic averaging SGD", NeurIPS 2015, arXiv 1412.6651.

Shapes: see :mod:`fed.layout`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fed.aggregators.base import ClientWork, Report
from fed.aggregators.easgd import EASGD
from fed.config.hyperparameters import DecayRate

__all__ = ["EAMSGD", "ClientState"]


class ClientState(NamedTuple):
    """Client state, kept from task to task."""

    model_P: Tensor  # x_i
    velocity_P: Tensor  # v_i


@dataclass(frozen=True, kw_only=True)
class EAMSGD(EASGD):
    r"""Elastic averaging of clients that descend with Nesterov's momentum (Zhang et al. 2015, 1412.6651).

    .. math::
        v_i ← δ v_i + d(x_i + δ v_i), \qquad x_i ← x_i + v_i, \qquad
        x_i ← x_i - α (x_i - c), \qquad c ← c + α \sum_{i ∈ S} (x_i - c)

    d(x̂) is the movement of a period's local steps from x̂. With one step, d(x̂) = −η ∇f_i(x̂), and this is the paper's
    rule, but that the differences are those after the step, as in :mod:`fed.aggregators.easgd`. With τ steps we deviate
    further: the paper's velocity changes after every step, ours after every period, because the optimizer's own
    momentum
    restarts with every task. ``local.momentum`` would come on top of it.

    Args:
        momentum: δ in [0, 1), from one exchange to the next. The paper has 0.99 from one step to the next, which over a
            period of τ = 10 steps decays to 0.99¹⁰ ≈ 0.9. In the long run clients move 1/(1 − δ) times as far as
            those of EASGD: take local.lr shorter by as much.
    """

    momentum: DecayRate = 0.9

    def init_client(self, params_P: Tensor) -> ClientState:  # type: ignore[override]  # it keeps more
        """The centre, at rest, where every client begins."""
        return ClientState(params_P, torch.zeros_like(params_P))

    def local_start(self, anchor_P: Tensor, client_state: ClientState) -> Tensor:  # type: ignore[override]  # as above
        """Start one momentum step ahead of the client's own model: x_i + δ v_i."""
        return client_state.model_P + self.momentum * client_state.velocity_P

    def report(self, work: ClientWork) -> Report:
        """The pull α (x_i − c) after the velocity's step; the client keeps the velocity."""
        velocity_KP = self.momentum * work.client_state.velocity_P + work.update_KP
        trained_KP = work.client_state.model_P + velocity_KP
        # unlike the paper's, the difference after the step
        pull_KP = self.elasticity_among(work.population) * (trained_KP - work.anchor_P)
        return Report((pull_KP,), torch.ones_like(work.samples_K1), ClientState(trained_KP - pull_KP, velocity_KP))
